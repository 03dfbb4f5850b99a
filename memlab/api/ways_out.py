"""Ways out of an out-of-memory error, each verified: the cell that failed is predicted again, changed, in child processes.

Nothing here uses memory of the GPU, and nothing of the notebook changes. A child gets the notebook as it is after the error,
releases what the failed cell's frames hold, as `%memoom release` does, and runs the cell on a fake GPU of the same kind. A
cell that starts programs is not predicted, as that would start them again.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
import types
from collections.abc import Callable, Collection
from typing import Any

import torch

from memlab.analysis.leak import Leaks
from memlab.analysis.oom.actions import OF_ERRORS, OUTPUTS, Kind, WayOut, WaysOut, root_of
from memlab.analysis.oom.facts import Failure
from memlab.api.advise.edits import diff
from memlab.api.advise.observed import FOR_INFERENCE, NO_GRAPH
from memlab.api.advise.search import Search, candidates, one_reason, shares_of
from memlab.api.advise.subject import OfStep, TimeUp, as_after_release, card_of, gpus_of
from memlab.api.cell_batch import Batch, batches
from memlab.api.cell_names import names_made_anew, names_read
from memlab.api.display import Progress
from memlab.api.largest_batch import Bracket
from memlab.api.oom import OomExplained, keep_oom
from memlab.api.prediction import Prediction, asks_for_nothing, smallest_card
from memlab.api.run import Run
from memlab.errors import MemlabError, PredictionError
from memlab.prediction.cards import Card, find
from memlab.prediction.torch_versions import other_version
from memlab.prediction.workspaces import BlasRules
from memlab.saving_techniques import techniques
from memlab.simulated_gpu import is_simulated
from memlab.torch_internals.traceback import running_shell
from memlab.units import ByteRange, format_bytes, format_seconds, listed

LIMIT_S = 30.0
"""How long the search may take."""
MOST_BATCHES = 7
"""How many sizes of one batch are predicted at most."""
LEAST_FREED = 0.02
"""What share of the GPU a cell must still hold from the run before for that to be freed first."""
MOST_FAILED = 3
"""How many techniques that are not enough are listed."""
_WORD = re.compile(r"[^\W\d]\w*")
_LESS = 0.98
"""A batch counts as found if half of it lowers the need to this share, at most."""
_EXACT_TO = 0.05
"""How near to the largest batch the one that is offered is: the time for the last few is better spent on techniques."""
Show = Callable[[WaysOut], None]


def card_here(failure: Failure, freed: Collection[str] = ()) -> Card:
    """The GPU on which memory ran out, with what this process can have of it once frames and these variables are released."""
    facts = torch.cuda.get_device_properties(failure.message.device or 0)
    total, capability = facts.total_memory, (facts.major, facts.minor)
    try:
        known = find(facts.name)
    except PredictionError:
        known = Card(facts.name, total, capability, multiprocessors=facts.multi_processor_count)
    context = known.context_bytes
    if (seen := failure.beside) is not None:  # it may still grow, as kernels are loaded at their first call
        context = seen if is_simulated() else ByteRange(seen.low, max(seen.high, context.high))
    # A prediction packs what is there into segments of its own; here, parts of them may be of no use.
    released = [one.address for one in failure.holders if root_of(one.path) in (OF_ERRORS, *freed)]
    blas = BlasRules.of(known, torch.__version__, os.environ)
    pinned = failure.pinned_bytes(released, (blas.workspace_bytes, blas.lt_bytes))
    context = ByteRange(context.low, context.high + pinned)
    usable, allowed = total - (failure.others_bytes or 0), failure.message.allowed
    if allowed is not None:  # a limit on what PyTorch reserves
        usable = min(usable, allowed.low + context.low)
    return dataclasses.replace(
        known,
        total_bytes=total,
        context_bytes=context,
        compute_capability=capability,
        usable_bytes=usable,
        usable_high_bytes=usable,
        multiprocessors=facts.multi_processor_count,
    )


def look_for_ways_out(said: OomExplained, text: str, show: Callable[[OomExplained], None]) -> None:
    """Look for what would have fitted, by predicting the text of the cell, and show the explanation with it.

    Where nothing can be predicted, as after an error of the CPU, nothing happens.
    """
    if (failure := said.failure_here) is not None and text.strip():
        found = said.with_ways(WaysSearch(text, failure, lambda ways: show(said.with_ways(ways))).run())
        keep_oom(found)
        show(found)


class WaysSearch:
    """One search: `run` looks until the time is over, or Ctrl-C, and shows each way as it is found; `found` has them all."""

    def __init__(self, text: str, failure: Failure, show: Show) -> None:
        self._text, self._failure, self._show = text, failure, show
        self._began = time.monotonic()
        self._card = card_here(failure)
        self._subject = OfStep("the cell", self._card, text=text, before=as_after_release)
        self._freeing, self._freed_bytes = "", 0
        self.found = WaysOut(self._card.name, self._card.usable_bytes)

    def run(self) -> WaysOut:
        """Search; what was found until an interrupt or the end of the time stays."""
        state = ""
        try:
            self._tell("the cell as it is")
            self._search()
        except KeyboardInterrupt:
            state = "The search for ways out was interrupted."
        except TimeUp:
            state = f"The search for ways out ended after {format_seconds(LIMIT_S)}."
        except Exception as error:
            state = f"The search for ways out ended: {one_reason(error)}"
        self.found = dataclasses.replace(self.found, state=state)
        return self.found

    def _search(self) -> None:
        try:
            as_it_is = self._predict(self._subject)
        except TimeUp:
            raise
        except MemlabError as error:
            self.found = dataclasses.replace(self.found, problem=one_reason(error))
            return
        if asks_for_nothing(as_it_is.forecast):
            self.found = dataclasses.replace(self.found, problem="it allocates nothing on the GPU when it is run again")
            return
        self.found = dataclasses.replace(self.found, needs=as_it_is.peak_device_bytes)
        if as_it_is.fits == "yes":
            self._add(WayOut("free", "`%memoom release`, then the same cell again", as_it_is.peak_device_bytes))
            return
        as_it_is = self._without_its_own(as_it_is)
        if as_it_is.fits == "yes":
            return
        here = (self._without_leftovers, self._smaller_batch, self._with_techniques)
        # What fills free memory takes a search of its own on each GPU: what can be done here is worth the time more.
        for look in (*here, self._larger_gpu) if as_it_is.fills_what_is_free else (self._larger_gpu, *here):
            look(as_it_is)

    def _add(self, way: WayOut) -> None:
        """Found: those that cost nothing stand first, another GPU last.

        One that was shown to fit here takes at most what is here: with more it would have kept a larger cache.
        """
        if way.kind != "gpu":
            low, high = way.needs
            way = dataclasses.replace(way, needs=ByteRange(low, max(low, min(high, self._card.usable_bytes))))
        ways = sorted((*self.found.ways, way), key=lambda one: one.cost)
        self.found = dataclasses.replace(self.found, ways=tuple(ways))
        self._show(self.found)

    def _tell(self, what: str) -> None:
        took = f"{format_seconds(time.monotonic() - self._began)} of at most {format_seconds(LIMIT_S)}"
        state = f"Looking for ways out, {took}: predicting {what} (interrupt the kernel to stop)."
        self._show(dataclasses.replace(self.found, state=state))

    def _predict(self, subject: OfStep) -> Prediction:
        left_s = self._began + LIMIT_S - time.monotonic()
        if left_s <= 0:
            raise TimeUp("the time limit was reached")
        found = subject.attempt((), lambda text: None, left_s)
        assert isinstance(found, Prediction)
        return found

    # --- what to free first ---

    def _without_its_own(self, as_it_is: Prediction) -> Prediction:
        """The cell that first frees what it made in the run before; all that follows starts from this one."""
        shell: Any = running_shell()
        anew = [name for name in names_made_anew(self._text, shell.user_ns) if not name.startswith("_")]
        names = [name for name in anew if _may_hold(shell.user_ns[name])]
        held = sum(one.nbytes for one in self._failure.holders if root_of(one.path) in names)
        if (
            held < LEAST_FREED * self._card.usable_bytes
            or self._text.lstrip().startswith("%%")
            or "from __future__" in self._text
        ):
            return as_it_is
        # Without the last call, what the cell makes next would be put into the pieces, and pin them.
        line = f"import torch; {' = '.join(names)} = None; torch.cuda.empty_cache()  # free what the run before left\n"
        line = line.removeprefix("import torch; " if shell.user_ns.get("torch") is torch else "")
        card, text = card_here(self._failure, names), line + self._text
        there = dataclasses.replace(self._subject, on=card, text=text, original=self._text, asked={})
        self._tell(f"the cell without its own {listed(names, 3)}")
        try:
            freed = self._predict(there)
        except TimeUp:
            raise
        except MemlabError:  # it needs one of them in a way that does not show
            return as_it_is
        self._card, self._subject = card, there
        self._freeing, self._freed_bytes = line.partition("  #")[0], held
        self.found = dataclasses.replace(self.found, needs=freed.peak_device_bytes)
        if freed.fits == "yes":
            change = f"first free what the run before left: `{self._freeing}`"
            self._add(WayOut("free", change, freed.peak_device_bytes, "", diff(self._text, text), text))
        return freed

    def _first(self, is_shown: bool) -> str:
        """That the cell first frees what the run before left, and how, unless a change is shown that has it.

        Until then that is held: where the rest needs less, it alone is what the cell needs.
        """
        if not self._freeing:
            return ""
        how = "" if is_shown else f", by `{self._freeing}`,"
        return f" (first frees{how} the {format_bytes(self._freed_bytes)} of the run before, which its need includes)"

    def _without_leftovers(self, as_it_is: Prediction) -> None:
        """Delete variables that neither the cell nor a function of it names, the largest first, until it fits."""
        shell: Any = running_shell()
        held: dict[str, int] = {}
        for one in self._failure.holders:
            root = root_of(one.path)
            if root not in ("", OF_ERRORS, OUTPUTS) and root in shell.user_ns:
                held[root] = held.get(root, 0) + one.nbytes
        needed = {*_WORD.findall(self._text), *names_read(self._text, shell.user_ns)}
        loose = [name for name in sorted(held, key=lambda name: -held[name]) if name not in needed]
        missing = as_it_is.peak_device_bytes.high - self._card.usable_bytes
        for count in range(1, len(loose) + 1):
            if sum(held[name] for name in loose[:count]) >= missing:
                break
        else:
            return
        for names in (loose[:count], loose[: count + 1])[: 1 + (count < len(loose))]:
            self._tell(f"the cell without {', '.join(names)}")
            before = functools.partial(as_after_release, names)
            try:
                freed = self._predict(dataclasses.replace(self._subject, before=before))
            except TimeUp:
                raise
            except MemlabError:  # it needs one of them in a way that does not show
                return
            if freed.fits == "yes":
                after = "and `%memoom release`, then the same cell again"
                change = f"`del {', '.join(names)}`, if not needed any more, {after}{self._first(is_shown=False)}"
                self._add(WayOut("free", change, freed.peak_device_bytes))
                return

    # --- the batch ---

    def _smaller_batch(self, as_it_is: Prediction) -> None:
        shell: Any = running_shell()
        for batch in batches(self._subject.text, shell.user_ns):
            try:
                half = self._with_batch(batch, batch.size // 2)
            except TimeUp:
                raise
            except MemlabError:  # the cell does not run with another
                continue
            is_less = half.peak_device_bytes.high <= _LESS * as_it_is.peak_device_bytes.high
            # What changes the model itself, as its depth does, is no batch.
            if is_less and _parameter_bytes(half) == _parameter_bytes(as_it_is):
                self._largest(batch, {batch.size: as_it_is, batch.size // 2: half})
                return

    def _with_batch(self, batch: Batch, size: int) -> Prediction:
        self._tell(batch.said(size))
        inside = functools.partial(batch.set_names, size) if batch.set_names is not None else None
        return self._predict(dataclasses.replace(self._subject, text=batch.text_with(size), inside=inside))

    def _largest(self, batch: Batch, tried: dict[int, Prediction]) -> None:
        """The largest size that fits, between two that were predicted."""
        known = {size: (one.fits == "yes", one.peak_device_bytes.high) for size, one in tried.items()}
        bracket, ended = Bracket(self._card.usable_bytes, batch.size, known, _EXACT_TO), False
        while (size := bracket.next_number) is not None and len(tried) < MOST_BATCHES:
            try:
                tried[size] = one = self._with_batch(batch, size)
            except MemlabError:  # the time is over, or it does not run with this one
                ended = True
                break
            bracket.add(size, one.fits == "yes", one.peak_device_bytes.high)
        low, high = bracket.low, bracket.high
        over = f"{high} {'does not fit' if tried[high].fits == 'no' else 'is too close to call'}"
        grown = _grown(tried[batch.size])
        kept, with_low = (sum(one.total_bytes for one in found) for found in (grown, _grown(tried[low]) if low else ()))
        if low and grown and kept - with_low + tried[low].peak_device_bytes.low > self._card.usable_bytes:
            # The same data in smaller batches: as much is kept of it as now.
            roots = dict.fromkeys(root_of(one.path) for one in self._failure.listed)
            by = listed([f"`{root}`" for root in roots if root not in ("", OF_ERRORS, OUTPUTS)], 2)
            why = f"{grown[0].text}{f' It is kept by {by}.' if by else ''}"
            self._fails(f"{batch.said(low)}: fits for as many steps as now, and not for the same data. {why}")
        elif low:
            price = "more and smaller batches"
            price += "; in training, gradient accumulation keeps the effective batch" if self._failure.trains else ""
            # A change that is in no text, of tensors, is told alone: the cell without it is not what was predicted.
            cell = batch.text_with(low) if batch.set_names is None else ""
            change = diff(self._text, cell) if cell else ""
            self._add(
                WayOut(
                    "batch",
                    f"{batch.said(low)}{self._first(bool(cell))}; {over}",
                    tried[low].peak_device_bytes,
                    price,
                    change,
                    cell,
                )
            )
        else:
            self._fails(f"{batch.said(high)}: needs {tried[high].peak_device_bytes}")
        if ended:
            raise TimeUp("the time limit was reached")

    def _fails(self, what: str) -> None:
        self.found = dataclasses.replace(self.found, not_enough=(*self.found.not_enough, what))

    # --- techniques ---

    def _with_techniques(self, as_it_is: Prediction) -> None:
        deadline = self._began + LIMIT_S
        search = Search(self._subject, "device", self._tell, deadline, self._card.usable_bytes)
        search.begin(as_it_is)
        largest, every = (
            candidates(self._subject, shares, "device", None, allow_changes=False)[0] for shares in (search.shares, {})
        )
        trains, missing = self._failure.trains, max(search.before_bytes) - self._card.usable_bytes

        def rank(name: str) -> tuple[bool, bool, bool, int]:
            """Those first that only leave the graph out, that could be enough alone, that keep the results as they are."""
            held = sum(search.shares.get(one, 0) for one in techniques[name].attacks)
            return name not in NO_GRAPH, held < missing, techniques[name].equality.kind != "exact", -held

        try:
            names, others = (
                sorted((name for name in some if not (trains and name in FOR_INFERENCE)), key=rank)
                for some in (largest, every)
            )
            for one in search.each(names, others):
                if search.is_enough(one):
                    kind: Kind = "slower" if one.costs else "technique"
                    lines = self._subject.diff(one.names)
                    change = " + ".join(f"`{name}`: {techniques[name].idea}" for name in one.names)
                    change += self._first(bool(lines))
                    cell = self._subject.changed(one.names)[0] if lines else ""
                    code = "" if lines else "\n\n".join(techniques[name].code_over(1) for name in one.names)
                    self._add(WayOut(kind, change, one.peak_bytes, " ".join(one.prices), lines, cell, code))
                    return
        finally:  # what was tried until the end of the time is told
            tried = [one for one in (*search.tried, *search.combined) if not one.failed and not one.is_wrong]
            if not any(map(search.is_enough, tried)):
                for one in sorted(tried, key=lambda one: max(one.peak_bytes))[:MOST_FAILED]:
                    self._fails(f"{' + '.join(f'`{name}`' for name in one.names)}: still needs {one.peak_bytes}")

    # --- another GPU ---

    def _larger_gpu(self, as_it_is: Prediction) -> None:
        def predicted(card: Card) -> Prediction | None:
            self._tell(f"the cell on {card.name}")
            try:
                return self._predict(dataclasses.replace(self._subject, on=card, asked={}, observed={}))
            except TimeUp:
                raise
            except MemlabError:  # it does not run there
                return None

        there = smallest_card(as_it_is, predicted)
        if there is not None:
            change = f"the same cell on {there.card.name}, the smallest on which it fits"
            self._add(WayOut("gpu", change, there.peak_device_bytes, "another GPU"))


def _grown(predicted: Prediction) -> Leaks:
    """What the whole cell keeps more of with each step."""
    return Run(predicted.name, predicted.requests()).leaks()


def _parameter_bytes(predicted: Prediction) -> int:
    """What parameters hold at the peak."""
    return shares_of(predicted).get("parameter", 0)


def _may_hold(value: Any) -> bool:
    """Whether something of the notebook can keep memory of a GPU alive."""
    kind = type(value)
    if kind is torch.Tensor:
        return bool(value.is_cuda)
    return not issubclass(kind, int | float | str | bytes | type | types.ModuleType | types.FunctionType | None)


# --- a cell that raised, whatever the error ---

WHOLE_CELL_S = 60.0
"""How long the prediction of a whole cell may take."""


def whole_cell_of(run: Run) -> Prediction | None:
    """The prediction of the run's cell, as it would run now; None if it cannot be predicted, or fails there too.

    A child process runs it on a fake GPU like that of the run, and releases first what the failed cell still holds. One that
    needs less than the run had reached is not of the same work, as names of the notebook have changed since: also None.
    """
    card = card_of(run)
    if card is None or not run.cell_text or running_shell() is None:
        return None
    name = f"{run.name} (it raised; its cell predicted to the end)"
    version, devices = other_version(run.trace), gpus_of(run)
    subject = OfStep(name, card, text=run.cell_text, before=as_after_release, torch_version=version, devices=devices)
    with Progress(card.name) as progress:

        def tell(text: str) -> None:
            progress.write(f"predicting {run.name} to its end: {text}")

        try:
            found = subject.attempt((), tell, WHOLE_CELL_S)
        except MemlabError:
            return None
    assert isinstance(found, Prediction)
    return found if found.allocated_bytes.high >= run.peak_allocated_bytes else None
