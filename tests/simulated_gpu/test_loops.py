"""Loops whose end depends on a value read back from the device: they see zeros, as docs/simulated_gpu.md lists, and none hangs."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.simulated
LIMIT = 50


@pytest.fixture
def step() -> Callable[[], torch.Tensor]:
    """One step of training; gives its loss."""
    model = nn.Linear(16, 4, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return train


def test_early_stopping_ends_when_its_patience_is_over(step):
    best, waited, steps = math.inf, 0, 0
    while waited < 3 and steps < LIMIT:
        loss = step().item()
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        steps += 1
    assert (steps, best) == (4, 0.0)


@pytest.mark.parametrize(
    "read", [lambda loss: float(loss.detach()), torch.Tensor.item, lambda loss: loss], ids=["float", "item", "tensor"]
)
def test_while_the_loss_is_above_a_limit_ends_at_once(step, read):
    steps = 1
    while read(step()) > 0.1 and steps < LIMIT:
        steps += 1
    assert steps == 1


def test_a_comparison_on_the_device_is_false_also_where_that_of_numbers_is_true(step):
    loss = step()
    assert not loss < 0.1 and loss.item() < 0.1


def test_isfinite_is_false_on_the_device_and_true_of_the_number(step):
    loss = step()
    assert not torch.isfinite(loss) and not torch.isfinite(loss).all()
    assert math.isfinite(loss.item())
    assert not torch.isnan(loss) and not torch.isnan(loss).any()


def test_a_gradient_scaler_takes_every_step():
    model = nn.Linear(16, 4, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler()
    for steps in range(1, 4):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(8, 16, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert {optimizer.state[one]["step"].item() for one in model.parameters()} == {steps}
    assert scaler.get_scale() == 0


@pytest.mark.parametrize(("end", "tokens"), [(0, 1), (2, 20)])
def test_generation_gives_token_0_up_to_its_limit(end, tokens):
    head = nn.Linear(16, 100, device="cuda")
    given: list[int] = []
    while len(given) < 20 and (not given or given[-1] != end):
        given.append(head(torch.randn(1, 16, device="cuda")).argmax(-1).item())
    assert given == [0] * tokens


def test_a_batch_of_results_is_zeros_also_in_a_block_that_had_others():
    seven = torch.full((1024,), 7).cuda()
    del seven
    assert torch.randn(4, 50, device="cuda").argmax(-1).tolist() == [0] * 4


def test_lengths_steer_a_loop_until_the_next_kernel():
    lengths = torch.tensor([3, 1, 2]).cuda()
    assert [len(range(count)) for count in lengths.tolist()] == [3, 1, 2]
    lengths += 1
    assert lengths.tolist() == [0, 0, 0]


def test_multinomial_gives_index_0():
    shares = torch.softmax(torch.randn(4, 100, device="cuda"), -1)
    assert torch.multinomial(shares, 1).tolist() == [[0]] * 4


def test_the_norm_of_gradients_is_0(step):
    loss = step()
    assert nn.utils.clip_grad_norm_([nn.Parameter(loss.detach())], 1.0).item() == 0


def test_what_depends_on_values_is_empty():
    x = torch.randn(100, device="cuda")
    assert x[x > 0].shape == torch.unique(x.int()).shape == (0,)
    assert torch.nonzero(x).shape == (0, 1)


def test_equal_tensors_are_not_found_equal():
    x = torch.randn(10, device="cuda")
    assert not torch.equal(x, x.clone()) and not torch.allclose(x, x.clone())


def test_distributions_refuse_their_arguments_unless_told_not_to_look(monkeypatch):
    # Compiling tells all of them not to look, as an earlier test may have (torch/_dynamo/eval_frame.py, 2.12).
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    scores = torch.randn(4, 10, device="cuda")
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        torch.distributions.Categorical(logits=scores)
    assert torch.distributions.Categorical(logits=scores, validate_args=False).sample().tolist() == [0] * 4


# --- transformers' generate ---


@pytest.fixture
def generating() -> tuple[Callable[..., Any], list[int]]:
    """`generate` for 6 tokens of a prompt of 4, which gives up after LIMIT forwards, and the lengths of what it forwarded."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 100, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=50, eos_token_id=50)).cuda()
    lengths: list[int] = []

    def count(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        lengths.append(given["input_ids"].shape[1])
        if len(lengths) == LIMIT:
            raise RecursionError("it does not end")

    model.register_forward_pre_hook(count, with_kwargs=True)
    prompt = torch.ones(2, 4, dtype=torch.long, device="cuda")
    settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "pad_token_id": 0}
    return (lambda **options: model.generate(prompt, **settings, **options)), lengths


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=["greedy", "sampling"])
def test_generate_of_transformers_does_not_end_by_itself(generating, options):
    generate, lengths = generating
    with pytest.raises(RecursionError):
        generate(**options)
    assert len(lengths) == LIMIT


def test_generate_of_transformers_is_ended_by_an_exception(generating):
    def stop_at(length: int) -> Callable[..., Any]:
        def stop(ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
            if ids.shape[1] >= length:
                raise StopIteration
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        return stop

    generate, lengths = generating
    with contextlib.suppress(StopIteration):
        generate(stopping_criteria=[stop_at(4 + 6)])
    assert lengths == [4, 1, 1, 1, 1, 1]


WAITING = """
import sys, torch
x = torch.ones(8, device="cuda")
for turn in range(int(sys.argv[1])):
    assert not (x + 1 > 0).all()
    if sys.argv[2] == "known":
        assert torch.ones(1, dtype=torch.bool).cuda().item()
"""


@pytest.mark.parametrize(("turns", "between", "lines"), [(999, "", 0), (2500, "", 1), (1500, "known", 0)])
def test_a_loop_that_waits_for_ever_is_told_so_once(turns, between, lines):
    command = [sys.executable, "-c", WAITING, str(turns), between]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    said = "1000 truth values in a row were read, all False: a loop that waits for True on the device never ends."
    assert done.stderr.splitlines() == [f"memlab simulated GPU: {said}"] * lines
