"""Where names begin: the notebook's variables, its outputs, the last error, running functions, modules.

Nothing is imported for it, and nothing of the user's is run; frames are given away and not kept. memlab's own modules and
functions are no beginnings.
"""

from __future__ import annotations

import contextvars
import os
import re
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memlab.names import kinds
from memlab.names.walk import Root
from memlab.seams import frames

VARIABLES, OUTPUTS, UNDERSCORES, ERRORS, FRAMES, THREADS, SHELL, MACHINERY, MODULES = range(9)
"""The tiers of roots: the first that leads to a tensor names it. From SHELL on they are not the user's."""

_UNDERSCORE = re.compile(r"_{1,3}|_\d+|_oh")
_HIDDEN = re.compile(r"In|_dh|_ih|_i{1,3}|_i\d+|__\w+__|get_ipython|exit|quit")
_LIBRARIES = ("<frozen ", str(Path(os.__file__).resolve().parent) + os.sep, str(Path(os.__file__).parent) + os.sep)
_INSTALLED = "-packages" + os.sep  # site-packages, dist-packages
_dict_of_module: Any = kinds.attributes_of_class(types.ModuleType)["__dict__"].__get__
_OWN_FILES = str(Path(__file__).resolve().parent.parent) + os.sep


def namespaces() -> Iterator[Any]:
    """The dicts of all loaded modules, and the modules of memlab: no way leads through them."""
    for name, module in sys.modules.copy().items():
        own = _namespace(module)
        if own is not None:
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
        for name, thing in kinds.items_of(own):
            if type(name) is str:
                yield Root(MODULES, f"{module_name}.{name}", thing)


def _notebook_names() -> dict[str, Any]:
    own = _namespace(sys.modules.get("__main__"))
    return {} if own is None else own.copy()


def _namespace(module: Any) -> dict[str, Any] | None:
    """The dict of a module; of whatever else lies in `sys.modules`, nothing is asked."""
    is_module = any(base is types.ModuleType for base in kinds.mro_of(type(module)))
    return _dict_of_module(module) if is_module else None


def _is_ours(module_name: Any) -> bool:
    return type(module_name) is str and (module_name == "memlab" or module_name.startswith("memlab."))


def _running() -> list[Root]:
    """The functions that run now, in this thread and in others, and the values of this thread's context."""
    found = [Root(FRAMES, f"context variable {one.name!r}", value) for one, value in contextvars.copy_context().items()]
    tops, here = sys._current_frames(), threading.get_ident()
    frame: types.FrameType | None
    try:
        for thread, frame in tops.items():
            above = _below_us(frame) if thread == here else frame
            place, tier = ("", FRAMES) if thread == here else (f"thread {_name_of_thread(thread)}: ", THREADS)
            found += _frames_from(above, place, tier)
        return found
    finally:
        # One of them is the frame of this very function: a circle, which would keep all that its callers' variables hold.
        tops.clear()
        frame = above = None


def _frames_from(frame: types.FrameType | None, place: str, tier: int) -> list[Root]:
    """The functions from a frame down to the first; those of libraries come after the shell."""
    found = []
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN_FILES):
            is_users = not file.startswith(_LIBRARIES) and _INSTALLED not in file
            found.append(Root(tier if is_users else MACHINERY, f"{place}{frame.f_code.co_name}()", frame))
        frame = frame.f_back
    return found


def _below_us(frame: types.FrameType | None) -> types.FrameType | None:
    """The first frame that did not come about by asking: not memlab's own, nor IPython's that call a magic of it."""
    while frame is not None and (frame.f_code.co_filename.startswith(_OWN_FILES) or frames.is_shells(frame.f_code)):
        frame = frame.f_back
    return frame


def _name_of_thread(number: int) -> str:
    """A thread's name; from its attribute, as a class of the user's may compute another."""
    thread = threading._active.copy().get(number)  # type: ignore[attr-defined]
    own = (kinds.instance_dict(thread) if thread is not None else None) or {}
    name = own.get("_name")
    return repr(name) if type(name) is str else str(number)
