"""All techniques by name, and how they are combined."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from memlab.by_name import ByName
from memlab.errors import DoesNotApply, MemlabError
from memlab.saving_techniques import (
    batches,
    checkpoint,
    cuda_memory,
    fsdp,
    fused_attention,
    in_place,
    inference,
    loading,
    loop,
    optimizers,
    parameters,
    precision,
    rebinding,
    recomputed_norm,
    shufflenet_rules,
)
from memlab.saving_techniques.technique import STAGES, TEXTS, Technique
from memlab.workloads.job import Job, Parts

_MODULES = (
    *(fused_attention, checkpoint, recomputed_norm, in_place, rebinding, precision, loop, batches),
    *(loading, parameters, fsdp, optimizers, inference, cuda_memory, shufflenet_rules),
)

LESSONS = {
    "pure_fp16": "07_mixed_precision",
    "sync_batchnorm": "10_accumulation",
    **dict.fromkeys(("adam_8bit", "contiguous_parameters"), "11_optimizers"),
    **dict.fromkeys(("drop_last", "loader_workers"), "26_host_memory"),
    **dict.fromkeys(("host_reads", "memory_mapped_data", "non_blocking", "pack_small_files"), "13_feeding"),
    **dict.fromkeys(("pin_memory", "prefetch", "preprocess_on_card", "resize_once"), "13_feeding"),
    **dict.fromkeys(("distillation", "dynamic_quantization", "pruning"), "14_small_inference"),
    **dict.fromkeys(("channels_last", "cudnn_benchmark", "cudnn_deterministic", "reproducible_seeding"), "16_design"),
    **dict.fromkeys(("cuda_launch_blocking", "cuda_visible_devices"), "18_out_of_memory"),
}
"""Practices that memlab does not switch on -> the lesson about each."""


class Techniques(ByName[Technique]):
    """Name -> Technique."""

    def __init__(self, known: Iterable[Technique]) -> None:
        self._known: dict[str, Technique] = {}
        for technique in known:
            if technique.name in self._known:
                raise MemlabError(f"two techniques are named {technique.name!r}: rename one.")
            self._known[technique.name] = technique

    def _unknown(self, name: str) -> MemlabError:
        if isinstance(name, str) and name in LESSONS:
            return MemlabError(f"{name} is a practice without a switch: notebooks/{LESSONS[name]}.ipynb shows it.")
        near = difflib.get_close_matches(str(name)[:80], self._known, 5)
        hint = (
            f"Did you mean {' or '.join(near)}?" if near else f"import memlab; memlab.techniques shows all {len(self)}."
        )
        return MemlabError(f"there is no technique {name!r:.80}. {hint}")

    def __repr__(self) -> str:
        width = max(map(len, self._known), default=0)
        return "\n".join(f"{one.name:<{width}}  {one.kind:<6}  {one.idea}" for one in self._known.values())

    def to_pandas(self) -> Any:
        """One row per technique."""
        import pandas

        columns = ["kind", "idea", "attacks", "equality", "price", "not_when", "tips"]
        table = pandas.DataFrame(
            [[getattr(one, column) for column in columns] for one in self._known.values()],
            pandas.Index(list(self._known), name="name"),
            columns,
        )
        return table.map(lambda value: ", ".join(value) if isinstance(value, tuple) else str(value))

    # --- several at once ---------------------------------------------------------------------------------------------------

    def conflict(self, names: Iterable[str]) -> str:
        """Why these cannot be combined, in a sentence; "" if they can."""
        chosen = [self[name] for name in names]
        for first in chosen:
            for second in chosen:
                if second.name in first.excludes:
                    return f"{first.name} and {second.name} exclude each other: {first.excludes[second.name]}"
        return ""

    def said(self, names: Iterable[str], world_size: int) -> list[str]:
        """The names as they are shown: those that are for several GPUs with their number."""
        return [f"{name} over {world_size} GPUs" if self[name].shards else name for name in names]

    def ordered(self, names: Iterable[str]) -> list[Technique]:
        """The techniques in the order in which they are applied; raises if two exclude each other."""
        if isinstance(names, str):
            raise MemlabError(f"techniques is a list of names, got {names!r:.80}.")
        names = list(dict.fromkeys(names))
        if why := self.conflict(names):
            raise MemlabError(f"{why}. Leave one out.")
        listed = [one for name, one in self._known.items() if name in names]
        return sorted(listed, key=lambda one: STAGES.index(one.stage))

    def prepare(
        self, job: Job, make: Callable[[], Parts], names: Iterable[str] = (), habits: Iterable[str] = ()
    ) -> None:
        """Build the job from the parts of `make`, with these techniques, and with the baseline patterns of `habits`."""
        chosen = self.ordered(names)
        for technique in chosen:
            make = technique.make(make) if technique.make is not None else make
        job.build(make)
        for name in habits:
            if pattern := self[name].baseline_pattern:
                pattern(job)
        for technique in chosen:
            try:
                technique.apply(job)
            except DoesNotApply as error:  # the error names the technique, as there may be several
                raise DoesNotApply(f"{technique.name}: {str(error).removeprefix(f'{technique.name}: ')}") from error


_PLACES = {name: place for place, name in enumerate(TEXTS)}
techniques = Techniques(
    sorted((one for module in _MODULES for one in module.TECHNIQUES), key=lambda one: _PLACES[one.name])
)
"""Every technique that memlab knows."""
