"""Who runs a Lab's work, how it is stopped, and that cells and runs never go at once."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from lab_samples import Listener, tiny
from processes import python

from memlab import Lab
from memlab.api.runs import runs
from memlab.lab import worker as worker_module
from memlab.lab.worker import ExecutionLock, Worker

LONG_S = 30.0


def wait_for(true, limit_s: float = 300) -> None:
    until = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def endless(worker: Worker) -> None:
    while True:
        worker.check()
        time.sleep(0.005)


def deaf(worker: Worker) -> None:
    """Work that never checks: only a break ends it."""
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        time.sleep(0.005)
    raise AssertionError("nothing stopped it")


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("work", [endless, deaf])
def test_a_stop_ends_what_goes_on_in_a_thread_and_here(work, is_here, monkeypatch):
    monkeypatch.setattr(worker_module, "GRACE_S", 0.1)
    ended = []
    worker = Worker(work, ended.append)
    if is_here:
        stopper = threading.Timer(0.1, worker.stop)
        stopper.start()
        with pytest.raises(KeyboardInterrupt):
            worker.call()
        stopper.join()
    else:
        worker.start()
        wait_for(lambda: worker.is_working)
        worker.stop()
        worker.stop()
        assert worker.join(120)
    assert ended == [worker]


def test_a_stop_in_time_breaks_into_nothing_later(monkeypatch):
    monkeypatch.setattr(worker_module, "GRACE_S", 0.05)
    worker = Worker(endless, lambda _: time.sleep(0.2))  # a break that came late would break this sleep
    worker.start()
    wait_for(lambda: worker.is_working)
    worker.stop()
    assert worker.join(120)


def test_a_run_waits_for_the_cell_and_a_cell_for_the_run():
    lock, order = ExecutionLock(), []
    lock.cell_begins()
    worker = Worker(lambda _: None, lambda _: None)

    def run() -> None:
        with lock.held_by(worker):
            order.append("run")
            time.sleep(0.1)
            order.append("run ends")

    thread = threading.Thread(target=run)
    thread.start()
    assert worker.is_queued.wait(120)
    lock.cell_begins()  # nested: it cannot wait for a run that waits for its outer cell
    lock.cell_ends()
    order.append("cell ends")
    lock.cell_ends()
    lock.cell_begins()
    order.append("next cell")
    lock.cell_ends()
    thread.join()
    assert order == ["cell ends", "run", "run ends", "next cell"]


def test_a_run_that_waits_can_be_stopped(monkeypatch):
    lock = ExecutionLock()
    monkeypatch.setattr(worker_module, "execution_lock", lock)
    lock.cell_begins()
    ended = []
    worker = Worker(deaf, ended.append)
    worker.start()
    time.sleep(0.05)
    worker.stop()
    assert worker.join(120)
    assert ended == [worker]


def test_a_cell_that_was_not_seen_to_begin_ends_nothing():
    lock = ExecutionLock()
    lock.cell_ends()
    lock.cell_begins()
    assert not lock.is_free


def slow():
    model, optimizer, batch, loss = tiny()

    def slowly(output, target):
        time.sleep(0.05)
        return loss(output, target)

    return model, optimizer, batch, slowly


def test_a_lab_runs_in_a_thread_and_is_stopped():
    lab = Lab(slow, steps=1000, force=True)
    before = list(runs)
    assert lab.start()
    assert not lab.start()
    wait_for(lambda: lab.is_working)
    time.sleep(0.2)
    lab.stop()
    assert lab.wait(120)
    assert not lab.is_running and lab.rows == ()
    assert set(runs) <= set(before)  # nothing was added; of a full registry the oldest may be gone
    assert "Stopped" in lab.problem


def test_a_lab_is_stopped_inside_of_a_long_step(monkeypatch):
    monkeypatch.setattr(worker_module, "GRACE_S", 0.1)
    begun = threading.Event()

    def endless_step():
        model, optimizer, batch, _ = tiny()

        def loss(output, target):
            begun.set()
            until = time.monotonic() + LONG_S
            while time.monotonic() < until:
                output = output * 1.0
            return torch.nn.functional.mse_loss(output, target)

        return model, optimizer, batch, loss

    lab = Lab(endless_step, steps=1, force=True)
    lab.start()
    assert begun.wait(120)
    lab.stop()
    assert lab.wait(120)
    assert "Stopped" in lab.problem and lab.rows == ()
    assert lab.run(workload="mlp", size="tiny", steps=1).peak_bytes > 0  # and it can be used again


def test_a_prediction_is_stopped(monkeypatch):
    monkeypatch.setattr(worker_module, "GRACE_S", 0.1)
    lab, listener = Lab(slow, steps=1000, card="RTX 4060"), Listener()
    lab.listener = listener
    lab.start()
    assert listener.stepped.wait(120)
    lab.stop()
    assert lab.wait(120)
    assert "Stopped" in lab.problem and lab.rows == ()


def test_closing_stops_and_waits():
    lab = Lab(slow, steps=1000, force=True)
    lab.start()
    wait_for(lambda: lab.is_working)
    lab.close()
    assert not lab.is_running
    assert not [one for one in threading.enumerate() if one.name.startswith("memlab")]


STOPPED = """
import sys, threading, time
from memlab.lab import worker as worker_module
worker_module.GRACE_S = 0.1

def work(worker):
    until = time.monotonic() + 30
    while time.monotonic() < until:
        {check}
        time.sleep(0.005)

worker = worker_module.Worker(work, lambda _: None)
worker.start()
while not worker.is_working:
    time.sleep(0.01)
worker.stop()
assert worker.join(120)
sys.settrace(lambda *event: None)
(lambda: None)()
print("went on")
"""


@pytest.mark.parametrize("check", ["worker.check()", "pass"])
def test_a_debugger_works_after_a_stop(check):
    """CPython 3.11 hung where a break was withdrawn in the plain way: every stop that came in time did that."""
    program = STOPPED.format(check=check)
    assert python("-c", program, timeout=300) == "went on\n"
