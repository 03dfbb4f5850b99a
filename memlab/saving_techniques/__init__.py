"""The techniques that can be switched on, one file per mechanism; `techniques` is the registry."""

from __future__ import annotations

from memlab.saving_techniques.registry import Techniques, techniques
from memlab.saving_techniques.technique import Demo, Equality, Technique

__all__ = ["Demo", "Equality", "Technique", "Techniques", "techniques"]
