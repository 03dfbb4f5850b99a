"""Private pools of memory, those of CUDA graphs and of `torch.cuda.MemPool`: who uses them, and how a request names one.

A block belongs to a stream and to a pool and never changes them, so both are one number wherever a stream is named (`in_pool`);
the pool that every program has is 0. The rules are those of graph_pools, graph_pools_freeable and captures_underway in
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_STREAM_BITS = 48
"""The streams of a measured trace are addresses in the program, of 47 bits."""
_STREAM = (1 << _STREAM_BITS) - 1


def in_pool(pool: int, stream: int) -> int:
    """A stream's blocks in a private pool.

    >>> stream_of(in_pool(3, 7)), pool_of(in_pool(3, 7)), in_pool(0, 7)
    (7, 3, 7)
    """
    return pool << _STREAM_BITS | stream


def stream_of(place: int) -> int:
    """The stream of such a number."""
    return place & _STREAM


def pool_of(place: int) -> int:
    """The pool of such a number, 0 for none."""
    return place >> _STREAM_BITS


@dataclass(slots=True)
class PrivatePools:
    """The pools of one device by number: `uses` counts the graphs and objects that keep each, `routes` the open captures and
    contexts.

    While there is a route, other streams' blocks stay pending and the cache is not emptied for an allocation, in any pool. `whole`
    has the pools that do not split their segments (`no_split`).
    """

    uses: dict[int, int] = field(default_factory=dict)
    routes: int = 0
    whole: set[int] = field(default_factory=set)

    def keep(self, pool: int) -> None:
        """One more graph or object uses a pool (createOrIncrefPool)."""
        self.uses[pool] = self.uses.get(pool, 0) + 1

    def keep_whole(self, pool: int) -> None:
        """The same for a pool that does not split its segments."""
        self.whole.add(pool)
        self.keep(pool)

    def begin(self, pool: int) -> None:
        """Requests go to a pool from here on (beginAllocateToPool)."""
        self.keep(pool)
        self.routes += 1

    def end(self, pool: int) -> None:
        """They no longer do (endAllocateToPool); the pool is still in use."""
        self.routes -= 1

    def release(self, pool: int) -> None:
        """One user less; without any, its free memory goes when the cache is emptied (releasePool)."""
        self.uses[pool] -= 1

    def keeps(self, place: int) -> bool:
        """Whether the free blocks of a stream in a pool stay when the cache is emptied."""
        return self.uses.get(pool_of(place), 0) > 0
