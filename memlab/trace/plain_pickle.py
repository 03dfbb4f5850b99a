"""An unpickler that only builds plain data: it knows no classes, calls nothing, and refers to nothing outside the file.

Its opcodes are those that PyTorch's own writers of memory snapshots use (Python's `pickle.dump` behind
torch.cuda.memory._dump_snapshot, and the JIT pickler behind the C++ dump). None of them makes more than a few dozen bytes
of memory for each byte read; `pickle.Unpickler` allocates a stated length before checking that the file has it.

Limits: the result may still share and nest its parts without bound, so any code that walks it has to count.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

DAMAGED = (IndexError, struct.error, UnicodeDecodeError, KeyError, TypeError, ValueError, OverflowError, MemoryError)
"""Errors that a truncated or damaged file may raise here, besides Refused."""


def load(data: bytes) -> Any:
    """Load the plain data of a pickle; Refused if it contains anything else."""
    return _Machine(data).run()


class Refused(Exception):
    """A file is refused; the message says why in a few words."""


class _Machine:
    __slots__ = ("at", "data", "marks", "memo", "stack")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, stack, memo = self.data, self.stack, self.memo
        unpack_int, unpack_index = _INT.unpack_from, _INDEX.unpack_from
        at = 0
        while True:
            code = data[at]
            at += 1
            # Nine of ten opcodes in a snapshot are these six; function calls would take three times as long.
            if code == _BINGET:
                stack.append(memo[data[at]])
                at += 1
            elif code == _LONG_BINGET:
                stack.append(memo[unpack_index(data, at)[0]])
                at += 4
            elif code == _BININT1:
                stack.append(data[at])
                at += 1
            elif code == _BININT:
                stack.append(unpack_int(data, at)[0])
                at += 4
            elif code == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif code == _MARK:
                self.marks.append(len(stack))
            else:
                if code == _STOP:
                    return stack.pop()
                self.at = at
                if code in _VALUES:
                    stack.append(_VALUES[code](self))
                elif code in _ACTIONS:
                    _ACTIONS[code](self)
                else:
                    raise Refused(f"its opcode {code:#04x} builds no plain data (byte {at - 1}); nothing was executed.")
                at = self.at

    def take(self, count: int) -> bytes:
        """The next bytes; a length beyond the file is refused before anything is allocated."""
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise Refused(f"it is cut off at byte {len(self.data)}.")
        part = self.data[self.at : end]
        self.at = end
        return part

    def number(self, layout: struct.Struct) -> Any:
        """The next number."""
        self.at += layout.size
        return layout.unpack_from(self.data, self.at - layout.size)[0]

    def text(self, length: int) -> None:
        self.stack.append(self.take(length).decode("utf-8", "surrogatepass"))

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def since_mark(self) -> list[Any]:
        """Pop everything above the last mark."""
        mark = self.marks.pop()
        if mark > len(self.stack):
            raise Refused("its marks do not match.")
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def last(self, count: int) -> tuple[Any, ...]:
        """Pop this many items."""
        if len(self.stack) < count:
            raise Refused("it takes more than there is.")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    def extend(self, items: Sequence[Any]) -> None:
        """Add items to the list on top of the stack."""
        if type(self.stack[-1]) is not list:
            raise Refused("it appends to what is no list.")
        self.stack[-1].extend(items)

    def update(self, items: Sequence[Any]) -> None:
        """Add keys and values to the dict on top of the stack.

        Only strings are keys: hashing deeply nested tuples would overflow the C stack.
        """
        keys = items[::2]
        if not all(type(key) is str for key in keys):
            raise Refused("a key is no text.")
        if type(self.stack[-1]) is not dict:
            raise Refused("it sets an item of what is no table.")
        self.stack[-1].update(zip(keys, items[1::2], strict=True))

    def table(self) -> None:
        items = self.since_mark()
        self.stack.append({})
        self.update(items)

    def check_protocol(self) -> None:
        version = self.take(1)[0]
        if not 2 <= version <= 5:
            raise Refused(f"it says pickle protocol {version}.")


_STOP, _MARK, _MEMOIZE = ord("."), ord("("), 0x94
_BINGET, _LONG_BINGET, _BININT, _BININT1 = ord("h"), ord("j"), ord("J"), ord("K")
_INT, _INDEX = struct.Struct("<i"), struct.Struct("<I")
_U1, _U2, _U8, _FLOAT = (struct.Struct(layout) for layout in ("<B", "<H", "<Q", ">d"))
_ACTIONS: dict[int, Callable[[_Machine], object]] = {
    0x80: _Machine.check_protocol,
    0x95: lambda machine: machine.take(8),  # FRAME
    0x8C: lambda machine: machine.text(machine.number(_U1)),  # SHORT_BINUNICODE
    ord("X"): lambda machine: machine.text(machine.number(_INDEX)),  # BINUNICODE
    0x8D: lambda machine: machine.text(machine.number(_U8)),  # BINUNICODE8
    ord("q"): lambda machine: machine.put(machine.number(_U1)),  # BINPUT
    ord("r"): lambda machine: machine.put(machine.number(_INDEX)),  # LONG_BINPUT
    ord("a"): lambda machine: machine.extend(machine.last(1)),  # APPEND
    ord("e"): lambda machine: machine.extend(machine.since_mark()),  # APPENDS
    ord("s"): lambda machine: machine.update(machine.last(2)),  # SETITEM
    ord("u"): lambda machine: machine.update(machine.since_mark()),  # SETITEMS
    ord("d"): _Machine.table,
}
_VALUES: dict[int, Callable[[_Machine], object]] = {  # pushed values
    0x8A: lambda machine: int.from_bytes(machine.take(machine.number(_U1)), "little", signed=True),  # LONG1
    ord("M"): lambda machine: machine.number(_U2),  # BININT2
    ord("G"): lambda machine: machine.number(_FLOAT),  # BINFLOAT
    ord("}"): lambda machine: {},
    ord("]"): lambda machine: [],
    ord(")"): lambda machine: (),
    ord("N"): lambda machine: None,
    0x88: lambda machine: True,
    0x89: lambda machine: False,
    ord("l"): _Machine.since_mark,
    ord("t"): lambda machine: tuple(machine.since_mark()),
    0x85: lambda machine: machine.last(1),  # TUPLE1
    0x86: lambda machine: machine.last(2),
    0x87: lambda machine: machine.last(3),
}
