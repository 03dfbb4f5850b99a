"""What the notebooks of the course need: guesses, claims, checks of exercises."""

from __future__ import annotations

from memlab.lesson.lesson import Lesson

__all__ = ["Lesson"]
