"""Whether the host's memory suffices for a run, asked before it: a kernel that runs out of memory dies without a word.

The need of a large one is predicted in a child process; an estimate, as the CPU's kernels are not a card's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from memlab.errors import MemlabError
from memlab.lab.state import Choices, State
from memlab.predictor.cards import Card
from memlab.probes.host import HostMemory
from memlab.session import trial as trials
from memlab.session.runs import runs
from memlab.units import GiB, TiB, format_bytes

SHARE = 0.8
"""Of what is free, a run may take so much."""
LEAST_BYTES = GiB
"""What has to be free for a run whose need is not predicted, which is that of a laptop's size."""
LARGE = ("card",)
"""Sizes whose need is predicted first."""


class TooLarge(MemlabError):
    """A run may take more memory than the host has."""


def check_room(choices: Choices, state: State, tell: Callable[[str, int, int], None]) -> None:
    """Raise TooLarge where a run here may need more of the host than is free."""
    if state.device != "cpu" or state.force:
        return
    free = HostMemory().read().available_bytes
    needed = _needed_bytes(choices, state, tell) if state.size in LARGE else LEAST_BYTES
    if needed > SHARE * free:
        what = "needs about" if state.size in LARGE else "should have"
        raise TooLarge(
            f"{choices.work(state)} {what} {format_bytes(needed)} on the host, and {format_bytes(free)} is free: the "
            f"kernel may be killed. Take a smaller size or batch, predict it for a card, or allow it (force)."
        )


def _needed_bytes(choices: Choices, state: State, tell: Callable[[str, int, int], None]) -> int:
    """The most that the plain job or the chosen one takes."""
    host = Card("this host", total_bytes=TiB, compute_capability=(8, 6))  # later ones have larger workspaces
    habits = trials.habits_of(state.techniques)
    tell(f"how much memory {choices.work(state)} needs", 0, 1)
    found = trials.trial(
        choices.work(dataclasses.replace(state, device="card")),
        (),
        habits,
        on=host,
        steps=1,
        on_step=lambda done, total: tell("how much memory it needs", done, total),
    )
    runs.discard(found)
    return found.peak_bytes
