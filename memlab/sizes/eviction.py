"""Stand-ins that a forward left outside of its model, in a global list or a cache: found, and taken out again.

They would meet real tensors later. An object that holds one as an attribute keeps it, and is named.
"""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict, deque
from types import FrameType
from typing import Any

from memlab.seams.fakes import FakeTensor, FakeTensorMode
from memlab.sizes.watch import Packed

_ROUNDS = 3
"""Through how many tuples a list or dict is looked for."""


def evict(mode: FakeTensorMode) -> list[str]:
    """Take the stand-ins of a mode out of lists, dicts, sets and function caches; the classes of what still holds some."""
    if not _left(mode):
        return []
    gc.collect()
    things: list[Any] = _left(mode)
    for _ in range(_ROUNDS if things else 0):
        things = _take_out(things)
    del things
    return _holders(_left(mode))


def _left(mode: FakeTensorMode) -> list[Any]:
    """The living stand-ins: an instance refers to its class, and no object is asked what it claims to be."""
    return [thing for thing in gc.get_referrers(FakeTensor) if type(thing) is FakeTensor and thing.fake_mode is mode]


def _take_out(things: list[Any]) -> list[Any]:
    """Take things out of the containers that hold them; the tuples among those, which can only go as a whole."""
    numbers = {id(thing) for thing in things}
    tuples = []
    for holder in gc.get_referrers(*things) if things else ():
        if type(holder) is tuple:
            tuples.append(holder)
        elif holder is not things:
            _empty(holder, numbers)
    return tuples


def _empty(holder: Any, numbers: set[int]) -> None:
    kind = type(holder)
    if kind in (dict, OrderedDict, defaultdict):
        for key in [key for key, value in list(holder.items()) if id(value) in numbers]:
            if "__builtins__" in holder:  # a name in somebody's code, which may ask for it
                holder[key] = None
            else:
                del holder[key]
    elif kind in (list, deque):
        for place in reversed(range(len(holder))):
            if id(holder[place]) in numbers:
                del holder[place]
    elif kind is set:
        for thing in [thing for thing in holder if id(thing) in numbers]:
            holder.discard(thing)
    elif kind.__name__ == "_lru_cache_wrapper":
        holder.cache_clear()


def _holders(left: list[Any]) -> list[str]:
    """The classes of what refers to these, apart from each other and from the code that runs now."""
    kinds = {type(holder) for holder in (gc.get_referrers(*left) if left else ()) if holder is not left}
    return sorted(kind.__name__ for kind in kinds - {FakeTensor, FrameType, Packed}) or ["unknown"] * bool(left)
