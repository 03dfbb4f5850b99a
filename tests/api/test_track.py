from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel import kernel

import memlab
from memlab.api import track as module
from memlab.api.display import Display
from memlab.api.track import Options
from memlab.errors import BudgetExceeded, MemlabError
from memlab.probes.cpu import CpuProbe
from memlab.probes.measurement import Measurement
from memlab.probes.sampler import Reading, Sample, Sampler
from memlab.probes.tensor_labels import TensorLabels
from memlab.trace import CPU
from memlab.units import format_bytes

MiB = 1 << 20


def grow(size: int = MiB, device: str = "cpu") -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def risen(run: memlab.Run) -> int:
    return run.peak_bytes - run.devices[0].levels[0].start_bytes


# --- what it measures ---


def test_a_block_is_measured_exactly():
    with memlab.track("exact", show=False) as run:
        assert run.is_running
        kept = grow(3 * MiB)
        del kept
        left = grow(MiB)
    assert not run.is_running
    assert left.nbytes == MiB
    assert (risen(run), run.devices[0].levels[0].left_bytes) == (3 * MiB, MiB)
    assert run.is_exact
    assert memlab.runs["exact"] is memlab.last_run() is run


def test_nested_blocks_each_have_their_own_peak():
    with memlab.track("outer", show=False) as outer:
        grow(5 * MiB)
        with memlab.track("inner", show=False) as inner:
            grow(2 * MiB)
        grow(3 * MiB)
    assert (risen(outer), risen(inner)) == (5 * MiB, 2 * MiB)
    assert list(memlab.runs)[-2:] == ["inner", "outer"]


def test_tracks_in_threads_do_not_disturb_each_other():
    found, both = {}, threading.Barrier(2)

    def work(count: int) -> None:
        with memlab.track(f"thread {count}", show=False) as run:
            both.wait(120)
            kept = [grow() for _ in range(count)]
            both.wait(120)
            del kept
        found[count] = risen(run)

    threads = [threading.Thread(target=work, args=(count,)) for count in (2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {2: 2 * MiB, 5: 5 * MiB}


def test_generators_may_end_in_any_order():
    def tracked(name: str):
        with memlab.track(name, show=False) as run:
            yield run

    first, second = tracked("first"), tracked("second")
    outer, inner = next(first), next(second)
    kept = grow()
    first.close()  # the outer one ends first
    kept = [kept, grow()]
    second.close()
    assert (risen(outer), risen(inner)) == (MiB, 2 * MiB)
    notes = [note for run in (outer, inner) for note in run.summary.notes if "GeneratorExit" not in note]
    assert not any("raised" in note for note in notes)


def test_a_generator_closed_by_another_thread_leaves_the_counts_right():
    def tracked():
        with memlab.track("elsewhere", show=False):
            yield

    generator = tracked()
    next(generator)
    closer = threading.Thread(target=generator.close)
    closer.start()
    closer.join()
    assert not +module.open_tracks
    # The dispatch mode of the tracker can only be popped by the thread that put it on.
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)


# --- errors ---


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_each_call_of_a_decorated_function_is_a_run():
    @memlab.track(show=False)
    def made(rows, *, width=10):
        """Its own words."""
        return torch.ones(rows, width)

    assert [made(rows).shape for rows in (1000, 2000)] == [(1000, 10), (2000, 10)]
    assert memlab.runs["made"].peak_bytes == 2000 * 10 * 4
    assert made.__doc__ == "Its own words."
    with pytest.raises(TypeError):
        made()
    assert memlab.last_run().name == "made"


def test_a_decorated_coroutine_is_measured_until_it_ends():
    @memlab.track("waits", show=False, lines=True)
    async def made():
        first = torch.ones(1000)
        await asyncio.sleep(0)
        return torch.cat([first, first])

    assert asyncio.run(made()).shape == (2000,)
    assert memlab.runs["waits"].peak_bytes == 4 * 3000


@pytest.mark.parametrize("error", [ValueError("mine\nsecond line"), KeyboardInterrupt(), SystemExit(3), Unprintable()])
def test_the_users_error_goes_out_unchanged_and_the_run_is_kept(error):
    with pytest.raises(type(error)) as caught, memlab.track("raised", show=False) as run:
        grow(2 * MiB)
        raise error
    assert caught.value is error
    assert not getattr(error, "__notes__", [])
    assert error.__context__ is None
    assert (risen(run), memlab.last_run()) == (2 * MiB, run)
    (note,) = run.summary.notes
    assert note.startswith(f"It raised {type(error).__name__}")
    assert "second line" not in note


def test_a_track_runs_once():
    track = memlab.track("once", show=False)
    with track, pytest.raises(MemlabError, match="started before"):
        track.start()
    with pytest.raises(MemlabError, match="started before"), track:
        pass
    assert track.stop() is None


def broken(*_: object, **__: object) -> None:
    raise OSError("it broke")


@pytest.mark.parametrize("place", [(CpuProbe, "start"), (Sampler, "start"), (Measurement, "start")])
def test_a_start_that_fails_half_way_leaves_nothing(monkeypatch, tmp_path, place):
    monkeypatch.setattr(*place, broken)
    track = memlab.track("unborn", save=tmp_path / "x.memlab", show=True)
    before = dict(memlab.runs)
    with pytest.raises(OSError, match="it broke"):
        track.start()
    assert track.stop() is None
    assert not +module.open_tracks
    assert dict(memlab.runs) == before
    assert not list(tmp_path.iterdir())
    with pytest.raises(MemlabError, match="OSError: it broke"):
        _ = track.run.trace


@pytest.mark.parametrize("place", [(CpuProbe, "build_trace"), (Measurement, "_complete"), (module.Run, "finish")])
def test_a_stop_that_fails_leaves_nothing_on_and_tells_and_does_not_hide_the_users_error(monkeypatch, tmp_path, place):
    monkeypatch.setattr(*place, broken)
    with pytest.raises(OSError, match="it broke"), memlab.track("lost", save=tmp_path / "x.memlab", show=False) as run:
        grow()
    assert not +module.open_tracks
    assert not list(tmp_path.iterdir())
    with pytest.raises(MemlabError, match="OSError: it broke"):
        _ = run.trace
    with pytest.raises(ValueError, match="mine") as caught, memlab.track("lost", show=False):
        raise ValueError("mine")
    assert caught.value.__notes__ == ["memlab has no report of run 'lost': OSError: it broke"]


def test_an_interrupt_in_the_last_walk_over_the_heap_comes_after_the_report(monkeypatch, capsys):
    walk, came, handler = TensorLabels.strays_alive, [], signal.getsignal(signal.SIGINT)

    def interrupted(labels, tensors):
        if tensors is None:  # the last one
            signal.raise_signal(signal.SIGINT)
            came.append(1)
        return walk(labels, tensors)

    monkeypatch.setattr(TensorLabels, "strays_alive", interrupted)
    with pytest.raises(KeyboardInterrupt), memlab.track("interrupted", show=True) as run:
        grow(3 * MiB)
    assert came == [1]
    assert risen(run) == 3 * MiB
    assert "memlab · interrupted" in capsys.readouterr().out
    assert memlab.last_run() is run and not +module.open_tracks
    assert (torch._C._len_torch_dispatch_stack(), signal.getsignal(signal.SIGINT)) == (0, handler)


def test_an_analysis_that_fails_is_told_where_the_report_would_stand(monkeypatch, capsys):
    monkeypatch.setattr("memlab.api.run.summary", broken)
    with memlab.track("unread", show=True):
        grow()
    assert "could not report on 'unread': OSError: it broke" in capsys.readouterr().out
    assert memlab.last_run().name == "unread"


# --- budget ---


def test_a_budget_that_is_exceeded_fails_the_block_after_it_ran_and_one_that_is_kept_says_nothing(capsys):
    ran = []
    with memlab.track(budget="10GiB", show=False):
        grow()
    with pytest.raises(BudgetExceeded) as caught, memlab.track("big", budget=1000, show=True):
        grow()
        ran.append(1)
    assert ran == [1]
    assert "run 'big': cpu peaked at" in str(caught.value)
    assert "above its budget of 1000 B." in str(caught.value)
    assert memlab.runs["big"].trace.notes["budget_bytes"] == 1000  # its picture has a line for it
    assert "memlab · big" in capsys.readouterr().out
    # The user's error matters more.
    with pytest.raises(ValueError, match="mine"), memlab.track(budget=1000, show=False):
        grow()
        raise ValueError("mine")


# --- what stays alive ---


def test_neither_run_nor_report_keep_a_tensor_alive():
    tensor = grow()
    seen = weakref.ref(tensor.untyped_storage())
    with memlab.track("alive", show=False) as run:
        other = tensor * 2
        also = weakref.ref(other.untyped_storage())
    report, figure = run.report(), run.report().figure
    text = str(report)
    del tensor, other
    gc.collect()
    assert (seen(), also()) == (None, None)
    assert figure.data
    assert text


# --- options ---


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""}, {"name": "   "}, {"name": "x" * 201}, {"name": 7}, {"device": "gpu7"}, {"device": "meta"},
        {"device": "cuda:99"}, {"budget": "much"}, {"budget": "0"}, {"budget": -5}, {"budget": "2 potatoes"},
        {"rate_hz": 0}, {"rate_hz": 21}, {"rate_hz": float("nan")}, {"rate_hz": float("inf")}, {"rate_hz": "fast"},
        {"entries": 10}, {"entries": 1e6}, {"save": ""}, {"save": "no/such/folder/x"}, {"save": os.sep},
        {"save": "folder" + os.sep}, {"save": 7}, {"save": "a\0b/c"},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_line_before_anything_runs(wrong):
    with pytest.raises(MemlabError) as caught:
        memlab.track(**wrong)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="colour"):
        memlab.track(colour="red")


def test_a_file_is_remembered_whole_because_a_cell_may_change_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    with memlab.track("moved", save="run.memlab", show=False):
        os.chdir("sub")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["run.memlab"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Options(save="~/x.memlab").save == tmp_path / "x.memlab"


def test_the_values_of_a_measured_block_are_what_they_would_be():
    torch.manual_seed(1)
    plain = torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum()
    torch.manual_seed(1)
    with memlab.track("values", show=False):
        tracked = torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum()
    assert np.array_equal(plain.detach().numpy(), tracked.detach().numpy())


# --- on the simulated GPU ---


@pytest.mark.simulated
def test_forced_to_cuda_that_is_never_used_the_run_says_so(tmp_path):
    with memlab.track("nothing", device="cuda", save=tmp_path / "x.memlab", show=True) as run:
        torch.ones(10)
    if torch.cuda.is_initialized():
        pytest.skip("another test has brought up CUDA")
    assert (run.peak_bytes, tuple(run.devices)) == (0, ())
    assert "No measured device was used." in str(run)
    assert memlab.load(tmp_path / "x.memlab").devices == ()


@pytest.mark.simulated
def test_all_levels_of_a_cuda_run(tmp_path):
    grow(1, "cuda")
    with memlab.track("levels", save=tmp_path / "x.memlab", show=False) as run:
        kept = grow(30 * MiB, "cuda")
        del kept
        kept = grow(5 * MiB, "cuda")
    level = run.devices[0].level("allocated")
    assert (level.peak.low_bytes - level.start_bytes, level.left_bytes) == (30 * MiB, 5 * MiB)
    assert run.peak_bytes <= run.peak_reserved_bytes <= run.peak_device_bytes
    assert run.is_exact
    for of in ("allocated", "reserved"):
        assert run.breakdown("line", of=of).total_bytes == getattr(run, f"peak_{of}_bytes")
    assert str(memlab.load(tmp_path / "x.memlab")) == str(run)
    del kept


@pytest.mark.simulated
def test_a_run_of_the_cpu_says_what_lies_on_cuda():
    weights = grow(7 * MiB, "cuda")
    held = f"PyTorch held {format_bytes(torch.cuda.memory_allocated())} allocated and "
    held += f"{format_bytes(torch.cuda.memory_reserved())} reserved on cuda:0."
    with memlab.track("free", show=False) as run:
        torch.ones(1000)
    assert run.devices[0].device.label == "cpu"
    assert f"Nothing was allocated or freed on CUDA in this run. Throughout, {held}" in str(run)
    with memlab.track("forced", device="cpu", show=False) as run:
        torch.ones(1000)
    assert f"Only the CPU was measured. When this run ended, {held}" in str(run)
    with memlab.track("cuda", show=False) as run:
        grow(MiB, "cuda")
    assert "PyTorch held" not in str(run)
    del weights


@pytest.mark.simulated
def test_nested_runs_and_budgets_on_cuda():
    torch.cuda.empty_cache()  # of a block that is cached, the allocator may give up to 1 MiB more than is asked for
    with (
        pytest.raises(BudgetExceeded, match=r"cuda:0 peaked at"),
        memlab.track("outer", budget="60MiB", show=False) as outer,
    ):
        grow(120 * MiB, "cuda")
        torch.cuda.empty_cache()
        with memlab.track("inner", budget="60MiB", show=False) as inner:
            grow(30 * MiB, "cuda")
    rises = [run.peak_bytes - run.devices[0].levels[0].start_bytes for run in (outer, inner)]
    assert rises == [120 * MiB, 30 * MiB]


@pytest.mark.simulated
def test_a_result_is_copied_to_the_host_and_keeps_nothing_alive():
    with memlab.track("result", show=False) as run:
        value = run.result(grow(MiB, "cuda"))
    gc.collect()  # what other tests have left
    seen, before = weakref.ref(value), torch.cuda.memory_allocated()
    del value
    gc.collect()
    assert seen() is None
    assert before - torch.cuda.memory_allocated() == MiB


@pytest.mark.simulated
def test_a_cell_that_runs_out_of_memory_reports_and_the_next_one_runs(tmp_path):
    with kernel(tmp_path, "import torch", "%load_ext memlab") as notebook:
        body = "kept = [torch.empty(1 << 30, dtype=torch.uint8, device='cuda') for _ in range(10_000)]"
        plain = notebook.run(body)
        tracked = notebook.run(f"%%memtrack --name full\n{body}")
        assert plain.error == tracked.error == "OutOfMemoryError"
        assert [line - 1 for line in tracked.lines][
            : len(plain.lines)
        ] == plain.lines  # the tracker's frame comes below
        assert "The allocator ran out of memory " in tracked.report
        assert "The cell raised OutOfMemoryError" in tracked.report
        assert "application/vnd.plotly.v1+json" in tracked.shown[0]
        again = notebook.run("%%memtrack --name after\nx = torch.empty(1 << 20, device='cuda')\nx.numel()")
        assert (again.status, again.out) == ("ok", "1048576"), again.traceback
        assert "cuda:0" in again.report
        assert "exact" in again.report
        notebook.run("%unload_ext memlab")
        assert notebook.value("torch._C._cuda_isHistoryEnabled()") is False
        assert notebook.value("torch.cuda.memory._record_memory_history.__module__") == "torch.cuda.memory"


@pytest.mark.parametrize(
    ("on_gpu", "shows"),
    [(False, {"allocated": [3.0], "rss": [8.0]}), (True, {"allocated": [7.0], "reserved": [9.0], "used": [10.0]})],
)
def test_the_live_view_shows_the_device_that_the_cell_uses(on_gpu, shows):
    measured = SimpleNamespace(uses_accelerator=on_gpu, start_ns=0, peak_so_far=lambda reading: (reading.device, True))
    display, pushed = Display(SimpleNamespace(name="cell"), measured, live=True), []
    display.view = SimpleNamespace(
        push=lambda times, values, **more: pushed.append((times, values, more["peak_bytes"]))
    )
    readings = (
        Reading(0, 5, 6, 7),
        Reading(1, 7, 9, 10),
        Reading(CPU, 3, used_bytes=2, own_bytes=8, available_bytes=1 << 40),
    )
    with memlab.track("cell", show=False):  # has marks
        display.tick(Sample(2_000_000_000, readings))
    assert pushed == [([2.0], shows, int(on_gpu))]


def test_the_decorator_needs_no_parentheses():
    @memlab.track
    def grow(size):
        return torch.ones(size)

    assert grow(1000).shape == (1000,)
    assert memlab.last_run().name == "grow"
    assert memlab.last_run().peak_bytes == 4000


def test_a_secret_of_the_environment_is_in_no_run(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2xyz")
    with pytest.raises(RuntimeError, match="hunter2xyz"), memlab.track("secret", show=False) as run:
        raise RuntimeError("cannot log in with hunter2xyz")
    assert "cannot log in with [MY_TOKEN]" in str(run.report())
    assert "hunter2xyz" not in str(run.trace.notes)


def test_the_last_line_of_an_error_is_the_users():
    """The tracker's own frame, between the line and the operator, is no longer in the error."""
    with pytest.raises(RuntimeError, match="allocate") as raised, memlab.track("too much", device="cpu", show=False):
        torch.empty(1 << 50)
    assert [str(entry.path) for entry in raised.traceback] == [__file__]
