"""The last out-of-memory error of this session: recorded when a cell ends with it, explained on request, and released.

Only texts and numbers are kept; no error, frame or tensor. Whatever could not be read becomes a gap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from memlab import torch_internals
from memlab.allocator.replay import NOTE as ALLOCATOR
from memlab.allocator.replay import simulate
from memlab.analysis.oom.actions import WaysOut
from memlab.analysis.oom.explain import NAMED, Explanation, explain, grouped
from memlab.analysis.oom.facts import FRAGMENTATION, Failure, HeldSegment, Holder
from memlab.analysis.oom.moment import Moment, last_moment
from memlab.analysis.oom.text import Message, is_out_of_memory, read_message
from memlab.api.provenance import provenance_here, remark_here
from memlab.api.report import advice_hint
from memlab.api.run import Run
from memlab.errors import MemlabError
from memlab.prediction import child
from memlab.probes.counters import Nvml, has_context
from memlab.probes.host import HostMemory
from memlab.probes.rows import segments_of
from memlab.references import release as references
from memlab.references.live_storages import Storage, live_storages
from memlab.references.release import Released, first_argument
from memlab.torch_internals import cell_code
from memlab.torch_internals.frames import OWN_FILES
from memlab.trace.columns import Kind, Phase
from memlab.trace.trace import Trace
from memlab.units import ByteRange, format_bytes, number_of
from memlab.views.oom import named_table, oom_page
from memlab.views.page import Page, PageLines, Part
from memlab.views.shown import Shown
from memlab.views.table import Column, Table

SEARCH_S = 2.0
"""Time limit of the search for names after a cell ran out of memory."""
MOST_REPLAYED = 300_000
"""A longer trace is not replayed to see whether other settings of the allocator would have helped: it would take seconds."""
LAST_SEARCH_S = 30.0
"""The same where the process ends with the error: what is not found now is never found."""

_T = TypeVar("_T")
_TORCH = str(Path(torch.__file__).parent) + os.sep
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of libraries, in the paths of their files."""
# Suffixes of PyTorch's files whose frames reveal the phase, most specific first.
_PHASES = (
    (("autograd", "__init__.py"), "backward", Phase.BACKWARD),
    (("autograd", "graph.py"), "_engine_run_backward", Phase.BACKWARD),
    (("optim", "optimizer.py"), "", Phase.OPTIMIZER),
    (("nn", "modules", "module.py"), "", Phase.FORWARD),
)
_BACKWARD = re.compile(r"\.backward\(|\bautograd\.grad\(")
_RELEASE = "`%memoom release`"


class OomExplained(Shown):
    """An explained out-of-memory error; `explanation` has it as values, and `ways` what was shown to fit, if it was looked for."""

    def __init__(
        self, failure: Failure, found: Explanation | None = None, pointer: str = "", ways: WaysOut | None = None
    ) -> None:
        self._failure, self._pointer, self.ways = failure, pointer, ways
        self.explanation: Explanation = found or explain(failure)

    @property
    def page(self) -> Page:
        """What happened, and what to do."""
        return oom_page(self.explanation, self._failure.cell, self._pointer, self.ways)

    @property
    def failure_here(self) -> Failure | None:
        """The facts, if memory ran out on a GPU of this process; None for a pasted message, a prediction, or the CPU."""
        failure = self._failure
        is_cuda = failure.message.label.startswith("cuda") and failure.has_context
        return failure if is_cuda and child.current() is None and torch.cuda.is_initialized() else None

    def with_ways(self, ways: WaysOut) -> OomExplained:
        """The same with ways out."""
        return OomExplained(self._failure, self.explanation, self._pointer, ways)

    def released(self, freed: str) -> OomExplained:
        """The same after a release, which is no longer advised."""
        before = self.explanation
        said = f"{_RELEASE} was run since, and gave back {freed or 'nothing'}; what is alive is as of before."
        sentences = (said, *(one for one in before.sentences if not one.startswith(_RELEASE)))
        actions = tuple(action for action in before.actions if not action.text.startswith(_RELEASE))
        after = dataclasses.replace(before, sentences=sentences, actions=actions)
        return OomExplained(self._failure, after, self._pointer, self.ways)

    def to_pandas(self) -> Any:
        """The message's numbers, what was alive, and what could be done, as one DataFrame of bytes."""
        import pandas

        found = self.explanation
        rows: list[tuple[str, str, int, int, str]] = []
        rows += [("term", t.name, t.amount.low, t.amount.high, t.meaning) for t in found.terms]
        rows += [("alive", one.path, one.nbytes, one.nbytes, one.category) for one in found.named]
        rows += [("action", a.text, a.gives.low, a.gives.high, "") for a in found.actions]
        rows += [("way out", w.change, *w.needs, w.price) for w in (self.ways.ways if self.ways is not None else ())]
        return pandas.DataFrame(rows, columns=["what", "name", "low_bytes", "high_bytes", "remark"])


latest: OomExplained | None = None


def note_oom(error: BaseException | None, run: Run | None = None, goes_on: bool = True) -> OomExplained | None:
    """Record the out-of-memory error of a cell; None for any other error.

    Call it while the error still exists (at the end of the cell); `run` is the cell's run, if it was tracked, and `goes_on`
    whether this process does after the error. It never raises.
    """
    try:
        failed = oom_error(error)
        if failed is None:
            return None
        failure = failure_facts(failed, run, goes_on, outer=error)
        share = failure.moment.share("category") if failure.moment is not None else None
        pointer = ""
        if run is not None and share is not None:  # tracked, and something large holds the memory
            pointer = advice_hint(share.shares, run.name, run.trace.notes, run.cell_text, "what was allocated")
        keep_oom(OomExplained(failure, pointer=pointer))
        return latest
    except Exception:
        return None


def keep_oom(found: OomExplained | None) -> None:
    """Let this be what is known of the last error of this session; None forgets it."""
    global latest
    latest = found


def explain_oom(message: str | BaseException | None = None) -> OomExplained:
    """Explain the last out-of-memory error of this session, or PyTorch's message, given as text or error."""
    if message is None:
        if latest is None:
            how = "import memlab; memlab.explain_oom('CUDA out of memory. ...')"
            raise MemlabError(f"nothing in this session ended out of memory. For a message from elsewhere: {how}.")
        return latest
    if issubclass(type(message), BaseException):
        message = first_argument(cast(BaseException, message))
    if not issubclass(type(message), str):
        raise MemlabError(f"a message is a text or an error, got {type(message).__name__}.")
    return OomExplained(Failure(read_message(str(message))))


def note_predicted_oom(run: Run, card: str, message: str) -> None:
    """Record that memory ran out, with this message, in the prediction `run`. It never raises."""
    with contextlib.suppress(Exception):
        moment = _numbered(last_moment(run.trace), run)
        found = read_message(message) if moment is None else _refined(read_message(message), moment)
        cell = f"{run.name} · predicted for {card}"
        keep_oom(OomExplained(Failure(found, cell, moment=moment, provenance="predicted")))


# --- release ---


class ReleaseReport(Shown):
    """What was released and how many bytes that freed; `released` has it as values."""

    def __init__(self, released: Released) -> None:
        self.released = released

    @property
    def page(self) -> Page:
        """What was released, and what is still held."""
        released = self.released
        levels = [level for level in released.levels if level.freed_bytes] or list(released.levels)
        errors = tuple(f"Released the frames of {error.rstrip('.')}." for error in released.errors)
        parts: list[Part] = [PageLines(errors or ("No error was kept.",))]
        if levels:
            names = ("released", "allocated before", "after")
            columns = (Column("device"), *(Column(name, "bytes") for name in names))
            rows = tuple((level.device, level.freed_bytes, level.before_bytes, level.after_bytes) for level in levels)
            parts.append(Table("", columns, rows))
        if released.outputs:
            outputs = tuple((one.path, one.nbytes, one.device) for one in released.outputs)
            heads = (Column("", limit=160), Column("", "bytes"), Column(""))
            parts.append(Table("Outputs removed (nothing else kept these)", heads, outputs))
        for device in [level.device for level in levels if level.after_bytes]:
            there = [one for one in released.still_held if one.device == device]
            found = grouped(tuple(Holder(one.path, one.category, one.nbytes) for one in there))
            title = f"Still held on {device}, by what references it"
            hidden = PageLines(("nothing that can be seen",), title)
            parts.append(named_table(title, found[:NAMED], max(len(found) - NAMED, 0)) if found else hidden)
        parts += [] if released.is_complete else ["The search for names was cut short."]
        frames = len(released.errors)
        title = f"released {freed}" if (freed := _freed(released)) else "nothing to release"
        if frames and not freed:
            title = f"released the frames of {number_of(frames, 'error')}; that freed no memory"
        return Page(f"memlab · {title}", tuple(parts)).remarked(remark_here(level.device for level in released.levels))

    def to_pandas(self) -> Any:
        """Bytes before and after by device, as a DataFrame."""
        import pandas

        rows = [(level.device, level.before_bytes, level.after_bytes) for level in self.released.levels]
        return pandas.DataFrame(rows, columns=["device", "before_bytes", "after_bytes"]).set_index("device")


def release(outputs: bool = True) -> ReleaseReport:
    """Release what the last failed cell still holds; see `references.release`."""
    released = references.release(outputs)
    if latest is not None:
        keep_oom(latest.released(_freed(released)))
    return ReleaseReport(released)


def _freed(released: Released) -> str:
    """The freed bytes as text, "" for none."""
    levels = [level for level in released.levels if level.freed_bytes]
    return ", ".join(f"{format_bytes(level.freed_bytes)} on {level.device}" for level in levels)


# --- recording ---------------


def oom_error(error: BaseException | None) -> BaseException | None:
    """The nearest out-of-memory error in the chain of an error; None if there is none."""
    for one in references.all_errors([error]) if error is not None else ():
        kind = type(one)
        # A MemoryError has no fixed wording: Python's is empty, numpy's gives a size.
        if issubclass(kind, torch.OutOfMemoryError | MemoryError):
            return one
        if issubclass(kind, RuntimeError) and is_out_of_memory(first_argument(one)):
            return one
    return None


def failure_facts(
    error: BaseException, run: Run | None = None, goes_on: bool = True, outer: BaseException | None = None
) -> Failure:
    """The facts of an out-of-memory error that just ended a cell; `outer` is the error that it led to, if not itself."""
    text, gaps = first_argument(error), list[str]()
    message = Message("CPU" if issubclass(type(error), MemoryError) else "CUDA")
    if is_out_of_memory(text):
        message = read_message(text)

    def attempt(what: str, look: Callable[[], _T], default: _T) -> _T:
        try:
            return look()
        except Exception as problem:
            gaps.append(f"{what}: could not be read ({type(problem).__name__})")
            return default

    on_cuda = message.label.startswith("cuda")
    moment = attempt("the trace", lambda: _moment(message, run), None)
    if moment is not None:
        message = _refined(message, moment)
    label, called = message.label, run.name if run is not None else ""
    # Where the process goes on, the shell keeps the error, and names what it holds as the traceback of its cell.
    budget_s, errors = SEARCH_S, list[BaseException]()
    if not goes_on:
        budget_s, errors = LAST_SEARCH_S, list(references.all_errors([outer or error]))
    alive = attempt("what is alive", lambda: live_storages(label, budget_s=budget_s, errors=errors), None)
    # If the device index is unknown ("cuda"), on all devices of the type.
    storages = alive.storages if alive is not None else ()
    there = [one for one in storages if one.device == label or one.device.startswith(f"{label}:")]
    raised = attempt("the traceback", lambda: _raised(error), dict[str, Any](cell=""))
    failure = Failure(
        message=message,
        cell=" · ".join(filter(None, (called, raised.pop("cell")))),
        moment=moment,
        holders=tuple(map(holder_of, there)),
        all_named=alive is not None and alive.is_complete,
        provenance=provenance_here([label]),
        goes_on=goes_on,
        **raised,
    )
    failure = attempt("the device", lambda: _with_device(failure, gaps), failure)
    if failure.verdict == FRAGMENTATION and run is not None and moment is not None:
        fits = attempt("a replay with expandable segments", lambda: _fits_expandable(run.trace, moment), None)
        failure = dataclasses.replace(failure, fits_expandable=fits)
    if alive is not None and not alive.is_complete:
        gaps.append("names: the search for what keeps each tensor was cut short")
    if moment is None and run is not None and on_cuda:
        why = "so lines and categories at that moment are unknown"
        gaps.append(f"moment: the trace holds no row for it, {why}")
    return dataclasses.replace(failure, gaps=tuple(gaps))


def holder_of(storage: Storage) -> Holder:
    """What the explanation takes of a live storage."""
    return Holder(storage.path, storage.category, storage.nbytes, storage.address, storage.others)


def _moment(message: Message, run: Run | None) -> Moment | None:
    """The OOM row of a tracked cell, if it matches this message."""
    moment = last_moment(run.trace) if run is not None and message.label.startswith("cuda") else None
    if moment is None or message.device not in (None, moment.device):
        return None
    if message.asked is not None and moment.asked_bytes > message.asked.high:
        return None
    return _numbered(moment, run)


def _fits_expandable(trace: Trace, moment: Moment) -> bool | None:
    """Whether the request that failed fits if all that came before is replayed with expandable segments; None if not known."""
    events = trace.events
    has_all = moment.device == 0 and not (events.kind == Kind.PREEXISTING).any() and len(events) <= MOST_REPLAYED
    if not has_all or trace.made_by.bounded:
        return None
    there = simulate(trace, moment.reserved_bytes + moment.free_bytes, "expandable_segments:True")
    return not there.notes[ALLOCATOR]["out_of_memory"]


def _numbered(moment: Moment | None, run: Run | None) -> Moment | None:
    """The same with the execution counts of cells in the names of lines."""
    if moment is None or run is None:
        return moment
    return dataclasses.replace(moment, shares=tuple(map(run.with_cells, moment.shares)))


def _refined(message: Message, moment: Moment) -> Message:
    """The message with the exact sizes of the trace, if all of them agree with its rounded digits."""
    names = ("free", "allocated", "reserved", "cached")
    said = {name: size for name in names if (size := getattr(message, name)) is not None}
    traced = {name: int(getattr(moment, f"{name}_bytes")) for name in said}
    if any(not size.low <= traced[name] <= size.high for name, size in said.items()):
        return message
    exact: dict[str, Any] = {name: ByteRange.exact(traced[name]) for name in said}
    return dataclasses.replace(message, device=moment.device, **exact)


def _raised(error: BaseException) -> dict[str, Any]:
    """The outermost cell, the line in the user's code, and PyTorch's phase, from the traceback: fields of a Failure."""

    def is_installed(file: str) -> bool:
        return not _INSTALLED.isdisjoint(Path(file).parts) or file.startswith("<frozen ")

    place, phase, calls_backward, cells, users = "", Phase.OTHER, False, list[str](), ""
    written = os.environ.get(
        "TORCHINDUCTOR_CACHE_DIR"
    )  # the compiler sets it; nobody knows the code that it wrote there
    others = (_TORCH, OWN_FILES, *([written.rstrip(os.sep) + os.sep] if written else []))
    first = link = references.traceback_of(error)
    while link is not None:
        code, line, link = link.tb_frame.f_code, link.tb_lineno, link.tb_next
        file = code.co_filename
        if file.startswith(_TORCH) and phase != Phase.BACKWARD:
            parts = Path(file.removeprefix(_TORCH)).parts
            told = (one for ends, name, one in _PHASES if parts == ends and name in ("", code.co_name))
            phase = next(told, phase)
        if file.startswith(others):
            continue
        number = cell_code.cell_number(file)
        place = f"at {Path(file).name}:{line}"
        if number is not None:
            cells.append(f"cell [{number}]" if number else "")
            place = f"at line {line} of {cells[-1] or 'a cell'}"
        place += "" if code.co_name.startswith("<") else f", in {code.co_name}()"
        users = users if is_installed(file) else place
        if not calls_backward:
            with contextlib.suppress(Exception):  # the source may be gone, or there is no memory to read it
                text = "".join(linecache.getlines(file)) if number is not None else ""
                calls_backward = "backward" in code.co_names or _BACKWARD.search(text) is not None
    # In a library, a trainer's for example: where the user's code called it, which may not be in the traceback yet.
    outer = first.tb_frame.f_back if first is not None else None
    while outer is not None and not users:
        file = outer.f_code.co_filename
        if not is_installed(file) and not file.startswith(others):
            users = f"at {Path(file).name}:{outer.f_lineno}"
        outer = outer.f_back
    place += f", called {users}" if users and users != place else ""
    return {"cell": cells[0] if cells else "", "place": place, "phase": phase, "calls_backward": calls_backward}


def _held_segment(segment: Any) -> HeldSegment:
    used = {block["address"]: block["size"] for block in segment["blocks"] if block["state"] != "inactive"}
    return HeldSegment(segment["total_size"], used, segment["is_expandable"])


def _with_device(failure: Failure, gaps: list[str]) -> Failure:
    """The device's and the machine's memory now; CUDA is queried only if the user's code has initialized it."""
    label = failure.message.label
    if label == "cpu":
        host = HostMemory().read()
        capacity, free = ByteRange.exact(host.total_bytes), ByteRange.exact(host.available_bytes)
        return dataclasses.replace(failure, message=dataclasses.replace(failure.message, capacity=capacity, free=free))
    if not label.startswith("cuda") or child.current() is not None or not torch.cuda.is_initialized():
        return failure  # in a prediction "cuda" is fake: the driver, if there is one, knows nothing of it
    device, shot = failure.message.device or 0, torch_internals.snapshot()
    held = segments_of(shot, device)
    pieces = [block["size"] for one in held for block in one["blocks"] if block["state"] == "inactive"]
    with Nvml.open() as nvml:
        reading = nvml.read(device)
        gaps += [f"{gap.name}: {gap.text}" for gap in nvml.gaps]
    message, is_there = failure.message, has_context(device)
    if not is_there and reading.total_bytes is not None and reading.used_bytes is not None:
        # The message of a context that did not fit has no sizes, and this process holds nothing that would change them.
        total, unused = reading.total_bytes, reading.total_bytes - reading.used_bytes
        sizes: dict[str, Any] = {"capacity": ByteRange.exact(total), "free": ByteRange.exact(unused)}
        message = dataclasses.replace(message, device=device, **sizes)
    return dataclasses.replace(
        failure,
        message=message,
        has_context=is_there,
        largest_free_bytes=max(pieces, default=0),
        segments=tuple(map(_held_segment, held)),
        expandable=shot["allocator_settings"].get("expandable_segments"),
        others_bytes=reading.others_bytes,
    )
