"""What can be seen of an out-of-memory once its cell has ended: the error's words and places, what is alive, the device.

Nothing seen is kept: texts and numbers leave, and no frame, error or tensor. Whatever fails becomes a gap.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from memlab import seams
from memlab.analysis.oom.facts import Failure, Holder
from memlab.analysis.oom.moment import Moment, last_moment
from memlab.analysis.oom.text import Message, exactly, is_out_of_memory, read_message
from memlab.names.census import Census, census
from memlab.names.release import all_errors, first_argument, traceback_of
from memlab.probes.host import HostMemory
from memlab.probes.look import segments_of
from memlab.probes.nvml import Nvml
from memlab.seams import cells
from memlab.session.run import Run
from memlab.trace.columns import Phase

CENSUS_S = 2.0
"""How long the search for names may take after a cell ran out of memory."""

_T = TypeVar("_T")
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent.parent) + os.sep
# The ends of files of PyTorch whose functions tell the phase, the most telling first.
_PHASES = (
    (("autograd", "__init__.py"), "backward", Phase.BACKWARD),
    (("autograd", "graph.py"), "_engine_run_backward", Phase.BACKWARD),
    (("optim", "optimizer.py"), "", Phase.OPTIMIZER),
    (("nn", "modules", "module.py"), "", Phase.FORWARD),
)


def oom_error(error: BaseException | None) -> BaseException | None:
    """The out-of-memory in an error or in what it is chained to, the nearest; None if there is none."""
    found = all_errors([error]) if error is not None else ()
    return next((one for one in found if _is_oom(one)), None)


def _is_oom(error: BaseException) -> bool:
    kind = type(error)
    if issubclass(kind, torch.OutOfMemoryError):
        return True
    # A MemoryError has no wording of its own: Python's, and numpy's, which gives a size.
    return issubclass(kind, MemoryError) or (issubclass(kind, RuntimeError) and is_out_of_memory(first_argument(error)))


def seen(error: BaseException, run: Run | None = None, found: Census | None = None) -> Failure:
    """The facts of an out-of-memory that just ended a cell."""
    message = _message(error)
    gaps: list[str] = []
    attempt = _Attempts(gaps)
    moment = attempt("the trace", lambda: _moment(message, run), None)
    if moment is not None:
        message = _refined(message, moment)
    alive = found or attempt("what is alive", lambda: census(message.label, budget_s=CENSUS_S), None)
    place, phase = attempt("the place", lambda: _place(error), ("", Phase.OTHER))
    number = attempt("the cell", lambda: _cell(error), "")
    all_named = alive is not None and alive.is_complete
    cell = " · ".join(filter(None, (run.name if run is not None else "", number)))
    failure = Failure(message, cell, place, phase, moment, _holders(alive, message.label), all_named)
    failure = attempt("the device", lambda: _with_device(failure, gaps), failure)
    if alive is not None and not all_named:
        gaps.append("names: the search for what keeps each tensor was cut short")
    if moment is None and run is not None and message.label.startswith("cuda"):
        gaps.append(
            "moment: the trace of the cell holds no row for it, so lines and categories at that moment are unknown"
        )
    return replace(failure, gaps=tuple(gaps))


class _Attempts:
    """Calls what may fail; a failure is a gap, and the default is given instead."""

    def __init__(self, gaps: list[str]) -> None:
        self.gaps = gaps

    def __call__(self, what: str, look: Callable[[], _T], default: _T) -> _T:
        try:
            return look()
        except Exception as error:
            self.gaps.append(f"{what}: could not be read ({type(error).__name__})")
            return default


def _message(error: BaseException) -> Message:
    text = first_argument(error)
    if is_out_of_memory(text):
        return read_message(text)
    return Message("CPU" if issubclass(type(error), MemoryError) else "CUDA")


def _moment(message: Message, run: Run | None) -> Moment | None:
    """The row OOM of a tracked cell, if it can be that of this message."""
    if run is None or not message.label.startswith("cuda"):
        return None
    moment = last_moment(run.trace)
    fits = moment is not None and message.device in (None, moment.device)
    too_large = moment is not None and message.asked is not None and moment.asked_bytes > message.asked.high_bytes
    return moment if fits and not too_large else None


def _refined(message: Message, moment: Moment) -> Message:
    """The message with the exact sizes of the trace, where all of these are what its digits can stand for."""
    traced: dict[str, int] = {
        "free": moment.free_bytes,
        "allocated": moment.allocated_bytes,
        "reserved": moment.reserved_bytes,
        "cached": moment.cached_bytes,
    }
    said = {name: getattr(message, name) for name in traced}
    if all(size is None or size.low_bytes <= traced[name] <= size.high_bytes for name, size in said.items()):
        exact: dict[str, Any] = {name: exactly(traced[name]) for name, size in said.items() if size is not None}
        return replace(message, device=moment.device, **exact)
    return message


def _holders(found: Census | None, label: str) -> tuple[Holder, ...]:
    """What was alive on the device; where its number is not told ("cuda"), on all of the kind."""
    storages = found.storages if found is not None else ()
    on_device = [one for one in storages if one.device == label or one.device.startswith(f"{label}:")]
    return tuple(Holder(one.path, one.category, one.nbytes, one.address) for one in on_device)


# --- the place ------------------------------------------------------------------------------------------------------------


def _place(error: BaseException) -> tuple[str, Phase]:
    """Where in the user's code it was raised, and the phase that PyTorch's functions on the way tell."""
    place, phase = "", Phase.OTHER
    link = traceback_of(error)
    while link is not None:
        code = link.tb_frame.f_code
        if code.co_filename.startswith(_TORCH):
            phase = phase if phase == Phase.BACKWARD else _phase_of(code.co_filename, code.co_name) or phase
        elif not code.co_filename.startswith(_OURS):
            place = _in_words(code.co_filename, link.tb_lineno, code.co_name)
        link = link.tb_next
    return place, phase


def _cell(error: BaseException) -> str:
    """The cell that was being executed: that of the outermost frame which comes from one."""
    link = traceback_of(error)
    while link is not None:
        number = cells.cell_number(link.tb_frame.f_code.co_filename)
        if number is not None:
            return _numbered(number) if number else ""
        link = link.tb_next
    return ""


def _numbered(number: int) -> str:
    return f"cell [{number}]"


def _phase_of(file: str, function: str) -> Phase:
    parts = Path(file.removeprefix(_TORCH)).parts
    return next((phase for ends, name, phase in _PHASES if parts == ends and name in ("", function)), Phase.OTHER)


def _in_words(file: str, line: int, function: str) -> str:
    number = cells.cell_number(file)
    cell = _numbered(number) if number else "a cell"
    where = f"at line {line} of {cell}" if number is not None else f"at {Path(file).name}:{line}"
    return where if function.startswith("<") else f"{where}, in {function}()"


# --- the device -----------------------------------------------------------------------------------------------------------


def _with_device(failure: Failure, gaps: list[str]) -> Failure:
    """What the device and the machine say now; CUDA is asked only where the user's code has brought it up."""
    label = failure.message.label
    if label == "cpu":
        host = HostMemory().read()
        there = replace(failure.message, capacity=exactly(host.total_bytes), free=exactly(host.available_bytes))
        return replace(failure, message=there)
    if not label.startswith("cuda") or not torch.cuda.is_initialized():
        return failure
    device = failure.message.device or 0
    shot = seams.snapshot()
    pieces = [
        block["size"]
        for segment in segments_of(shot, device)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    with Nvml.open() as nvml:
        reading = nvml.read(device)
        gaps += [f"{gap.name}: {gap.text}" for gap in nvml.gaps]
    return replace(
        failure,
        largest_free_bytes=max(pieces, default=0),
        expandable=shot["allocator_settings"].get("expandable_segments"),
        others_bytes=reading.others_bytes,
    )
