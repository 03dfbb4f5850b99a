"""The ranks of a job: a page whose first lines say what failed, what grows and which ranks differ, and a picture.

The picture has the peak of *allocated* in each optimizer step on its left and by rank on its right, on one scale. With more
than a few ranks the left shows the highest, the median and the lowest of them, and by name those that matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from memlab.analysis.breakdown import BEFORE, ELSEWHERE, ROUNDING
from memlab.analysis.job_ranks import CUT_OFF, TERMINATED, JobRanks, RankRun, consecutive, ranks_text
from memlab.trace.columns import Array
from memlab.trace.trace import SIMULATED_GPU
from memlab.units import format_bytes, format_seconds, number_of, one_line
from memlab.views import theme
from memlab.views.page import Beside, Folded, Page, PageLines, Part
from memlab.views.scene import Axis, Bands, Bars, Item, Label, Line, Mark, Panel, Rule, Scene, Shade, round_ticks
from memlab.views.table import Cell, Column, Table

_NAMED, _FEW, _ROWS, _BARS = 3, 8, 16, 32  # up to so many ranks get a name, a line, a row, a bar of their own
_SHADES = 200
_SHOWN = 7  # rows by category or module
_HOLDERS = 3
_CAPACITY_SHOWN_FROM = 0.25
_NAMES = {ELSEWHERE: "outside any module", BEFORE: BEFORE}


def ranks_title(job: JobRanks) -> str:
    """The job, its ranks and their peaks in one line."""
    peak, there = job.peak, len(job.ranks)
    count = number_of(job.world_size, "rank") if not job.missing else f"{there} of {number_of(job.world_size, 'rank')}"
    source = SIMULATED_GPU if job.provenance == "simulated" else job.provenance
    bound = "≥ " if peak.is_bound else ""
    high = f"peak allocated {bound}{format_bytes(peak.worst_bytes)}"
    if there > 1 and not peak.spread_bytes and not any(one.is_partial for one in job.ranks):
        high += " on every rank"
    elif there > 1:
        high += f" (rank {peak.worst_rank}), median {format_bytes(peak.median_bytes)}"
        high += f", lowest {format_bytes(peak.lowest_bytes)} (rank {peak.lowest_rank})"
    return f"{one_line(job.name, 60)} · {count} · {source} · {high}"


def ranks_page(job: JobRanks, left_out: Sequence[str] = ()) -> Page:
    """The whole report."""
    findings = PageLines(tuple(findings_of(job)), colour=theme.WARNING)
    tables = [_spreads(job, by) for by in ("category", "module")]
    parts: list[Part] = [findings, _ranks_table(job), Beside(tuple(one for one in tables if one.rows))]
    gaps: dict[str, list[int]] = {}
    for one in job.ranks:
        for gap in one.gaps:
            gaps.setdefault(gap, []).append(one.rank)
    if gaps:
        texts = (f"{'all ranks' if len(on) == len(job.ranks) else ranks_text(on)}: {gap}" for gap, on in gaps.items())
        parts.append(Folded("Not seen", PageLines(tuple(texts))))
    if left_out:
        parts.append(Folded("Files that were left out", PageLines(tuple(left_out))))
    return Page(ranks_title(job), tuple(parts))


def findings_of(job: JobRanks) -> Iterator[str]:
    """What failed, what is missing, and what grows; nothing if all went well."""
    first, failed = job.first_failed, [one for one in job.ranks if one.is_failed]
    began_s = min(one.began_s for one in job.ranks)
    if first is not None:
        yield from _first_failure(first, began_s)
        yield from _later_failures(failed, first)
    elif failed and not any(one.is_partial for one in failed):
        yield f"All ranks were {failed[0].error}."
    elif failed:
        yield "No rank has written its end: the job still runs, or all its processes were killed. Files are read as far as they go."
        hosts = {one.rank: one.host for one in failed if one.host is not None}
        if hosts:
            rank = min(hosts, key=lambda rank: hosts[rank].available_bytes / max(hosts[rank].total_bytes, 1))
            yield f"Rank {rank}: {hosts[rank].text}"
    if job.missing:
        yield f"Missing: {ranks_text(job.missing)} left no file."
    for growth in job.growth:
        yield growth.sentence


def _first_failure(first: RankRun, began_s: float) -> Iterator[str]:
    """When, where and how the first rank failed, and what it held."""
    step = f", in optimizer step {first.steps.finished + 1:,}" if len(first.steps.number) else ""
    when = f", {format_seconds(max(first.ended_s - began_s, 0))} after the job began" if first.has_times else ""
    how = f": {first.error}" if first.error else ""
    if first.is_partial:
        how = ": its file ends there, as it was killed or still runs"
    yield f"Rank {first.rank} failed first{when}{step}{how}{'' if how.endswith(('.', '…')) else '.'}"
    if first.host is not None:
        yield first.host.text
    held = first.held
    if held is None:
        return
    by = held.shares.get("category", {})
    what = ", ".join(f"{name} {format_bytes(count)}" for name, count in list(by.items())[:_HOLDERS])
    names = ", ".join(f"{one_line(path, 60)} {format_bytes(count)}" for path, count in held.named[:_HOLDERS])
    modules = {name: count for name, count in held.shares.get("module", {}).items() if name not in (*_NAMES, ROUNDING)}
    where = ", ".join(f"{one_line(name, 60)} {format_bytes(count)}" for name, count in list(modules.items())[:_HOLDERS])
    text = f"It held {format_bytes(held.allocated_bytes)}"
    if not by:
        yield f"{text} at its last sample; what held them is unknown." if first.is_partial else f"{text}."
        return
    more = [f"by name {names}"] if names else []
    more += [f"by module {where}"] if where else []
    yield f"{'; '.join([f'{text}: {what}', *more])}."


def _later_failures(failed: Sequence[RankRun], first: RankRun) -> Iterator[str]:
    """What the other ranks did then, those with the same error together."""
    alike: dict[str, list[RankRun]] = {}
    for one in failed:
        if one is not first:
            endings = {CUT_OFF: "was cut off", TERMINATED: f"was {one.error}"}
            alike.setdefault(endings.get(one.ending, f"raised {one.error or 'an error'}"), []).append(one)
    for what, ones in alike.items():
        later_s = min(one.ended_s for one in ones) - first.ended_s
        later = f"{format_seconds(later_s)} later " if first.has_times else "later "
        when = later if later_s > 0 else ""
        end = "; files of ranks that were cut off are read as far as they go" if ones[0].is_partial else ""
        stop = "" if what.endswith("…") else "."
        text = f"{when}{ranks_text(one.rank for one in ones)} {what.rstrip('.')}{end}{stop}"
        yield text[:1].upper() + text[1:]


def _ranks_table(job: JobRanks) -> Table:
    """All ranks, or of many those that matter."""
    shown = list(job.ranks)
    if len(shown) > _ROWS:
        ranked = sorted(job.ranks, key=lambda one: -one.peak.low)
        chosen = {one.rank for one in (*notable(job), *ranked[:5], job[job.peak.lowest_rank])}
        shown = [one for one in job.ranks if one.rank in chosen]
    rows: list[tuple[Cell, ...]] = []
    for one in shown:
        device = one.device.label if one.device is not None else ""
        ending = {"raised": one.error or "raised", "cut off": "cut off: a lower bound"}.get(one.ending, "")
        rows.append((str(one.rank), one.peak, one.reserved, one.steps.finished or None, device, ending))
    title = f"{len(shown)} of {number_of(len(job.ranks), 'rank')}" if len(shown) < len(job.ranks) else ""
    columns = (
        Column("rank"), Column("peak allocated", "bytes"), Column("reserved", "bytes"), Column("steps", "count"),
        Column("device"), Column("ended", limit=60),
    )  # fmt: skip
    return Table(title, columns, tuple(rows), bar=1)


def _spreads(job: JobRanks, by: str) -> Table:
    """Worst, median and lowest by category or module: categories by size, modules by their difference between ranks."""
    found = [one for one in job.by(by) if one.worst_bytes > 0]
    if by == "category":
        found.sort(key=lambda one: -one.worst_bytes)
    shown = found[:_SHOWN]
    rows: list[tuple[Cell, ...]] = []
    for one in shown:
        rank = str(one.worst_rank) if one.spread_bytes else None
        name = _NAMES.get(one.name, one.name)
        rows.append((name, one.worst_bytes, rank, one.median_bytes, one.lowest_bytes, one.spread_bytes))
    notes = (f"and {len(found) - len(shown):,} more",)
    columns = (
        Column(f"peak by {by}", limit=60), Column("worst", "bytes"), Column("on rank"), Column("median", "bytes"),
        Column("lowest", "bytes"), Column("spread", "bytes"),
    )  # fmt: skip
    colours = tuple(theme.CATEGORIES.get(one.name, "") if by == "category" else "" for one in shown)
    return Table("", columns, tuple(rows), notes if len(found) > len(shown) else (), bar=1, colours=colours)


# --- the picture -----------------------------------------------------------------------------------------------------------


def notable(job: JobRanks) -> dict[RankRun, tuple[str, str]]:
    """The ranks to name, with a colour and a word: the first that failed, those that grow alone, and the worst."""
    chosen: dict[RankRun, tuple[str, str]] = {}
    first = job.first_failed
    if first is not None:
        chosen[first] = (theme.CAPACITY, "failed first")
    for growth in job.growth:
        if len(growth.ranks) <= 2 < job.world_size or len(growth.ranks) == 1:
            for rank in growth.ranks:
                chosen.setdefault(job[rank], (theme.WARNING, "grows"))
    if job.peak.spread_bytes:
        chosen.setdefault(job[job.peak.worst_rank], (theme.SERIES["allocated"], "worst"))
    return dict(list(chosen.items())[:4])


def ranks_scene(job: JobRanks, words: str) -> Scene:
    """Peaks by optimizer step and by rank; `words` is its text alternative."""
    named, top = notable(job), max(job.peak.worst_bytes, 1)
    capacity = max((one.device.capacity_bytes for one in job.ranks if one.device is not None), default=-1)
    shows_capacity = capacity > 0 and top >= _CAPACITY_SHOWN_FROM * capacity
    height = Axis.of_bytes(1.12 * max(top, capacity if shows_capacity else 0))
    limit = [Rule(capacity, theme.CAPACITY, f"capacity {format_bytes(capacity)}")] if shows_capacity else []
    numbers, levels = job.by_step()
    has_steps = len(numbers) > 1
    panels = []
    if has_steps:
        ticks = tuple((at, f"{at:,}") for at in round_ticks(int(numbers[0]), int(numbers[-1])))
        axis = Axis(float(numbers[0]), float(numbers[-1]), ticks, "optimizer step: the highest allocated in each")
        panels.append(Panel(height, {"": (axis,)}, (*_step_lines(job, named, numbers, levels), *limit), end=0.56))
        limit = [Rule(one.y, one.colour, "") for one in limit]  # its text once
    last = job.world_size - 1  # all ranks have a tick, or a few round ones and the last
    step = 1 << max((job.world_size // 5).bit_length(), 1) if last >= 16 else 1
    shown = [*(at for at in range(0, last, step) if last - at > step // 2), last]
    axis = Axis(-0.5, last + 0.5, tuple((at, str(at)) for at in shown), "rank: what held its peak")
    panels.append(Panel(height, {"": (axis,)}, (*_rank_bars(job, named), *limit), begin=0.6 if has_steps else 0.0))
    return Scene(ranks_title(job), words, tuple(panels), ranks_title(job), height=300, top=26, bottom=44)


def _step_lines(job: JobRanks, named: dict[RankRun, tuple[str, str]], numbers: Array, levels: Array) -> Iterator[Item]:
    """A line per rank, or of many the highest, median and lowest, and those with a name on top."""
    for one, row in zip(job.ranks, levels, strict=True):
        there = np.isfinite(row)
        if not there.any() or (len(job.ranks) > _FEW and one not in named):
            continue
        colour, word = named.get(one, (theme.TEXT, ""))
        at, level = numbers[there], row[there]
        if len(at) > 1:
            is_seen, is_named = bool(one.steps.is_seen.all()), bool(word) or len(job.ranks) <= _NAMED
            name = f"rank {one.rank}{f': {word}' if word else ''}{'' if is_seen else ' (samples)'}"
            shape = "joined" if is_seen else "samples"
            yield Line(name, at, level, colour, 1.8 if word else 1.0, shape=shape, named=is_named)
        if one.is_failed and (one in named or len(job.ranks) <= _FEW):
            yield Mark(float(at[-1]), float(level[-1]), "cross", colour, f"rank {one.rank}: {one.ending}")
    if len(job.ranks) > _FEW:
        finished = max(one.steps.finished for one in job.ranks)
        some = np.isfinite(levels).any(axis=0) & (numbers <= finished)  # what a failed step had is no lowest level
        for name, of in (("highest, median, lowest", np.nanmedian), ("highest", np.nanmax), ("lowest", np.nanmin)):
            level, is_median = of(levels[:, some], axis=0), of is np.nanmedian
            width = 1.6 if is_median else 0.8
            yield Line(name, numbers[some], level, theme.TEXT, width, shape="joined", named=is_median)


def _rank_bars(job: JobRanks, named: dict[RankRun, tuple[str, str]]) -> Iterator[Item]:
    """What held the peak of each rank, stacked; missing ranks are shaded."""
    known = [one for one in job.ranks if one.shares.get("category")]
    found = dict.fromkeys(name for one in known for name in one.shares["category"])
    layers = {name: np.zeros(job.world_size) for name in sorted(found, key=[*theme.CATEGORIES, *found].index)}
    for one in known:
        for name, count in one.shares["category"].items():
            layers[name][one.rank] = count
    if job.world_size <= _BARS:
        yield Bars({name: column.tolist() for name, column in layers.items()}, (1.0,) * job.world_size)
    else:
        edges = np.arange(job.world_size + 1) - 0.5
        yield Bands(edges, {name: np.append(column, column[-1]) for name, column in layers.items()})
    unknown = [one for one in job.ranks if one not in known]
    for number, one in enumerate(unknown):  # a level without what held it
        ends, level = np.array([one.rank - 0.4, one.rank + 0.4]), np.full(2, one.peak.low)
        yield Line("held by what is not known", ends, level, theme.TEXT, 2.0, shape="joined", named=not number)
    for missing in consecutive(job.missing)[:_SHADES]:
        text = f"{ranks_text(missing)} left no file"
        yield Shade(missing.start - 0.5, missing.stop - 0.5, theme.CAPACITY, 0.12, text)
    for one, (colour, word) in named.items():
        text = f"{one.rank} {word}" if job.world_size > _BARS else word
        yield Label(one.rank, one.peak.low, text, colour, is_bold=True)
    for one in job.ranks:
        if one.is_failed and (job.world_size <= _BARS or one in named):
            yield Mark(one.rank, 0, "cross", theme.CAPACITY, f"rank {one.rank}: {one.error or one.ending}")
