"""What came of a child: its result, or how it failed, and what was held off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChildError:
    """An error that the work raised, as texts: nothing of the child is rebuilt in the parent."""

    name: str
    text: str
    traceback: tuple[str, ...] = ()
    """Formatted as the shell would have shown it; the lines of Python's own format where there is no shell."""

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.text else self.name


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a child."""

    result: bytes | None = None
    ended: str = ""
    """One line where the child died or was stopped, "" where it ended by itself: "the step was killed by SIGSEGV at line 4"."""
    error: ChildError | None = None
    refused: tuple[str, ...] = ()
    """What the fence held off: "writing 'model.pt' (3 times)"."""
    started: tuple[str, ...] = ()
    """The programs that were started, which the fence of Python cannot follow."""
    notes: tuple[str, ...] = ()
    """What else is to be known of this child, as sentences."""
    printed: str = ""
    """The last of what it printed; all of it was shown as it came."""
    duration_s: float = 0.0
