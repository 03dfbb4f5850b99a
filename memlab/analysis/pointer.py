"""One line that points from a report to the advisor, where something large holds the peak. It promises trying, not saving."""

from __future__ import annotations

from collections.abc import Mapping

from memlab.units import MiB

LARGE = 0.5
"""Of the peak: a category that holds less is not worth pointing at."""
LEAST_BYTES = 32 * MiB
"""Peaks below are not worth an advice."""
PLURAL = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "activation": "activations",
    "optimizer": "optimizer states",
    "input": "inputs",
    "temporary": "temporaries",
}


def is_large(shares: Mapping[str, int]) -> bool:
    """Whether one category of tensors holds most of a peak that is worth it."""
    total, name = sum(shares.values()), _largest(shares)
    return name in PLURAL and total >= LEAST_BYTES and shares[name] >= LARGE * total


def pointer(shares: Mapping[str, int], known: Mapping[str, int], call: str, of: str = "the peak") -> str:
    """The line, "" where no category holds most of the peak or no technique is known for the one that does.

    `shares` has the bytes at the peak by category, `known` how many techniques can be tried on each, `call` what to call.

    >>> pointer({"activation": 80 * MiB, "parameter": 20 * MiB}, {"activation": 7}, "memlab.advise(run)")
    'Activations hold 80 % of the peak: memlab.advise(run) tries 7 techniques on them.'
    """
    name = _largest(shares)
    count = known.get(name, 0)
    if not is_large(shares) or not count:
        return ""
    tries = f"tries {count} technique{'s' if count > 1 else ''} on them"
    return (
        f"{PLURAL[name].capitalize()} hold {100 * shares[name] / sum(shares.values()):.0f} % of {of}: {call} {tries}."
    )


def _largest(shares: Mapping[str, int]) -> str:
    return max(shares, key=lambda one: shares[one], default="")
