"""Noting, explaining and showing an out-of-memory error, and what is kept of it: on the CPU, where every error can be had."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from scripted_traces import Script

import memlab
from memlab.api import oom
from memlab.api.oom import explain_oom, failure_facts, keep_oom, note_oom, oom_error, release
from memlab.api.run import Run
from memlab.errors import MemlabError
from memlab.references.live_storages import LiveStorages, Storage, storages
from memlab.torch_internals import cell_code
from memlab.trace import Phase
from memlab.units import ByteRange

MiB = 1 << 20
TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free. "
    "Including non-PyTorch memory, this process has 7.00 GiB memory in use. Of the allocated memory 6.20 GiB is allocated by "
    "PyTorch, and 0.30 GiB is reserved by PyTorch but unallocated."
)


@pytest.fixture(autouse=True)
def nothing_is_kept():
    gc.collect()
    keep_oom(None)
    yield
    keep_oom(None)
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)


def too_much(size: int = 1 << 45) -> torch.Tensor:
    held = torch.ones(MiB)
    return torch.empty(size) + held[0]


def raised(function=too_much) -> BaseException:
    """The error of a cell that failed, kept as a shell keeps it."""
    try:
        function()
    except BaseException as error:
        sys.last_value, sys.last_traceback = error, error.__traceback__
        return error
    raise AssertionError("it did not fail")


# --- which errors are meant ---


class Wrapped(Exception):
    """An error that says nothing of memory, and tells lies when asked."""

    def __str__(self) -> str:
        raise AssertionError("user code was run")

    __repr__ = __str__


def wrapping(inner: BaseException) -> BaseException:
    try:
        raise Wrapped("training failed") from inner
    except Wrapped as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(TEXT),
        torch.OutOfMemoryError(),
        torch.OutOfMemoryError(17),
        RuntimeError(TEXT),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to "
                     "allocate 8 bytes."),
        RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB). Tried to allocate 1.00 GB on shared pool."),
        RuntimeError("CUDA error: out of memory"),
        MemoryError(),
        wrapping(RuntimeError(TEXT)),
        ExceptionGroup("workers", [ValueError(), torch.OutOfMemoryError(TEXT)]),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_every_kind_of_out_of_memory_is_noted(error):
    found = note_oom(error)
    assert found is not None
    assert explain_oom() is found
    assert "ran out of memory" in found.text


@pytest.mark.parametrize(
    "error",
    [None, ValueError(TEXT), RuntimeError("out of memory"), KeyboardInterrupt(), Wrapped("x"), SystemExit(1)],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_not(error):
    assert note_oom(error) is None
    with pytest.raises(MemlabError, match="nothing in this session ended out of memory"):
        explain_oom()


def test_the_nearest_in_a_chain_counts_also_in_a_circle():
    first, second = RuntimeError(TEXT), RuntimeError("CUDA error: out of memory")
    first.__context__, second.__cause__ = second, first
    assert oom_error(second) is second
    assert oom_error(wrapping(first)) is first


# --- what is told of a real one ---


def test_a_real_one_on_the_cpu_is_told_with_its_place_its_names_and_the_machine():
    found = note_oom(raised()).explanation
    assert found.label == "cpu"
    assert found.verdict == "too much"
    assert found.title.startswith("cpu ran out of memory: 128.0 TiB requested, ")
    line = too_much.__code__.co_firstlineno + 2
    assert f"It was raised at test_oom.py:{line}, in too_much()." in found.sentences[0]
    assert {term.name for term in found.terms} == {"asked", "free", "capacity"}
    assert found.terms[0].amount.low == 1 << 47
    assert 4 * MiB <= sum(one.nbytes for one in found.named) <= found.alive_bytes
    held = [action for action in found.actions if "%memoom release" in action.text]
    assert [action.gives.low for action in held] == [4 * MiB]


def test_garbage_that_was_not_collected_is_told_apart(monkeypatch):
    monkeypatch.setattr("memlab.api.oom.SEARCH_S", 60.0)  # other tests may have left much to search
    gc.collect()
    gc.disable()
    try:
        circle = [torch.ones(3 * MiB)]
        circle.append(circle)
        del circle
        told = note_oom(raised()).explanation
    finally:
        gc.enable()
        gc.collect()
    (garbage,) = [action for action in told.actions if "gc.collect()" in action.text]
    assert 12 * MiB <= garbage.gives.high < 12.1 * MiB  # what other tests left lies about too


def test_what_lies_on_another_device_is_not_named_and_a_search_cut_short_is_said(monkeypatch):
    found = LiveStorages((Storage(1, 0, "cuda:0", 5 * MiB, None, "", "other", "batches[3]", 0),
                    Storage(2, 0, "cuda:1", 9 * MiB, None, "", "other", "elsewhere", 0)), (), False)  # fmt: skip
    monkeypatch.setattr(oom, "live_storages", lambda *args, **how: found)
    told = note_oom(RuntimeError(TEXT)).explanation
    assert [(one.path, one.nbytes) for one in told.named] == [("batches[3]", 5 * MiB)]
    assert "names: the search for what keeps each tensor was cut short" in told.gaps


def test_a_tracked_cell_without_cuda_is_noted_too():
    with pytest.raises(RuntimeError) as caught, memlab.track("mine", show=False) as run:
        too_much()
    assert note_oom(caught.value, run).text.startswith("memlab · mine · cpu ran out of memory")
    assert note_oom(RuntimeError(TEXT), memlab.api.run.Run("never measured")) is not None


# --- nothing is kept ---


def test_noting_and_explaining_keep_no_tensor_no_frame_and_no_error():
    seen: list[weakref.ref] = []

    def fail() -> None:
        held = torch.ones(MiB)
        seen.append(weakref.ref(held))
        too_much()

    before = {one.key for one in storages("cpu")}
    found = note_oom(raised(fail))
    str(found), found.html, found.to_pandas()
    assert seen[0]() is not None
    for name in ("last_value", "last_traceback"):
        vars(sys).pop(name)
    gc.collect()
    assert seen[0]() is None
    assert {one.key for one in storages("cpu")} <= before
    assert oom.latest is found


@pytest.mark.parametrize("what", ["live_storages", "HostMemory", "_raised", "_moment"])
def test_what_cannot_be_seen_is_named_and_the_rest_is_told(monkeypatch, what):
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("broken")

    monkeypatch.setattr(f"memlab.api.oom.{what}", fail)
    found = note_oom(raised())
    assert found.explanation.label == "cpu"
    assert any("could not be read (OSError)" in gap for gap in found.explanation.gaps)
    assert "Not seen" in found.text


def test_a_cell_whose_text_is_gone_is_named_all_the_same(monkeypatch):
    monkeypatch.setattr(oom.cell_code, "cell_number", lambda file: 3 if file == __file__ else None)
    monkeypatch.setattr(oom.linecache, "getlines", lambda file: 1 / 0)
    found = note_oom(raised())
    assert "cell [3]" in found.text and not any("could not be read" in gap for gap in found.explanation.gaps)


def test_the_message_of_a_tracked_cell_has_the_exact_sizes_of_its_trace():
    script = Script()
    script.segment(9 << 30, at=1)
    script.alloc(8 << 30, at=2)
    script.oom(asked=20 << 20, free=10 << 20)
    text = (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.00 GiB of which 10.00 MiB is free. "
        "Of the allocated memory 8.00 GiB is allocated by PyTorch, and 1024.00 MiB is reserved by PyTorch but unallocated."
    )
    error = torch.OutOfMemoryError(text)
    assert note_oom(error, Run("mine", script.trace())) is not None
    message = failure_facts(error, Run("mine", script.trace())).message
    assert (message.allocated, message.cached) == (ByteRange.exact(8 << 30), ByteRange.exact(1 << 30))


def test_the_lines_of_a_moment_have_the_number_of_their_cell():
    script = Script()
    script.alloc(64 << 20, line="/tmp/ipykernel_7/1.py:8")
    script.oom(asked=20 << 20, free=10 << 20)
    message = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 10.00 MiB is free."
    run = Run("mine", script.trace(notes={"cells": {"/tmp/ipykernel_7/1.py": 3}}))
    assert "cell [3] line 8" in note_oom(torch.OutOfMemoryError(message), run).text


def test_whatever_goes_wrong_noting_never_raises(monkeypatch):
    monkeypatch.setattr(oom, "failure_facts", lambda *args: 1 / 0)
    assert note_oom(raised()) is None


# --- given as text ---


def test_a_pasted_message_is_explained_and_not_kept():
    found = explain_oom(TEXT)
    assert found.explanation.title.startswith("cuda:0 ran out of memory: 2.00 GiB requested, 1.00 GiB free: ")
    assert explain_oom(RuntimeError(TEXT)).text == found.text
    with pytest.raises(MemlabError, match="nothing in this session"):
        explain_oom()


@pytest.mark.parametrize(
    "message", ["nothing of the sort", "", 17, b"CUDA out of memory", ["x"], ValueError(), Wrapped("x")]
)
def test_what_is_no_message_is_refused_in_one_line(message):
    with pytest.raises(MemlabError) as caught:
        explain_oom(message)
    assert "\n" not in str(caught.value)


def test_shown_as_text_html_and_numbers():
    found = explain_oom(TEXT)
    assert str(found) == repr(found) == found.text
    assert found._repr_mimebundle_() == {"text/html": found.html, "text/plain": found.text}
    frame = found.to_pandas()
    asked = frame[(frame["what"] == "term") & (frame["name"] == "asked")].iloc[0]
    assert asked["low_bytes"] <= 2 << 30 <= asked["high_bytes"]
    term = next(term for term in found.explanation.terms if term.name == "asked")
    assert (term.amount.low_bytes, term.amount.high_bytes) == (asked["low_bytes"], asked["high_bytes"])  # earlier names


def test_hostile_names_stay_on_their_line_and_are_escaped(monkeypatch):
    name = "losses['<script>alert(1)</script>\x1b[2J\r\n" + "x" * 5000 + "']"
    found = LiveStorages((Storage(1, 0, "cuda:0", 5 * MiB, None, "", "other", name, 0),), (), True)
    monkeypatch.setattr(oom, "live_storages", lambda *args, **how: found)
    told = note_oom(RuntimeError(TEXT))
    assert not any(character in told.text + told.html for character in "\x1b\r")
    assert "<script>" not in told.html
    assert "&lt;script&gt;" in told.html
    assert max(map(len, told.text.splitlines())) < 700


# --- release ---


def test_release_gives_what_was_said_and_is_shown_as_text_html_and_numbers():
    assert release().text.startswith("memlab · nothing to release\n\nNo error was kept.")
    said = next(one for one in note_oom(raised()).explanation.actions if "release" in one.text).gives.low
    found = release()
    assert said == 4 * MiB == found.released.levels[0].freed_bytes
    assert found.text.startswith(
        "memlab · released 4.00 MiB on cpu\n\nReleased the frames of RuntimeError: [enforce fail"
    )
    assert found._repr_mimebundle_() == {"text/html": found.html, "text/plain": found.text}
    assert found.to_pandas().loc["cpu", "before_bytes"] - found.to_pandas().loc["cpu", "after_bytes"] == 4 * MiB
    assert not hasattr(sys, "last_value")
    assert not any("%memoom release" in one.text for one in note_oom(RuntimeError(TEXT)).explanation.actions)


def test_code_that_would_go_backward_is_told_apart_from_inference():
    def trains(loss=None):
        if loss is None:
            raise MemoryError
        loss.backward()

    def infers():
        raise MemoryError

    for step, expected in ((trains, True), (infers, False)):
        try:
            step()
        except MemoryError as error:
            assert failure_facts(error).calls_backward is expected


WRITTEN = """
class Net(torch.nn.Module):
    def forward(self, x): raise MemoryError
class Back(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, grad: Net()(grad))
"""


@pytest.mark.parametrize(
    ("call", "phase", "place"),
    [
        ("Net()(1)", Phase.FORWARD, "at line 3 of cell [5], in forward()"),
        (
            "Back.apply(torch.ones(1, requires_grad=True)).backward()",
            Phase.BACKWARD,
            "at line 3 of cell [5], in forward()",
        ),
        ("torch.nn.Linear(1 << 22, 1 << 22)", Phase.OTHER, "at line 1 of cell [3]"),
    ],
)
def test_where_it_was_raised_and_what_pytorch_was_doing(monkeypatch, call, phase, place):
    monkeypatch.setattr(cell_code, "cell_number", {"<caller>": 3, "<written>": 5}.get)
    names = {"torch": torch}
    exec(compile(WRITTEN, "<written>", "exec"), names)
    found = failure_facts(raised(lambda: exec(compile(call, "<caller>", "exec"), names)))
    assert (found.cell, found.place, found.phase) == ("cell [3]", place, phase)
