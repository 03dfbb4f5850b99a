"""A run of a script for people and programs: as text, as JSON, and as one HTML page that needs nothing else.

They contain sizes, names of modules, files and variables. Environment variables, arguments and values are not in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from html import escape
from typing import TYPE_CHECKING, Any

from memlab.api.ranks import Ranks
from memlab.errors import MemlabError
from memlab.units import UNBOUNDED, plain
from memlab.views.curves import timeline_scene
from memlab.views.page import document
from memlab.views.svg import svg

if TYPE_CHECKING:
    from memlab.analysis.job_ranks import RankRun, Spread
    from memlab.analysis.oom.explain import Explanation
    from memlab.analysis.oom.moment import StepNeed
    from memlab.analysis.summary import DeviceSummary, Level
    from memlab.api.oom import OomExplained
    from memlab.api.run import Run
    from memlab.scripts.step_times import StepTimes


_EXPLAINED = "explained"
"""Among the notes of a run: why memory ran out, as text and as data."""


def keep(run: Run, explained: OomExplained) -> None:
    """Store with the run why memory ran out, for those who read its file."""
    run.note(_EXPLAINED, {"text": explained.text, "facts": _out_of_memory(explained.explanation)})


def _kept_text(run: Run) -> str:
    """What was stored; a file may say anything, so no terminal escapes are left."""
    return "\n".join(map(plain, str(run.trace.noted(_EXPLAINED).get("text", "")).splitlines()))


def as_text(run: Run | Ranks, explained: OomExplained | None = None, times: StepTimes | None = None) -> str:
    """The report; if memory ran out, the explanation comes first."""
    if isinstance(run, Ranks):
        return run.text
    why = explained.text if explained is not None else _kept_text(run)
    parts = (why, run.report().text, _step_times(run, times))
    return "\n\n".join(filter(None, parts))


def as_html(run: Run | Ranks, explained: OomExplained | None = None, times: StepTimes | None = None) -> str:
    """A page that is readable without network and scripts: picture, report, modules, and if memory ran out why."""
    if isinstance(run, Ranks):
        return document(run.job.name, [run.svg(), run.html])
    report = run.report()
    sections = [explained.html] if explained is not None else []
    if explained is None and (why := _kept_text(run)):
        sections.append(f"<pre>{escape(why)}</pre>")
    if run.devices:
        sections.append(svg(timeline_scene(report.curves, report.title)))
    sections.append(report.html)
    sections += [escape(text)] if (text := _step_times(run, times)) else []
    with contextlib.suppress(MemlabError):  # no module was called
        sections.append(run.modules().html)
    return document(report.title, sections)


def _step_times(run: Run, times: StepTimes | None) -> str:
    return times.text if times is not None and run.summary.has_times else ""


def as_json(run: Run | Ranks, explained: OomExplained | None = None, times: StepTimes | None = None) -> str:
    """One object on one line: sizes are bytes, times seconds."""
    if isinstance(run, Ranks):
        return json.dumps(_job(run))
    summary = run.summary
    facts: dict[str, Any] = {
        "name": summary.name,
        "provenance": summary.provenance,
        "engine": summary.engine,
        "exact": run.is_exact,
        **({"duration_s": summary.duration_s} if summary.has_times else {}),
        **({"step": times.facts} if times is not None and summary.has_times else {}),
        "devices": [_device(one) for one in summary.devices],
        "not_seen": {gap.name: gap.text for gap in summary.gaps},
        "notes": list(summary.notes),
    }
    if explained is not None:
        facts["out_of_memory"] = _out_of_memory(explained.explanation)
    elif (kept := run.trace.noted(_EXPLAINED).get("facts")) is not None:
        facts["out_of_memory"] = kept
    return json.dumps(facts)


def _job(ranks: Ranks) -> dict[str, Any]:
    job, first = ranks.job, ranks.first_failed
    began_s = min(one.began_s for one in job.ranks)
    return {
        "name": job.name,
        "provenance": job.provenance,
        "world_size": job.world_size,
        "missing": list(job.missing),
        "left_out": list(ranks.left_out),
        "peak_allocated": _spread(job.peak),
        "peak_reserved": _spread(job.reserved) if job.reserved is not None else None,
        "peak_by": {by: [_spread(one) for one in job.by(by)] for by in ("category", "module")},
        "first_failed": first.rank if first is not None else None,
        "growth": [
            {
                "ranks": list(one.ranks),
                "steady": one.steady,
                "bytes_per_step": one.bytes_per_step,
                "text": one.text,
                "held_by": dict(one.holders),
            }
            for one in ranks.growth
        ],
        "ranks": [_rank(one, began_s) for one in job.ranks],
    }


def _spread(one: Spread) -> dict[str, Any]:
    return dataclasses.asdict(one) | {"spread_bytes": one.spread_bytes}


def _rank(one: RankRun, began_s: float) -> dict[str, Any]:
    held = one.held
    return {
        "rank": one.rank,
        "device": one.device.label if one.device is not None else None,
        "peak_low_bytes": one.peak.low,
        "peak_high_bytes": one.peak.high if one.peak.high < UNBOUNDED else None,
        "steps": one.steps.finished,
        "ending": one.ending,
        **({"ended_s": one.ended_s - began_s} if one.has_times else {}),
        "error": one.error or None,
        **(
            {"host_at_end": dataclasses.asdict(one.host) | {"is_short": one.host.is_short}}
            if one.host is not None
            else {}
        ),
        "held": {"allocated_bytes": held.allocated_bytes, **held.shares, "named": dict(held.named)} if held else None,
        "files": list(one.files),
    }


def _device(one: DeviceSummary) -> dict[str, Any]:
    return {
        "device": one.device.label,
        "name": one.device.name,
        "capacity_bytes": one.device.capacity_bytes if one.device.capacity_bytes > 0 else None,
        **{level.of.replace(" ", "_"): _level(level) for level in one.levels},
        "at_peak": dict(one.at),
        "peak_by": {share.by: dict(share) for share in one.shares},
    }


def _level(level: Level) -> dict[str, int | None]:
    peak = level.peak
    figures = {"start_bytes": level.start_bytes, "end_bytes": level.end_bytes}
    return {
        "peak_low_bytes": peak.low_bytes,
        "peak_high_bytes": peak.high_bytes if peak.high_bytes < UNBOUNDED else None,
        **{name: count if count >= 0 else None for name, count in figures.items()},
    }


def _out_of_memory(found: Explanation) -> dict[str, Any]:
    return {
        "device": found.label,
        "title": found.title,
        "sentences": list(found.sentences),
        "step": _step(found.step) if found.step is not None else None,
        "held_by": [{"path": one.path, "category": one.category, "bytes": one.nbytes} for one in found.named],
        "actions": [
            {
                "text": one.text,
                "frees_low_bytes": one.gives.low,
                "frees_high_bytes": one.gives.high,
                "is_enough": one.is_enough,
            }
            for one in found.actions
        ],
    }


def _step(step: StepNeed) -> dict[str, Any]:
    as_before = step.as_before
    return {
        "at_least_bytes": step.at_least_bytes,
        "as_earlier_steps_low_bytes": as_before.low if as_before is not None else None,
        "as_earlier_steps_high_bytes": as_before.high if as_before is not None else None,
        "earlier_steps": step.earlier,
        "available_bytes": step.available_bytes,
    }
