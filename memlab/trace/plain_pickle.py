"""A pickle machine that can only build plain data: it knows no classes, calls nothing, refers to nothing outside the file.

Its opcodes are those that PyTorch's own writers of memory snapshots use (Python's `pickle.dump` behind
torch.cuda.memory._dump_snapshot, and the JIT pickler behind the C++ dump). None of them makes more than a few dozen bytes
of memory for each byte read; `pickle.Unpickler` makes room for a length before it looks whether the file has it.

Limits: what comes out may still share and nest its parts without end, so whoever walks it has to count.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

DAMAGED = (IndexError, struct.error, UnicodeDecodeError, KeyError, TypeError, ValueError, OverflowError, MemoryError)
"""What a file that is cut off or damaged may raise here, besides Refused."""


def load(data: bytes) -> Any:
    """The plain data that a pickle describes; Refused where it asks for anything else."""
    return _Machine(data).run()


class Refused(Exception):
    """Why a file is refused, in a few words."""


class _Machine:
    """A pickle machine without classes, calls and references: it can only build what it is told, item by item."""

    __slots__ = ("at", "data", "marks", "memo", "stack")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, codes, stack, memo = self.data, _CODES, self.stack, self.memo
        unpack_int, unpack_index = _INT.unpack_from, _INDEX.unpack_from
        at = 0
        while True:
            code = data[at]
            at += 1
            # Nine of ten opcodes of a snapshot are these six; a call for each would take three times as long.
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
                action = codes[code]
                if action is None:
                    if code == _STOP:
                        return stack.pop()
                    raise Refused(f"its opcode {code:#04x} builds no plain data (byte {at - 1}); nothing was executed.")
                self.at = at
                action(self)
                at = self.at

    def take(self, count: int) -> bytes:
        """The next bytes; a length that the file does not have is refused before anything is made of it."""
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise Refused(f"it is cut off at byte {len(self.data)}.")
        part = self.data[self.at : end]
        self.at = end
        return part

    def since_mark(self) -> list[Any]:
        """What was put on the stack after the last mark."""
        mark = self.marks.pop()
        if mark > len(self.stack):
            raise Refused("its marks do not match.")
        items = self.stack[mark:]
        del self.stack[mark:]
        return items


def _small(format_: str) -> Callable[[_Machine], None]:
    """An opcode that carries a number of fixed width."""
    layout = struct.Struct(format_)

    def push(machine: _Machine) -> None:
        machine.stack.append(layout.unpack_from(machine.data, machine.at)[0])
        machine.at += layout.size

    return push


def _text(format_: str) -> Callable[[_Machine], None]:
    layout = struct.Struct(format_)

    def push(machine: _Machine) -> None:
        (length,) = layout.unpack_from(machine.data, machine.at)
        machine.at += layout.size
        machine.stack.append(machine.take(length).decode("utf-8", "surrogatepass"))

    return push


def _put(format_: str) -> Callable[[_Machine], None]:
    layout = struct.Struct(format_)

    def put(machine: _Machine) -> None:
        machine.memo[layout.unpack_from(machine.data, machine.at)[0]] = machine.stack[-1]
        machine.at += layout.size

    return put


def _constant(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(make())


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def push(machine: _Machine) -> None:
        if len(machine.stack) < count:
            raise Refused("it takes more than there is.")
        items = tuple(machine.stack[-count:])
        del machine.stack[-count:]
        machine.stack.append(items)

    return push


def _proto(machine: _Machine) -> None:
    version = machine.take(1)[0]
    if not 2 <= version <= 5:
        raise Refused(f"it says pickle protocol {version}.")


def _frame(machine: _Machine) -> None:
    machine.take(8)


def _long1(machine: _Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.take(1)[0]), "little", signed=True))


def _append(machine: _Machine) -> None:
    item = machine.stack.pop()
    _list_on_top(machine).append(item)


def _appends(machine: _Machine) -> None:
    items = machine.since_mark()
    _list_on_top(machine).extend(items)


def _setitem(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _dict_on_top(machine).update(_pairs([key, value]))


def _setitems(machine: _Machine) -> None:
    items = machine.since_mark()
    _dict_on_top(machine).update(_pairs(items))


def _list(machine: _Machine) -> None:
    machine.stack.append(machine.since_mark())


def _tuple(machine: _Machine) -> None:
    machine.stack.append(tuple(machine.since_mark()))


def _dict(machine: _Machine) -> None:
    machine.stack.append(_pairs(machine.since_mark()))


def _pairs(items: list[Any]) -> dict[str, Any]:
    """Keys and values. Only texts are keys: the hash of a tuple of tuples of ... would overflow the C stack."""
    keys = items[::2]
    if not all(type(key) is str for key in keys):
        raise Refused("a key is no text.")
    return dict(zip(keys, items[1::2], strict=True))


def _list_on_top(machine: _Machine) -> list[Any]:
    top = machine.stack[-1]
    if type(top) is not list:
        raise Refused("it appends to what is no list.")
    return top


def _dict_on_top(machine: _Machine) -> dict[Any, Any]:
    top = machine.stack[-1]
    if type(top) is not dict:
        raise Refused("it sets an item of what is no table.")
    return top


_STOP, _MARK, _MEMOIZE = ord("."), ord("("), 0x94
_BINGET, _LONG_BINGET, _BININT, _BININT1 = ord("h"), ord("j"), ord("J"), ord("K")
_INT, _INDEX = struct.Struct("<i"), struct.Struct("<I")
_ACTIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _proto,
    0x95: _frame,
    0x8A: _long1,
    0x8C: _text("<B"),  # SHORT_BINUNICODE
    ord("X"): _text("<I"),  # BINUNICODE
    0x8D: _text("<Q"),  # BINUNICODE8
    ord("q"): _put("<B"),  # BINPUT
    ord("r"): _put("<I"),  # LONG_BINPUT
    ord("M"): _small("<H"),  # BININT2
    ord("G"): _small(">d"),  # BINFLOAT
    ord("}"): _constant(dict),
    ord("]"): _constant(list),
    ord(")"): _constant(tuple),
    ord("N"): _constant(lambda: None),
    0x88: _constant(lambda: True),
    0x89: _constant(lambda: False),
    ord("a"): _append,
    ord("e"): _appends,
    ord("s"): _setitem,
    ord("u"): _setitems,
    ord("l"): _list,
    ord("d"): _dict,
    ord("t"): _tuple,
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
}
_CODES: list[Callable[[_Machine], None] | None] = [_ACTIONS.get(code) for code in range(256)]
