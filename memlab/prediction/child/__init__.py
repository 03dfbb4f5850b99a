"""Run work in a sandboxed child process, leaving the notebook's kernel unchanged."""

from memlab.prediction.child.channel import Channel, ChildError, ChildOutcome, current, guard
from memlab.prediction.child.runner import Child

__all__ = ["Channel", "Child", "ChildError", "ChildOutcome", "current", "guard"]
