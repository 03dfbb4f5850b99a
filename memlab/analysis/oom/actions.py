"""What could be done about an out-of-memory, each with the bytes it would give; only what the facts support.

What is enough comes before what may be and what is not, then what was measured before what is estimated.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memlab.analysis.oom.facts import FRAGMENTATION, LIMIT, TOO_MUCH, Failure, Holder
from memlab.analysis.oom.text import Amount, exactly
from memlab.trace.columns import Phase
from memlab.units import GiB, MiB, format_bytes

MOST = 3
"""No more advice than can be tried."""
TRACEBACK = "traceback"
"""How the paths of storages begin that only a failed cell's frames keep."""
LEAST_OUTPUT_BYTES = 1 << 16
"""What an output has to keep alone to be removed by a release."""
OUTPUTS = "outputs"
"""What stands for `Out[7]`, `_7`, `_` and their kin."""

_ROOT = re.compile(r"[^\W\d]\w*")
_OUTPUT = re.compile(r"(?:Out|_oh)\[(\d+)\]|_(\d+)(?!\w)|(_{1,3})(?!\w)")
_NEEDED = ("parameter", "buffer", "optimizer", "gradient")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do and what it gives; `is_enough` says whether that covers what was short (None: not known)."""

    text: str
    gives: Amount
    is_estimate: bool = False
    is_enough: bool | None = None
    may_give_more: bool = False


def root_of(path: str) -> str:
    """What a path begins with: a variable, "traceback" for a failed cell's frames, "outputs" for Out and its kin.

    >>> root_of("model.fc.weight"), root_of("losses[17]"), root_of("traceback of cell 5 -> step() -> big"), root_of("Out[3]")
    ('model', 'losses', 'traceback', 'outputs')
    """
    if path.startswith((f"{TRACEBACK} ", "sys.last_")):
        return TRACEBACK
    if _OUTPUT.match(path):
        return OUTPUTS
    found = _ROOT.match(path)
    return found[0] if found else ""


def actions(failure: Failure) -> tuple[Action, ...]:
    """At most three things to do, the best first."""
    proposals = _WHATEVER_WAS_ASKED if failure.verdict == TOO_MUCH else _PROPOSALS
    found = [action for propose in proposals for action in propose(failure) if action.gives.high_bytes > 0]
    return tuple(sorted((_judged(action, failure) for action in found), key=_rank))[:MOST]


def _judged(action: Action, failure: Failure) -> Action:
    short = failure.shortfall
    if short is None or failure.verdict == TOO_MUCH:
        return action
    is_enough = True if action.gives.low_bytes >= short.high_bytes else None
    if action.gives.high_bytes < short.low_bytes and not action.may_give_more:
        is_enough = False
    return dataclasses.replace(action, is_enough=is_enough)


def _rank(action: Action) -> tuple[int, bool, int]:
    return (True, None, False).index(action.is_enough), action.is_estimate, -action.gives.middle_bytes


# --- proposals ------------------------------------------------------------------------------------------------------------


def _release(failure: Failure) -> Iterator[Action]:
    frames = sum(holder.nbytes for holder in failure.holders if root_of(holder.path) == TRACEBACK)
    outputs: dict[str | None, int] = {}
    for holder in failure.holders:
        found = _OUTPUT.match(holder.path)
        if found is not None:
            name = found[1] or found[2] or found[3]
            outputs[name] = outputs.get(name, 0) + holder.nbytes
    held = {TRACEBACK: frames, OUTPUTS: sum(size for size in outputs.values() if size >= LEAST_OUTPUT_BYTES)}
    parts = [f"{words} {format_bytes(held[root])}" for root, words in _RELEASED.items() if held[root]]
    text = f"`%memoom release`: lets go of {' and '.join(parts)}, for the next cell"
    yield Action(text, exactly(sum(held.values())))


_RELEASED = {
    TRACEBACK: "what only the failed cell's frames hold,",
    OUTPUTS: "outputs (`Out`, `_`) that alone keep tensors,",
}


def _garbage(failure: Failure) -> Iterator[Action]:
    """Where every name was looked for, what none leads to is garbage in circles, or held by C++."""
    if failure.all_named:
        size = sum(holder.nbytes for holder in failure.holders if not holder.path)
        text = "`gc.collect()`: no name leads to these; most likely objects that refer to each other and nobody needs"
        yield Action(text, Amount(0, size), is_estimate=True)


def _names(failure: Failure) -> Iterator[Action]:
    """The largest name that holds nothing a model or optimizer is made of."""
    groups: dict[str, list[Holder]] = {}
    for holder in failure.holders:
        groups.setdefault(root_of(holder.path), []).append(holder)
    loose = {
        root: sum(holder.nbytes for holder in group)
        for root, group in groups.items()
        if root not in ("", TRACEBACK, OUTPUTS) and not any(holder.category in _NEEDED for holder in group)
    }
    root = max(loose, key=lambda name: loose[name], default=None)
    if root is None or loose[root] < max(MiB, 0.01 * failure.allocated_bytes):
        return
    yield Action(_advice(root, groups[root], loose[root]), exactly(loose[root]))


def _advice(root: str, group: list[Holder], size: int) -> str:
    """What to do about a name, by what most of its bytes are."""
    count = f"{len(group)} storages" if len(group) > 1 else "a storage"
    if 2 * sum(holder.nbytes for holder in group if f" {TRACEBACK} of " in holder.path) > size:
        return f"`{root}` keeps an error whose frames hold {count}: `del {root}`"
    if 2 * sum(holder.nbytes for holder in group if holder.category == "activation") > size:
        return f"`{root}` keeps {count}, most of it autograd graphs: store `.item()` or `.detach()`, or `del {root}`"
    return f"`{root}` keeps {count}: `del {root}` if you no longer need it"


def _fragmentation(failure: Failure) -> Iterator[Action]:
    """Segments that grow leave fewer pieces over; pieces between living tensors stay what they are, so it may give nothing."""
    if failure.verdict != FRAGMENTATION or failure.expandable or failure.message.backend not in ("CUDA", "HIP"):
        return
    cached = failure.message.cached or exactly(0)
    conf = f"PYTORCH_{failure.message.backend}_ALLOC_CONF=expandable_segments:True"
    yield Action(f"restart with `{conf}`: fewer pieces are left over", Amount(0, cached.high_bytes), is_estimate=True)


def _gradients(failure: Failure) -> Iterator[Action]:
    if _phase(failure) == Phase.FORWARD:
        text = "`optimizer.zero_grad()` before the forward: gradients were held and no backward ran (not while accumulating)"
        yield Action(text, exactly(failure.bytes_of("gradient")))


def _no_grad(failure: Failure) -> Iterator[Action]:
    """Only where a whole tracked cell ran forwards and no backward."""
    moment = failure.moment
    if moment is not None and not moment.has_backward and moment.phase == Phase.FORWARD:
        text = (
            "`with torch.inference_mode():` if this needs no gradients: activations were kept and no backward had come"
        )
        yield Action(text, exactly(failure.bytes_of("activation")), is_estimate=True)


def _smaller_batch(failure: Failure) -> Iterator[Action]:
    """Only what this step made counts: what a list or an earlier graph keeps stays, whatever the batch.

    A list may also be of this step (an RNN in a loop of the user's): then it saves more, so it is not called too little.
    """
    saves = failure.half_the_batch()
    wanted = failure.allocated_bytes + (failure.message.asked or exactly(0)).middle_bytes
    if failure.is_in_step and saves.high_bytes >= 0.1 * wanted:
        text = "half the batch, or checkpointing of half the layers: half of what this step made and asked for"
        text += ", without what lists keep" if failure.gathered else ""
        yield Action(text, saves, is_estimate=True, may_give_more=bool(failure.gathered))


def _optimizer(failure: Failure) -> Iterator[Action]:
    if failure.moment is not None and _phase(failure) == Phase.OPTIMIZER:
        text = "`foreach=False` or `fused=True` in the optimizer: its step held temporaries for all parameters at once"
        yield Action(text, exactly(failure.moment.step_bytes), is_estimate=True)


def _others(failure: Failure) -> Iterator[Action]:
    """Processes that are listed; what is only told by subtraction holds the driver's part too, so it must be a lot."""
    text = "end other processes on the device (`nvidia-smi` lists them; often kernels of other notebooks)"
    listed = [size for pid, size in failure.message.others if pid != failure.own_pid]
    if failure.others_bytes is not None:
        yield Action(text, exactly(failure.others_bytes))
    elif listed:
        yield Action(text, sum(listed, exactly(0)))
    elif failure.others is not None and failure.others.low_bytes >= GiB:
        yield Action(text, failure.others, is_estimate=True)


def _limit(failure: Failure) -> Iterator[Action]:
    message = failure.message
    if failure.verdict == LIMIT and message.allowed is not None and message.free is not None:
        text = "raise the limit: `torch.cuda.set_per_process_memory_fraction(1.0)`"
        yield Action(text, message.free)


def _phase(failure: Failure) -> Phase:
    return failure.moment.phase if failure.moment is not None else failure.phase


_PROPOSALS: tuple[Callable[[Failure], Iterator[Action]], ...] = (
    _release,
    _garbage,
    _names,
    _fragmentation,
    _gradients,
    _no_grad,
    _smaller_batch,
    _optimizer,
    _others,
    _limit,
)
_WHATEVER_WAS_ASKED = (_release, _garbage, _smaller_batch)
"""What still makes sense where no room that could be made would do: it helps the next cell, or asks for less."""
