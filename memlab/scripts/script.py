"""A script or module of the user, run in this process as `python` would run it."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType

from memlab.errors import MemlabError

_AROUND = (str(Path(__file__).parent.parent) + os.sep, "<frozen runpy>", "<frozen importlib", runpy.__file__)
"""Where the frames around a script come from."""


@dataclass(frozen=True, slots=True)
class Script:
    """What stands after `python` on a command line: `train.py ARGS...`, or with `is_module` what stands after `-m`."""

    target: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        """The name of its run: `train` of `tools/train.py` and of `tools.train`."""
        return self.target.rpartition(".")[2] if self.is_module else Path(self.target).stem

    @property
    def words(self) -> tuple[str, ...]:
        """What stands on the command line."""
        return (*(("-m",) if self.is_module else ()), self.target, *self.arguments)

    def check(self) -> None:
        """Raise MemlabError if there is nothing to run."""
        if not self.is_module:
            found = Path(self.target)
            if not any(map(os.path.isfile, (found, found / "__main__.py"))):  # False if the name is too long
                raise MemlabError(f"there is no script {self.target!r:.200}. Name a file of Python, or -m MODULE.")
            return
        self._search_in(Path.cwd())
        if not self._is_found(self.target):
            raise MemlabError(f"there is no module {self.target!r:.200} here. Name one that `python -m` runs.")

    @staticmethod
    def _is_found(name: str) -> bool:
        """Whether there is a module, and if it is a package its `__main__`; nothing is imported, as that belongs to the script."""
        path: Sequence[str] | None = None
        parts = name.split(".")
        if not all(parts):
            return False
        with contextlib.suppress(Exception):  # of finders of all kinds; runpy says what it finds
            for at, _ in enumerate(parts):
                prefix = ".".join(parts[: at + 1])
                specs = (finder.find_spec(prefix, path) for finder in sys.meta_path)
                spec = next(filter(None, specs), None)
                path = spec.submodule_search_locations if spec is not None else None
                if spec is None or (path is None and at + 1 < len(parts)):
                    return False
            return (
                path is None
                or parts[-1] == "__main__"
                or any(one.find_spec(f"{name}.__main__", path) for one in sys.meta_path)
            )
        return True

    def run(self) -> None:
        """Run it as `__main__`, with its `sys.argv` and `sys.path`; whatever it raises is raised here."""
        sys.argv = ["-m" if self.is_module else self.target, *self.arguments]
        if self.is_module:
            self._search_in(Path.cwd())
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            return
        path = str(Path(self.target).absolute())
        main = ModuleType("__main__")
        sys.modules["__main__"] = main
        vars(main).update(__builtins__=builtins, __file__=path, __cached__=None)
        if (finder := pkgutil.get_importer(path)) is not None and (spec := finder.find_spec("__main__")) is not None:
            # A folder or an archive with a __main__.py.
            vars(main).update(
                __file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader, __spec__=spec, __package__=""
            )
            sys.path[0:0] = [path]
            if not sys.flags.safe_path:
                del sys.path[1]  # that of memlab's command
            code: CodeType = spec.loader.get_code("__main__")  # type: ignore[union-attr]
        else:
            self._search_in(Path(path).resolve().parent)
            code = self._code_of(path, main)
        exec(code, vars(main))

    @staticmethod
    def _code_of(path: str, main: ModuleType) -> CodeType:
        """The code of a file, source or compiled; its loader becomes an attribute of the module."""
        content = Path(path).read_bytes()
        is_compiled = content.startswith(importlib.util.MAGIC_NUMBER)
        loader = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", path)
        vars(main)["__loader__"] = loader
        compiled: CodeType | None = loader.get_code("__main__") if is_compiled else None
        return compiled or compile(content, path, "exec", dont_inherit=True)

    @staticmethod
    def _search_in(folder: Path) -> None:
        """The first place where modules are searched is the script's, in the place of that of memlab's command."""
        if not sys.flags.safe_path:
            sys.path[0] = str(folder)


def frame_of_script() -> FrameType | None:
    """The innermost frame of the script's own code, if it is running in this thread."""
    names = vars(sys.modules["__main__"])
    # Its own frame in a variable would be a cycle, which keeps what the functions of its callers held.
    found: FrameType | None = sys._getframe(1)
    while found is not None and found.f_globals is not names:
        found = found.f_back
    return found


def show_as_python(error: BaseException) -> None:
    """Let the traceback of an error that ends the program be as if `python` had run it: without the frames around the script.

    A backward that raises has one of memlab's in the middle.
    """
    shown = sys.excepthook

    def hook(kind: type[BaseException], last: BaseException, trace: TracebackType | None) -> None:
        if last is error:
            while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_AROUND):
                trace = trace.tb_next  # none is left of a syntax error in the script
            last.__traceback__ = inner = trace
            while inner is not None:
                after = inner.tb_next
                while after is not None and after.tb_frame.f_code.co_filename.startswith(_AROUND[0]):
                    after = after.tb_next
                inner.tb_next = after or inner.tb_next  # an error of memlab's own keeps its frames
                inner = inner.tb_next
        shown(kind, last, trace)

    sys.excepthook = hook
