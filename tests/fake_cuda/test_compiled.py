"""`torch.compile` in predictions."""

from __future__ import annotations

import functools
import json
import os

import pytest
import torch
from processes import python
from torch import nn

import memlab
from memlab.fake_cuda.compiled import COMPILED, EAGER, SKIPPED, TUNED, WHOLE
from memlab.fake_cuda.graph_trees import IN_GRAPHS, OVERWRITTEN, WITHOUT_GRAPHS

IN_CI = (
    "function", "convolutions", "checkpoints", "selective", "function_in_graphs", "reads", "disabled", "shared", "norms",
)  # fmt: skip
OTHERS = ("casts", "language_half", "in_place", "prints", "branches")  # more of them: docs/prediction.md


@pytest.mark.simulated
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("programs", [IN_CI, pytest.param(OTHERS, marks=pytest.mark.release)])
def test_compiled_programs_take_what_inductor_takes(tmp_path, programs):
    run = functools.partial(python, "-m", "compiled_programs", timeout=900, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    run("measured", *programs)  # times its kernels
    # The children could not use CUDA had their parent counted devices by it.
    there = json.loads(run("alone", *programs, PYTORCH_NVML_BASED_CUDA_CHECK="1"))
    assert json.loads(run("predicted", *programs)) == there


def peak_of(fake, step):
    """The most that was allocated during the second of two steps."""
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        step()
    return torch.cuda.max_memory_allocated()


def scores(x, weight):
    return torch.softmax((x @ weight).relu() * 2 + 1, -1) @ weight.t()


def a_step(function):
    weight = torch.randn(256, 1024, device="cuda", requires_grad=True)

    def step():
        function(torch.randn(2048, 256, device="cuda"), weight).sum().backward()
        weight.grad = None

    return step


def test_a_compiled_function_keeps_and_requests_less(fake):
    eager = peak_of(fake, a_step(scores))
    kept = torch.cuda.memory_allocated()
    step = a_step(torch.compile(scores))
    step()
    assert torch.cuda.memory_allocated() == kept + 256 * 1024 * 4  # the weight of this step
    assert peak_of(fake, step) < 0.75 * eager
    assert fake.assumptions[COMPILED] == 1
    assert not torch.compiler.is_compiling()


def reads(x, weight):
    return (x @ weight).relu() if weight.sum().item() > 0 else x


def steps(x, weight):
    loss = scores(x, weight).sum()
    loss.backward()
    return loss.detach()


def looks(x, weight):
    return (x @ weight)[:, :4].cpu()


def test_what_copies_to_the_host_runs_as_eager_and_says_so(fake):
    weight = torch.randn(256, 1024, device="cuda", requires_grad=True)
    x = torch.randn(2048, 256, device="cuda")
    wanted = peak_of(fake, lambda: looks(x, weight))
    assert peak_of(fake, lambda: torch.compile(looks)(x, weight)) == wanted
    assert any(text.startswith(EAGER) and "it copies to the host" in text for text in fake.assumptions)


@pytest.mark.parametrize("function", [reads, steps])
def test_what_reads_values_or_calls_backward_is_compiled_around_it(fake, function):
    weight = torch.randn(256, 1024, device="cuda", requires_grad=True)
    x = torch.randn(2048, 256, device="cuda")
    wanted = peak_of(fake, lambda: function(x, weight))
    weight.grad = None
    assert peak_of(fake, lambda: torch.compile(function)(x, weight)) <= wanted
    assert fake.assumptions[COMPILED] and not [text for text in fake.assumptions if text.startswith(EAGER)]


def test_what_returns_nothing_but_writes_is_compiled(fake):
    def update(weight, grad, rate):
        weight.sub_(torch.tanh(grad * rate) * 2)

    weight, grad = (torch.zeros(1 << 20, device="cuda") for _ in range(2))
    step = lambda function: lambda: function(weight, grad, torch.tensor(0.1))  # noqa: E731
    before = torch.cuda.memory_allocated()
    assert peak_of(fake, step(update)) >= before + (4 << 20)
    assert peak_of(fake, step(torch.compile(update))) == before
    assert not [text for text in fake.assumptions if text.startswith(EAGER)]


def test_what_makes_a_tensor_from_nothing_is_compiled(fake):
    @torch.compile(fullgraph=True)
    def mask(length):
        return torch.ones(length, length, device="cuda").tril() * 2

    assert peak_of(fake, lambda: mask(1024)) == 4 << 20
    assert fake.assumptions[COMPILED]


def test_errors_of_the_function_are_its_own(fake):
    def wrong(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        torch.compile(wrong)(torch.ones(2, device="cuda"))
    assert not torch.compiler.is_compiling()


def test_models_stay_the_same_objects(fake):
    model = nn.Linear(4, 4)
    assert torch.compile(model) is model
    assert torch.compile(model, disable=True) is model
    assert list(model.state_dict()) == ["weight", "bias"]
    assert model.compile() is None and SKIPPED in fake.assumptions
    assert torch.compile(backend="eager")(scores) is scores


def test_state_that_a_first_call_makes_is_counted(fake):
    kept = {}

    def function(x):
        kept.setdefault("state", torch.zeros(1 << 20, device="cuda"))
        return x * 2 + kept["state"][0]

    x = torch.ones(1024, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.compile(function)(x)
    assert torch.cuda.memory_allocated() == before + (4 << 20)


def test_what_was_compiled_before_is_compiled_for_the_gpu():
    model = torch.compile(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)))

    def step():
        model.to("cuda")(torch.randn(512, 256, device="cuda")).sum().backward()

    assert any(text.startswith("compiled code: the graphs") for text in memlab.predict(step, "T4").assumptions)


def scaled(x, weight):
    return torch.relu(x @ weight) * 2


def test_a_replayed_graph_allocates_nothing(fake):
    weight, x = (torch.randn(1024, 1024, device="cuda", requires_grad=one) for one in (True, False))
    function = torch.compile(scaled, mode="reduce-overhead")
    held = []
    for _ in range(4):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function(x, weight).sum().backward()
        weight.grad = None
        held.append(torch.cuda.max_memory_allocated() - before)
    warm, captured, replayed, again = held
    assert captured >= warm + (4 << 20)  # backward keeps the copy of x in the pool, next to x
    assert replayed == again == (4 << 20) + 1024  # the gradient of the sum, made outside, and two scalars
    assert fake.assumptions[IN_GRAPHS] == 1


def test_what_a_step_returned_goes_when_the_next_begins(fake):
    function = torch.compile(scaled, mode="reduce-overhead")
    x = torch.ones(1024, 1024, device="cuda")
    with torch.no_grad():
        first = function(x, x)
        held = torch.cuda.memory_allocated()
        second = function(x, x)  # captured: its input and its output are in the pool
        assert torch.cuda.memory_allocated() <= held + (4 << 20) + 4096
        function(x, x)
    assert first.shape == second.shape


def test_gradients_that_are_kept_for_the_next_step_are_named(fake):
    weight = torch.randn(256, 256, device="cuda", requires_grad=True)
    function = torch.compile(scaled, mode="reduce-overhead")
    for _ in range(2):
        function(torch.ones(256, 256, device="cuda"), weight).sum().backward()
    assert fake.assumptions[OVERWRITTEN]


def adds(x, cache):
    cache.add_(x)
    return cache * 2


@pytest.mark.parametrize(
    ("function", "device", "reason"), [(adds, "cuda", "it writes to an argument"), (torch.add, "cpu", "on the CPU")]
)
def test_why_code_runs_without_graphs(fake, function, device, reason):
    x = torch.ones(256, 256, device="cuda")
    with torch.no_grad():
        torch.compile(lambda one, other: function(one, other), mode="reduce-overhead")(
            x, torch.ones((256, 256) if device == "cuda" else (), device=device)
        )
    assert any(text.startswith(WITHOUT_GRAPHS) and reason in text for text in fake.assumptions)
    assert not fake.assumptions[IN_GRAPHS]


def test_what_is_chosen_by_time_is_said(fake):
    torch.compile(scaled, mode="max-autotune")
    assert fake.assumptions[TUNED] == 1


def middle(x, weight, between):
    found = torch.tanh((x @ weight).relu() * 2)
    between()
    return found.sigmoid() * 2 + found


@torch.compiler.disable
def disabled():
    pass


def held(between, function=middle):
    """What the result of a function and its backward hold."""
    weight = torch.randn(256, 1024, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    out = torch.compile(function)(torch.randn(2048, 256, device="cuda"), weight, between)
    assert out.requires_grad
    return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("between", [lambda: print("here"), lambda: torch._dynamo.graph_break(), disabled])
def test_each_graph_keeps_what_its_own_backward_needs(fake, between):
    whole, broken = held(lambda: None), held(between)
    assert broken > whole
    assert fake.assumptions[COMPILED]


@pytest.mark.skipif("MEMLAB_DYNAMO_FAILS" not in os.environ, reason="runs in the process of the test below")
def test_dynamo_fails(fake, monkeypatch):
    def fails(translator):
        raise ValueError("no such instruction")

    def function(x, weight, between):  # Dynamo compiles one, such as `middle`, eight times at most
        between()
        return scores(x, weight)

    whole = held(lambda: None, function)
    monkeypatch.setattr("torch._dynamo.symbolic_convert.InstructionTranslatorBase.run", fails)
    assert held(disabled, function) == whole
    (text,) = [one for one in fake.assumptions if one.startswith(WHOLE)]
    assert text.endswith("ValueError: no such instruction")


def test_where_dynamo_fails_a_function_is_one_graph_and_the_report_says_so():
    # After an error in its callback, PyTorch (2.13) leaves Dynamo's frame evaluator on: callers then hold what they pass.
    here = f"{__file__}::{test_dynamo_fails.__name__}"
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider", here, MEMLAB_DYNAMO_FAILS="1")
    assert "1 passed" in said
