from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from scripted_traces import HOST, Script, busy

import memlab
from memlab.api import runs as module
from memlab.api.run import Run
from memlab.api.runs import Runs
from memlab.errors import MemlabError


def small(name: str = "small") -> Run:
    script = Script(HOST)
    script.preexisting(100)
    script.alloc(300, at=5)
    return Run(name, script.trace(notes={"name": name}))


def test_a_run_that_has_not_ended_has_no_figures_and_says_so():
    run = Run("early")
    assert "not measured yet" in repr(run) == str(run)
    run.is_running = True
    assert "still going on" in repr(run)
    assert run._repr_mimebundle_() == {"text/plain": repr(run)}
    assert run.nbytes() == 0
    for figure in (lambda: run.trace, lambda: run.peak_bytes, run.report, run.to_pandas, run.breakdown):
        with pytest.raises(MemlabError, match=r"'early'.*still going on"):
            figure()


def test_earlier_names_of_attributes_still_work():
    run = small()
    run.cell_text = "step()"
    assert (run.again, run.report().run) == ("step()", run)


def test_the_peak_is_placed_in_the_cell_with_its_number_where_it_has_one():
    script = Script(HOST)
    script.alloc(300, at=5, line="/tmp/ipykernel_1/2.py:4")
    trace = script.trace()
    for cells, words in (({"/tmp/ipykernel_1/2.py": 3}, "cell [3] line 4"), ({}, "cell line 4"), (None, "cell line 4"),
                         ({"/tmp/ipykernel_1/2.py": "<b>"}, "cell line 4")):  # fmt: skip
        run = Run("placed", dataclasses.replace(trace, notes={} if cells is None else {"cells": cells}))
        assert run.report().text.splitlines()[0] == f"Peak 300 B allocated {words}"
    assert dict(run.breakdown("line")) == {"/tmp/ipykernel_1/2.py:4": 300}


def test_a_run_that_failed_says_why():
    run = Run("broken")
    run.fail("OSError: no")
    assert "OSError: no" in repr(run)
    with pytest.raises(MemlabError, match="no figures: OSError: no"):
        _ = run.trace


def test_the_figures_are_those_of_the_trace():
    run = small()
    assert run.peak_bytes == run.peak_allocated_bytes == 400
    assert (run.peak_reserved_bytes, run.peak_device_bytes) == (0, 0)
    assert run.is_exact
    assert run.gaps == run.trace.gaps
    assert dict(run.breakdown("phase")) == {"other": 300, "before the run": 100}
    assert "cpu, peak allocated 400 B" in repr(run)
    assert len(run.to_pandas()) == 2


def test_the_figures_are_of_the_device_with_the_largest_peak():
    run = Run("busy", busy(400))
    assert run.devices[0].device.index == 0
    assert run.peak_reserved_bytes >= run.peak_bytes > 0
    assert run.peak_device_bytes >= run.peak_reserved_bytes
    assert run.breakdown("module", of="reserved").total_bytes == run.peak_reserved_bytes


def test_a_run_without_devices_answers_in_words():
    script = Script()
    script.devices = ()
    run = Run("none", script.trace())
    assert (run.peak_bytes, run.peak_reserved_bytes, run.peak_device_bytes) == (0, 0, 0)
    for ask in (run.breakdown, run.explore, lambda: run.report().figure):
        with pytest.raises(MemlabError, match="used no device"):
            ask()
    assert "No measured device" in str(run)


def test_a_run_is_saved_and_read_with_its_name_and_notes(tmp_path):
    run = Run("a name")
    run.finish(small().trace, ["a warning"])
    path = run.save(tmp_path / "run.memlab")
    found = memlab.load(path)
    assert (found.name, found.peak_bytes, found.summary.notes) == ("a name", 400, ("a warning",))
    assert str(found) == str(run)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(MemlabError, match="no file"):
        memlab.load(tmp_path / "absent.memlab")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(MemlabError, match="not a memlab trace"):
        memlab.load(tmp_path / "text")


# --- its modules ---


@pytest.fixture(scope="module")
def net() -> Run:
    model = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.ReLU())
    with memlab.track("net") as run:
        model(torch.ones(50, 100)).sum().backward()
    return run


def test_the_modules_of_a_run_by_their_paths_also_from_a_file(net, tmp_path):
    found = net.modules()
    assert list(found) == ["Sequential", "Sequential.0", "Sequential.1"]
    assert found["Sequential"].calls == 1
    # The output of the first is overwritten by none, and saved by none.
    assert [one.kept_bytes for one in found.values()] == [50 * 300 * 4, 0, 50 * 300 * 4]
    assert found["Sequential.0"].own_bytes == net.breakdown("module")["Sequential.0"]
    assert memlab.load(net.save(tmp_path / "run.memlab")).modules().text == found.text


def test_it_prints_and_shows_itself_and_is_a_frame(net):
    found = net.modules()
    assert str(found) == repr(found) == found.text
    assert found._repr_mimebundle_() == {"text/html": found.html, "text/plain": found.text}
    assert found.to_pandas().loc["Sequential", "calls"] == 1
    assert found.figure.data[0].type == "icicle"
    assert (len(found), found.get("nothing"), "Sequential" in found) == (3, None, True)


def test_a_run_without_a_device_or_without_modules_says_so():
    script = Script()
    script.devices = ()
    with pytest.raises(MemlabError, match="used no device"):
        Run("none", script.trace()).modules()
    found = Run("plain", Script(HOST).trace()).modules()
    assert "No module was called" in found.text and "No module was called" in found.html
    with pytest.raises(MemlabError, match="nothing to draw"):
        _ = found.figure


# --- the runs of a session ---


def test_the_last_fifty_are_kept():
    kept = Runs()
    for number in range(60):
        kept.add(small(f"r{number}"))
    assert list(kept) == [f"r{number}" for number in range(10, 60)]
    assert (len(kept), kept.last().name) == (50, "r59")


def test_at_most_a_gigabyte_is_kept_but_the_last_always(monkeypatch):
    assert module.MAX_BYTES == 1 << 30
    one = Run("one", busy(500))
    monkeypatch.setattr(module, "MAX_BYTES", int(one.nbytes() * 2.5))
    kept = Runs()
    for name in ("a", "b", "c", "d"):
        kept.add(Run(name, one.trace))
    assert list(kept) == ["c", "d"]
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    kept.add(Run("e", one.trace))
    assert list(kept) == ["e"]


def test_a_name_is_replaced_and_moves_to_the_end():
    kept = Runs()
    first, second = small("a"), small("a")
    for one in (first, small("b"), second):
        kept.add(one)
    assert list(kept) == ["b", "a"]
    assert kept["a"] is kept.last() is second


def test_what_is_not_there_is_named_with_what_is():
    kept = Runs()
    with pytest.raises(MemlabError, match=r"no run 'x'. Known: none yet"):
        kept["x"]
    with pytest.raises(MemlabError, match="no run yet"):
        kept.last()
    kept.add(small("a"))
    with pytest.raises(MemlabError, match=r"Known: 'a'"):
        kept["x"]


def test_it_is_a_mapping_which_can_be_read_while_runs_come():
    kept = Runs()
    assert (kept.get("x"), kept.get("x", 3), "x" in kept, repr(kept)) == (None, 3, False, "no runs yet")
    kept.add(small("a"))
    assert kept.get("a") is kept["a"]
    assert [name for name, _ in kept.items()] == ["a"]
    assert repr(kept) == repr(kept["a"])
    for number in range(5):
        kept.add(small(str(number)))
    for name in kept:
        kept.add(small(f"{name}!"))
    assert len(kept) == 12


def test_names_are_given_once_also_to_many_threads():
    kept, names = Runs(), []
    threads = [threading.Thread(target=lambda: names.extend(kept.new_name() for _ in range(200))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 800
