from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from scripted_traces import HOST, Script
from storage_tracking import Counting

import memlab
from memlab.analysis.results import Fact, Numbers, Result, check, read_result
from memlab.api import results
from memlab.api.results import serialized
from memlab.api.run import Run
from memlab.errors import MemlabError
from memlab.torch_internals import dispatch
from memlab.units import MiB


def small(name: str = "small") -> Run:
    script = Script(HOST)
    script.alloc(300, at=5)
    return Run(name, script.trace(notes={"name": name}))


def parts(value: object) -> Result:
    """What is read of a result, after a file has had it, by the paths of its parts."""
    return read_result(json.loads(json.dumps(serialized(value))))


def read(value: object) -> Numbers:
    """A result that has one part."""
    return parts(value)[()]


def result_of(run: Run) -> Numbers:
    return read_result(run.trace.notes["result"])[()]


# --- what a run does with it ---


def test_a_result_comes_back_as_it_is_and_keeps_no_tensor_alive():
    run, tensor = small(), torch.ones(3, requires_grad=True) * 2
    value = {"loss": 0.5, "parts": [tensor, (tensor, "text")], "none": None}
    for given in (tensor, value):
        assert run.result(given) is given
    seen = weakref.ref(tensor)
    del tensor, value, given
    gc.collect()
    assert seen() is None
    found = read_result(run.trace.notes["result"])
    assert found["loss",].values.tolist() == [0.5]
    assert found["parts", 1, 0].values.tolist() == [2, 2, 2]
    assert found["none",] == Fact("None")


def test_a_result_is_a_copy():
    run, value = small(), torch.zeros(2)
    run.result(value)
    value += 1
    assert result_of(run).values.tolist() == [0, 0]


def test_a_result_goes_with_the_run_into_files_and_out_of_them(tmp_path):
    with memlab.track("kept", show=False) as run:
        run.result({"loss": torch.tensor([0.1, float("nan")]), "n": 1 << 80, "text": "ü\ud800"})
    found = memlab.load(run.save(tmp_path / "run.memlab"))
    assert found.trace.notes["result"] == run.trace.notes["result"]
    assert check(*(read_result(one.trace.notes["result"]) for one in (found, run))).verdict == "equal"


def test_the_last_result_counts_also_after_the_run_has_ended():
    with memlab.track(show=False) as run:
        run.result(1)
        run.result(2)
    assert result_of(run).values.tolist() == [2]
    run.result(3)
    assert result_of(run).values.tolist() == [3]


@pytest.mark.parametrize(
    "make",
    [lambda x: x, lambda x: x.t(), lambda x: x.bfloat16(), lambda x: x.bfloat16()[::2],
     lambda x: torch.complex(x, x).conj(), lambda x: torch._neg_view(x), lambda x: x.expand(3, *x.shape)],
)  # fmt: skip
def test_a_result_noted_inside_a_track_is_not_measured(make):
    value = torch.ones(700, 600)
    with memlab.track(show=False) as run:
        made = make(value)
        modes = [*map(id, dispatch.modes())]  # noting takes them off and puts them back
        run.result(made)
        assert [*map(id, dispatch.modes())] == modes
    with memlab.track(show=False) as plain:
        make(value)
    peaks = [one.peak_bytes - one.summary.devices[0].level("allocated").start_bytes for one in (run, plain)]
    assert peaks[0] == peaks[1]


def test_noting_leaves_modes_and_the_random_state_as_they_were_also_where_it_fails():
    value, state = torch.ones(5), torch.get_rng_state()
    with Counting() as first, Counting() as second:
        before = [*map(id, dispatch.modes())]
        serialized(value)
        with pytest.raises(MemlabError):
            serialized([value, object()])
        assert [*map(id, dispatch.modes())] == before
        assert first.seen == second.seen == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


# --- what can be noted ---

KNOWN = (torch.bfloat16, torch.float16, torch.bool, torch.complex64, torch.float8_e5m2, torch.float8_e4m3fn, torch.int8)
KNOWN += (torch.uint16, torch.float64, torch.complex32)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", KNOWN)
def test_a_result_of_any_dtype(dtype):
    found = read(torch.ones(2).to(dtype))
    assert (found.values == 1).all()
    assert (found.dtype, found.shape) == (str(dtype).removeprefix("torch."), (2,))


Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    name: str = "n"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "None"), ("a", "text"), (b"a", "byte"), (True, ""), (3, ""), (1 << 70, "text"), (2.5, ""), (1j, ""),
        (np.float32(2), ""), (np.arange(3), ""), (np.ones(2, ">f4"), ""), ([], "a list"), ((1, 2), "a list"),
        (Pair(1, 2), "a list"), ({}, "a dict"), (OrderedDict(a=1), "a dict"), (lambda: Output(torch.ones(2)), "a dict"),
        ([0.5] * 100, ""), (lambda: torch.ones(0), ""), (lambda: torch.nn.Parameter(torch.ones(1)), ""),
        (torch.Size([1]), "a list"), (lambda: torch.ones(2, requires_grad=True) * 2, ""), ({1: 2, "1": 3, None: 4}, "a dict"),
        (np.arange(200_000, dtype="u8")[::-1], ""),
    ],
)  # fmt: skip
def test_what_is_noted_is_read_and_equals_itself(value, kind):
    value = value() if callable(value) else value
    found = parts(value)
    assert getattr(found[()], "kind", "") == kind
    assert check(found, parts(value)).verdict == "equal"


@pytest.mark.parametrize("value", ["a layer", object(), {"a": {1, 2}}, Output, len])
def test_what_might_hold_tensors_unseen_is_refused(value):
    value = torch.nn.Linear(1, 1) if value == "a layer" else value
    with pytest.raises(MemlabError, match="a result is a tensor"):
        small().result(value)


@pytest.mark.parametrize(
    "make",
    [lambda: torch.ones(2, device="meta"), lambda: torch.eye(2).to_sparse(), lambda: np.array([object()]),
     lambda: np.array(["a"]), lambda: {(1, 2): 3}, lambda: [[]] * 30_000, lambda: [0] * 1_000_001],
)  # fmt: skip
def test_what_has_no_values_to_note_is_refused_in_one_line(make):
    with pytest.raises(MemlabError) as caught:
        small().result(make())
    assert "\n" not in str(caught.value)


def test_a_list_within_itself_ends():
    value: list = []
    value.append(value)
    with pytest.raises(MemlabError, match="levels"):
        small().result(value)


# --- how much of it ---


def test_up_to_a_mebibyte_every_value_is_kept_above_it_a_digest_and_some():
    whole, large = read(torch.arange(MiB // 4).float()), read(torch.arange(MiB // 4 + 1).float())
    assert len(whole.values) == MiB // 4
    assert (large.is_whole, len(large.values)) == (False, results.SAMPLE)
    assert (len(large.sha256), large.largest, large.nans) == (64, MiB // 4, 0)
    assert large.norm == pytest.approx(float(torch.arange(MiB // 4 + 1).double().norm()))


def test_the_limit_is_for_all_parts_together_and_the_small_ones_stay_whole():
    found = parts({"loss": torch.ones(3), "a": torch.ones(200_000), "b": torch.ones(200_000)})
    assert [found[key,].is_whole for key in ("loss", "a", "b")] == [True, False, False]


@pytest.mark.parametrize(
    ("make", "mib"),
    [(lambda: torch.zeros(4 * MiB), 2), (lambda: [torch.zeros(MiB // 2) for _ in range(9)], 2), (lambda: "x" * 3 * MiB, 2),
     (lambda: [torch.zeros(200) for _ in range(3000)], 3)],
)  # fmt: skip
def test_a_note_is_never_much_longer_than_the_limit(make, mib):
    assert len(json.dumps(serialized(make()))) < mib * MiB


def test_beyond_what_is_read_a_small_sample_is_left(monkeypatch):
    monkeypatch.setattr(results, "READ_BYTES", MiB)
    tensor = torch.arange(MiB).float().reshape(1024, -1)
    views = (
        tensor.t(),
        tensor.t().numpy(),
        torch._neg_view(-tensor.t()),
        tensor.t().to(torch.bfloat16).float().t().t(),
    )
    for value in views:
        kept = read(value)
        assert (kept.sha256, len(kept.values)) == ("", 256)
        found = check(parts(value), parts(value))
        assert (found.verdict, found.short) == ("not checked", "not checked (too large)")
        assert check(parts(value), parts(value * 2)).verdict == "different"
    assert [read(one).values.tolist() for one in views[1:3]] == [read(views[0]).values.tolist()] * 2
    assert check(parts(tensor), parts(tensor[1:])).verdict == "different"


def test_a_mebibyte_of_every_dtype_is_kept_whole():
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.complex32, torch.int64):
        assert read(torch.ones(MiB // dtype.itemsize, dtype=dtype)).is_whole


def test_views_that_are_worked_out_when_they_are_read():
    x = torch.arange(MiB).float()
    pair = torch.complex(x, x + 1)
    for view in (pair.conj(), pair.conj().imag, torch._neg_view(x), pair.conj()[::2]):
        plain = view.clone().resolve_conj().resolve_neg()
        assert not plain.is_conj()
        assert serialized(view) == serialized(plain)


def test_a_digest_is_of_every_bit_the_dtype_and_the_shape():
    x = torch.zeros(MiB)
    changed = x.clone()
    changed[12_345] = 1e-30
    digests = [read(one).sha256 for one in (x, x.clone(), changed, x.view(2, -1), x.int(), -x)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


# --- the last value of a cell ---


def offered(value: object) -> Run:
    run = Run("cell")
    run.offer(value)
    run.finish(small().trace)
    return run


def test_what_is_offered_becomes_the_result_and_is_not_kept():
    value = torch.ones(2)
    seen, run = weakref.ref(value), offered(value)
    del value
    gc.collect()
    assert seen() is None
    assert result_of(run).values.tolist() == [1, 1]


@pytest.mark.parametrize("value", [None, object(), "meta", {"a": {1}}])
def test_what_cannot_be_noted_is_none_without_a_word(value):
    value = torch.ones(2, device="meta") if value == "meta" else value
    assert "result" not in offered(value).trace.notes


def test_a_result_that_was_given_is_not_replaced_by_an_offer():
    run = Run("cell")
    run.result("mine")
    run.offer("last value")
    run.finish(small().trace)
    assert result_of(run).text == "mine"


def test_an_interrupt_while_a_last_value_is_noted_costs_the_result_alone(monkeypatch):
    def interrupted(value: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "serialized", interrupted)
    run = offered(torch.ones(2))
    assert "result" not in run.trace.notes
    assert run.peak_bytes == 300


def test_an_interrupt_while_modes_are_taken_off_leaves_all_of_them_on_in_order(monkeypatch):
    remove, calls = dispatch.remove_mode, []

    def interrupted(mode):
        calls.append(mode)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return remove(mode)

    monkeypatch.setattr(dispatch, "remove_mode", interrupted)
    with Counting(), Counting(), Counting():
        before = dispatch.modes()
        with pytest.raises(KeyboardInterrupt):
            serialized(torch.ones(3))
        assert len(before) == 3 and list(map(id, dispatch.modes())) == list(map(id, before))
