from __future__ import annotations

import pytest
import torch
from handmade import HOST, Script

import memlab
from memlab.errors import MemlabError
from memlab.session.modules import modules
from memlab.session.run import Run, load


def tracked() -> Run:
    model = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.ReLU())
    with memlab.track("net") as run:
        model(torch.ones(50, 100)).sum().backward()
    return run


def test_the_modules_of_a_run_by_their_paths():
    found = modules(tracked())
    assert list(found) == ["Sequential", "Sequential.0", "Sequential.1"]
    assert found["Sequential"].calls == 1
    assert found["Sequential.0"].kept_bytes == 0  # its output is overwritten by none, and saved by none
    assert found["Sequential.1"].kept_bytes == 50 * 300 * 4
    assert found["Sequential"].kept_bytes == 50 * 300 * 4


def test_what_they_held_is_their_share_of_the_peak():
    run = tracked()
    shares = run.breakdown("module")
    assert modules(run)["Sequential.0"].own_bytes == shares["Sequential.0"]


def test_it_prints_and_shows_itself_and_is_a_frame():
    found = modules(tracked())
    assert str(found) == repr(found) == found.text
    assert found._repr_mimebundle_() == {"text/html": found.html, "text/plain": found.text}
    assert found.to_pandas().loc["Sequential", "calls"] == 1
    assert found.figure.data[0].type == "icicle"
    assert len(found) == 3
    assert found.get("nothing") is None
    assert "Sequential" in found


def test_a_saved_run_has_them_too(tmp_path):
    run = tracked()
    assert modules(load(run.save(tmp_path / "run.memlab"))).text == modules(run).text


def test_a_run_without_a_device_says_so():
    script = Script()
    script.devices = ()
    with pytest.raises(MemlabError, match="used no device"):
        modules(Run("none", script.trace()))


def test_a_run_without_modules_says_so():
    found = modules(Run("plain", Script(HOST).trace()))
    assert "No module was called" in found.text
    assert "No module was called" in found.html
    with pytest.raises(MemlabError, match="nothing to draw"):
        _ = found.figure
