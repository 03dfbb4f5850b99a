"""The facts of one out-of-memory error: how the device was divided, what was short, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from memlab.allocator.rules import LARGE_SEGMENT, ROUND_LARGE
from memlab.analysis.oom.moment import Moment, gathered
from memlab.analysis.oom.text import Message
from memlab.trace.columns import Phase
from memlab.units import ByteRange

TOO_MUCH, LIMIT, FRAGMENTATION, OTHERS, FULL, UNKNOWN = "too much", "limit", "fragmentation", "others", "full", ""
"""Why the request failed."""
LARGE_CACHE = 0.1
"""A share of *reserved*: any program has a smaller cache; a larger one suggests fragmentation."""
_NOTHING = ByteRange.exact(0)


@dataclass(frozen=True, slots=True)
class Holder:
    """A storage alive at the end of the failed cell: its path, category, bytes, and address (0: unknown).

    `others` is how many more paths keep it, at least.
    """

    path: str
    category: str
    nbytes: int
    address: int = 0
    others: int = 0


@dataclass(frozen=True, slots=True)
class HeldSegment:
    """A segment of the allocator, and the sizes of its blocks in use, by address."""

    nbytes: int
    used: Mapping[int, int]
    is_expandable: bool = False


@dataclass(frozen=True)
class Failure:
    """All that is known of one out-of-memory error; "" and None mean unknown.

    `message` is what the error said, `moment` what a tracked cell's trace shows. `holders` are the storages alive on the
    device at the end of the cell (`all_named`: every name was looked for), `largest_free_bytes` the largest piece of the
    allocator's cache then, `segments` all that it held. `phase` and `place` are where the error was raised, `others_bytes`
    what the driver lists for other processes, `calls_backward` whether the failed code contains a backward, reached or not.
    `expandable` is whether expandable segments are on, `fits_expandable` whether with them the request would have fitted.
    `provenance` is "measured", "simulated" or "predicted"; without `has_context` CUDA found no room for this process's context.
    `goes_on` is whether the process does after the error; else what would help the next cell is no advice.
    """

    message: Message
    cell: str = ""
    place: str = ""
    phase: Phase = Phase.OTHER
    moment: Moment | None = None
    holders: tuple[Holder, ...] = ()
    all_named: bool = False
    largest_free_bytes: int | None = None
    segments: tuple[HeldSegment, ...] = ()
    expandable: bool | None = None
    fits_expandable: bool | None = None
    others_bytes: int | None = None
    calls_backward: bool = False
    has_context: bool = True
    provenance: str = "measured"
    goes_on: bool = True
    gaps: tuple[str, ...] = ()

    def given_back(self, addresses: Collection[int]) -> int:
        """What goes back to the driver for certain once these blocks are free: a segment with any other block stays.

        An expandable segment returns pages; those at the ends of a block may hold another block too.
        """
        count = 0
        for one in self.segments:
            freed = [size for address, size in one.used.items() if address in addresses]
            if one.is_expandable:
                count += sum(max(size - 2 * LARGE_SEGMENT, 0) for size in freed)
            elif freed and len(freed) == len(one.used):
                count += one.nbytes
        return count

    def pinned_bytes(self, released: Collection[int], sizes: Collection[int]) -> int:
        """The free pieces of segments in which something stays after these blocks are free: what is larger finds no room.

        Blocks of these sizes that nothing is known to hold count as freed, too: workspaces that are given back.
        """
        known, count = {one.address for one in self.holders}, 0
        for one in self.segments:
            goes = (
                address in released or (size in sizes and address not in known) for address, size in one.used.items()
            )
            stays = sum(size for size, gone in zip(one.used.values(), goes, strict=True) if not gone)
            count += one.nbytes - stays if stays and not one.is_expandable else 0
        return count

    @property
    def alive_bytes(self) -> int:
        """The sum of the storages found."""
        return sum(holder.nbytes for holder in self.holders)

    @property
    def allocated_bytes(self) -> int:
        """What tensors held when memory ran out, as exactly as it is known."""
        if self.moment is not None:
            return self.moment.allocated_bytes
        return self.message.allocated.middle if self.message.allocated is not None else self.alive_bytes

    def bytes_of(self, category: str) -> int:
        """What a category held: when memory ran out if the cell was tracked, else at its end."""
        share = self.moment.share("category") if self.moment is not None else None
        if share is not None:
            return share.get(category, 0)
        return sum(holder.nbytes for holder in self.holders if holder.category == category)

    @property
    def raised_in(self) -> Phase:
        """The phase in which memory ran out."""
        return self.moment.phase if self.moment is not None else self.phase

    @property
    def is_in_step(self) -> bool:
        """Whether it ran out in a forward, in the loss after it, or in backward."""
        is_after_forward = self.moment is not None and self.moment.batch.is_in_step and self.raised_in == Phase.OTHER
        return self.raised_in in (Phase.FORWARD, Phase.BACKWARD) or is_after_forward

    @cached_property
    def gathered(self) -> tuple[Holder, ...]:
        """What graphs hold through entries of a long list: most likely those of earlier steps."""
        paths = gathered(holder.path for holder in self.holders)
        return tuple(one for one in self.holders if one.path in paths and one.category == "activation")

    @property
    def trains(self) -> bool:
        """Whether there is a sign of training: a backward, gradients, or the state of an optimizer."""
        has_backward = self.calls_backward or (self.moment is not None and self.moment.has_backward)
        return has_backward or any(self.bytes_of(category) for category in ("gradient", "optimizer"))

    @cached_property
    def listed(self) -> tuple[Holder, ...]:
        """What long lists hold of earlier steps, and where nothing is trained of earlier forwards."""
        if self.moment is None:
            return self.gathered
        old = self.moment.before_step if self.trains else self.moment.before_pass
        paths = gathered(holder.path for holder in self.holders)
        return tuple(one for one in self.holders if one.path in paths and one.address in old)

    @property
    def is_full_of_tensors(self) -> bool:
        """Whether live tensors took most of the device, so that neither the cache nor other processes matter."""
        held, capacity = self.message.allocated, self.message.capacity
        return bool(self.verdict == FULL and held and capacity and 2 * held.low >= capacity.high)

    def half_the_batch(self) -> ByteRange:
        """What half of the batch would have saved of what was held, and of the request itself.

        In an untracked cell it follows from what is alive at its end: at least what only its frames hold; at most also
        whatever else graphs hold. What is `gathered` does not depend on this step's batch.
        """
        if self.moment is not None:
            return self.moment.batch.saving({holder.address for holder in self.gathered})
        asked, kept = self.message.asked or _NOTHING, set(self.gathered)
        # The message gives the segment, and one up to `LARGE_SEGMENT` is shared by smaller tensors; in backward it may be
        # for the gradient of a weight.
        is_batch = asked.low > LARGE_SEGMENT and self.phase == Phase.FORWARD
        mine = [one for one in self.holders if one.category == "activation" and one not in kept]
        surely = sum(one.nbytes for one in mine if one.path.startswith("traceback "))
        surely += asked.low - ROUND_LARGE if is_batch else 0
        return ByteRange(surely // 2, (sum(one.nbytes for one in mine) + asked.high) // 2)

    # --- what follows ---------------------------------------------------------------------------------------------------

    @cached_property
    def own_pid(self) -> int | None:
        """The listed process that must be this one, where its own line is missing, as in containers."""
        message = self.message
        if message.process is not None or message.capacity is None or message.reserved is None:
            return None
        room = message.capacity - message.reserved - (message.free or _NOTHING)
        least = max(room.high + 1, message.reserved.low, 1)
        fits = [pid for pid, size in message.others if size.high >= least]
        return fits[0] if len(fits) == 1 else None

    @property
    def process(self) -> ByteRange | None:
        """All that this process had on the device."""
        own = next((size for pid, size in self.message.others if pid == self.own_pid), None)
        return self.message.process or own

    @property
    def held(self) -> ByteRange | None:
        """What PyTorch's allocator held: reserved, or allocated if only that is known."""
        return self.message.reserved or self.message.allocated

    @property
    def beside(self) -> ByteRange | None:
        """This process outside PyTorch's allocator: the context and libraries."""
        if self.message.elsewhere is not None or self.process is None or self.held is None:
            return self.message.elsewhere
        return (self.process - self.held).at_least(0)

    @property
    def rest(self) -> ByteRange | None:
        """What is neither free nor this process's, or, where processes are not distinguished, not PyTorch's."""
        known = self.process or self.held
        if self.message.capacity is None or self.message.free is None or known is None:
            return None
        return (self.message.capacity - self.message.free - known).at_least(0)

    @property
    def others(self) -> ByteRange | None:
        """What other processes held on the device, as far as known."""
        if self.others_bytes is not None:
            return ByteRange.exact(self.others_bytes)
        return self.rest if self.process is not None else None

    @property
    def over_limit(self) -> ByteRange | None:
        """By how much the request would have exceeded the limit of the process; negative if it would not."""
        if self.message.allowed is None or self.message.asked is None or self.held is None:
            return None
        return self.held + (self.message.elsewhere or _NOTHING) + self.message.asked - self.message.allowed

    @property
    def shortfall(self) -> ByteRange | None:
        """By how much the request exceeded what was available."""
        asked, free = self.message.asked, self.message.free
        if asked is not None and self.verdict == LIMIT and self.over_limit is not None:
            return self.over_limit.at_least(0)
        return (asked - free).at_least(0) if asked is not None and free is not None else None

    @cached_property
    def verdict(self) -> str:
        """Why the request failed."""
        message, asked, free = self.message, self.message.asked, self.message.free
        if asked is None:
            return UNKNOWN
        most = message.allowed or message.capacity
        if most is not None and asked.low > most.high:
            return TOO_MUCH
        is_over = self.over_limit is not None and self.over_limit.high > 0
        if is_over and (free is None or free.high >= asked.low):
            return LIMIT
        if self._is_fragmented(asked):
            return FRAGMENTATION
        if free is None:
            return FULL if message.capacity is not None else UNKNOWN
        return OTHERS if self.others is not None and 0 < (asked - free).high <= self.others.low else FULL

    def _is_fragmented(self, asked: ByteRange) -> bool:
        """Whether the cache is large, and would have been enough for the request or the shortfall.

        A small cache is not fragmentation, even if it is larger than the request: live tensors fill the device.
        """
        message = self.message
        cached, reserved, free, capacity = message.cached, message.reserved, message.free, message.capacity
        if cached is None or reserved is None or cached.low < LARGE_CACHE * reserved.high:
            return False
        # The tensor's own size, where it is known, would have been enough.
        least = min(asked.low, self.moment.asked_bytes) if self.moment is not None else asked.low
        if cached.low >= least or free is None or capacity is None:
            return bool(cached.low >= least)
        return bool(cached.low >= LARGE_CACHE * capacity.high and cached.low >= (asked - free).high)
