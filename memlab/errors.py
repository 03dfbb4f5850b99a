"""All errors that memlab raises: one base class and its subclasses."""

from __future__ import annotations


class MemlabError(Exception):
    """The base class of all errors that memlab raises."""


class TraceError(MemlabError):
    """A trace is inconsistent, or a file does not hold one."""


class ProbeError(MemlabError):
    """A probe cannot run as asked."""


class BudgetExceeded(MemlabError):
    """The peak of a tracked cell was above the budget it was given."""


class PredictionError(MemlabError):
    """A run cannot be predicted as asked."""


class SimulatedGpuError(MemlabError):
    """A simulated GPU cannot be made or used as asked."""


class DoesNotApply(MemlabError):
    """A technique finds nothing to change in this job, or would break it; the text says why."""


class ClaimRefuted(MemlabError, AssertionError):
    """A lesson's claim does not hold on this machine."""
