from __future__ import annotations

import pytest
from handmade import HOST, Script, busy

import memlab
from memlab.errors import MemlabError
from memlab.session.run import Run


def small(name: str = "small") -> Run:
    script = Script(HOST)
    script.adopt(100)
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
    assert dict(run.breakdown("phase")) == {"other": 300, "before the cell": 100}
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
    assert "No device" in str(run)


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
