"""Traces of the ranks of a job, written by hand: whole ones, and what a killed rank left."""

from __future__ import annotations

from scripted_traces import HOST, Script

from memlab.trace.columns import Category, MarkKind
from memlab.trace.trace import UNFINISHED, Bounded, MadeBy, Trace
from memlab.units import MiB

BEGIN, END, MODULE = MarkKind.PHASE_BEGIN, MarkKind.PHASE_END, MarkKind.MODULE_BEGIN
KiB = 1024


def notes(rank: int, world_size: int = 4, **more) -> dict:
    return {"name": "train", "rank": {"rank": rank, "world_size": world_size, "job": "a", "attempt": 0}, **more}


def trained(
    rank: int, size: int = MiB, kept: int = 0, steps: int = 6, began_s: float = 100.0, world_size: int = 4, **more
) -> Trace:
    """Steps of 1 s; each allocates `size` for an activation, and `kept` that stays."""
    script = Script(HOST)
    script.alloc(4 * MiB, 1, category=Category.PARAMETER, module="net")
    for step in range(steps):
        at = step * 10**9
        block = script.alloc(size, at + 10, category=Category.ACTIVATION, module="net.0")
        if kept:
            script.alloc(kept, at + 20, module="net.keeps")
        script.free(block, at + 30)
        script.mark(BEGIN, "optimizer", at + 40)
        script.mark(END, "optimizer", at + 50)
    return script.trace(steps * 10**9, notes(rank, world_size, **more), started_at_s=began_s, gaps=())


def cut_off(rank: int, levels: list[int], began_s: float = 100.0, every_ns: int = 10**8) -> Trace:
    """What a killed process left: samples, and after every second of them a step."""
    script = Script(HOST)
    for number, level in enumerate(levels):
        script.sample(number * every_ns, level)
        if number % 2:
            script.mark(BEGIN, "optimizer", number * every_ns + 1)
            script.mark(END, "optimizer", number * every_ns + 2)
    end = len(levels) * every_ns
    made = script.trace(end, notes(rank), started_at_s=began_s, bounded=(Bounded(-1, 0, end, 0),), gaps=())
    made_by = MadeBy(UNFINISHED, (HOST,), started_at_s=began_s, duration_ns=end, bounded=made.made_by.bounded)
    return Trace(made.events, made.blocks, made_by, 0, made.marks, made.samples, texts=made.texts, notes=made.notes)


def error(text: str, out_of_memory: bool = False) -> dict:
    return {"raised": True, "error": {"text": text, "out_of_memory": out_of_memory}}
