"""Private hooks of ipykernel and ipywidgets."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def let_clicks_through(widget: Any) -> None:
    """Let messages from the browser reach a widget while the cell runs.

    ipykernel 7.4 sends a comm's messages to the subshell that spoke last on it, which is the busy main shell for a widget
    made in a cell (`comm._reply_subshell_for`). Where the attribute means nothing, nothing changes.
    """
    with contextlib.suppress(Exception):
        if hasattr(widget.comm, "_reply_subshell_for"):
            widget.comm._reply_subshell_for = None


def is_kernel(shell: Any) -> bool:
    """Whether this IPython shell talks to a notebook front end (ipykernel's ZMQInteractiveShell) and not a terminal."""
    return shell is not None and "ipykernel" in sys.modules and hasattr(shell, "kernel")
