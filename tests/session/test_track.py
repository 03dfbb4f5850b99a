from __future__ import annotations

import gc
import os
import threading
import weakref

import numpy as np
import pytest
import torch

import memlab
from memlab.errors import BudgetExceeded, MemlabError
from memlab.probes.cpu import CpuProbe
from memlab.probes.measurement import Measurement
from memlab.probes.sampler import Sampler
from memlab.session import track as module
from memlab.session.track import options

MiB = 1 << 20


def grow(size: int = MiB) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


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
            both.wait(30)
            kept = [grow() for _ in range(count)]
            both.wait(30)
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
    assert not any(
        "raised" in note for run in (outer, inner) for note in run.summary.notes if "GeneratorExit" not in note
    )


def test_a_generator_closed_by_another_thread_leaves_the_counts_right():
    def tracked():
        with memlab.track("elsewhere", show=False):
            yield

    generator = tracked()
    next(generator)
    closer = threading.Thread(target=generator.close)
    closer.start()
    closer.join()
    assert not +module._open_tracks
    # The mode of the tally can only be taken off by the thread that put it on.
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)


# --- errors ---


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


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
    assert note.startswith(f"The cell raised {type(error).__name__}")
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
    assert not +module._open_tracks
    assert dict(memlab.runs) == before
    assert not list(tmp_path.iterdir())
    with pytest.raises(MemlabError, match="OSError: it broke"):
        _ = track.run.trace


@pytest.mark.parametrize("place", [(CpuProbe, "_trace"), (Measurement, "_complete"), (module.Run, "finish")])
def test_a_stop_that_fails_leaves_nothing_on_and_tells(monkeypatch, tmp_path, place):
    monkeypatch.setattr(*place, broken)
    with pytest.raises(OSError, match="it broke"), memlab.track("lost", save=tmp_path / "x.memlab", show=False) as run:
        grow()
    assert not +module._open_tracks
    assert not list(tmp_path.iterdir())
    with pytest.raises(MemlabError, match="OSError: it broke"):
        _ = run.trace


def test_a_stop_that_fails_does_not_hide_the_users_error(monkeypatch):
    monkeypatch.setattr(Measurement, "_complete", broken)
    with pytest.raises(ValueError, match="mine") as caught, memlab.track("lost", show=False):
        raise ValueError("mine")
    assert caught.value.__notes__ == ["memlab has no report of run 'lost': OSError: it broke"]


def test_an_analysis_that_fails_is_told_where_the_report_would_stand(monkeypatch, capsys):
    monkeypatch.setattr("memlab.session.run.summary", broken)
    with memlab.track("unread", show=True):
        grow()
    assert "could not report on 'unread': OSError: it broke" in capsys.readouterr().out
    assert memlab.last_run().name == "unread"


# --- budget ---


def test_a_budget_that_is_kept_says_nothing():
    with memlab.track(budget="10GiB", show=False):
        grow()


def test_a_budget_that_is_exceeded_fails_the_block_after_it_ran(capsys):
    ran = []
    with pytest.raises(BudgetExceeded) as caught, memlab.track("big", budget=1000, show=True):
        grow()
        ran.append(1)
    assert ran == [1]
    assert "run 'big': cpu peaked at" in str(caught.value)
    assert "above its budget of 1000 B." in str(caught.value)
    assert "memlab · big" in capsys.readouterr().out


def test_the_users_error_matters_more_than_the_budget():
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
    assert options(save="~/x.memlab").save == tmp_path / "x.memlab"


def test_the_values_of_a_measured_block_are_what_they_would_be():
    torch.manual_seed(1)
    plain = torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum()
    torch.manual_seed(1)
    with memlab.track("values", show=False):
        tracked = torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum()
    assert np.array_equal(plain.detach().numpy(), tracked.detach().numpy())
