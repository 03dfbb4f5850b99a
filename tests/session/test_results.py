from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from handmade import HOST, Script

import memlab
from memlab.analysis.noted import Mapped, Nothing, Numbers, Series, Text, value_of
from memlab.analysis.results import check
from memlab.errors import MemlabError
from memlab.session import results
from memlab.session.results import noted
from memlab.session.run import Run
from memlab.units import MiB


def small(name: str = "small") -> Run:
    script = Script(HOST)
    script.alloc(300, at=5)
    return Run(name, script.trace(notes={"name": name}))


def read(value: object):
    """What is read of a note, after a file has had it."""
    return value_of(json.loads(json.dumps(noted(value))))


# --- what a run does with it ---


def test_a_result_comes_back_and_keeps_no_tensor_alive():
    run, value = small(), torch.ones(3, requires_grad=True) * 2
    assert run.result(value) is value
    seen = weakref.ref(value)
    del value
    gc.collect()
    assert seen() is None
    assert value_of(run.trace.notes["result"]).values.tolist() == [2, 2, 2]


def test_a_result_of_many_parts_keeps_none_of_them_alive():
    run, tensor = small(), torch.arange(3)
    value = {"loss": 0.5, "parts": [tensor, (tensor, "text")], "none": None}
    assert run.result(value) is value
    seen = weakref.ref(tensor)
    del tensor, value
    gc.collect()
    assert seen() is None
    found = value_of(run.trace.notes["result"])
    assert found.items["loss"].values.tolist() == 0.5 or found.items["loss"].values.tolist() == [0.5]
    assert found.items["parts"].items[1].items[0].values.tolist() == [0, 1, 2]
    assert found.items["none"] == Nothing()


def test_a_result_is_a_copy():
    run, value = small(), torch.zeros(2)
    run.result(value)
    value += 1
    assert value_of(run.trace.notes["result"]).values.tolist() == [0, 0]


def test_a_result_goes_with_the_run_into_files_and_out_of_them(tmp_path):
    with memlab.track("kept", show=False) as run:
        run.result({"loss": torch.tensor([0.1, float("nan")]), "n": 1 << 80, "text": "ü\ud800"})
    found = memlab.load(run.save(tmp_path / "run.memlab"))
    assert found.trace.notes["result"] == run.trace.notes["result"]
    assert check(value_of(found.trace.notes["result"]), value_of(run.trace.notes["result"])).verdict == "equal"


def test_the_last_result_counts_also_after_the_run_has_ended():
    with memlab.track(show=False) as run:
        run.result(1)
        run.result(2)
    assert value_of(run.trace.notes["result"]).values.tolist() == [2]
    run.result(3)
    assert value_of(run.trace.notes["result"]).values.tolist() == [3]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x.bfloat16(),
        lambda x: x.bfloat16()[::2],
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch._neg_view(x),
        lambda x: x.expand(3, *x.shape),
    ],
)
def test_a_result_noted_inside_a_track_is_not_measured(make):
    value = torch.ones(700, 600)
    with memlab.track(show=False) as run:
        made = make(value)
        level = run_level()
        run.result(made)
        assert run_level() == level
    with memlab.track(show=False) as plain:
        make(value)
    peaks = [one.peak_bytes - one.summary.devices[0].level("allocated").start_bytes for one in (run, plain)]
    assert peaks[0] == peaks[1]


def run_level() -> list[int]:
    """The dispatch modes that are on: noting takes them off and puts them back."""
    return [id(torch._C._get_dispatch_stack_at(i)) for i in range(torch._C._len_torch_dispatch_stack())]


def test_noting_leaves_modes_and_the_random_state_as_they_were_also_where_it_fails():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Mode.seen += 1
            return func(*args, **(kwargs or {}))

    value, state = torch.ones(5), torch.get_rng_state()
    with Mode(), Mode():
        before = run_level()
        noted(value)
        with pytest.raises(MemlabError):
            noted([value, object()])
        assert run_level() == before
        assert Mode.seen == 0
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
        (None, Nothing), ("a", Text), (b"a", Text), (True, Numbers), (3, Numbers), (1 << 70, Text), (2.5, Numbers),
        (1j, Numbers), (np.float32(2), Numbers), (np.arange(3), Numbers), (np.ones(2, ">f4"), Numbers), ([], Series),
        ((1, 2), Series), (Pair(1, 2), Series), ({}, Mapped), (OrderedDict(a=1), Mapped), (lambda: Output(torch.ones(2)), Mapped),
        ([0.5] * 100, Numbers), (lambda: torch.ones(0), Numbers), (lambda: torch.nn.Parameter(torch.ones(1)), Numbers),
        (torch.Size([1]), Series), (lambda: torch.ones(2, requires_grad=True) * 2, Numbers), ({1: 2, "1": 3, None: 4}, Mapped),
    ],
)  # fmt: skip
def test_what_is_noted_is_read_and_equals_itself(value, kind):
    value = value() if callable(value) else value
    found = read(value)
    assert type(found) is kind
    assert check(found, read(value)).verdict == "equal"


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
    assert large.values is None
    assert len(large.sample) == results.SAMPLE
    assert (len(large.sha256), large.largest, large.nans) == (64, MiB // 4, 0)
    assert large.norm == pytest.approx(float(torch.arange(MiB // 4 + 1).double().norm()))


def test_the_limit_is_for_all_parts_together_and_the_small_ones_stay_whole():
    found = read({"loss": torch.ones(3), "a": torch.ones(200_000), "b": torch.ones(200_000)})
    assert [found.items[key].values is None for key in ("loss", "a", "b")] == [False, True, True]


@pytest.mark.parametrize(
    "make", [lambda: torch.zeros(4 * MiB), lambda: [torch.zeros(MiB // 2) for _ in range(9)], lambda: "x" * 3 * MiB]
)
def test_a_note_is_never_much_longer_than_the_limit(make):
    assert len(json.dumps(noted(make()))) < 2 * MiB


def test_many_large_parts_are_bounded_too():
    assert len(json.dumps(noted([torch.zeros(200) for _ in range(3000)]))) < 3 * MiB


def test_beyond_what_is_read_a_few_values_are_enough(monkeypatch):
    monkeypatch.setattr(results, "READ_BYTES", MiB)
    tensor = torch.arange(MiB).float().reshape(1024, -1)
    large, other, array = read(tensor.t()), read(tensor.t() + 1), read(tensor.numpy())
    assert (large.sha256, large.values, len(large.sample)) == ("", None, results.SMALL_SAMPLE)
    assert check(large, large).verdict == "not checked"
    assert check(large, other).verdict == "close"
    assert check(array, read(tensor)).verdict == "not checked"
    assert array.sample.tolist() == read(tensor).sample.tolist()


def test_a_sample_of_a_strided_tensor_is_of_its_values_in_order(monkeypatch):
    tensor = torch.arange(MiB).float().reshape(1024, -1)
    whole = read(tensor.t())
    monkeypatch.setattr(results, "READ_BYTES", 0)
    few = read(tensor.t())
    assert whole.sample[: results.SMALL_SAMPLE].tolist() == few.sample.tolist()


@pytest.mark.parametrize("read_bytes", [0, 64 * MiB])
def test_views_that_are_worked_out_when_they_are_read(monkeypatch, read_bytes):
    monkeypatch.setattr(results, "READ_BYTES", read_bytes)
    x = torch.arange(MiB).float()
    pair = torch.complex(x, x + 1)
    for view in (pair.conj(), pair.conj().imag, torch._neg_view(x), pair.conj()[::2]):
        plain = view.clone().resolve_conj().resolve_neg()
        assert not plain.is_conj()
        assert noted(view) == noted(plain)


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


def test_what_is_offered_becomes_the_result_and_is_let_go():
    value = torch.ones(2)
    seen, run = weakref.ref(value), offered(value)
    del value
    gc.collect()
    assert seen() is None
    assert value_of(run.trace.notes["result"]).values.tolist() == [1, 1]


@pytest.mark.parametrize("value", [None, object(), "meta", {"a": {1}}])
def test_what_cannot_be_noted_is_none_without_a_word(value):
    value = torch.ones(2, device="meta") if value == "meta" else value
    assert "result" not in offered(value).trace.notes


def test_a_result_that_was_given_is_not_replaced_by_an_offer():
    run = Run("cell")
    run.result("mine")
    run.offer("last value")
    run.finish(small().trace)
    assert value_of(run.trace.notes["result"]).text == "mine"


def test_an_interrupt_while_a_last_value_is_noted_costs_the_result_alone(monkeypatch):
    def interrupted(value: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "noted", interrupted)
    run = offered(torch.ones(2))
    assert "result" not in run.trace.notes
    assert run.peak_bytes == 300
