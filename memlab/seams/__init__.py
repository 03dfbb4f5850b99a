"""Every private hook of PyTorch, IPython and ipykernel that memlab leans on, in one place.

None of these is a public promise. Each says what it uses and where that was seen; `tests/test_seams.py` notices when one
breaks. Nothing else in memlab may touch a private name of these libraries. Those of the dispatcher, which need torch at
import, are in `memlab.seams.dispatch`.
"""

from memlab.seams.allocator import (
    blas_workspace_sizes,
    cuda_stats,
    device_count,
    forget_when_cuda_starts,
    has_primary_context,
    history_is_on,
    history_switch,
    record_history,
    replace_history_switch,
    snapshot,
    stop_history,
    when_cuda_starts,
)
from memlab.seams.engine import (
    engine_entry,
    forget_unfinished_backward,
    replace_engine_entry,
)
from memlab.seams.kernel import (
    is_kernel,
    let_clicks_through,
)

__all__ = [
    "blas_workspace_sizes",
    "cuda_stats",
    "device_count",
    "engine_entry",
    "forget_unfinished_backward",
    "forget_when_cuda_starts",
    "has_primary_context",
    "history_is_on",
    "history_switch",
    "is_kernel",
    "let_clicks_through",
    "record_history",
    "replace_engine_entry",
    "replace_history_switch",
    "snapshot",
    "stop_history",
    "when_cuda_starts",
]
