"""A piece of work, or the body of a cell, in a fenced child process: the notebook's kernel stays as it is."""

from memlab.predictor.child.cell import run_cell
from memlab.predictor.child.channel import Channel, current
from memlab.predictor.child.outcome import ChildError, Outcome
from memlab.predictor.child.step import run

__all__ = ["Channel", "ChildError", "Outcome", "current", "run", "run_cell"]
