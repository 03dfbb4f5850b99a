"""A real kernel for tests: run a cell as a notebook would, and look at all that came back."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parent.parent
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Reply:
    """What a cell gave: the status, and its outputs as a notebook keeps them (updates replace what they update)."""

    status: str = ""
    error: str = ""
    traceback: str = ""
    out: str | None = None
    stdout: str = ""
    stderr: str = ""
    shown: list[dict[str, Any]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[int]:
        """The line numbers to which the traceback points."""
        return [int(number) for number in re.findall(r"-+> (\d+)", self.traceback)]

    @property
    def said(self) -> str:
        """What it says of an error."""
        return self.stderr + self.traceback

    @property
    def kinds(self) -> list[set[str]]:
        """The MIME types of each display."""
        return [set(data) for data in self.shown]

    @property
    def report(self) -> str:
        """The text of the report; empty without one."""
        return next((data["text/plain"] for data in self.shown if "text/html" in data), "")


class Kernel:
    """A kernel that runs one cell after the other."""

    def __init__(self, client: Any, manager: KernelManager, folder: Path) -> None:
        self.client, self.manager = client, manager
        self._is_hung = False
        self.stacks = folder / "ipython" / "stacks.txt"
        self.run(
            f"import faulthandler, signal; faulthandler.register(signal.SIGUSR2, open({str(self.stacks)!r}, 'w'))\n"
            "del faulthandler, signal",
            silent=True,
        )

    def run(self, code: str, *, interrupt_at: str = "", silent: bool = False) -> Reply:
        """Run a cell. When it has printed `interrupt_at` it gets what the notebook's interrupt button sends."""
        reply, places = Reply(), {}

        def take(message: dict[str, Any]) -> None:
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                setattr(reply, content["name"], getattr(reply, content["name"]) + content["text"])
                if interrupt_at and interrupt_at in reply.stdout and "interrupted" not in reply.order:
                    reply.order.append("interrupted")
                    os.kill(self.manager.provisioner.pid, signal.SIGINT)  # the manager's own starts a thread that stays
            elif kind == "execute_result":
                reply.out = content["data"]["text/plain"]
            elif kind == "error":
                reply.traceback = ANSI.sub("", "\n".join(content["traceback"]))
            elif kind == "display_data":
                places[content["transient"].get("display_id", len(places))] = len(reply.shown)
                reply.shown.append(content["data"])
            elif (
                kind == "update_display_data" and content["transient"]["display_id"] in places
            ):  # else of an earlier cell
                reply.shown[places[content["transient"]["display_id"]]] = content["data"]
            if kind in ("stream", "execute_result", "error", "display_data", "update_display_data"):
                reply.order.append(kind)

        answer = self.answer(code, take, silent)
        reply.status = answer["status"]
        reply.error = answer.get("ename", "")
        return reply

    def answer(self, code: str, take: Callable[[dict[str, Any]], None], silent: bool = False) -> dict[str, Any]:
        """Run a cell, give each of its messages to `take`, and return the reply. After one that hangs all fail at once."""
        assert not self._is_hung, "an earlier cell of this kernel has hung"
        try:
            reply = self.client.execute_interactive(
                code, silent=silent, output_hook=take, timeout=300, allow_stdin=False
            )
        except TimeoutError as error:
            self._is_hung = True
            os.kill(self.manager.provisioner.pid, signal.SIGUSR2)
            time.sleep(1)
            raise AssertionError(f"a cell has hung:\n{code}\n{self.stacks.read_text()}") from error
        return reply["content"]

    def ok(self, code: str) -> Reply:
        """Run a cell that must not fail."""
        reply = self.run(code)
        assert reply.status == "ok", reply.said
        return reply

    def value(self, expression: str) -> Any:
        """The value of an expression, by its repr."""
        return eval(self.ok(f"print(repr({expression}))").stdout)


@contextmanager
def kernel(folder: Path, *cells: str) -> Iterator[Kernel]:
    """A kernel that works in `folder`, after these cells; what this process keeps of the card is given back before."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
        "IPYTHONDIR": str(folder / "ipython"),
        "NO_COLOR": "1",
    }
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=environment, cwd=str(folder))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=300)
        found = Kernel(client, manager, folder)
        for cell in cells:
            found.ok(cell)
        yield found
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
