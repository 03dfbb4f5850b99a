"""An account of a peak: each term with its formula, what the formula predicts, what was measured, and what remains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memlab.units import format_bytes
from memlab.views.who import Listing


@dataclass(frozen=True, slots=True)
class Term:
    """One owner of bytes: `formula` is text for the reader, `predicted_bytes` what it comes to."""

    name: str
    formula: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def residual_bytes(self) -> int:
        """What was measured beyond the formula."""
        return self.measured_bytes - self.predicted_bytes


@dataclass(frozen=True, slots=True)
class Account:
    """All terms of one figure; `total_bytes` is that figure as it was measured, and what no term explains is a row.

    `found` heads the column of what was measured: where it was simulated or rehearsed it says so.
    """

    title: str
    total_bytes: int
    terms: tuple[Term, ...]
    found: str = "measured"

    @property
    def unexplained_bytes(self) -> int:
        """The measured figure minus what the formulas say of it."""
        return self.total_bytes - sum(one.predicted_bytes for one in self.terms)

    @property
    def unexplained_share(self) -> float:
        """The same as a share of the figure."""
        return self.unexplained_bytes / max(self.total_bytes, 1)

    def listing(self) -> Listing:
        """The account as a table."""
        rows = [_row(one.name, one.formula, one.predicted_bytes, one.measured_bytes) for one in self.terms]
        predicted = sum(one.predicted_bytes for one in self.terms)
        rows.append(_row("together", "", predicted, self.total_bytes))
        share = (
            f"The formulas leave {format_bytes(self.unexplained_bytes)} of {format_bytes(self.total_bytes)} unexplained"
        )
        return Listing(
            self.title,
            ("predicted", self.found, "residual", "what", "formula"),
            tuple(rows),
            (f"{share} ({abs(self.unexplained_share):.1%}).",),
            numbers=3,
        )

    def __str__(self) -> str:
        return self.listing().text()

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self.listing().html()}

    def to_pandas(self) -> Any:
        """One row per term, sizes in bytes."""
        import pandas

        rows = [
            (one.name, one.formula, one.predicted_bytes, one.measured_bytes, one.residual_bytes) for one in self.terms
        ]
        return pandas.DataFrame(
            rows, columns=["what", "formula", "predicted_bytes", "measured_bytes", "residual_bytes"]
        )


def _row(name: str, formula: str, predicted_bytes: int, measured_bytes: int) -> tuple[str, ...]:
    residual = format_bytes(measured_bytes - predicted_bytes)
    return format_bytes(predicted_bytes), format_bytes(measured_bytes), residual, name, formula


def account(
    title: str, total_bytes: int, terms: Sequence[tuple[str, str, int, int]], found: str = "measured"
) -> Account:
    """An account of `total_bytes`; each term is its name, its formula as text, predicted and measured bytes."""
    return Account(title, total_bytes, tuple(Term(*one) for one in terms), found)
