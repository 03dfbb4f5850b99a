"""Where a figure of a lesson comes from: said by what made it, so that no author writes "measured"."""

from __future__ import annotations

from collections.abc import Iterable

from torch.utils.flop_counter import FlopCounterMode

from memlab.allocator import CachingAllocator
from memlab.api.advise import Advice
from memlab.api.largest_batch import MaxBatch
from memlab.api.oom import OomExplained
from memlab.api.prediction import Prediction
from memlab.api.provenance import provenance_here
from memlab.api.run import Run
from memlab.api.size import ModelSize
from memlab.api.who import Who
from memlab.errors import MemlabError

Maker = Run | ModelSize | Who | MaxBatch | Advice | CachingAllocator | OomExplained | FlopCounterMode
COMPUTED = "computed"
"""What a figure is that no instrument and no prediction made: arithmetic, or the values of tensors."""


def source_of(makers: Iterable[Maker]) -> str:
    """Return the source of a figure, such as "measured on cpu", from what made it; "computed" without any.

    Raises MemlabError for an object that does not say where its figures come from.
    """
    sources = dict.fromkeys(map(_source, makers))
    return " and ".join(sources) or COMPUTED


def _source(maker: Maker) -> str:
    if type(maker).__module__.startswith("psutil"):  # a process: its memory is in no run
        return "measured on the host"
    match maker:
        case Prediction() | MaxBatch():
            return f"predicted for {maker.card.name}"
        case Run():
            where = f" on {maker.devices[0].device.label}" if maker.devices else ""
            return f"{maker.trace.provenance}{where}"
        case Advice():
            return _source(maker.before)
        case CachingAllocator():
            return "simulated"
        case OomExplained():
            return "read from the message"
        case Who():
            return provenance_here(one.device for one in maker.storages)
        case ModelSize() | FlopCounterMode():
            return COMPUTED
    raise MemlabError(
        f"a figure comes from a run, a prediction or another result of memlab, got {type(maker).__name__}. "
        "Leave it out where the notebook computed the figure."
    )
