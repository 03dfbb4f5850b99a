"""Requests to the engines of ipyparallel, on their way out; seen in 9.2.

`%px`, `%%px` and all methods of a DirectView send by two methods of the class Client, once for each engine, which is named by
`ident`. An engine runs requests in the order in which they come, in one thread. A client forgets a request when its reply came, but
not that it is in `history`, by which views count their own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from memlab.torch_internals.replacement import Replacement

_EXECUTE, _CLOSE = "send_execute_request", "close"
_METHODS = (_EXECUTE, "send_apply_request", _CLOSE)


class Engines:
    """The engines that get requests between `follow` and `leave`.

    `begin(number)` is code for one before its first request, `end` after its last; this is waited for if it has nothing left to do.
    """

    def __init__(self, begin: Callable[[int], str], end: str, limit_s: float) -> None:
        self._begin, self._end, self._limit_s = begin, end, limit_s
        self._replaced: dict[str, Replacement] = {}
        self._is_on = False
        # The client and the name of an engine -> client, socket, and the future of the last request.
        self._last: dict[tuple[int, bytes], tuple[Any, Any, Any]] = {}

    def follow(self) -> None:
        """Begin, if ipyparallel was imported."""
        found = getattr(sys.modules.get("ipyparallel"), "Client", None)
        if found is not None and all(callable(vars(found).get(name)) for name in _METHODS):
            self._is_on = True
            for name in _METHODS:
                ours = (self._closing if name == _CLOSE else self._sending)(vars(found)[name])
                self._replaced[name] = Replacement(found, name, ours)
                self._replaced[name].put()

    def leave(self) -> None:
        """End, unless somebody has wrapped ours meanwhile."""
        self._is_on = False
        for one in self._replaced.values():
            one.restore()
        self._finish([*self._last])

    def _sending(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def send(client: Any, socket: Any, *args: Any, **kwargs: Any) -> Any:
            ident = kwargs.get("ident")
            with contextlib.suppress(Exception):  # what goes wrong here is none of the request's business
                if self._is_on and isinstance(ident, bytes) and (id(client), ident) not in self._last:
                    number = {name.encode(): number for number, name in client._engines.items()}[ident]
                    begun = self._request(client, socket, self._begin(number), ident)
                    self._last[id(client), ident] = client, socket, begun
            future = theirs(client, socket, *args, **kwargs)
            if isinstance(ident, bytes) and (id(client), ident) in self._last:
                self._last[id(client), ident] = client, socket, future
            return future

        return send

    def _closing(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def close(client: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):
                self._finish([key for key in self._last if key[0] == id(client)])
            return theirs(client, *args, **kwargs)

        return close

    def _request(self, client: Any, socket: Any, code: str, ident: bytes) -> Any:
        """Send code that shows nothing and is not in the client's history."""
        future = self._replaced[_EXECUTE].theirs(client, socket, code, silent=True, ident=ident)
        with contextlib.suppress(ValueError):
            client.history.remove(future.msg_id)
        return future

    def _finish(self, keys: list[tuple[int, bytes]]) -> None:
        waiting = []
        for key in keys:
            client, socket, last = self._last.pop(key)
            with contextlib.suppress(Exception):  # a client that is closed
                is_idle = last.done()
                future = self._request(client, socket, self._end, key[1])
                waiting += [future] * is_idle
        wait(waiting, self._limit_s)
