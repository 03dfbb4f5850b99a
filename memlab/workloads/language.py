"""Models of language, at any width: GPT-2, a Llama, a BERT and an LSTM, with random tokens and without dropout.

The memory is that of real training, the text is not. `blocks` are the layers, `features(tokens)` is the input of `head`, and
`attend(q, k, v, is_causal)` is the one place where positions are mixed: a technique may replace it, module by module.

GPT-2 is that of Radford et al., 2019; `transformer` and `gpt2` are plain training steps of it, a small one for the CPU, and GPT-2
small. The Llama has the layer structure of Llama 3 (Grattafiori et al., 2024, https://arxiv.org/abs/2407.21783): RMSNorm, rotary
positions, SwiGLU, several query heads to one head of keys and values; size "card" is Llama 3.2 1B. The BERT (Devlin et al., 2018,
https://arxiv.org/abs/1810.04805) is without the next-sentence task, and without the bias for each word of the vocabulary; of
every seven tokens one is masked and predicted, always the same: the published 15 % are random. The LSTM is that of
Zaremba et al., 2014 (https://arxiv.org/abs/1409.2329), with one `nn.LSTM` per layer, as nothing can be inserted
between the layers of one; size "card" is their large model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.workloads.job import Parts
from memlab.workloads.workload import Workload, divided, stepping

# --- attention ---


class Attending(nn.Module):
    """A module that mixes positions."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        """The values of v, mixed by how well q matches k; all are (batch, heads, time, width of a head)."""
        return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


class Attention(Attending):
    """Self-attention with one projection for queries, keys and values; causal: a position sees those before it."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes the positions of x: (batch, time, width)."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = self.attend(q, k, v, self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class DecoderBlock(nn.Module):
    """Attention and a feed-forward part of four times the width, each behind its norm."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of the input's shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


# --- shared parts -------------


class WithHead(nn.Module):
    """A model whose last layer is `head`; its input is `features(x)`."""

    features: Callable[[Tensor], Tensor]
    head: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """Scores for each class, (batch, classes), or for the words at each position, (batch, time, vocabulary)."""
        return self.head(self.features(x))


class LanguageModel(WithHead):
    """Embeddings, `blocks`, and `head`, which gives scores; its input is `features(tokens)`: (batch, time, width)."""

    token: nn.Embedding
    position: nn.Embedding
    segment: nn.Embedding

    def add_tables(self, width: int, std: float = 0.02, **rows: int) -> None:
        """Embeddings by name, including `token`, with their numbers of rows."""
        for name, count in rows.items():
            setattr(self, name, nn.Embedding(count, width))
        for name in rows:
            nn.init.normal_(getattr(self, name).weight, std=std)

    def add_head(self, tied: bool) -> None:
        """The output layer; `tied` shares the embedding with it."""
        vocabulary, width = self.token.weight.shape
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for the words at each position, (batch, time, vocabulary)."""
        return super().forward(tokens)


def _token_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, averaged over all positions whose target is not -100."""
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def _predicting_tokens(model: nn.Module, batch: int, time: int, vocabulary: int) -> Parts:
    """The model with AdamW, predicting the next of random tokens."""
    text = torch.randint(vocabulary, (batch, time + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), _token_loss


# --- GPT-2 ---


class Transformer(LanguageModel):
    """A decoder-only language model; `tied` shares the embedding with the output layer, as GPT-2 does."""

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        vocabulary: int = 1000,
        time: int = 128,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.add_tables(width, token=vocabulary, position=time)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.add_head(tied)

    def features(self, tokens: Tensor) -> Tensor:
        """What goes into `head`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.norm(self.blocks(self.token(tokens) + self.position(positions)))


def _next_token(model: Transformer, batch: int, time: int) -> Parts:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    x, y = (torch.randint(0, model.token.num_embeddings, (batch, time)) for _ in range(2))
    return model, optimizer, (x, y), _token_loss


def transformer(batch: int = 4, time: int = 128, device: str = "cpu") -> Callable[[], float]:
    """A training step of a 1.1 M parameter transformer, AdamW."""
    return stepping(lambda: _next_token(Transformer(time=time), batch, time), device)


def gpt2(batch: int = 8, time: int = 1024, device: str = "cuda") -> Callable[[], float]:
    """A training step of GPT-2 small (124 M parameters) in float32, AdamW."""
    return stepping(lambda: _next_token(Transformer(12, 768, 12, 50257, 1024, tied=True), batch, time), device)


def gpt(batch: int, time: int, layers: int, width: int, heads: int, vocabulary: int, tied: bool) -> Parts:
    """The model in training, AdamW."""
    divided("width", "heads", width=width, heads=heads)
    return _predicting_tokens(Transformer(layers, width, heads, vocabulary, time, tied), batch, time, vocabulary)


# --- Llama ---


def _rotary(time: int, width: int, device: torch.device, base: float = 500_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding: (time, width)."""
    speeds = base ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.outer(torch.arange(time, device=device), speeds).repeat(1, 2)
    return angles.cos(), angles.sin()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x: (batch, heads, time, width)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


class GroupedAttention(Attending):
    """Causal attention with `heads` of queries and `groups` heads of keys and values."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.each, bias=False)
        self.v = nn.Linear(width, groups * self.each, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes the positions of x: (batch, time, width)."""
        batch, time, width = x.shape
        q = self.q(x).view(batch, time, self.heads, self.each).transpose(1, 2)
        k = self.k(x).view(batch, time, self.groups, self.each).transpose(1, 2)
        v = self.v(x).view(batch, time, self.groups, self.each).transpose(1, 2)
        cos, sin = _rotary(time, self.each, x.device)
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        k, v = (one.repeat_interleave(self.heads // self.groups, dim=1) for one in (k, v))
        y = self.attend(q, k, v, True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class SwiGlu(nn.Module):
    """A feed-forward part in which one half gates the other."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.act = nn.Linear(width, inner, bias=False), nn.SiLU()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape."""
        return self.down(self.act(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """Attention and SwiGLU, each behind its norm."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width, eps=1e-5), GroupedAttention(width, heads, groups)
        self.norm2, self.feed = nn.RMSNorm(width, eps=1e-5), SwiGlu(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of the input's shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Llama(LanguageModel):
    """A current decoder-only language model."""

    def __init__(
        self, layers: int, width: int, heads: int, groups: int, inner: int, vocabulary: int, tied: bool
    ) -> None:
        super().__init__()
        self.add_tables(width, token=vocabulary)
        self.blocks = nn.Sequential(*(LlamaBlock(width, heads, groups, inner) for _ in range(layers)))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.add_head(tied)

    def features(self, tokens: Tensor) -> Tensor:
        """What goes into `head`."""
        return self.norm(self.blocks(self.token(tokens)))


def llama(
    batch: int, time: int, layers: int, width: int, heads: int, groups: int, inner: int, vocabulary: int, tied: bool
) -> Parts:
    """The model in training, AdamW."""
    divided("width", "heads", width=width, heads=heads)
    divided("heads", "groups", heads=heads, groups=groups)
    model = Llama(layers, width, heads, groups, inner, vocabulary, tied)
    return _predicting_tokens(model, batch, time, vocabulary)


# --- BERT ---

MASK, EVERY, IGNORED = 0, 7, -100


class PostNormBlock(nn.Module):
    """Attention and a feed-forward part of four times the width, each before its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads, causal=False), nn.LayerNorm(width, eps=1e-12)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm2 = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of the input's shape."""
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed(x))


class Bert(LanguageModel):
    """A bidirectional encoder."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, longest: int, tied: bool) -> None:
        super().__init__()
        self.add_tables(width, token=vocabulary, position=longest, segment=2)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.blocks = nn.Sequential(*(PostNormBlock(width, heads) for _ in range(layers)))
        self.last = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=1e-12))
        self.add_head(tied)

    def features(self, tokens: Tensor) -> Tensor:
        """What goes into `head`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions) + self.segment(torch.zeros_like(tokens))
        return self.last(self.blocks(self.norm(x)))


def bert(batch: int, time: int, layers: int, width: int, heads: int, vocabulary: int, tied: bool) -> Parts:
    """The model in training, AdamW."""
    divided("width", "heads", width=width, heads=heads)
    model = Bert(layers, width, heads, vocabulary, max(time, 512), tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(1, vocabulary, (batch, time))
    target = torch.full_like(tokens, IGNORED)
    target[:, ::EVERY] = tokens[:, ::EVERY]
    tokens[:, ::EVERY] = MASK
    return model, optimizer, (tokens, target), _token_loss


# --- LSTM ---


class Recurrent(nn.Module):
    """One layer over all positions; its final state is dropped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape: (batch, time, width)."""
        return self.lstm(x)[0]


class LstmLanguage(LanguageModel):
    """Embedding, recurrent layers, and scores over the vocabulary."""

    def __init__(self, layers: int, width: int, vocabulary: int, tied: bool) -> None:
        super().__init__()
        self.add_tables(width, std=0.05, token=vocabulary)
        self.blocks = nn.Sequential(*(Recurrent(width) for _ in range(layers)))
        self.add_head(tied)

    def features(self, tokens: Tensor) -> Tensor:
        """What goes into `head`."""
        return self.blocks(self.token(tokens))


def lstm(batch: int, time: int, layers: int, width: int, vocabulary: int, tied: bool) -> Parts:
    """The model in training, AdamW."""
    return _predicting_tokens(LstmLanguage(layers, width, vocabulary, tied), batch, time, vocabulary)


_GPT = (4, 256, 6, 64, 4, 512, True), (8, 256, 6, 192, 6, 8192, True), (8, 1024, 12, 768, 12, 50_257, True)
_BERT = (8, 128, 6, 64, 4, 512, True), (16, 128, 6, 192, 6, 8192, True), (32, 512, 12, 768, 12, 30_522, True)
_LLAMA = (
    (4, 128, 6, 64, 4, 2, 192, 512, True),
    (8, 256, 6, 192, 6, 2, 512, 8192, True),
    (2, 2048, 16, 2048, 32, 8, 8192, 128_256, True),
)
_LSTM = (16, 64, 2, 64, 1000, False), (24, 64, 2, 256, 10_000, False), (20, 35, 2, 1500, 10_000, False)
WORKLOADS = (
    Workload.of("gpt", "a decoder-only language model: equal blocks, and scores over a large vocabulary", gpt, *_GPT),
    Workload.of(
        "llama", "a current language model: RMSNorm, rotary positions, SwiGLU, grouped-query attention", llama, *_LLAMA,
    ),
    Workload.of(
        "bert", "an encoder that predicts masked words: scores for the whole vocabulary, needed at one position in seven",
        bert, *_BERT,
    ),
    Workload.of(
        "lstm", "a recurrent language model: small states at many times, and scores over a vocabulary", lstm, *_LSTM,
    ),
)  # fmt: skip
