"""What to do after an out-of-memory error: what the facts support, and ways out that a prediction of the cell verified.

"Enough for this request" appears only where the freed bytes are known not to be needed again when the same cell is run
again, and where the allocator can return them: a segment in which anything is left stays. Actions that are enough come
first, then those that may be; measured ones before estimated ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from memlab.analysis.oom.facts import FRAGMENTATION, LIMIT, TOO_MUCH, Failure, Holder
from memlab.trace.columns import Phase
from memlab.units import ByteRange, GiB, MiB, format_bytes, one_line

MOST = 3
"""At most this many actions."""
TRACEBACK = "traceback"
"""The prefix of reference paths through a failed cell's frames."""
LEAST_OUTPUT_BYTES = 1 << 16
"""An output is released only if it alone holds at least this much."""
OF_ERRORS, OUTPUTS = "(errors)", "(outputs)"
"""The common names of what only a failed cell's frames hold, and of `Out[7]`, `_7`, `_` and so on; no variable has such a name."""
LEAST_BYTES, LEAST_SHARE = MiB, 0.01
"""Less than this, and less than this share of what is allocated, is worth no advice, unless it is enough."""

_ROOT = re.compile(r"[^\W\d]\w*")
_VARIABLE = re.compile(r"(?:([^\W\d]\w*)\(\) -> )?([^\W\d]\w*)(?![\w(])")
_OF_CELL = re.compile(rf"{TRACEBACK} of cell (\d+)\b")
_OUTPUT = re.compile(r"(?:Out|_oh)\[(\d+)\]|_(\d+)(?!\w)|(_{1,3})(?!\w)")
_NEEDED = ("parameter", "buffer", "optimizer", "gradient")


@dataclass(frozen=True, slots=True)
class Action:
    """One action and the bytes it frees.

    `counts` is the part known to stay free when the same cell runs again, `addresses` those of its blocks (None: it has
    none); `is_enough` is whether that covers the shortfall (None: not known).
    """

    text: str
    gives: ByteRange
    is_estimate: bool = False
    is_enough: bool | None = None
    may_give_more: bool = False
    counts: ByteRange | None = None
    addresses: frozenset[int] | None = None


def root_of(path: str) -> str:
    """The root of a path: a variable, "(errors)" for a failed cell's frames, "(outputs)" for Out and so on.

    >>> root_of("model.fc.weight"), root_of("losses[17]"), root_of("traceback of cell 5 -> step() -> big"), root_of("Out[3]")
    ('model', 'losses', '(errors)', '(outputs)')
    """
    if path.startswith((f"{TRACEBACK} ", "sys.last_")):
        return OF_ERRORS
    if _OUTPUT.match(path):
        return OUTPUTS
    found = _ROOT.match(path)
    return found[0] if found else ""


def actions(failure: Failure) -> tuple[Action, ...]:
    """At most three actions, the best first."""
    short, is_too_much = failure.shortfall, failure.verdict == TOO_MUCH
    # Where no action frees enough, it still makes sense to help the next cell, or to request less.
    proposed = [*_of_names(failure), *_of_the_batch(failure)]
    if not is_too_much:
        names = _of_large_names(failure) if failure.goes_on else _of_variables(failure)
        proposed += [*names, *_of_the_step(failure), *_of_the_device(failure)]
    least = max(LEAST_BYTES, LEAST_SHARE * failure.allocated_bytes)
    found = []
    for action in proposed:
        counts = action.counts or ByteRange(0, action.gives.high)
        is_enough, given_back = None, counts.low
        if action.addresses is not None and failure.segments:
            given_back = min(given_back, failure.given_back(action.addresses))
        if short is not None and not is_too_much and given_back >= short.high:
            is_enough = True
        elif short is not None and not is_too_much and counts.high < short.low and not action.may_give_more:
            is_enough = False
        if action.gives.high >= least or (is_enough and action.gives.high > 0):
            found.append(dataclasses.replace(action, is_enough=is_enough))
    found.sort(key=lambda one: ((True, None, False).index(one.is_enough), one.is_estimate, -one.gives.middle))
    return tuple(found[:MOST])


# --- proposals ------------------------------------------------------------------------------------------------------------


def _known(text: str, count: ByteRange | int, addresses: frozenset[int] | None = None) -> Action:
    """What is certain to be free, also when the same cell runs again."""
    gives = count if isinstance(count, ByteRange) else ByteRange.exact(count)
    return Action(text, gives, counts=gives, addresses=addresses)


def _addresses(holders: Iterable[Holder]) -> frozenset[int]:
    return frozenset(one.address for one in holders)


def _bytes(holders: Iterable[Holder]) -> int:
    return sum(one.nbytes for one in holders)


def _of_names(failure: Failure) -> Iterator[Action]:
    own = re.search(r"\[(\d+)\]", failure.cell)
    frames, earlier = list[Holder](), list[Holder]()
    outputs: defaultdict[str, list[Holder]] = defaultdict(list)
    for holder in failure.holders:
        if root_of(holder.path) == OF_ERRORS:
            cell = _OF_CELL.match(holder.path)
            frames.append(holder)
            earlier += [holder] if own and cell and cell[1] != own[1] else []
        elif output := _OUTPUT.match(holder.path):
            outputs[output[1] or output[2] or output[3]].append(holder)
    kept = [one for group in outputs.values() for one in group if _bytes(group) >= LEAST_OUTPUT_BYTES]
    parts = [f"what only the failed cell's frames hold, {format_bytes(_bytes(frames))}"] if frames else []
    parts += [f"outputs (`Out`, `_`) that alone hold tensors, {format_bytes(_bytes(kept))}"] if kept else []
    # What the failed cell's own frames hold is needed again when it runs again, so it does not count.
    again = "; the same cell needs most of it again" if len(frames) > len(earlier) else ""
    text = f"`%memoom release`: frees {' and '.join(parts)}, for the next cell{again}"
    counts = [*kept, *earlier]
    gives = ByteRange.exact(_bytes([*frames, *kept]))
    if failure.goes_on:
        yield Action(text, gives, counts=ByteRange.exact(_bytes(counts)), addresses=_addresses(counts))
    if failure.all_named:  # unreferenced storages are garbage in reference cycles, or held by C++
        size = _bytes(holder for holder in failure.holders if not holder.path)
        text = "`gc.collect()`: no name leads to these; most likely unneeded objects that refer to each other"
        yield Action(text, ByteRange(0, size), is_estimate=True)


def _of_the_batch(failure: Failure) -> Iterator[Action]:
    """Only what this step made counts: what a list or an earlier graph holds does not depend on the batch.

    A list may belong to this step (an RNN in a user's loop): then it saves more, so it is never called "not enough".
    """
    saves, moment = failure.half_the_batch(), failure.moment
    wanted = failure.allocated_bytes + (failure.message.asked or ByteRange.exact(0)).middle
    # With smaller batches a list holds as much of the same data, after more of them.
    is_of_lists = 2 * _bytes(failure.listed) >= wanted
    if failure.is_in_step and saves.high >= 0.1 * wanted and not is_of_lists:
        text = "half the batch: half of what this step made and asked for"
        kept = [one for one in failure.gathered if moment is None or one.address in moment.before_pass]
        text += ", without what lists keep" if kept else ""
        text += ", if that grows with the batch; later requests of the step are not counted"
        if not failure.goes_on and failure.message.capacity is not None and failure.message.label.startswith("cuda"):
            card = format_bytes(failure.message.capacity.middle).replace(" ", "")
            text += f" and may fail then: `memlab predict --card {card} SCRIPT ARGS` counts them, without a GPU"
        counts = saves if moment is not None else None
        yield Action(text, saves, is_estimate=True, may_give_more=bool(kept), counts=counts)


def _of_large_names(failure: Failure) -> Iterator[Action]:
    """The largest name that holds no part of a model or optimizer, to delete before the next cell.

    What a running function holds has none to delete.
    """
    groups: defaultdict[str, list[Holder]] = defaultdict(list)
    for holder in failure.holders:
        groups[root_of(holder.path)].append(holder)
    loose = {}
    for root, group in groups.items():
        is_name = root not in ("", OF_ERRORS, OUTPUTS) and not group[0].path.startswith(f"{root}() ")
        if is_name and not any(holder.category in _NEEDED for holder in group):
            loose[root] = _bytes(group)
    root = max(loose, key=lambda name: loose[name], default="")
    if not root:
        return
    group, size = groups[root], loose[root]
    # What an earlier cell holds is freed for good; any other name may belong to the failed cell itself. A list is filled
    # again when that runs again, but without graphs if they are not stored.
    old = failure.moment.preexisting if failure.moment is not None else frozenset()
    graphs = {one for one in group if ".grad_fn" in one.path}
    count = f"{len(group)} storages" if len(group) > 1 else "a storage"
    what, again = f"`{root}` keeps {count}: `del {root}` if you no longer need it", set[Holder]()
    if 2 * _bytes(one for one in group if f" {TRACEBACK} of " in one.path) > size:
        what = f"`{root}` keeps an error whose frames hold {count}: `del {root}`"
    elif 2 * _bytes(graphs) > size:
        what = f"`{root}` keeps {count}, most of it autograd graphs: `del {root}`, and store `.item()` or `.detach()`"
        again = graphs & {*failure.gathered}
    counted = [one for one in group if one.address in old or one in again]
    what += ", then `%memoom release` for what the failed cell's frames hold of it" if failure.cell else ""
    is_shared = any(one.others for one in group)  # what a graph holds is found once, whatever leads to the graph
    what += "; `%memwho` counts the other names that keep it" if is_shared else ""
    counts = 0 if is_shared else _bytes(counted)
    gives, addresses = ByteRange(0 if is_shared else size, size), _addresses(counted)
    yield Action(what, gives, counts=ByteRange(counts, size), addresses=addresses)


def _of_variables(failure: Failure) -> Iterator[Action]:
    """The variable of a script, or of one of its functions, that holds most of what earlier steps made, to hold less.

    What the step that failed had made it needs, except for graphs in lists if that is no training step.
    """
    moment, lists = failure.moment, {*failure.listed, *failure.gathered}
    old = frozenset[int]()
    if moment is not None:
        old = moment.before_step if failure.trains else moment.before_pass
    groups: defaultdict[tuple[str, str], list[Holder]] = defaultdict(list)
    for holder in failure.holders:
        found = _VARIABLE.match(holder.path)
        is_meant = holder.address in old or holder in lists
        if is_meant and found is not None and holder.category not in _NEEDED:
            groups[found[2], found[1] or ""].append(holder)
    if not groups:
        return
    (name, function), group = max(groups.items(), key=lambda item: _bytes(item[1]))
    graphs = [one for one in group if ".grad_fn" in one.path]
    is_list, is_certain = any(one in lists for one in group), all(one.address in old for one in group)
    called = f"`{name}` of {function}()" if function else f"`{name}`"
    what = f"{called} keeps {f'{len(group)} storages' if len(group) > 1 else 'a storage'}"
    what += " of earlier steps" if is_certain else ""
    freed = group
    if 2 * _bytes(graphs) > _bytes(group):
        what += ", most of it autograd graphs: "
        what += "store `.detach()` or `.item()` in it" if is_list else f"`del {name}` before the next step"
        what += "" if is_certain else ", if no backward goes through them"
        freed = graphs if is_list else group
    else:
        them = "them" if len(group) > 1 else "it"
        what += f": keep {them} on the CPU (`.cpu()`), or `del {name}` if no longer needed"
    # Another variable may lead to the same graph, and is not found then.
    is_shared = any(one.others for one in freed)
    sure = [] if is_shared and graphs else [one for one in freed if not one.others]
    gives, addresses = ByteRange(_bytes(sure), _bytes(freed)), _addresses(sure)
    counts = gives if is_certain else None
    yield Action(what, gives, is_estimate=not is_certain, counts=counts, addresses=addresses if is_certain else None)


def _of_the_step(failure: Failure) -> Iterator[Action]:
    message, moment = failure.message, failure.moment
    if failure.raised_in == Phase.FORWARD:
        text = "`optimizer.zero_grad()` before the forward: gradients were held and no backward ran (not while accumulating)"
        held = _addresses(one for one in failure.holders if one.category == "gradient")
        yield _known(text, failure.bytes_of("gradient"), held)
    # Only if a tracked cell ran forwards and shows no sign of training: no backward, gradient or optimizer.
    if moment is not None and not failure.trains and moment.phase == Phase.FORWARD:
        why = "activations were kept and no backward had come"
        text = f"`with torch.inference_mode():` if this needs no gradients: {why}"
        # The results that a list keeps are kept without gradients as well.
        results = _bytes(one for one in failure.listed if ".grad_fn" not in one.path)
        yield Action(text, ByteRange.exact(max(failure.bytes_of("activation") - results, 0)), is_estimate=True)
    # With a pasted message it is unknown which tensors were alive, but known that they filled the device.
    is_pasted = not (failure.cell or failure.place or failure.holders or moment)
    if is_pasted and failure.is_full_of_tensors and message.allocated is not None:
        text = (
            "fewer live tensors: `torch.inference_mode()` where no backward follows; in training a smaller batch, checkpointing "
            "or mixed precision. The cache is small, so `expandable_segments` would not help"
        )
        yield Action(text, ByteRange(0, message.allocated.high), is_estimate=True)
    if moment is not None and failure.raised_in == Phase.OPTIMIZER:
        text = (
            "`fused=True` in the optimizer (Adam, AdamW, SGD, Adagrad): its step held temporaries for all parameters at once; "
            "`foreach=False` holds those of one at a time"
        )
        yield Action(text, ByteRange.exact(moment.step_bytes), is_estimate=True)


def _of_the_device(failure: Failure) -> Iterator[Action]:
    message = failure.message
    # Growing segments leave fewer free pieces; those between live tensors remain, so it may free nothing.
    fits = failure.fits_expandable
    is_settable = not failure.expandable and fits is not False and message.backend in ("CUDA", "HIP")
    if failure.verdict == FRAGMENTATION and is_settable and message.cached is not None:
        text = f"restart with `PYTORCH_{message.backend}_ALLOC_CONF=expandable_segments:True`: less fragmentation"
        text += "; what this process allocated, replayed with it, leaves room for this request" if fits else ""
        least = failure.shortfall.high if fits and failure.shortfall is not None else 0
        gives = ByteRange(least, max(message.cached.high, least))
        yield Action(text, gives, is_estimate=True, counts=gives if fits else None)
    # Listed processes; a figure found by subtraction includes the driver's part, so it must be large.
    # A simulated GPU has no `nvidia-smi`.
    lists = "torch.cuda.list_gpu_processes()" if failure.provenance == "simulated" else "nvidia-smi"
    text = f"end other processes on the device (`{lists}` lists them; often kernels of other notebooks)"
    listed = [size for pid, size in message.others if pid != failure.own_pid]
    if failure.others_bytes is not None:
        yield _known(text, failure.others_bytes)
    elif listed:
        yield _known(text, sum(listed, ByteRange.exact(0)))
    elif failure.others is not None and failure.others.low >= GiB:
        yield Action(text, failure.others, is_estimate=True)
    if failure.verdict == LIMIT and message.allowed is not None and message.free is not None:
        yield _known("raise the limit: `torch.cuda.set_per_process_memory_fraction(1.0)`", message.free)


Kind = Literal["free", "technique", "batch", "slower", "gpu"]
_BY_PRICE: tuple[Kind, ...] = ("free", "technique", "batch", "slower", "gpu")


@dataclass(frozen=True, slots=True)
class WayOut:
    """One change, what the cell needs of the device with it (predicted), and what it costs.

    `cell` is the changed text of the cell, as it was predicted, and `diff` the change, where it could be written into it; where
    it could not, `code` says how a technique is written.
    """

    kind: Kind
    change: str
    needs: ByteRange
    price: str = ""
    diff: str = ""
    cell: str = ""
    code: str = ""

    @property
    def cost(self) -> int:
        """The rank of its price."""
        return _BY_PRICE.index(self.kind)


@dataclass(frozen=True, slots=True)
class WaysOut:
    """What the whole cell needs, and what would have fitted.

    `needs` is what the cell needs as it is, run again after `%memoom release`, of the `limit_bytes` of `card` that this process
    can have; None if it could not be predicted, and `problem` says why. `ways` are sorted by price, `not_enough` what was
    tried and does not fit. `state` says what the search is doing, or why it ended before everything was tried.
    """

    card: str
    limit_bytes: int
    needs: ByteRange | None = None
    ways: tuple[WayOut, ...] = ()
    not_enough: tuple[str, ...] = ()
    state: str = ""
    problem: str = ""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The need of the whole cell, and what is left to say."""
        if self.problem:
            why = one_line(self.problem, 300).rstrip(".")
            return (f"What the whole cell needs is not known, as it could not be predicted: {why}.",)
        if self.needs is None:
            return (self.state,) if self.state else ()
        has = f"{self.card} has {format_bytes(self.limit_bytes)} for it"
        said = [f"The whole cell needs {self.needs} of the device, predicted with the cell itself; {has}."]
        if not self.ways and not self.state:
            said.append("Nothing that was tried makes it fit.")
        said += [self.state] if self.state else []
        return tuple(said)
