"""The last out-of-memory of this session: noted when a cell ended with it, explained when asked, and let go of.

What is kept of it is texts and numbers; no error, frame or tensor.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from memlab.analysis.oom.explain import NAMED, Explanation, explain, grouped
from memlab.analysis.oom.facts import Failure, Holder
from memlab.analysis.oom.text import read_message
from memlab.errors import MemlabError
from memlab.names.census import Census
from memlab.names.release import Holding, Released, first_argument
from memlab.names.release import release as let_go
from memlab.session.advise.pointing import pointer_of
from memlab.session.oom_seen import oom_error, seen
from memlab.session.run import Run
from memlab.units import format_bytes
from memlab.views.oom import Page, Part, named_rows, oom_page


class _Shown:
    """A page that a notebook shows as HTML and anything else as text."""

    def __init__(self, page: Page) -> None:
        self._page = page

    @property
    def text(self) -> str:
        """It in words."""
        return self._page.text()

    @property
    def html(self) -> str:
        """It as small HTML tables; everything in them is escaped."""
        return self._page.html()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": self.html, "text/plain": self.text}

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


class OomExplained(_Shown):
    """An out-of-memory, explained; `explanation` has it as values."""

    def __init__(self, failure: Failure, found: Explanation | None = None, pointer: str = "") -> None:
        self._failure, self._pointer = failure, pointer
        self.explanation: Explanation = found or explain(failure)
        page = oom_page(self.explanation, failure.cell)
        super().__init__(dataclasses.replace(page, parts=(*page.parts, Part("", (pointer,) if pointer else ()))))

    def released(self, freed: str) -> OomExplained:
        """The same after a release, which is not advised any more."""
        before = self.explanation
        said = f"`%memoom release` was run since, and gave back {freed or 'nothing'}; what is alive is that of before."
        return OomExplained(
            self._failure,
            dataclasses.replace(
                before,
                sentences=(said, *(one for one in before.sentences if not one.startswith("`%memoom release`"))),
                actions=tuple(action for action in before.actions if not action.text.startswith("`%memoom release`")),
            ),
            self._pointer,
        )

    def to_pandas(self) -> Any:
        """The numbers of the message, what was alive by name, and what could be done, as one DataFrame of bytes."""
        import pandas

        found = self.explanation
        rows: list[tuple[str, str, int, int, str]] = []
        rows += [("term", t.name, t.amount.low_bytes, t.amount.high_bytes, t.meaning) for t in found.terms]
        rows += [("alive", one.path, one.nbytes, one.nbytes, one.category) for one in found.named]
        rows += [("action", a.text, a.gives.low_bytes, a.gives.high_bytes, "") for a in found.actions]
        return pandas.DataFrame(rows, columns=["what", "name", "low_bytes", "high_bytes", "remark"])


class ReleaseReport(_Shown):
    """What was let go and what it gave back; `released` has it as values."""

    def __init__(self, released: Released) -> None:
        self.released = released
        super().__init__(_release_page(released))

    def to_pandas(self) -> Any:
        """Each device's bytes before and after as a DataFrame."""
        import pandas

        rows = [(level.device, level.before_bytes, level.after_bytes) for level in self.released.levels]
        return pandas.DataFrame(rows, columns=["device", "before_bytes", "after_bytes"]).set_index("device")


_last: OomExplained | None = None


def note_oom(error: BaseException | None, run: Run | None = None, found: Census | None = None) -> OomExplained | None:
    """Note an out-of-memory with which a cell ended; None, and nothing is noted, where the error is of something else.

    Call it while the error is still kept (at the end of the cell); `run` is the cell's run, if it was tracked, and `found`
    a census that was just made anyway. It never raises, whatever the error is.
    """
    global _last
    try:
        failed = oom_error(error)
        if failed is None:
            return None
        failure = seen(failed, run, found)
        _last = OomExplained(failure, pointer=_pointer(failure, run))
        return _last
    except Exception:
        return None


def _pointer(failure: Failure, run: Run | None) -> str:
    """The line that points to `memlab.advise`, where the cell was tracked and something large held the memory."""
    share = failure.moment.share("category") if failure.moment is not None else None
    return pointer_of(run, share.shares, "what was allocated") if run is not None and share is not None else ""


def explain_oom(message: str | BaseException | None = None) -> OomExplained:
    """Explain an out-of-memory: the last one of this session, or a message of PyTorch's given as text or as its error."""
    if message is None:
        if _last is None:
            raise MemlabError(
                "no cell of this session ended out of memory; give the message: memlab.explain_oom('CUDA out of memory. ...')."
            )
        return _last
    if issubclass(type(message), BaseException):
        message = first_argument(cast(BaseException, message))
    if not issubclass(type(message), str):
        raise MemlabError(f"a message is a text or an error, got {type(message).__name__}.")
    return OomExplained(Failure(read_message(str(message))))


def forget_oom() -> None:
    """Forget the last out-of-memory."""
    global _last
    _last = None


def release(outputs: bool = True) -> ReleaseReport:
    """Let go of what the last failed cell still holds, so that the next one has the memory; see `names.release`."""
    global _last
    released = let_go(outputs)
    if _last is not None:
        _last = _last.released(_freed(released))
    return ReleaseReport(released)


def _freed(released: Released) -> str:
    """What a release gave back, "" for nothing."""
    return ", ".join(
        f"{format_bytes(level.freed_bytes)} on {level.device}" for level in released.levels if level.freed_bytes
    )


def _release_page(released: Released) -> Page:
    levels = [level for level in released.levels if level.freed_bytes] or list(released.levels)
    rows = tuple(
        (level.device, format_bytes(level.freed_bytes), f"{format_bytes(level.before_bytes)} allocated before, "
         f"{format_bytes(level.after_bytes)} after")
        for level in levels
    )  # fmt: skip
    errors = tuple(f"Let go of the frames of {error.rstrip('.')}." for error in released.errors)
    errors = errors or ("No error was kept.",)
    parts = (
        Part("", errors, rows),
        Part("Outputs removed (nothing else kept these)", (), tuple(map(_row, released.outputs))),
        *(_still_held(released, level.device) for level in levels if level.after_bytes),
        Part("", () if released.is_complete else ("The search for names was cut short.",)),
    )
    return Page(f"memlab · released {_freed(released) or 'nothing'}", parts)


def _still_held(released: Released, device: str) -> Part:
    """What is still on a device, by what keeps it."""
    there = tuple(Holder(one.path, one.category, one.nbytes) for one in released.still_held if one.device == device)
    found = grouped(there)
    rows = tuple(named_rows(found[:NAMED], max(len(found) - NAMED, 0)))
    return Part(f"Still held on {device}, by what keeps it", () if rows else ("nothing that can be seen",), rows)


def _row(one: Holding) -> tuple[str, str, str]:
    return one.path, format_bytes(one.nbytes), one.device
