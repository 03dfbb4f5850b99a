"""The line magics, from `%memwho` to `%memlab`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.display import display

from memlab import cells
from memlab.api.ledger import ledger, the_ledger
from memlab.api.oom import explain_oom, release
from memlab.api.runs import last_run, runs
from memlab.api.who import Who, who
from memlab.errors import MemlabError
from memlab.torch_internals.shell import is_result_dropped

if TYPE_CHECKING:
    from memlab.api.advise import Advice
    from memlab.api.compare import Comparison
    from memlab.api.fit import FitTable
    from memlab.api.run import Run
    from memlab.lab import Lab


@contextlib.contextmanager
def usage_errors(magic: str) -> Iterator[None]:
    """Show the errors of memlab in one line, without a traceback."""
    try:
        yield
    except MemlabError as error:
        raise UsageError(f"%{magic}: {error}") from None


def shown(magic: Callable[..., Any]) -> Callable[..., Any]:
    """A magic that prints its docstring if asked for help, and whose result is shown on whichever line of a cell it stands."""

    @functools.wraps(magic)
    def shown_magic(self: Any, line: str, *args: Any, **kwargs: Any) -> Any:
        if cells.asks_for_help(line):
            print(inspect.getdoc(magic) or "")
            return None
        result = magic(self, line, *args, **kwargs)
        if result is not None and is_result_dropped():
            display(result)
        return result

    return shown_magic


@magics_class
class LineMagics(Magics):
    """Line magics; prediction and widgets are imported on use."""

    @line_magic
    @shown
    @no_var_expand
    @needs_local_scope
    def memwho(self, line: str, local_ns: dict[str, Any] | None = None) -> Who:
        """Who holds memory now: `%memwho`; what keeps a tensor alive: `%memwho EXPR`; one device: `%memwho -d cuda:0`."""
        device, expression = None, line.strip()
        if line.split(maxsplit=1)[:1] in (["-d"], ["--device"]):
            _, device, expression = [*line.split(maxsplit=2), "", ""][:3]
            if not device:
                raise UsageError("%memwho: -d needs a device, for example -d cuda:0.")
        shell: Any = self.shell
        found, problem = _who(expression, device, shell.user_ns, local_ns)
        if found is None:  # here, not in a variable: a traceback would keep this frame and the value
            raise UsageError(f"%memwho: {problem}")
        return found

    @line_magic
    @shown
    def memledger(self, line: str) -> Any:
        """Show what each cell allocated and did not free: `%memledger`; `%memledger on`, `off` or `clear`."""
        word = line.strip()
        if not word:
            return ledger()
        actions = {"on": the_ledger.on, "off": the_ledger.off, "clear": the_ledger.clear}
        if word not in actions:
            raise UsageError(
                f"%memledger: unknown {word[:80]!r}. %memledger shows what each cell did not free; %memledger on, off or clear."
            )
        return actions[word]()

    @line_magic
    @shown
    def memoom(self, line: str) -> Any:
        """Explain the last out-of-memory: `%memoom`; free what its cell still holds: `%memoom release`."""
        words = line.split()
        if words[:1] == ["release"] and words[1:] in ([], ["--keep-outputs"]):
            return release(outputs=not words[1:])
        if words:
            raise UsageError(
                f"%memoom: unknown {line.strip()[:80]!r}. %memoom explains the last out-of-memory; "
                "%memoom release [--keep-outputs] frees what it still holds."
            )
        with usage_errors("memoom"):
            return explain_oom()

    @line_magic
    @shown
    @no_var_expand
    def memfit(self, line: str) -> FitTable:
        """A run against the GPUs: `%memfit`, `%memfit RUN`, `%memfit RUN RTX 4060, A100 80GB`."""
        from memlab.api.fit import fit

        with usage_errors("memfit"):
            return fit(*_run_and_cards(line.strip()))

    @line_magic
    @shown
    @no_var_expand
    def memadvise(self, line: str) -> Advice:
        """What makes a run smaller: `%memadvise [RUN] [--target 8GiB]`; RUN may also be a workload or a function."""
        from memlab.api.advise import advise
        from memlab.workloads import workloads

        name, flag, target = (one.strip() for one in f" {line} ".partition(" --target "))
        with usage_errors("memadvise"):
            if (flag and not target) or "--" in name or "--" in target:
                raise MemlabError(f"unknown {line.strip()[:80]!r}: %memadvise [RUN] [--target 8GiB].")
            own = self.shell.user_ns.get(name) if self.shell is not None else None
            what: Any = name if name in workloads and name not in runs else own if callable(own) else None
            said = repr(name) if isinstance(what, str) else name
            if name in runs or what is None:
                what = runs[name] if name else last_run()
                said = f"memlab.runs[{what.name!r}]"
            found = advise(what, target or None)
            if any("allow_changes=True" in why for _, why in found.findings.left_out):  # no option of this magic
                found = found.noted(f"To try more: `import memlab; memlab.advise({said}, allow_changes=True)`.")
            return found

    @line_magic
    @shown
    @no_var_expand
    def memcompare(self, line: str) -> Comparison:
        """The second run against the first: `%memcompare A B`, names, files or `last`; `%memcompare` alone: the last two."""
        from memlab.api.compare import compare

        with usage_errors("memcompare"):
            return compare(*two_runs(line))

    @line_magic
    @shown
    @no_var_expand
    def memlab(self, line: str) -> Lab:
        """The Lab: `%memlab`, `%memlab gpt`, `%memlab gpt checkpoint,autocast_bf16`, `%memlab my_function`."""
        from memlab.lab import Lab
        from memlab.workloads import workloads

        words = line.replace(",", " ").split()
        with usage_errors("memlab"):
            if not words:
                return Lab()
            own = self.shell.user_ns.get(words[0]) if self.shell is not None else None
            workload = own if words[0] not in workloads and callable(own) else words[0]
            return Lab(workload, techniques=words[1:]) if words[1:] else Lab(workload)


def _who(
    expression: str, device: str | None, names: dict[str, Any], local: dict[str, Any] | None
) -> tuple[Who | None, str]:
    """Show a result, or the error in one line."""
    try:
        if not expression:
            return who(device=device), ""
        # In a function use the names of its frame; at top level the notebook's own dict, not a copy.
        value = eval(expression, {**names, **local} if local is not None and local is not names else names)
        if value is None:
            return None, f"{expression[:80]} is None."
        return who(value, device, name=expression), ""
    except MemlabError as error:
        return None, str(error)
    except Exception as error:
        return None, f"{expression[:80]!r} failed: {type(error).__name__}: {str(error)[:200]}"


def _run_and_cards(text: str) -> tuple[Run | None, list[str] | None]:
    """The run whose name the line begins with, and the GPUs after it."""
    from memlab.prediction.cards import find

    named = max((name for name in runs if text == name or text.startswith(f"{name} ")), key=len, default="")
    wanted = [one.strip() for one in text.removeprefix(named).split(",") if one.strip()]
    for card in wanted:
        try:
            find(card)
        except MemlabError as error:
            known = ", ".join(list(runs)[-5:]) or "none yet"
            raise MemlabError(
                f"{error}{'' if named else f' Nor is there a run of that name; known: {known}.'}"
            ) from None
    return (runs[named] if named else None), wanted or None


def two_runs(line: str) -> tuple[str, str]:
    """Split a line into two words, or at the one place where both parts are names."""
    from memlab.api.compare import is_run

    try:
        words = shlex.split(line)
    except ValueError as error:
        raise MemlabError(f"{error} in {line[:80]!r}.") from None
    if not words:
        latest = list(runs)[-2:]
        if len(latest) < 2:
            there = "is one" if latest else "is none"
            raise MemlabError(f"two runs are needed and there {there}: %memcompare A B.")
        return latest[0], latest[1]
    if len(words) == 1:
        return words[0], "last"
    cuts = [(" ".join(words[:i]), " ".join(words[i:])) for i in range(1, len(words))]
    found = [cut for cut in cuts if all(map(is_run, cut))]
    if found or len(words) == 2:
        return (found or cuts)[0]
    known = ", ".join(map(repr, list(runs)[-5:])) or "none yet"
    raise MemlabError(f"{line.strip()[:80]!r} does not name two runs: %memcompare A B. Known: {known}.")


def close_labs() -> None:
    """Close every displayed Lab, without importing anything for it."""
    view = sys.modules.get("memlab.lab.view")
    if view is not None:
        view.close_all()
