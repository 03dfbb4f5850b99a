"""The techniques: one small file for each or for a close family, in rooms by what they change; `techniques` gathers them."""

from __future__ import annotations

from memlab.savings.registry import Techniques, techniques
from memlab.savings.technique import EXACT, Equality, Shown, Technique, changes, close

__all__ = ["EXACT", "Equality", "Shown", "Technique", "Techniques", "changes", "close", "techniques"]
