"""An advice as a page: the recommendation, everything that was tried, and the code to paste."""

from __future__ import annotations

from collections.abc import Iterator

from memlab.analysis.advice import UNCHECKED, Findings
from memlab.trace.trace import SIMULATED_GPU
from memlab.units import UNBOUNDED, ByteRange, format_bytes, format_seconds, one_line
from memlab.views.page import Folded, Page, PageLines, Part, code_block
from memlab.views.table import Cell, Column, Table, percent

_COLUMNS = (
    Column(""), Column("peak", "bytes"), Column("saved", "bytes"), Column("share", "share"), Column("time", "times"),
    Column("results"), Column("price", limit=72, wraps=True, least=24),
)  # fmt: skip


def advice_page(found: Findings, code: str = "", diff: str = "", cell: str = "", setting: str = "") -> Page:
    """Findings as a page; `diff` and `cell` are the change of the user's cell and the changed cell.

    `setting` is the value of PYTORCH_CUDA_ALLOC_CONF that belongs to it.
    """
    where = f"predicted for {found.on}" if found.is_predicted else f"measured on {found.on}"
    where = f"on {found.on}, a {SIMULATED_GPU}" if found.is_simulated else where
    combined = sorted(found.combined, key=lambda one: one.peak_bytes.high)
    shown = [one for one in (*found.ranking(), *combined) if not one.failed]
    parts: list[Part] = list(_sentences(found))
    rows: list[tuple[Cell, ...]] = [("as it is", found.before_bytes, None, None, None, None, None)]
    # Predictions have neither: one note instead of two columns that say the same in each row.
    has_times, has_results = any(one.ratio is not None for one in shown), any(one.results != UNCHECKED for one in shown)
    alone = {one.names[0] for one in found.tried}
    for one in shown:
        results = f"{one.results}, more than allowed" if one.is_wrong else one.results if has_results else None
        time = one.ratio if one.ratio is not None else "not measured" if has_times else None
        # Of a combination, the prices of those that have no row of their own.
        prices = [
            text for name, text in zip(one.names, one.prices, strict=False) if len(one.names) == 1 or name not in alone
        ]
        price = prices[0] if len(prices) == 1 else "; ".join(text.rstrip(".") for text in prices) or None
        share = _share(one.saved_bytes, found)
        rows.append((one.name, one.peak_bytes, one.saved_bytes, share, time, results, price))
    if shown:
        strong = frozenset(number for number, one in enumerate(shown, 1) if one == found.recommended)
        unknown = ["" if has_times else "Times were not measured.", "" if has_results else "Results were not checked."]
        notes = (" ".join(filter(None, unknown)),) if any(unknown) else ()
        parts.append(Table("", _COLUMNS, tuple(rows), notes, bar=1, strong=strong))
    failed = [(one.name, one.failed) for one in (*found.tried, *found.combined) if one.failed]
    for heading, reasons in (("Could not be tried", failed), ("Not tried", found.left_out)):
        names: dict[str, list[str]] = {}  # those with the same reason, in one line
        for name, why in reasons:
            names.setdefault(why, []).append(name)
        lines = tuple(one_line(f"{', '.join(named)}: {why}") for why, named in names.items())
        parts += [Folded(heading, PageLines(lines))] if lines else []
    stopped = (f"The search is not complete: {found.stopped}.",) if found.stopped else ()
    parts.append(PageLines((*stopped, *found.notes)))
    if diff:
        was = "predicted" if found.is_predicted else "measured"
        if setting:
            parts.append(f"Before the kernel starts, set PYTORCH_CUDA_ALLOC_CONF={setting}; the rest is in the cell.")
        heading = f"Your cell, changed; the peak above was {was} with this very text"
        parts.append(Folded(heading, code_block(diff), is_open=True))
        parts.append(Folded("The changed cell, to paste", code_block(cell)))
    elif code:
        parts.append(Folded("To paste", code_block(code), is_open=True))
    return Page(f"memlab · advice on {found.name} · {where} · {format_seconds(found.duration_s)}", tuple(parts))


def _sentences(found: Findings) -> Iterator[str]:
    best, of, before = found.recommended, "the device" if found.of == "device" else found.of, found.before_bytes
    target = format_bytes(found.target_bytes or 0)
    if not found.tried and not found.left_out:
        yield f"As it is: the peak of {of} is {before}."
        return
    if found.reaches and best is None:
        yield f"The peak of {of} is {before}: the target of {target} is already met."
        return
    if best is None and not found.tried:
        yield f"Nothing was tried: the peak of {of} is {before}."
    elif best is None:
        yield f"Nothing that was tried saves memory here: the peak of {of} stays {before}."
    else:
        time = f", a step takes {best.ratio:.2f} times as long" if best.ratio is not None else ""
        saved = f"−{best.saved_bytes}, −{percent(_share(best.saved_bytes, found))}"
        each = " per rank" if best.world_size > 1 else ""
        peaks = f"peak of {of} {best.peak_bytes}{each} instead of {before}"
        yield f"{best.name}: {peaks} ({saved}){time}, results {best.results}."
    if found.target_bytes is not None and found.reaches:
        yield f"The target of {target} is reached."
    elif found.target_bytes is not None:
        is_bounded = max(found.after_bytes) < UNBOUNDED
        missed = f"is missed by {format_bytes(found.missed_bytes)}" if is_bounded else "may be missed"
        yield f"The target of {target} {missed}."
    yield from found.remarks
    if found.shares:
        largest = sorted(found.shares.items(), key=lambda item: -item[1])[:3]
        total = max(sum(found.shares.values()), 1)
        held = ", ".join(f"{name} {format_bytes(count)} ({percent(count / total)})" for name, count in largest)
        yield f"Held at the peak before: {held}."


def _share(saved: ByteRange, found: Findings) -> float:
    before = found.before_bytes
    if max(map(abs, (*saved, *before))) >= UNBOUNDED:  # the certain part
        return max(saved.low, 0) / max(before.low, 1)
    return sum(saved) / max(sum(before), 1)
