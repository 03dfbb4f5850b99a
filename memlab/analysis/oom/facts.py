"""The facts of one out-of-memory and what follows from them: how the device was divided, what was short, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from memlab.allocator.rules import LARGE_SEGMENT, ROUND_LARGE
from memlab.analysis.oom.batch import gathered
from memlab.analysis.oom.moment import Moment
from memlab.analysis.oom.text import Amount, Message, exactly
from memlab.trace.columns import Phase

TOO_MUCH, LIMIT, FRAGMENTATION, OTHERS, FULL, UNKNOWN = "too much", "limit", "fragmentation", "others", "full", ""
"""Why there was no room."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A storage that was alive when the failed cell had ended: the path to it, its category, bytes, and address (0: unknown)."""

    path: str
    category: str
    nbytes: int
    address: int = 0


@dataclass(frozen=True)
class Failure:
    """All that is known of one out-of-memory; "" and None are what is not.

    `message` is what the error said, `moment` what a tracked cell's trace shows. `holders` are the storages alive on the
    device at the end of the cell (`all_named`: every name was looked for), `largest_free_bytes` the largest piece of the
    allocator's cache then. `phase` and `place` tell where the error was raised, `others_bytes` what the driver lists for
    other processes.
    """

    message: Message
    cell: str = ""
    place: str = ""
    phase: Phase = Phase.OTHER
    moment: Moment | None = None
    holders: tuple[Holder, ...] = ()
    all_named: bool = False
    largest_free_bytes: int | None = None
    expandable: bool | None = None
    others_bytes: int | None = None
    gaps: tuple[str, ...] = ()

    @property
    def alive_bytes(self) -> int:
        """What the storages that were found come to."""
        return sum(holder.nbytes for holder in self.holders)

    @property
    def allocated_bytes(self) -> int:
        """What tensors held when memory ran out, as exactly as it is known."""
        if self.moment is not None:
            return self.moment.allocated_bytes
        return self.message.allocated.middle_bytes if self.message.allocated is not None else self.alive_bytes

    def bytes_of(self, category: str) -> int:
        """What a category held: at the moment itself where it was tracked, else at the end of the cell."""
        share = self.moment.share("category") if self.moment is not None else None
        if share is not None:
            return share.get(category, 0)
        return sum(holder.nbytes for holder in self.holders if holder.category == category)

    @property
    def is_in_step(self) -> bool:
        """Whether it ran out in a forward, in the loss behind it, or in backward."""
        if self.moment is None:
            return self.phase in (Phase.FORWARD, Phase.BACKWARD)
        phase = self.moment.phase
        return phase in (Phase.FORWARD, Phase.BACKWARD) or (phase == Phase.OTHER and self.moment.batch.is_in_step)

    @cached_property
    def gathered(self) -> tuple[Holder, ...]:
        """What graphs keep through one of many entries of a list: of earlier steps, as far as can be told."""
        paths = gathered(holder.path for holder in self.holders)
        return tuple(one for one in self.holders if one.path in paths and one.category == "activation")

    def half_the_batch(self) -> Amount:
        """What half of the batch would have saved of what was held then, and of the request itself.

        In an untracked cell it is told from what is alive at its end: surely what only its frames hold; at most whatever else
        graphs keep, too. What is `gathered` was there whatever this step's batch.
        """
        if self.moment is not None:
            return self.moment.batch.saving({holder.address for holder in self.gathered})
        asked, kept = self._tensor_asked(), set(self.gathered)
        mine = [one for one in self.holders if one.category == "activation" and one not in kept]
        surely = sum(one.nbytes for one in mine if one.path.startswith("traceback ")) + asked.low_bytes
        return Amount(surely // 2, (sum(one.nbytes for one in mine) + asked.high_bytes) // 2)

    def _tensor_asked(self) -> Amount:
        """The tensor that was asked for and grows with the batch, without a trace: the message gives the segment for it.

        A segment up to `LARGE_SEGMENT` is shared by smaller tensors; in backward it may be for the gradient of a weight.
        """
        asked = self.message.asked or exactly(0)
        surely = asked.low_bytes - ROUND_LARGE if asked.low_bytes > LARGE_SEGMENT and self.phase == Phase.FORWARD else 0
        return Amount(surely, asked.high_bytes)

    # --- what follows ---------------------------------------------------------------------------------------------------

    @cached_property
    def own_pid(self) -> int | None:
        """The listed process that must be this one, where its own line is missing, as in containers."""
        message = self.message
        if message.process is not None or message.capacity is None or message.reserved is None:
            return None
        room = message.capacity - message.reserved - (message.free or exactly(0))
        least = max(room.high_bytes + 1, message.reserved.low_bytes, 1)
        fits = [pid for pid, size in message.others if size.high_bytes >= least]
        return fits[0] if len(fits) == 1 else None

    @property
    def process(self) -> Amount | None:
        """All that this process had on the device."""
        own = next((size for pid, size in self.message.others if pid == self.own_pid), None)
        return self.message.process or own

    @property
    def held(self) -> Amount | None:
        """What PyTorch's allocator had taken: what is reserved, or where only that is told, what is allocated."""
        return self.message.reserved or self.message.allocated

    @property
    def beside(self) -> Amount | None:
        """This process outside of PyTorch's allocator: the context and libraries."""
        if self.message.elsewhere is not None:
            return self.message.elsewhere
        both = self.process is not None and self.held is not None
        return (self.process - self.held).not_negative() if both else None  # type: ignore[operator]

    @property
    def rest(self) -> Amount | None:
        """What is neither free nor of this process, or, where that is not told apart, not of PyTorch's allocator."""
        known = self.process or self.held
        if self.message.capacity is None or self.message.free is None or known is None:
            return None
        return (self.message.capacity - self.message.free - known).not_negative()

    @property
    def over_limit(self) -> Amount | None:
        """By how much the request would have passed the limit set for the process; negative where it would not."""
        if self.message.allowed is None or self.message.asked is None or self.held is None:
            return None
        return self.held + (self.message.elsewhere or exactly(0)) + self.message.asked - self.message.allowed

    @property
    def shortfall(self) -> Amount | None:
        """By how much the request missed what there was."""
        asked, free = self.message.asked, self.message.free
        if asked is None:
            return None
        if self.verdict == LIMIT and self.over_limit is not None:
            return self.over_limit.not_negative()
        return (asked - free).not_negative() if free is not None else None

    @cached_property
    def verdict(self) -> str:
        """Why there was no room."""
        message, asked = self.message, self.message.asked
        if asked is None:
            return UNKNOWN
        most = message.allowed or message.capacity
        if most is not None and asked.low_bytes > most.high_bytes:
            return TOO_MUCH
        if self.over_limit is not None and self.over_limit.high_bytes > 0:
            fits_device = message.free is None or message.free.high_bytes >= asked.low_bytes
            if fits_device:
                return LIMIT
        if self._is_fragmented(asked):
            return FRAGMENTATION
        if message.free is None:
            return FULL if message.capacity is not None else UNKNOWN
        others = self.others
        missing = (asked - message.free).high_bytes
        return OTHERS if others is not None and 0 < missing <= others.low_bytes else FULL

    def _is_fragmented(self, asked: Amount) -> bool:
        """Whether what was cached would have done: all that was asked, or, where it is a good deal, what was missing."""
        message = self.message
        if message.cached is None:
            return False
        # The tensor's own size, where it is known, would have been enough.
        least = min(asked.low_bytes, self.moment.asked_bytes) if self.moment is not None else asked.low_bytes
        if message.cached.low_bytes >= least:
            return True
        if message.free is None or message.capacity is None:
            return False
        is_much = message.cached.low_bytes >= 0.1 * message.capacity.high_bytes
        return is_much and message.cached.low_bytes >= (asked - message.free).high_bytes

    @property
    def others(self) -> Amount | None:
        """What other processes had on the device, as far as it is told."""
        if self.others_bytes is not None:
            return exactly(self.others_bytes)
        return self.rest if self.process is not None else None
