"""Categories from objects: to the byte what the objects hold, on the CPU and on the simulated GPU."""

from __future__ import annotations

import copy
import gc
import textwrap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from probes import probed as probed_by
from probes.probed import DEVICES
from probes.stages import STAGES, held_bytes
from processes import python
from torch import nn

from memlab.analysis.breakdown import breakdown
from memlab.probes.cpu import CpuProbe
from memlab.probes.marks import marker
from memlab.probes.tensor_labels import tensor_labels
from memlab.trace import Trace
from memlab.trace.columns import Category, Kind

LARGE = 1 << 26


def probed(body: Callable[[], Any], device: str) -> tuple[Trace, Any]:
    """The trace of a body that ends with one large block, and what the body gave."""
    given = []

    def cell() -> None:
        given.append((body(), torch.empty(LARGE, dtype=torch.uint8, device=device)))
        assert not marker.watch_failures

    if device == "cuda":
        torch.cuda.init()
    trace = probed_by.probed(cell, device=device)
    return trace, given[0][0]


def by_category(trace: Trace, device: str) -> dict[str, int]:
    found = dict(breakdown(trace, -1 if device == "cpu" else 0, "category"))
    return {name: found.get(name, 0) for name in ("parameter", "gradient", "buffer", "optimizer")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STAGES)
def test_bytes_equal_the_sums_over_the_objects(name, device):
    gc.collect()
    before, _ = probed(lambda: None, device)  # what other tests have left alive
    running = STAGES[name](device)
    next(running)
    trace, held = probed(lambda: next(running), device)
    others = by_category(before, device)
    found = {category: count - others[category] for category, count in by_category(trace, device).items()}
    assert found == held_bytes(held, device)
    others = {"activation", "input", "temporary", "other", "rounding"}
    assert set(breakdown(trace, -1 if device == "cpu" else 0)) <= {*found, *others}


def categories(trace: Trace, kinds: tuple[Kind, ...] = (Kind.PREEXISTING, Kind.ALLOC)) -> list[tuple[int, str]]:
    """(requested bytes, category) of the blocks that were there or were made, in order."""
    events, category = trace.events, trace.blocks.category
    rows = np.flatnonzero(np.isin(events.kind, kinds))
    return [(int(events.requested_bytes[r]), Category(int(category[events.block[r]])).name.lower()) for r in rows]


def category_of(trace: Trace, wanted: int) -> list[str]:
    """The categories of the blocks of exactly so many requested bytes, in order."""
    return [category for requested, category in categories(trace) if requested == wanted]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_made_in_forward_and_kept_for_backward_is_an_activation(device):
    model = nn.Sequential(nn.Linear(10, 1000), nn.Tanh(), nn.Linear(1000, 7)).to(device)

    def body():
        model(torch.ones(9, 10, device=device)).sum().backward()

    trace, _ = probed(body, device)
    tanh = 9 * 1000 * 4
    assert category_of(trace, tanh)[:2] == ["temporary", "activation"]  # what went into tanh is gone before backward
    assert category_of(trace, 9 * 10 * 4) == ["input"]
    trace, _ = probed(lambda: model(torch.ones(9, 10, device=device)), device)  # still waits for its backward
    assert category_of(trace, tanh)[-1] == "activation"


@pytest.mark.parametrize("device", DEVICES)
def test_without_gradients_nothing_is_an_activation(device):
    model = nn.Sequential(nn.Linear(10, 1000), nn.Tanh(), nn.Linear(1000, 7)).to(device)

    def body():
        with torch.no_grad():
            return model(torch.ones(9, 10, device=device))

    trace, _ = probed(body, device)
    made = categories(trace, (Kind.ALLOC,))  # other tests may have left graphs behind
    assert "activation" not in {category for _, category in made}
    assert (9 * 7 * 4, "other") in made
    assert [category for size, category in made if size == 9 * 1000 * 4] == ["temporary", "temporary"]


@pytest.mark.parametrize("device", DEVICES)
def test_plain_tensors_that_a_backward_frees_are_activations(device):
    weight = torch.ones(100, 300, device=device, requires_grad=True)

    def body():
        (torch.ones(50, 100, device=device) @ weight).tanh().sum().backward()

    trace, _ = probed(body, device)
    assert "activation" in category_of(trace, 50 * 300 * 4)
    assert category_of(trace, 100 * 300 * 4)[0] == "other"  # a leaf that no module and no optimizer has
    assert category_of(trace, 100 * 300 * 4)[-1] == "gradient"


def test_what_one_network_makes_and_another_is_given_stays_an_activation():
    maker, judge = nn.Linear(3, 1111), nn.Linear(1111, 1)
    trace, _ = probed(lambda: judge(maker(torch.ones(5, 3))).sum().backward(), "cpu")
    assert category_of(trace, 5 * 1111 * 4)[0] == "activation"


def test_a_gradient_that_becomes_state_changes_its_category():
    class Keeper(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["last"] = parameter.grad
                    parameter.grad = None

    weight = nn.Parameter(torch.ones(777))
    keeper = Keeper([weight], lr=0.1)

    def body():
        weight.tanh().sum().backward()
        keeper.step()

    trace, _ = probed(body, "cpu")
    assert by_category(trace, "cpu")["optimizer"] == 777 * 4
    assert len(trace.recategorised) == 1
    assert trace.text("name", int(trace.blocks.name[trace.recategorised.block[0]])).startswith("grad of")


def test_names_and_modules_come_from_the_objects():
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20))
    optimizer = torch.optim.Adam(model.parameters())

    def body():
        model(torch.ones(4, 20)).sum().backward()
        optimizer.step()

    trace, _ = probed(body, "cpu")
    tensors = breakdown(trace, -1, "tensor")
    assert tensors["Sequential.0.weight"] == tensors["grad of Sequential.1.weight"] == 20 * 30 * 4
    assert tensors["exp_avg of Sequential.1.bias"] == 20 * 4
    assert breakdown(trace, -1, "module")["Sequential.0"] >= 4 * 20 * 30 * 4


def test_the_parameters_of_a_second_model_that_averages_the_first_are_parameters():
    model = nn.Linear(20, 30)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    copied = copy.deepcopy(model)

    def body():
        model(torch.ones(4, 20)).sum().backward()
        averaged.update_parameters(model)
        return copied

    trace, _ = probed(body, "cpu")
    assert by_category(trace, "cpu")["parameter"] >= 3 * (20 * 30 + 30) * 4


def test_a_model_that_is_converted_before_its_first_forward_has_parameters():
    """Of a notebook or script, whose variables have names."""
    code = """
        import memlab, torch
        net = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 200))
        with memlab.track("converted", device="cpu", show=False) as run:
            net.to(torch.bfloat16)
        print(run.breakdown("category")["parameter"], sum(run.breakdown("module")[name] for name in ("net.0", "net.1")),
              run.peak_allocated_bytes)
    """
    parameter, modules, peak_bytes = map(int, python("-c", textwrap.dedent(code)).split())
    assert parameter == modules == peak_bytes > 2 * 200 * 300 * 4


@pytest.mark.parametrize("device", DEVICES)
def test_so_has_one_that_the_same_cell_has_made(device):
    code = f"""
        import memlab, torch
        with memlab.track("made", device="{device}", show=False) as run:
            net = torch.nn.Sequential(torch.nn.Linear(2000, 500, device="{device}"), torch.nn.Linear(500, 2000))
            net.to("{device}").to(torch.float64)
        held = run.breakdown("category")
        print(held["parameter"] + held.get("rounding", 0), run.peak_allocated_bytes)
    """
    parameter, peak_bytes = map(int, python("-c", textwrap.dedent(code)).split())
    assert parameter == peak_bytes > 2000 * 500 * (4 + 8 + 8)


def test_claims_keep_nothing_alive_and_forget_everything():
    model = nn.Linear(10, 10)
    optimizer = torch.optim.Adam(model.parameters())
    refs = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.weight.untyped_storage())]
    probe = CpuProbe()
    probe.start()
    model(torch.ones(3, 10)).sum().backward()
    optimizer.step()
    refs.append(weakref.ref(model.weight.grad.untyped_storage()))
    del model, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4
    probe.stop()
    assert not tensor_labels.known and not tensor_labels.snapshots and marker.watch is None


def test_what_is_odd_never_fails_the_cell():
    class Odd(nn.Module):
        def forward(self, given):
            return given["x"] * 2

    class Hostile(dict):
        def values(self):
            raise RuntimeError("mine")

    lazy = nn.LazyLinear(5)  # its parameters have no shape yet
    trace, _ = probed(lambda: (Odd()(Hostile(x=torch.ones(5))), lazy(torch.ones(3, 7))), "cpu")
    assert breakdown(trace, -1, "tensor")["LazyLinear.weight"] == 5 * 7 * 4


@pytest.mark.simulated
def test_the_workspaces_of_cublas_have_their_name_and_no_category():
    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    free = torch.cuda.memory_allocated()

    def body():
        nn.Linear(64, 64, device="cuda")(weight).sum().backward()

    trace, _ = probed(body, "cuda")
    found = breakdown(trace, 0, "tensor").get("workspace of cuBLAS", 0)
    torch._C._cuda_clearCublasWorkspaces()
    assert found > 0
    assert found % (8 * 1024 * 1024 + 128 * 1024) == 0
    assert free <= before


@pytest.mark.simulated
@pytest.mark.parametrize("config", ["", ":4096:8"])
def test_what_a_graph_keeps_is_no_workspace_though_it_is_as_large(monkeypatch, config):
    """Losses of an earlier cell, whose activations are of 32 MiB each: 1.26 GiB were called a workspace of cuBLAS."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    size = 8 << 20  # floats
    kept = [torch.ones(size, device="cuda", requires_grad=True).exp().sum() for _ in range(9)]
    trace, _ = probed(lambda: torch.ones(9, device="cuda"), "cuda")
    found = breakdown(trace, 0, "tensor").get("workspace of cuBLAS", 0)
    assert found <= (2 * 4 * size if config else 2 * 8519680)
    assert kept[0].grad_fn is not None


def test_what_another_thread_runs_is_named_as_not_told_apart():
    model = nn.Linear(4, 4)

    def body():
        thread = threading.Thread(target=lambda: model(torch.ones(2, 4)))
        thread.start()
        thread.join()

    trace, _ = probed(body, "cpu")
    assert "other threads' work" in {gap.name for gap in trace.gaps}
    trace, _ = probed(lambda: model(torch.ones(2, 4)), "cpu")
    assert "other threads' work" not in {gap.name for gap in trace.gaps}


@pytest.mark.parametrize("device", DEVICES)
def test_what_graphs_kept_before_the_cell_are_activations(device):
    model = nn.Sequential(nn.Linear(64, 333), nn.Tanh()).to(device)
    kept = [model(torch.ones(17, 64, device=device)) for _ in range(4)]
    trace, _ = probed(lambda: None, device)
    assert category_of(trace, 17 * 333 * 4).count("activation") >= len(kept)
    assert by_category(trace, device)["parameter"] >= 64 * 333 * 4
