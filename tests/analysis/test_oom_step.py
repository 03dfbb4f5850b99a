"""What the step needs in which memory ran out: figures of traces written by hand."""

from __future__ import annotations

from scripted_traces import Script

from memlab.analysis.oom.explain import explain
from memlab.analysis.oom.facts import Failure
from memlab.analysis.oom.moment import StepNeed, last_moment
from memlab.analysis.oom.text import Message
from memlab.trace import MarkKind
from memlab.trace.spans import OPTIMIZER
from memlab.trace.trace import Bounded
from memlab.units import ByteRange


class Steps(Script):
    """1000 bytes before the start and 2000 of a model, then steps that rise by so much, each of which leaves something."""

    def __init__(self) -> None:
        super().__init__()
        self.preexisting(1000)
        self.segment(50_000, at=0)
        self.here_it_starts()
        self.alloc(2000)

    def step(self, *sizes: int, leaves: int = 0) -> None:
        self.mark(MarkKind.MODULE_BEGIN, "net", self.now + 1)
        blocks = [self.alloc(size) for size in sizes]
        self.mark(MarkKind.PHASE_BEGIN, OPTIMIZER, self.now + 1)
        if leaves:
            self.alloc(leaves)
        for block in blocks:
            self.free(block)
        self.mark(MarkKind.PHASE_END, OPTIMIZER, self.now + 1)

    def failed(self, reached: int, asked: int, **made_by) -> tuple[StepNeed, str]:
        self.mark(MarkKind.MODULE_BEGIN, "net", self.now + 1)
        self.alloc(reached)
        self.oom(asked, 64)
        moment = last_moment(self.trace(**made_by))
        assert moment is not None
        assert moment.step is not None
        return moment.step, " ".join(explain(Failure(Message("CUDA", 0), moment=moment)).sentences)


def test_a_step_like_those_before_it():
    steps = Steps()
    steps.step(9000, leaves=500)  # the first makes the optimizer's states
    steps.step(4000, 2000)
    steps.step(4000, 2400)
    found, text = steps.failed(4000, 1500)
    assert (found.at_least_bytes, found.begin_bytes, found.available_bytes) == (3500 + 4000 + 1500, 3500, 50_064)
    assert (found.earlier, found.rise) == (2, ByteRange(6000, 6400))
    assert found.as_before == ByteRange(9500, 9900)
    assert "the 2 steps before it rose by 5.86 KiB to 6.25 KiB" in text
    assert "if it is like them it needs 9.28 KiB to 9.67 KiB at its peak, at least 8.79 KiB" in text


def test_one_step_before_it_counts_with_what_it_made():
    steps = Steps()
    steps.step(6000, leaves=500)
    found, text = steps.failed(4000, 1500)
    assert (found.begin_bytes, found.rise) == (3500, ByteRange.exact(6500))
    assert found.as_before == ByteRange.exact(10_000)
    assert "the step before it rose by" in text


def test_a_step_that_rose_above_all_of_them_is_larger():
    steps = Steps()
    for _ in range(3):
        steps.step(2000)
    found, text = steps.failed(4000, 1500)
    assert found.as_before is None
    assert found.at_least_bytes == 3000 + 5500
    assert "more than a step like the 2 steps before it" in text


def test_before_the_first_step_ended_the_rest_is_not_known():
    found, text = Steps().failed(4000, 1500)
    assert (found.is_first, found.at_least_bytes, found.as_before) == (True, 8500, None)
    assert "before the first step of an optimizer had ended: this needs at least 8.30 KiB allocated" in text
    assert "not known" in text


def test_steps_whose_events_were_lost_do_not_count():
    steps = Steps()
    steps.step(9000)
    steps.step(9000)
    until = steps.now
    steps.step(2000)
    steps.step(2200)
    found, _ = steps.failed(100, 100, bounded=(Bounded(0, 0, until, 5),))
    assert (found.earlier, found.rise) == (2, ByteRange(2000, 2200))
    lost = Steps()
    lost.step(9000)
    found, text = lost.failed(100, 100, bounded=(Bounded(0, 0, lost.now, 5),))
    assert found.rise is None
    assert "not known" in text
