"""The roots of paths: the notebook's variables, its outputs, the last error, running functions, modules.

Nothing is imported and no code of the user is run; frames are returned and not kept. memlab's own modules and functions are
not roots.
"""

from __future__ import annotations

import contextvars
import os
import re
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memlab.references import edges
from memlab.references.memory import derives
from memlab.references.walk import Root
from memlab.torch_internals import frames

VARIABLES, OUTPUTS, UNDERSCORES, ERRORS, FRAMES, THREADS, SHELL, MACHINERY, MODULES = range(9)
"""The tiers of roots: the first from which a tensor is reached names it. From SHELL on they are not the user's."""

_UNDERSCORE = re.compile(r"_{1,3}|_\d+|_oh")
_HIDDEN = re.compile(r"In|_dh|_ih|_i{1,3}|_i\d+|__\w+__|get_ipython|exit|quit")
_LIBRARIES = ("<frozen ", str(Path(os.__file__).resolve().parent) + os.sep, str(Path(os.__file__).parent) + os.sep)
_INSTALLED = "-packages" + os.sep  # site-packages, dist-packages


def namespaces() -> Iterator[Any]:
    """The dicts of all loaded modules, and the modules of memlab: no path leads through them."""
    for name, module in sys.modules.copy().items():
        if (own := _namespace(module)) is not None:
            yield own
        if _is_ours(name):
            yield module


def notebook() -> Iterator[Root]:
    """The user's variables, then outputs, the last error, running functions of this thread and of others, the shell."""
    names = _notebook_names()
    if names.get("_oh") is names.get("Out"):
        names.pop("_oh", None)
    for name, thing in names.items():
        if type(name) is str and not _HIDDEN.fullmatch(name):
            tier = OUTPUTS if name == "Out" else UNDERSCORES if _UNDERSCORE.fullmatch(name) else VARIABLES
            yield Root(tier, name, thing)
    for name in ("last_traceback", "last_exc", "last_value"):
        if (error := vars(sys).get(name)) is not None:
            yield Root(ERRORS, f"sys.{name}", error)
    yield from _running()
    yield from (Root(SHELL, "get_ipython()", found) for found in shell())


def of_errors(errors: Iterable[BaseException]) -> Iterator[Root]:
    """The functions that errors have ended, as if they were running: what only their variables hold has no other name."""
    for error in errors:
        link = error.__traceback__
        while link is not None:
            frame, link = link.tb_frame, link.tb_next
            file = frame.f_code.co_filename
            if _is_users(frame):
                yield Root(FRAMES, f"{frame.f_code.co_name}()", frame)
            elif not file.startswith(frames.OWN_FILES):  # many libraries have a forward()
                yield Root(MACHINERY, f"{frame.f_code.co_name}() of {Path(file).name}", frame)


def shell() -> list[Any]:
    """IPython's shell, by the name that it puts into the notebook; none where there is no such name."""
    method = _notebook_names().get("get_ipython")
    return [method.__self__] if type(method) is types.MethodType else []


def modules() -> Iterator[Root]:
    """The namespaces of all modules but the notebook's, each value a root of its own."""
    done = {id(_namespace(sys.modules.get("__main__")))}
    for module_name, module in sys.modules.copy().items():
        own = _namespace(module)
        if own is None or id(own) in done or _is_ours(module_name) or type(module_name) is not str:
            continue
        done.add(id(own))
        for name, thing in edges.items_of(own):
            if type(name) is str:
                yield Root(MODULES, f"{module_name}.{name}", thing)


def _notebook_names() -> dict[str, Any]:
    return (_namespace(sys.modules.get("__main__")) or {}).copy()


def _namespace(module: Any) -> dict[str, Any] | None:
    """The dict of a module; None for anything else in `sys.modules`."""
    return edges.names_of_module(module) if derives(type(module), types.ModuleType) else None


def _is_ours(module_name: Any) -> bool:
    return type(module_name) is str and (module_name == "memlab" or module_name.startswith("memlab."))


def _is_users(frame: types.FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith((*_LIBRARIES, frames.OWN_FILES)) and _INSTALLED not in file


def _running() -> list[Root]:
    """The running functions, in this thread and in others, and the values of this thread's context.

    In this thread without the innermost frames of memlab and of IPython calling its magic. Functions of libraries come after
    the shell.
    """
    found = [Root(FRAMES, f"context variable {one.name!r}", value) for one, value in contextvars.copy_context().items()]
    tops, here = sys._current_frames(), threading.get_ident()
    frame: types.FrameType | None
    try:
        for thread, frame in tops.items():
            place, tier = "", FRAMES
            if thread != here:  # its name is that of its attribute: a subclass of the user may compute `name`
                known = threading._active.copy().get(thread)  # type: ignore[attr-defined]
                name = (edges.instance_dict(known) or {}).get("_name") if known is not None else None
                place, tier = f"thread {name if type(name) is str else thread!r}: ", THREADS
            is_asking = thread == here
            while frame is not None:
                file = frame.f_code.co_filename
                is_ours = file.startswith(frames.OWN_FILES)
                is_asking = is_asking and (is_ours or frames.is_shells(frame.f_code))
                if not is_ours and not is_asking:
                    name = f"{place}{frame.f_code.co_name}()"
                    found.append(Root(tier if _is_users(frame) else MACHINERY, name, frame))
                frame = frame.f_back
        return found
    finally:
        # One of them is the frame of this function: a cycle, which would keep its callers' variables alive.
        tops.clear()
        frame = None
