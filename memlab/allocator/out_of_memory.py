"""The out-of-memory exception, with the message that PyTorch would show."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from memlab.allocator.rules import release
from memlab.errors import MemlabError
from memlab.units import GiB, KiB, MiB

_ADVICE = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)
_ON_ADDRESSES = (
    " expandable_segments is enabled. If instead the process is running out of virtual address space (VSZ), expandable "
    "segments may be over-reserving VA (each segment reserves ~9/8 of device memory, times the number of streams); reduce it "
    "via PYTORCH_CUDA_ALLOC_CONF expandable_segments_reserve / expandable_segments_reserve_by_class."
)


def advice(expandable_segments: bool, torch_version: str = "") -> str:
    """How PyTorch's message ends: until 2.13 it advises expandable segments also where they are on, 2.14 then says nothing.

    (2.13.0, 2.14.1 and 2.15.0 on the simulated GPU.)
    """
    version = release(torch_version)
    if not expandable_segments or version < (2, 14):
        return _ADVICE
    return _ON_ADDRESSES if version >= (2, 15) else ""


@dataclass(eq=False, repr=False)
class OutOfMemory(MemlabError):
    """The simulated device is full: `requested_bytes` is the request, the other sizes are its state.

    The text is PyTorch's (TORCH_CHECK_WITH(OutOfMemoryError, ...) in DeviceCachingAllocator::malloc); `limit_bytes` is None
    without a memory fraction; `private_bytes` are free in private pools, which the text counts as allocated; `device` is the number
    of the GPU, `advice` the end of the text.
    """

    requested_bytes: int
    _: KW_ONLY
    tried_bytes: int
    total_bytes: int
    free_bytes: int
    process_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    private_bytes: int = 0
    limit_bytes: int | None = None
    device: int = 0
    advice: str = _ADVICE

    def __post_init__(self) -> None:
        limit = "" if self.limit_bytes is None else f"{torch_size(self.limit_bytes)} allowed; "
        private, taken = "", self.allocated_bytes + self.private_bytes
        if self.private_bytes:
            private = f"with {torch_size(self.private_bytes)} allocated in private pools (e.g., CUDA Graphs), "
        super().__init__(
            f"CUDA out of memory. Tried to allocate {torch_size(self.tried_bytes)}. "
            f"GPU {self.device} has a total capacity of {torch_size(self.total_bytes)} "
            f"of which {torch_size(self.free_bytes)} is free. "
            f"Including non-PyTorch memory, this process has {torch_size(self.process_bytes)} memory in use. {limit}"
            f"Of the allocated memory {torch_size(taken)} is allocated by PyTorch, {private}"
            f"and {torch_size(self.reserved_bytes - taken)} is reserved by PyTorch but unallocated.{self.advice}"
        )


def torch_size(count: int) -> str:
    """A size as the allocator writes it (format_size in CUDACachingAllocator.cpp).

    >>> torch_size(1024), torch_size(20 << 20)
    ('1024 bytes', '20.00 MiB')
    """
    if count <= KiB:
        return f"{count} bytes"
    for limit, unit in ((MiB, "KiB"), (GiB, "MiB")):
        if count <= limit:
            return f"{count / (limit >> 10):.2f} {unit}"
    return f"{count / GiB:.2f} GiB"
