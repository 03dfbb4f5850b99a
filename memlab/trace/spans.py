"""Interpret the marks of a trace: the phase and the module at any time.

Inside backward everything is backward (recomputed forwards of checkpoints too); else the innermost mark decides, so a
`grad` inside a forward is backward and the closure of an optimizer has its own forward and backward. Between the end
of a forward and the backward that follows is the loss, which counts as forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memlab.trace.columns import MODULE_BEGINS, Array, MarkKind, Marks, Phase

BACKWARD, OPTIMIZER, OPTIMIZER_WITH_CLOSURE = "backward", "optimizer", "optimizer with closure"
"""Names of phase marks. A step without a closure calls no forward: a forward inside it means that the step had raised."""

_BEGIN, _END, _MODULE_BEGIN, _MODULE_END, _, _BACKWARD_OF, _, _ = map(int, MarkKind)
_PHASE_OF_NAME = {BACKWARD: Phase.BACKWARD, OPTIMIZER: Phase.OPTIMIZER, OPTIMIZER_WITH_CLOSURE: Phase.OPTIMIZER}


@dataclass(frozen=True, slots=True)
class Steps:
    """A value that changes over time: from `time_ns[i]` on it is `value[i]`; before the first it is `before`."""

    time_ns: Array
    value: Array
    before: int

    def at(self, time_ns: Array) -> Array:
        """The value at each of these times."""
        if not len(self.time_ns):
            return np.full(len(time_ns), self.before)
        index = np.searchsorted(self.time_ns, time_ns, side="right") - 1
        return np.where(index >= 0, self.value[np.maximum(index, 0)], self.before)


class MarkStack:
    """Follows marks in order; has the phase and the innermost module (its name, or None) after each.

    A file may hold millions of begins without ends, or ends without begins: no mark walks through all that are open.
    """

    __slots__ = ("_backward_of", "_count", "_open")

    def __init__(self) -> None:
        # ((is a module, name), phase from here on, innermost module, whether a backward runs inside of that)
        self._open: list[tuple[tuple[bool, object], Phase, object | None, bool]] = []
        self._count: Counter[tuple[bool, object]] = Counter()  # of what is open
        self._backward_of: object | None = None

    @property
    def phase(self) -> Phase:
        """The phase now."""
        return self._open[-1][1] if self._open else Phase.OTHER

    @property
    def module(self) -> object | None:
        """The innermost module now; in backward the one whose forward it works on, if that was marked."""
        _, _, module, in_backward = self._open[-1] if self._open else (None, None, None, False)
        return self._backward_of if in_backward and self._backward_of is not None else module

    def step(self, kind: int, name: object) -> None:
        """Process the next mark; `name` of a phase mark is its text, of a module mark anything that identifies it."""
        if kind == _BEGIN or kind in MODULE_BEGINS:
            self._begin(kind != _BEGIN, name)
        elif kind in (_END, _MODULE_END):
            if kind == _END:
                self._backward_of = None
            ended = (kind == _MODULE_END, name)
            if self._count[ended]:
                while self._pop() != ended:
                    pass
        elif kind == _BACKWARD_OF and self.phase == Phase.BACKWARD:
            self._backward_of = name

    def _begin(self, is_module: bool, name: object) -> None:
        if is_module or name not in (OPTIMIZER, OPTIMIZER_WITH_CLOSURE):
            # Otherwise the step of a derived class calls that of its base; here an optimizer without a closure has raised.
            while self._open and self._open[-1][0] == (False, OPTIMIZER):
                self._pop()
        _, before, module, in_backward = self._open[-1] if self._open else (None, Phase.OTHER, None, False)
        if is_module:
            phase, module = Phase.BACKWARD if before == Phase.BACKWARD else Phase.FORWARD, name
        else:
            phase = _PHASE_OF_NAME.get(str(name), Phase.OTHER)
        in_backward = not is_module and (in_backward or phase == Phase.BACKWARD)
        self._open.append(((is_module, name), phase, module, in_backward))
        self._count[is_module, name] += 1

    def _pop(self) -> tuple[bool, object]:
        begun = self._open.pop()[0]
        self._count[begun] -= 1
        return begun


def resolve(
    times_ns: Sequence[int] | Array, kinds: Iterable[int], names: Sequence[int], texts: Sequence[str]
) -> tuple[Steps, Steps]:
    """The phase and the innermost module (an index into `texts`, -1 for none) over time."""
    stack = MarkStack()
    phases, modules = [], []
    for kind, name in zip(kinds, names, strict=True):
        stack.step(kind, texts[name] if kind in (_BEGIN, _END) else name)
        phases.append(stack.phase)
        module = stack.module
        modules.append(-1 if module is None else module)
    times = np.array(times_ns, np.int64)
    phase = _changes(times, np.array(phases, np.uint8), int(Phase.OTHER))
    value = phase.value.copy()
    # Between a forward and the backward after it is the loss. Only a closure goes straight from a forward back to the
    # optimizer, and its loss is forward as well.
    between = np.isin(value[1:-1], (Phase.OTHER, Phase.OPTIMIZER))
    between &= (value[:-2] == Phase.FORWARD) & (value[2:] == Phase.BACKWARD)
    value[1:-1][between] = Phase.FORWARD
    return Steps(phase.time_ns, value, phase.before), _changes(times, np.array(modules, np.int64), -1)


def phases(marks: Marks, texts: Sequence[str]) -> Steps:
    """The phase over time, by the marks of a trace."""
    return resolve(marks.time_ns, marks.kind.tolist(), marks.name.tolist(), texts)[0]


def recording(times_ns: Array, kinds: Iterable[int], names: Iterable[int]) -> Steps:
    """Whether autograd recorded (1) or not (0) in the running outermost module; 1 outside any."""
    depth: list[int] = []
    count: Counter[int] = Counter()  # of what is in `depth`, through which no mark may walk
    values, now = [], 1
    for kind, name in zip(kinds, names, strict=True):
        if kind in MODULE_BEGINS:
            now = int(kind == _MODULE_BEGIN) if not depth else now
            depth.append(name)
            count[name] += 1
        elif kind == _MODULE_END and count[name]:
            last = None
            while last != name:
                last = depth.pop()
                count[last] -= 1
        values.append(now if depth else 1)
    return _changes(np.array(times_ns, np.int64), np.array(values, np.int64), 1)


def _changes(times: Array, values: Array, before: int) -> Steps:
    if not len(values):
        return Steps(times, values, before)
    keep = np.diff(values.astype(np.int64), prepend=int(values[0]) - 1) != 0
    return Steps(times[keep], values[keep], before)
