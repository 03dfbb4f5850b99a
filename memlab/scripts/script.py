"""A script or module of the user, run in this process as `python` would run it."""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType, TracebackType

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
            if not found.is_file() and not (found / "__main__.py").is_file():
                raise MemlabError(f"there is no script {self.target!r:.200}. Name a file of Python, or -m MODULE.")
            return
        self._search_in(Path.cwd())
        try:
            spec = importlib.util.find_spec(self.target)
        except (ImportError, ValueError) as error:
            raise MemlabError(f"cannot find the module {self.target!r:.200}: {error}.") from None
        if spec is None:
            raise MemlabError(f"there is no module {self.target!r:.200} here. Name one that `python -m` runs.")

    def run(self) -> None:
        """Run it as `__main__`, with its `sys.argv` and `sys.path`; whatever it raises is raised here."""
        sys.argv = [self.target, *self.arguments]
        if self.is_module:
            self._search_in(Path.cwd())
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            return
        path = str(Path(self.target).absolute())
        if Path(path).is_dir() or path.endswith((".zip", ".pyz")):
            runpy.run_path(path, run_name="__main__")
            return
        main = ModuleType("__main__")
        vars(main).update(
            __file__=path, __cached__=None, __builtins__=builtins, __loader__=SourceFileLoader("__main__", path)
        )
        sys.modules["__main__"] = main
        self._search_in(Path(path).resolve().parent)
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))

    @staticmethod
    def _search_in(folder: Path) -> None:
        """The first place where modules are searched is the script's, in the place of that of memlab's command."""
        if not sys.flags.safe_path:
            sys.path[0] = str(folder)


def frame_of_script() -> FrameType | None:
    """The innermost frame of the script's own code, if it is running in this thread."""
    names, frame = vars(sys.modules["__main__"]), sys._getframe()
    found: FrameType | None = frame
    while found is not None and found.f_globals is not names:
        found = found.f_back
    return found


def show_as_python(error: BaseException) -> None:
    """Let the traceback of an error that ends the program begin in the script, as if `python` had run it."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], last: BaseException, trace: TracebackType | None) -> None:
        if last is error:
            while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_AROUND):
                trace = trace.tb_next  # none is left of a syntax error in the script
            last.__traceback__ = trace
        shown(kind, last, trace)

    sys.excepthook = hook
