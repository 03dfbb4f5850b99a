"""Private hooks of IPython and ipykernel, for a cell that runs in a forked child: redirect the shell's output.

Seen in IPython 9.18 and ipykernel 7.4. Everything ipykernel says to a front end passes `Session.send`.
"""

from __future__ import annotations

import base64
import contextlib
import dis
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

Error = TypeVar("Error", bound=BaseException)
Say = Callable[[str, Any], None]
SHOWN = ("display_data", "update_display_data", "execute_result", "clear_output", "error")
"""The messages that make an output. Widgets (comms) and states have no meaning outside of the process that sends them."""
_WIDGET = "application/vnd.jupyter.widget-view+json"


def is_result_dropped() -> bool:
    """Whether the line that called the magic which is running does nothing with its result, as above the last line of a cell.

    IPython shows only the last expression. What comes after the call is read from the caller's bytecode (CPython 3.11 to 3.14).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "run_line_magic":
        frame = frame.f_back
    caller = frame.f_back if frame is not None else None
    if caller is None:
        return False
    after = (one.opname for one in dis.get_instructions(caller.f_code) if one.offset > caller.f_lasti)
    return next(after, "") == "POP_TOP"


class Funnel:
    """In the child: lets everything that the shell would tell a front end go to `say(kind, content)`.

    The error that ends the cell is kept as `error`; one of a cell that runs inside of it (`run_cell`) is an output.
    """

    def __init__(
        self, shell: Any, say: Say, print_text: Callable[[str, str], None], started: Callable[[str], None]
    ) -> None:
        self.shell, self._say, self._print = shell, say, print_text
        self.error: tuple[str, str, list[str]] | None = None
        self._depth, self._counts_on = 0, False
        system = shell.system

        def run(command: str) -> Any:
            """`!command` as it was, after telling: it runs in a pseudo-terminal in which no audit hook can note what begins."""
            started(f"!{command}")
            return system(command)

        shell.system = run
        shell.events.register("pre_execute", self._deeper)
        shell.events.register("post_execute", self._higher)
        shell._showtraceback = self._show_error
        module = sys.modules.get("IPython.core.interactiveshell")
        if module is not None and type(shell) is module.InteractiveShell:  # without a front end, as of `spawned`
            self._results_as_outputs(shell.displayhook)
        kernel = getattr(shell, "kernel", None)
        if kernel is not None:
            kernel._allow_stdin = False
            type(kernel.session).send = lambda session, *args, **kwargs: self._send(*args, **kwargs)
        if not hasattr(shell.display_pub, "pub_socket"):  # a terminal's, or that of %%capture
            shell.display_pub.publish = self._publish
            shell.display_pub.clear_output = lambda wait=False: self._say("clear_output", {"wait": wait})

    def number_the_cell(self, transformed: str) -> None:
        """Let the next cell have the number of the one that is running, and `;` at its end mean silence.

        IPython takes the number, counts on when a cell that is kept in its history has begun (`Out` has one less than the
        count), and asks the last of its inputs about the semicolon.
        """
        count = _running_count(self.shell)
        if isinstance(count, int):
            self.shell.execution_count = count
        with contextlib.suppress(AttributeError, IndexError):
            self.shell.history_manager.input_hist_parsed[-1] = transformed
        self._counts_on = True

    def _deeper(self) -> None:
        self._depth += 1
        if self._counts_on:
            self._counts_on = False
            self.shell.execution_count += 1

    def _higher(self) -> None:
        self._depth -= 1

    def _send(self, stream: Any, msg_or_type: Any, content: Any = None, *args: Any, **kwargs: Any) -> None:
        """What stands for Session.send."""
        kind = msg_or_type
        if isinstance(kind, dict):
            kind, content = kind["msg_type"], kind["content"]
        if kind == "stream":
            self._print(content["name"], content["text"])
        elif kind in SHOWN:
            self._show(kind, content)

    def _results_as_outputs(self, hook: Any) -> None:
        """Let the last value be an output, which the parent shows as its own shell does, and not text."""

        def write(data: Any, metadata: Any = None) -> None:
            content = {"data": data, "metadata": metadata or {}, "execution_count": hook.prompt_count}
            self._say("execute_result", content)

        hook.write_output_prompt = hook.finish_displayhook = lambda: None
        hook.write_format_data = write

    def _publish(
        self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False, **_: Any
    ) -> None:
        plain = {kind: base64.b64encode(v).decode() if isinstance(v, bytes) else v for kind, v in data.items()}
        content = {"data": plain, "metadata": metadata or {}, "transient": transient or {}}
        self._show("update_display_data" if update else "display_data", content)

    def _show(self, kind: str, content: Any) -> None:
        """Say an output without the view of a widget, which lives in the child alone; its text stays."""
        if isinstance(content, dict) and _WIDGET in content.get("data", ()):
            content = {**content, "data": {name: value for name, value in content["data"].items() if name != _WIDGET}}
        self._say(kind, content)

    def _show_error(self, kind: type[BaseException], value: BaseException, lines: list[str]) -> None:
        """InteractiveShell._showtraceback, with which the shell shows every error that it has formatted."""
        try:
            text = str(value)
        except Exception:
            text = "<its text cannot be had>"
        if self._depth <= 1:
            self.error = (kind.__name__, text, list(lines))
        else:
            self._say("error", {"ename": kind.__name__, "evalue": text, "traceback": list(lines)})


def _running_count(shell: Any) -> Any:
    """The number of the cell that is running, None where none is."""
    running = getattr(getattr(shell, "displayhook", None), "exec_result", None)
    return getattr(running, "execution_count", None)


def cell_executes(shell: Any) -> bool:
    """Whether this is called by a cell, for which post_run_cell will be triggered, and not by a widget or a silent request.

    ipykernel's `get_parent` returns the message that is being handled, for a widget "comm_msg"; seen in ipykernel 6 and 7.
    """
    if not hasattr(shell, "get_parent"):  # a terminal has nothing but cells
        return True
    parent = shell.get_parent() or {}
    return parent.get("header", {}).get("msg_type") == "execute_request" and not parent.get("content", {}).get("silent")


def transform(shell: Any, above: str, body: str) -> tuple[str, Any]:
    """The body of a cell as Python, so that its lines have the numbers they have in the notebook; (code, what failed).

    The line above stays as a comment. IPython drops blank lines at the top, and a body that begins with another cell magic
    is rewritten as a whole: empty lines are put in front of that.
    """
    head = f"# {above.strip()}\n"
    rest = body.lstrip("\n")
    if rest.lstrip().startswith("%%"):
        text, first = rest.lstrip(), "\n" * (1 + len(body) - len(rest))
    else:
        text, first = head + body, ""
    try:
        return first + shell.transform_cell(text), None
    except Exception:
        return head + body, sys.exc_info()


def code_name(shell: Any, transformed: str, raw: str) -> str:
    """The file name of the code of a cell; `compile.cache`, with which IPython is going to ask for it."""
    with contextlib.suppress(Exception):
        return str(shell.compile.cache(transformed, shell.execution_count, raw_code=raw))
    return ""


async def execute(shell: Any, raw: str, transformed: str, failed: Any) -> BaseException | None:
    """Run a cell as the kernel does, with what belongs to its end; its error, None where all went well."""
    result = None
    try:
        result = await shell.run_cell_async(
            raw, store_history=False, transformed_cell=transformed, preprocessing_exc_tuple=failed
        )
    finally:  # ipykernel's do_execute; here matplotlib shows its figures
        shell.events.trigger("post_execute")
        shell.events.trigger("post_run_cell", result)
    return result.error_before_exec or result.error_in_exec


def show_again(shell: Any, error: BaseException) -> None:
    """Show the error that ended a cell, as the shell has shown it before its text changed."""
    shell.showtraceback((type(error), error, error.__traceback__), running_compiled_code=True)


class ShownTracebacks:
    """Trims every error before the shell formats it, and keeps the tracebacks of some of them until `show` is called.

    InteractiveShell.showtraceback formats an error, and _showtraceback shows what it has formatted.
    """

    def __init__(
        self, shell: Any, is_held: Callable[[BaseException], bool], trim: Callable[[BaseException], object]
    ) -> None:
        self._shell, self._is_held, self._trim = shell, is_held, trim
        self._waiting: list[tuple[Any, ...]] = []
        self._format, self._show_now = shell.showtraceback, shell._showtraceback
        shell.showtraceback, shell._showtraceback = self._format_trimmed, self._hold

    def _format_trimmed(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if error is not None:
            with contextlib.suppress(Exception):
                self._trim(error)
        self._format(exc_tuple, *args, **kwargs)

    def _hold(self, kind: type[BaseException], value: BaseException, lines: list[str]) -> None:
        try:
            is_held = self._is_held(value)
        except Exception:
            is_held = False
        if is_held:
            self._waiting.append((kind, value, lines))
        else:
            self._show_now(kind, value, lines)

    def show(self) -> None:
        """Show those that wait."""
        while self._waiting:
            self._show_now(*self._waiting.pop(0))

    def remove(self) -> None:
        """Show those that wait, and trim and hold none from now on; a function that replaced ours since then stays."""
        self.show()
        self._is_held = self._trim = lambda value: False
        for name, ours in (("showtraceback", self._format_trimmed), ("_showtraceback", self._hold)):
            if vars(self._shell).get(name) == ours:
                delattr(self._shell, name)


def publish(shell: Any, kind: str, content: Any) -> None:
    """In the parent: show what the child has shown, as this shell shows things."""
    pub = shell.display_pub
    if kind in ("display_data", "update_display_data"):
        update = kind == "update_display_data"
        pub.publish(data=content["data"], metadata=content["metadata"], transient=content["transient"], update=update)
    elif kind == "clear_output":
        pub.clear_output(content["wait"])
    elif hasattr(pub, "pub_socket"):
        hook = shell.displayhook
        sys.stdout.flush()
        sys.stderr.flush()
        topic = hook.topic.replace(b"execute_result", kind.encode()) if isinstance(hook.topic, bytes) else None
        hook.session.send(hook.pub_socket, kind, content, parent=hook.parent_header, ident=topic)
    elif kind == "error":
        print("\n".join(content["traceback"]))
    else:
        print(f"Out[{content['execution_count']}]: {content['data'].get('text/plain', '')}")


def formatted(shell: Any, error: BaseException, ours: Callable[[str], bool]) -> list[str]:
    """An error as the shell shows it, or as Python does without one; frames at the top that are ours are left out."""
    place = first_of_others(error.__traceback__, ours)
    if shell is not None:
        with contextlib.suppress(Exception):
            return list(shell.InteractiveTB.structured_traceback(type(error), error, place, tb_offset=0))
    return traceback.format_exception(type(error), error, place)


def first_of_others(place: TracebackType | None, ours: Callable[[str], bool]) -> TracebackType | None:
    """The traceback from the first frame on that is not ours; all of it where every frame is."""
    found = place
    while found is not None and ours(found.tb_frame.f_code.co_filename):
        found = found.tb_next
    return found or place


def show_as(error: Error, render: Callable[[], list[str]]) -> Error:
    """The error, of which IPython shows these lines; it asks errors for `_render_traceback_`."""
    error._render_traceback_ = render  # type: ignore[attr-defined]
    return error


def show_without(error: BaseException, shell: Any, ours: Callable[[str], bool]) -> None:
    """Let IPython show an error without the frames that are ours, wherever they lie; the traceback itself stays whole."""

    def render() -> list[str]:
        frames, place, kept = [], error.__traceback__, None
        while place is not None:
            frames.append(place)
            place = place.tb_next
        for one in reversed(frames):
            if not ours(one.tb_frame.f_code.co_filename):
                kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
        return list(shell.InteractiveTB.structured_traceback(type(error), error, kept, tb_offset=1))

    show_as(error, render)


def look(shell: Any) -> dict[str, Any]:
    """What a shell in a fresh process needs to show things as this one does; plain values."""
    return {
        "count": _running_count(shell) or shell.execution_count,
        "colors": str(getattr(shell, "colors", "nocolor")),
        "active_types": list(getattr(shell.display_formatter, "active_types", [])),
    }


def spawned(names: dict[str, Any], folder: Path, look: dict[str, Any]) -> Any:
    """A new shell, whose last values are outputs of their own as in a notebook; it writes into `folder` alone."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    made = InteractiveShell.instance(config=config, user_ns=names, ipython_dir=str(folder / "ipython"))
    made.execution_count = look["count"]
    with contextlib.suppress(Exception):
        made.colors = look["colors"]
    if look["active_types"] and made.display_formatter is not None:
        made.display_formatter.active_types = look["active_types"]
    return made
