"""Simulated devices from the cards that predictions know."""

from __future__ import annotations

from memlab.errors import SimulatedGpuError
from memlab.prediction.cards import Card
from memlab.simulated_gpu.machine import LONGEST_NAME, SimulatedDevice
from memlab.units import MiB, plain

SIMULATED = " (simulated)"


def device_of(card: Card, context_bytes: int | None = None) -> SimulatedDevice:
    """The card at the cautious end of what is known of it: the least memory that PyTorch sees of it, the largest context.

    So what fits here fits on the real card, except that workspaces of cuDNN, which are not simulated, come on top.
    """
    if card.backend != "cuda":
        raise SimulatedGpuError(
            f"{card.name} is a GPU for ROCm, and only CUDA is simulated; predictions know it: memlab.predict."
        )
    total = card.usable_bytes
    if not card.usable_range.is_exact:  # an estimate should not look like a figure that was read from a card
        total = total // MiB * MiB
    context = card.context_bytes.high // MiB * MiB if context_bytes is None else context_bytes
    # Saved runs keep only the name, by which their figures are known to be of a simulated GPU.
    name = plain(card.name).encode()[: LONGEST_NAME - len(SIMULATED)].decode(errors="ignore") + SIMULATED
    return SimulatedDevice(name, total, context, card.compute_capability, card.multiprocessors)


def card_of(total_bytes: int, capability: tuple[int, int]) -> Card:
    """A GPU of which only memory and capability are known: PyTorch sees exactly that much, the rest is as on similar GPUs."""
    name = "sm_{}{} GPU".format(*capability)
    similar = Card(name, total_bytes, capability, usable_bytes=total_bytes)
    return Card(name, total_bytes, capability, usable_bytes=total_bytes, multiprocessors=similar.multiprocessors)
