"""Work in a sandboxed child process: the notebook's kernel stays as it is."""

from memlab.prediction.child.channel import Channel, ChildError, ChildOutcome, current
from memlab.prediction.child.runner import Child

__all__ = ["Channel", "Child", "ChildError", "ChildOutcome", "current"]
