"""Shapes and dtypes of what CUDA allocates: a dispatch mode that notes the address of every new storage.

Only on request: it makes every operator a few times slower on the host, and the trace says so. It keeps no tensor alive.

Limits: what operators allocate inside and do not return, and what is allocated outside of operators, stays without a shape.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from array import array
from time import time_ns
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.seams import dispatch
from memlab.trace.columns import Kind
from memlab.trace.trace import Gap, Trace

MAX_NOTES = 4_000_000
_SLOWER = Gap("shapes", "--shapes: a dispatch mode was on in the cell's thread; operators took a few times longer")
Tensor, Parameter = torch.Tensor, torch.nn.Parameter


class Shapes(TorchDispatchMode):
    """Notes (time, address, shape and dtype) of storages that operators return on an accelerator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self._times, self._addresses, self._kinds = array("q"), array("q"), array("i")
        self._numbers: dict[tuple[Any, Any], int] = {}
        self._thread = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Watch the operators of this thread, and of the backward that it starts."""
        self._thread = threading.get_ident()
        dispatch.push_mode(self)

    def stop(self) -> None:
        """Stop watching; only the thread that started can."""
        if self._thread == threading.get_ident():
            dispatch.remove_mode(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note what it returns."""
        op = getattr(func, "_op", func)  # saves a Python frame
        out = op(*args, **kwargs) if kwargs else op(*args)
        with contextlib.suppress(Exception):  # what cannot be looked at stays without a shape
            self._look(out)
        return out

    def _look(self, out: Any) -> None:
        kind = type(out)
        if kind is Tensor or kind is Parameter:
            if out.device.type != "cpu":
                self._note(out)
        elif kind is tuple or kind is list:
            for item in out:
                self._look(item)

    def _note(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault((tensor.shape, tensor.dtype), len(self._numbers))
        with self._lock:
            self._times.append(time_ns())
            self._addresses.append(storage.data_ptr())
            self._kinds.append(number)
            if len(self._times) > MAX_NOTES:
                for column in (self._times, self._addresses, self._kinds):
                    del column[: MAX_NOTES // 2]

    def into(self, trace: Trace, start_ns: int) -> Trace:
        """The trace with shape and dtype of the blocks that were seen, where it had none."""
        made = np.flatnonzero(trace.events.kind == Kind.ALLOC)
        number = self._matched(trace.events.address[made], trace.events.time_ns[made] + start_ns)
        shapes, dtypes = list(trace.texts["shape"]), list(trace.texts["dtype"])
        table = [(_index(shapes, str(tuple(shape))), _index(dtypes, str(dtype)[6:])) for shape, dtype in self._numbers]
        block, columns = trace.events.block[made], {}
        for name, column in zip(("shape", "dtype"), np.array([*table, (-1, -1)], "i4").T, strict=True):
            known = getattr(trace.blocks, name).copy()
            fills = known[block] < 0
            known[block[fills]] = column[number[fills]]
            columns[name] = known
        texts = {**trace.texts, "shape": tuple(shapes), "dtype": tuple(dtypes)}
        return dataclasses.replace(trace, blocks=trace.blocks.replace(**columns), texts=texts).with_gaps(_SLOWER)

    def _matched(self, address: np.ndarray, time: np.ndarray) -> np.ndarray:
        """For each allocation the first note of its address after it, if no other allocation there comes before; else -1."""
        times, addresses = np.array(self._times, np.int64), np.array(self._addresses, np.int64)
        rows = np.concatenate([np.arange(len(time)), np.arange(len(times))])
        is_note = np.concatenate([np.zeros(len(time), bool), np.ones(len(times), bool)])
        order = np.lexsort((np.concatenate([time, times]), np.concatenate([address, addresses])))
        at = np.concatenate([address, addresses])[order]
        follows = (at[:-1] == at[1:]) & ~is_note[order][:-1] & is_note[order][1:]
        found = np.full(len(time), -1)
        first = np.flatnonzero(follows)
        found[rows[order[first]]] = np.array(self._kinds, np.int64)[rows[order[first + 1]]]
        return found


def _index(texts: list[str], text: str) -> int:
    if text not in texts:
        texts.append(text)
    return texts.index(text)
