from __future__ import annotations

import threading

import pytest
from handmade import HOST, Script, busy

import memlab
from memlab.errors import MemlabError
from memlab.session import runs as module
from memlab.session.run import Run
from memlab.session.runs import Runs


def run(name: str) -> Run:
    return Run(name, Script(HOST).trace())


def test_the_last_fifty_are_kept():
    kept = Runs()
    for number in range(60):
        kept.add(run(f"r{number}"))
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
    first, second = run("a"), run("a")
    for one in (first, run("b"), second):
        kept.add(one)
    assert list(kept) == ["b", "a"]
    assert kept["a"] is kept.last() is second


def test_what_is_not_there_is_named_with_what_is():
    kept = Runs()
    with pytest.raises(MemlabError, match=r"no run 'x'. Known: none yet"):
        kept["x"]
    with pytest.raises(MemlabError, match="no run yet"):
        kept.last()
    kept.add(run("a"))
    with pytest.raises(MemlabError, match=r"Known: 'a'"):
        kept["x"]


def test_it_is_a_mapping():
    kept = Runs()
    assert (kept.get("x"), kept.get("x", 3), "x" in kept, repr(kept)) == (None, 3, False, "no runs yet")
    kept.add(run("a"))
    assert kept.get("a") is kept["a"]
    assert [name for name, _ in kept.items()] == ["a"]
    assert repr(kept) == repr(kept["a"])


def test_names_are_given_once_also_to_many_threads():
    kept, names = Runs(), []
    threads = [threading.Thread(target=lambda: names.extend(kept.new_name() for _ in range(200))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 800


def test_it_can_be_read_while_runs_come():
    kept = Runs()
    for number in range(5):
        kept.add(run(str(number)))
    for name in kept:
        kept.add(run(f"{name}!"))
    assert len(kept) == 10


def test_a_track_is_kept_under_its_name():
    with memlab.track("kept", show=False) as one:
        pass
    assert memlab.runs["kept"] is memlab.last_run() is one


def test_runs_that_come_within_leave_those_that_were_there() -> None:
    held = Runs()
    for index in range(module.MAX_RUNS):
        held.add(run(f"mine {index}"))
    with held.as_they_are():
        held.add(run("a trial"))
        held.add(run("mine 7"))
        assert "a trial" in held and "mine 0" not in held
    assert list(held) == [f"mine {index}" for index in range(module.MAX_RUNS)]
