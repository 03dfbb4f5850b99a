"""The bytes of a language model by purpose, on a trace of a step that computes nothing."""

from __future__ import annotations

import pytest
import torch
from fake_gpus import card
from torch import nn

from memlab.analysis.model_shares import CACHE, LOGITS, WEIGHTS, generated, shares
from memlab.prediction import dry_run
from memlab.trace.file import loads

BATCH, TOKENS, WIDTH, WORDS, LAYERS = 2, 64, 128, 1000, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x, kept):
        kept.append(x + self.scale)
        return self.line(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x, kept):
        for layer in self.layers:
            x = layer(x, kept)
        return self.head(x)


def traced(step):
    with dry_run.dry_run(card()) as finish:
        step()
    return loads(finish())


def test_a_training_step():
    def step():
        model = Model().cuda()
        scales = torch.ones(1 << 20, device="cuda")  # as those of quantized weights, which are no parameters
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.ones(BATCH, TOKENS, WIDTH, device="cuda"), []).log_softmax(-1).sum().backward()
            optimizer.step()
        del scales

    found = shares(traced(step), 0, [BATCH * TOKENS * WORDS])
    parameters = LAYERS * (WIDTH * WIDTH + WIDTH) + WORDS * WIDTH
    assert found[WEIGHTS] == 4 * (parameters + LAYERS * WIDTH + (1 << 20))
    assert found["gradients"] == 4 * parameters
    assert found["optimizer state"] >= 8 * parameters
    assert found[LOGITS] % (4 * BATCH * TOKENS * WORDS) == 0 < found[LOGITS]
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_an_inference():
    def step():
        model, kept = Model().cuda(), []
        with torch.no_grad():
            model(torch.ones(BATCH, TOKENS, WIDTH, device="cuda"), kept)
            model(torch.ones(BATCH, 1, WIDTH, device="cuda"), kept)

    trace = traced(step)
    found, parts = shares(trace, 0, [BATCH * TOKENS * WORDS]), generated(trace, 0, [BATCH * TOKENS * WORDS])
    assert parts.cache_bytes == found[CACHE] == LAYERS * 4 * BATCH * TOKENS * WIDTH
    assert parts.prefill_bytes == pytest.approx(sum(found.values()))
    assert 0 < parts.decode_bytes < parts.prefill_bytes


def test_nothing_but_weights():
    found = shares(traced(lambda: torch.ones(1 << 20, device="cuda").sum()), 0, [5])
    assert set(found) <= {WEIGHTS, "rounding", "other", "temporaries"}
