"""Embeddings and losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernel_calls import Calls, I, K, N, T, W, f32

case = Calls()
CASES = case.cases

# embedding

case("embedding", (K(1000, 8, 128), (1000, 64)), F.embedding)
case("embedding slice", (K(1000, 8, 129), (1000, 64)), lambda i, w: F.embedding(i[:, :-1], w))
case("embedding slice large", (K(1000, 64, 513), (50000, 64)), lambda i, w: F.embedding(i[:, :-1], w))
case("embedding every second", (K(1000, 8, 128), (1000, 64)), lambda i, w: F.embedding(i[:, ::2], w))
case(
    "embedding transposed", (K(1000, 64, 128), (1000, 64)), lambda i, w: F.embedding(i, w).transpose(1, 2).contiguous()
)
case("embedding small", (K(1000, 8, 16), (1000, 64)), F.embedding)
case("embedding huge", (K(1000, 64, 512), (50000, 64)), F.embedding)
case("embedding int32", (K(1000, 64, 512, dtype=torch.int32), (50000, 64)), F.embedding)
case("embedding pad", (K(1000, 8, 512), (1000, 64)), lambda i, w: F.embedding(i, w, padding_idx=0))
case("embedding max_norm", (K(1000, 8, 128), (1000, 64)), lambda i, w: F.embedding(i, w.detach(), max_norm=1.0))
case("embedding max_norm large", (K(1000, 20000), (1000, 64)), lambda i, w: F.embedding(i, w.detach(), max_norm=1.0))
case(
    "embedding scale int32", (K(1000, 100000, dtype=torch.int32), (1000, 8)),
    lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
)  # fmt: skip
case("embedding of a table", (K(50257, 4, 1024), (50257, 96)), F.embedding)
case("embedding expanded", (K(512, 512), (512, 96)), lambda i, w: F.embedding(i.expand(8, 512), w))
case("embedding scale", (K(1000, 8, 512), (1000, 64)), lambda i, w: F.embedding(i, w, scale_grad_by_freq=True))
for m in ("sum", "mean", "max"):
    case(f"embedding_bag {m}", (K(1000, 8, 32), (1000, 64)), lambda i, w, m=m: F.embedding_bag(i, w, mode=m))
    case(f"embedding_bag large {m}", (K(1000, 512, 32), (1000, 64)), lambda i, w, m=m: F.embedding_bag(i, w, mode=m))
case("one_hot", (K(10, 64),), lambda i: F.one_hot(i, 10), (f32,))

# losses

TWO = ((64, 100), N(64, 100))
for n in (
    "l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "poisson_nll_loss", "kl_div",
    "binary_cross_entropy_with_logits", "hinge_embedding_loss",
):  # fmt: skip
    for red in ("mean", "none", "sum"):
        case(f"{n} {red}", TWO, lambda x, y, n=n, red=red: getattr(F, n)(x, y, reduction=red))
case("binary_cross_entropy", TWO, lambda x, y: F.binary_cross_entropy(torch.sigmoid(x), y))
case(
    "bce weights",
    (*TWO, N(100)),
    lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, weight=w, pos_weight=w),
)
case(
    "gaussian_nll_loss",
    (*TWO, lambda dt: torch.ones(64, 100, device="cuda", dtype=dt)),
    F.gaussian_nll_loss,
    (f32,),
)
case("nll_loss", ((64, 100), K(100, 64)), F.nll_loss)
case("nll_loss2d", ((4, 10, 16, 16), K(10, 4, 16, 16)), F.nll_loss)
case("cross_entropy", ((64, 1000), K(1000, 64)), F.cross_entropy)
case("cross_entropy big", ((4096, 5000), K(1000, 4096)), F.cross_entropy)
case("cross_entropy smooth", ((64, 1000), K(1000, 64)), lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1))
case("cross_entropy weight", ((64, 1000), K(1000, 64), N(1000)), lambda x, y, w: F.cross_entropy(x, y, w))
case("cross_entropy none", ((64, 1000), K(1000, 64)), lambda x, y: F.cross_entropy(x, y, reduction="none"))
case("cross_entropy sum", ((64, 1000), K(1000, 64)), lambda x, y: F.cross_entropy(x, y, reduction="sum"))
case("cross_entropy soft", ((64, 1000), N(64, 1000)), lambda x, y: F.cross_entropy(x, y))
case("cross_entropy 2d", ((4, 10, 16, 16), K(10, 4, 16, 16)), F.cross_entropy)
case(
    "cross_entropy 2d smooth",
    ((4, 10, 16, 16), K(10, 4, 16, 16)),
    lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
)
case(
    "cross_entropy llm",
    ((4, 65, 1000), K(1000, 4, 64)),
    lambda x, y: F.cross_entropy(x[:, :-1].reshape(-1, 1000).float(), y.view(-1), ignore_index=-100),
)
case("multi_margin", ((64, 100), K(100, 64)), F.multi_margin_loss, (f32,))
case("multilabel_margin", ((64, 100), K(100, 64, 100)), F.multilabel_margin_loss, (f32,))
case("multilabel_soft_margin", TWO, F.multilabel_soft_margin_loss)
case("triplet_margin", ((64, 100), (64, 100), (64, 100)), F.triplet_margin_loss)
case("margin_ranking", ((64,), (64,), N(64)), F.margin_ranking_loss)
case(
    "cosine_embedding",
    ((64, 100), (64, 100), lambda dt: torch.ones(64, device="cuda")),
    F.cosine_embedding_loss,
    (f32,),
)
case("cosine_similarity", ((64, 100), (64, 100)), F.cosine_similarity)
case("pairwise_distance", ((64, 100), (64, 100)), F.pairwise_distance)
case("cdist", (W(64, 100), W(80, 100)), torch.cdist, (f32,))
case("pdist", (W(64, 100),), F.pdist, (f32,))
case(
    "ctc",
    lambda dt: (T(50, 16, 20), I(19, 16, 10) + 1, torch.full((16,), 50), torch.full((16,), 10)),
    lambda x, y, a, b: F.ctc_loss(x.log_softmax(2), y, a, b),
    (f32,),
)
case(
    "ctc native",
    lambda dt: (T(50, 16, 20), I(19, 16, 10) + 1, torch.full((16,), 50).cuda(), torch.full((16,), 10).cuda()),
    lambda x, y, a, b: F.ctc_loss(x.log_softmax(2), y, a, b),
    (f32,),
)
case("cross_entropy (N, C, d)", ((4, 1000, 64), K(1000, 4, 64)), F.cross_entropy)
case(
    "cross_entropy (N, C, d) of (N, d, C)",
    ((4, 64, 1000), K(1000, 4, 64)),
    lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
)
case(
    "cross_entropy (N, C, d) none",
    ((4, 64, 1000), K(1000, 4, 64)),
    lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none"),
)
case(
    "cross_entropy (N, C, d) weight",
    ((4, 64, 1000), K(1000, 4, 64), N(1000)),
    lambda x, y, w: F.cross_entropy(x.transpose(1, 2), y, w),
)
case(
    "cross_entropy (N, C, d) smooth",
    ((4, 64, 1000), K(1000, 4, 64)),
    lambda x, y: F.cross_entropy(x.transpose(1, 2), y, label_smoothing=0.1),
)
case("log_softmax of (N, d, C)", ((4, 64, 1000),), lambda x: F.log_softmax(x.transpose(1, 2), 1))
case("softmax of (N, d, C)", ((4, 64, 1000),), lambda x: F.softmax(x.transpose(1, 2), 1))
