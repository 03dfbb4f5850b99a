"""Programs on the simulated GPU that read what the host's kernels computed: they go as they go on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import values

pytestmark = pytest.mark.simulated
Program = Callable[[str], Any]


def loop(device: str) -> Any:
    """A loop whose end is a value."""
    x, turns = torch.rand(100, device=device), 0
    while x.sum() < 1000:
        x, turns = x * 1.5, turns + 1
    return turns, round(x.max().item(), 3), len(x.tolist())


def selected(device: str) -> Any:
    """Masks, in forward and backward, and other counts."""
    x = torch.randn(200, 30, device=device, requires_grad=True)
    kept = x[x > 0.5]
    kept.square().sum().backward()
    y = x.detach().clone()
    y[y < 0] = torch.zeros((), device=device)
    whole = (x.detach() * 3).int()
    lengths = whole.flatten()[:100].abs()
    return (
        len(kept), x.grad.count_nonzero().item(), len(torch.nonzero(y)), len(y.masked_select(y[0] > 0)), whole.unique().tolist(),
        len(whole.unique_consecutive()), len(torch.repeat_interleave(lengths)), torch.bincount(lengths).tolist(), torch.equal(y, x),
        torch.isin(whole, whole[0]).sum().item(), str(y[0]).count('0.0000'), y.t()[:, 1:3].half().cpu().tolist(),
    )  # fmt: skip


def drawn(device: str) -> Any:
    """Numbers that the GPU draws, and those that the host draws, in turn; a scalar of the GPU in a list."""
    scores = torch.randn(5, 9, device=device)
    chosen = torch.multinomial(scores.softmax(-1), 1)
    dropped = nn.functional.dropout(scores, 0.5)
    pair = torch.tensor([scores[0, 0], scores[0, 1]], device=device)
    return pair.tolist(), chosen.shape, dropped.count_nonzero().item() <= 45


def experts(device: str) -> Any:
    """Tokens per expert, trained."""
    router, experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    router.to(device), experts.to(device)
    tokens, sizes = torch.randn(64, 16).to(device), []
    weights, chosen = router(tokens).softmax(-1).max(-1)
    out = torch.zeros_like(tokens)
    for number, expert in enumerate(experts):
        (rows,) = torch.where(chosen == number)
        sizes.append(len(rows))
        out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, None])
    out.square().sum().backward()
    return sizes, sum(sizes) == 64


def suppressed(device: str) -> Any:
    """Boxes that overlap."""
    torchvision = pytest.importorskip("torchvision")
    boxes = torch.rand(150, 4, device=device)
    boxes[:, 2:] += boxes[:, :2]
    with torch.inference_mode():  # where the dispatcher sees operators as they are called
        boxes = boxes[boxes[:, 0] > 0.1]
    return len(boxes), len(torchvision.ops.nms(boxes, boxes[:, 3], 0.3))


def generated(device: str) -> Any:
    """Until each sequence has ended."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 100, "n_positions": 64}
    model = (
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=list(range(40)))).eval().to(device)
    )
    prompt = torch.arange(60, 72).view(3, 4).to(device)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, pad_token_id=0, do_sample=False
    ).tolist()


def on_cpu(program: Program) -> Any:
    values.seed()
    return program("cpu")


@pytest.mark.parametrize("program", [loop, selected, experts, suppressed, generated])
def test_a_program_reads_what_it_would_on_the_cpu(program):
    found: list[Any] = []
    reads = values.computed(lambda: found.append(program("cuda")))
    with values.given(reads):
        found.append(program("cuda"))
    assert reads
    assert found == [on_cpu(program)] * 2


def test_numbers_of_the_gpu_are_not_drawn_from_those_of_the_host():
    after: list[Any] = []

    def program() -> None:
        after.append((drawn("cuda"), torch.rand(3).tolist()))

    with values.given(values.computed(program)):
        program()
    values.seed()
    assert after[0] == after[1] and after[0][1] == torch.rand(3).tolist()


def test_the_result_has_the_bytes_of_what_was_selected():
    x: list[torch.Tensor] = []

    def program() -> None:
        x[:] = [torch.randn(100_000, device="cuda")]
        x.append(x[0][x[0] > 1])

    reads = values.computed(program)
    with values.given(reads):
        before = torch.cuda.memory_allocated()
        x.clear()
        program()
    rounded = -(-reads[0].value * 4 // 512) * 512
    assert 10_000 < reads[0].value == len(x[1]) < 20_000
    assert x[1].untyped_storage().nbytes() == reads[0].value * 4
    assert before - before % 512 == before and rounded <= torch.cuda.memory_allocated()


def test_each_read_names_its_line():
    (read,) = values.computed(lambda: torch.ones(3, device="cuda").sum().item())
    assert read.operator == "_local_scalar_dense" and read.value == 3
    assert read.key.startswith("test_given_values.py:") and read.key.endswith(" item")


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (lambda x: (x.sum().item(), x[x > 2]), r"read 2 is nonzero of \[3\] .*on the host it was copy_ of \[3\]"),
        (lambda x: (x.sum().item(), x[:2].cpu()), r"read 2 is copy_ of \[2\] .*on the host it was copy_ of \[3\]"),
        (
            lambda x: (x.sum().item(), x.cpu(), x.cpu()),
            r"read 3 is copy_ of \[3\] .*on the host the program read 2 values",
        ),
        (lambda x: x.sum().item(), r"the program read 1 values, and 2 on the host; next: Read\(operator='copy_'"),
    ],
)
def test_another_order_is_an_error(program, says):
    def of_ones(program: Callable[[torch.Tensor], Any]) -> None:
        program(torch.ones(3, device="cuda"))

    reads = values.computed(lambda: of_ones(lambda x: (x.sum().item(), x.cpu())))
    with pytest.raises(ValueError, match=says), values.given(reads):
        of_ones(program)
    with contextlib.suppress(ValueError):
        assert torch.ones(3, device="cuda").sum().item() == 0  # as before


def test_what_is_not_computed_is_refused():
    with pytest.raises(NotImplementedError, match=r"the values of aten\.unique_dim\.default are not computed"):
        values.computed(lambda: torch.ones(3, 2, device="cuda").unique(dim=0))
