"""The ways out of an out-of-memory error: changes that a prediction of the same cell showed to be enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memlab.units import ByteRange, format_bytes, one_line

Kind = Literal["free", "technique", "batch", "slower", "gpu"]
_BY_PRICE: tuple[Kind, ...] = ("free", "technique", "batch", "slower", "gpu")


@dataclass(frozen=True, slots=True)
class WayOut:
    """One change, what the cell needs of the device with it (predicted), and what it costs.

    `cell` is the changed text of the cell, as it was predicted, and `diff` the change, where it could be written into it.
    """

    kind: Kind
    change: str
    needs: ByteRange
    price: str = ""
    diff: str = ""
    cell: str = ""

    @property
    def cost(self) -> int:
        """The rank of its price."""
        return _BY_PRICE.index(self.kind)


@dataclass(frozen=True, slots=True)
class WaysOut:
    """What the whole cell needs, and what would have fitted.

    `needs` is what the cell needs as it is, run again after `%memoom release`, of the `limit_bytes` of `card` that this process
    can have; None if it could not be predicted, and `problem` says why. `ways` are sorted by price, `not_enough` what was
    tried and does not fit. `state` says what the search is doing, or why it ended before everything was tried.
    """

    card: str
    limit_bytes: int
    needs: ByteRange | None = None
    ways: tuple[WayOut, ...] = ()
    not_enough: tuple[str, ...] = ()
    state: str = ""
    problem: str = ""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The need of the whole cell, and what is left to say."""
        if self.problem:
            why = one_line(self.problem, 300).rstrip(".")
            return (f"What the whole cell needs is not known, as it could not be predicted: {why}.",)
        if self.needs is None:
            return (self.state,) if self.state else ()
        has = f"{self.card} has {format_bytes(self.limit_bytes)} for it"
        said = [f"The whole cell needs {self.needs} of the device, predicted with the cell itself; {has}."]
        if not self.ways and not self.state:
            said.append("Nothing that was tried makes it fit.")
        said += [self.state] if self.state else []
        return tuple(said)
