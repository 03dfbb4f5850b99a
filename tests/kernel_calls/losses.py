"""Embeddings and losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernel_calls import Calls, I, T, f32

case = Calls()
CASES = case.cases

# embedding

case("embedding", lambda dt: (I(1000, 8, 128), T(1000, 64, dtype=dt)), F.embedding)
case("embedding small", lambda dt: (I(1000, 8, 16), T(1000, 64, dtype=dt)), F.embedding)
case("embedding huge", lambda dt: (I(1000, 64, 512), T(50000, 64, dtype=dt)), F.embedding)
case("embedding int32", lambda dt: (I(1000, 64, 512, dtype=torch.int32), T(50000, 64, dtype=dt)), F.embedding)
case(
    "embedding pad", lambda dt: (I(1000, 8, 512), T(1000, 64, dtype=dt)), lambda i, w: F.embedding(i, w, padding_idx=0)
)
case(
    "embedding max_norm",
    lambda dt: (I(1000, 8, 128), T(1000, 64, dtype=dt)),
    lambda i, w: F.embedding(i, w.detach(), max_norm=1.0),
)
case(
    "embedding scale",
    lambda dt: (I(1000, 8, 512), T(1000, 64, dtype=dt)),
    lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
)
for m in ("sum", "mean", "max"):
    case(
        f"embedding_bag {m}",
        lambda dt: (I(1000, 8, 32), T(1000, 64, dtype=dt)),
        lambda i, w, m=m: F.embedding_bag(i, w, mode=m),
    )
case("one_hot", lambda dt: (I(10, 64),), lambda i: F.one_hot(i, 10), (f32,))

# losses


def two(dt):
    return T(64, 100, dtype=dt), T(64, 100, dtype=dt, grad=False)


for n in (
    "l1_loss",
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "poisson_nll_loss",
    "kl_div",
    "binary_cross_entropy_with_logits",
    "hinge_embedding_loss",
):
    for red in ("mean", "none", "sum"):
        case(f"{n} {red}", two, lambda x, y, n=n, red=red: getattr(F, n)(x, y, reduction=red))
case(
    "binary_cross_entropy",
    lambda dt: (T(64, 100, dtype=dt), T(64, 100, dtype=dt, grad=False)),
    lambda x, y: F.binary_cross_entropy(torch.sigmoid(x), y),
)
case(
    "bce weights",
    lambda dt: (T(64, 100, dtype=dt), T(64, 100, dtype=dt, grad=False), T(100, dtype=dt, grad=False)),
    lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, weight=w, pos_weight=w),
)
case(
    "gaussian_nll_loss",
    lambda dt: (T(64, 100, dtype=dt), T(64, 100, dtype=dt, grad=False), torch.ones(64, 100, device="cuda", dtype=dt)),
    F.gaussian_nll_loss,
    (f32,),
)
case("nll_loss", lambda dt: (T(64, 100, dtype=dt), I(100, 64)), F.nll_loss)
case("nll_loss2d", lambda dt: (T(4, 10, 16, 16, dtype=dt), I(10, 4, 16, 16)), F.nll_loss)
case("cross_entropy", lambda dt: (T(64, 1000, dtype=dt), I(1000, 64)), F.cross_entropy)
case("cross_entropy big", lambda dt: (T(4096, 5000, dtype=dt), I(1000, 4096)), F.cross_entropy)
case(
    "cross_entropy smooth",
    lambda dt: (T(64, 1000, dtype=dt), I(1000, 64)),
    lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
)
case(
    "cross_entropy weight",
    lambda dt: (T(64, 1000, dtype=dt), I(1000, 64), T(1000, dtype=dt, grad=False)),
    lambda x, y, w: F.cross_entropy(x, y, w),
)
case(
    "cross_entropy none",
    lambda dt: (T(64, 1000, dtype=dt), I(1000, 64)),
    lambda x, y: F.cross_entropy(x, y, reduction="none"),
)
case(
    "cross_entropy sum",
    lambda dt: (T(64, 1000, dtype=dt), I(1000, 64)),
    lambda x, y: F.cross_entropy(x, y, reduction="sum"),
)
case(
    "cross_entropy soft",
    lambda dt: (T(64, 1000, dtype=dt), T(64, 1000, dtype=dt, grad=False)),
    lambda x, y: F.cross_entropy(x, y),
)
case("cross_entropy 2d", lambda dt: (T(4, 10, 16, 16, dtype=dt), I(10, 4, 16, 16)), F.cross_entropy)
case(
    "cross_entropy 2d smooth",
    lambda dt: (T(4, 10, 16, 16, dtype=dt), I(10, 4, 16, 16)),
    lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
)
case(
    "cross_entropy llm",
    lambda dt: (T(4, 65, 1000, dtype=dt), I(1000, 4, 64)),
    lambda x, y: F.cross_entropy(x[:, :-1].reshape(-1, 1000).float(), y.view(-1), ignore_index=-100),
)
case("multi_margin", lambda dt: (T(64, 100, dtype=dt), I(100, 64)), F.multi_margin_loss, (f32,))
case("multilabel_margin", lambda dt: (T(64, 100, dtype=dt), I(100, 64, 100)), F.multilabel_margin_loss, (f32,))
case("multilabel_soft_margin", two, F.multilabel_soft_margin_loss)
case(
    "triplet_margin",
    lambda dt: (T(64, 100, dtype=dt), T(64, 100, dtype=dt), T(64, 100, dtype=dt)),
    F.triplet_margin_loss,
)
case(
    "margin_ranking", lambda dt: (T(64, dtype=dt), T(64, dtype=dt), T(64, dtype=dt, grad=False)), F.margin_ranking_loss
)
case(
    "cosine_embedding",
    lambda dt: (T(64, 100, dtype=dt), T(64, 100, dtype=dt), torch.ones(64, device="cuda")),
    F.cosine_embedding_loss,
    (f32,),
)
case("cosine_similarity", lambda dt: (T(64, 100, dtype=dt), T(64, 100, dtype=dt)), F.cosine_similarity)
case("pairwise_distance", lambda dt: (T(64, 100, dtype=dt), T(64, 100, dtype=dt)), F.pairwise_distance)
case("cdist", lambda dt: (T(64, 100), T(80, 100)), torch.cdist, (f32,))
case("pdist", lambda dt: (T(64, 100),), F.pdist, (f32,))
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
