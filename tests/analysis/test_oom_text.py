"""Messages of out-of-memory as PyTorch has worded them: each is read to the digits that it gives, and no further."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.analysis.oom.text import Amount, Message, amount, exactly, is_out_of_memory, read_message
from memlab.errors import MemlabError

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

ADVICE_2_0 = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid "
    "fragmentation.  See documentation "
    "for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
ADVICE_2_12 = (
    " If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
    "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)

# PyTorch's version and backend -> (the message, what it says in binary units; sizes as (number, unit in bytes, digits)).
WORDINGS: dict[str, tuple[str, dict[str, object]]] = {
    "1.3": (
        "RuntimeError: CUDA out of memory. Tried to allocate 164.50 GiB (GPU 2; 10.92 GiB total "
        "capacity; 19.66 MiB already "
        "allocated; 10.40 GiB free; 14.34 MiB cached)",
        {"device": 2, "asked": (164.50, GiB), "capacity": (10.92, GiB), "allocated": (19.66, MiB), "free": (10.40, GiB),
         "cached": (14.34, MiB)},
    ),
    "1.4": (
        "RuntimeError: CUDA out of memory. Tried to allocate 128.00 MiB (GPU 0; 7.93 GiB total "
        "capacity; 6.94 GiB already "
        "allocated; 10.56 MiB free; 7.28 GiB reserved in total by PyTorch)",
        {"device": 0, "asked": (128, MiB), "capacity": (7.93, GiB), "allocated": (6.94, GiB), "free": (10.56, MiB),
         "reserved": (7.28, GiB)},
    ),
    "1.13": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 MiB (GPU 0; 2.00 "
        "GiB total capacity; 1.63 GiB "
        f"already allocated; 0 bytes free; 1.50 GiB allowed; 1.67 GiB reserved in total by PyTorch){ADVICE_2_0}",
        {"device": 0, "asked": (12, MiB), "capacity": (2, GiB), "allocated": (1.63, GiB), "free": 0, "allowed": (1.5, GiB),
         "reserved": (1.67, GiB)},
    ),
    "2.1": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a "
        "total capacty of 14.75 GiB of "
        "which 6.81 MiB is free. Process 3661 has 14.74 GiB memory in use. Of the allocated memory "
        "14.37 GiB is allocated by "
        "PyTorch, and 180.71 MiB is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting "
        "max_split_size_mb to avoid fragmentation.",
        {"device": 0, "asked": (20, MiB), "capacity": (14.75, GiB), "free": (6.81, MiB), "allocated": (14.37, GiB),
         "cached": (180.71, MiB), "others": {3661: (14.74, GiB)}},
    ),
    "2.12": (
        "CUDA out of memory. Tried to allocate 900.00 MiB. GPU 1 has a total capacity of 2.00 GiB "
        "of which 12.00 MiB is free. "
        "Process 71 has 256.00 MiB memory in use. Process 72 has 1.00 GiB memory in use. Including "
        "non-PyTorch memory, this "
        "process has 1.99 GiB memory in use. 1024.00 MiB allowed; Of the allocated memory 1.74 GiB "
        "is allocated by PyTorch, with "
        "22.00 MiB allocated in private pools (e.g., CUDA Graphs), and 0 bytes is reserved by "
        "PyTorch but unallocated."
        + ADVICE_2_12,
        {"device": 1, "asked": (900, MiB), "capacity": (2, GiB), "free": (12, MiB), "process": (1.99, GiB),
         "allowed": (1024, MiB), "allocated": (1.74, GiB), "private_pools": (22, MiB), "cached": 0,
         "others": {71: (256, MiB), 72: (1, GiB)}},
    ),
    "2.5, ROCm": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 76.00 MiB. GPU 1 has a total "
        "capacity of 287.98 GiB of which "
        "0 bytes is free. Of the allocated memory 200.12 GiB is allocated by PyTorch, and 1.20 GiB "
        "is reserved by PyTorch but "
        "unallocated.",
        {"backend": "HIP", "device": 1, "asked": (76, MiB), "capacity": (287.98, GiB), "free": 0, "allocated": (200.12, GiB),
         "cached": (1.2, GiB)},
    ),
    "cudaMallocAsync": (
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated   "
        "  : 9.43 GiB\nRequested          "
        "     : 640.00 MiB\nDevice limit            : 11.59 GiB\nFree (according to CUDA): 7.12 "
        "MiB\nPyTorch limit (set by "
        "user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        {"device": 0, "asked": (640, MiB), "capacity": (11.59, GiB), "free": (7.12, MiB), "allocated": (9.43, GiB)},
    ),
    "2.4, XPU": (
        "XPU out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.91 GiB. "
        "Of the allocated memory 14.55 GiB "
        "is allocated by PyTorch, and 30.25 MiB is reserved by PyTorch but unallocated. Please use "
        "`empty_cache` to release all "
        "unoccupied cached memory.",
        {"backend": "XPU", "device": 0, "asked": (20, MiB), "capacity": (15.91, GiB), "allocated": (14.55, GiB),
         "cached": (30.25, MiB)},
    ),
    "NPU": (
        "NPU out of memory. NPUWorkspaceAllocator tried to allocate 1.89 GiB(NPU 7; 60.96 GiB total "
        "capacity; 1.82 GiB free).",
        {"backend": "NPU", "device": 7, "asked": (1.89, GiB), "capacity": (60.96, GiB), "free": (1.82, GiB)},
    ),
    "1.13, MPS": (
        "MPS backend out of memory (MPS allocated: 67.09 GB, other allocations: 22.75 GB, max "
        "allowed: 81.60 GB). Tried to\nallocate "
        "30.25 KB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit "
        "for memory allocations (may cause "
        "system failure).",
        {"backend": "MPS", "asked": (30.25, KiB), "allocated": (67.09, GiB), "elsewhere": (22.75, GiB), "allowed": (81.6, GiB)},
    ),
    "2.9, MPS": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 1024.00 MiB, other allocations: "
        "384.00 KiB). Tried to allocate "
        "256.00 MiB on shared pool.",
        {"backend": "MPS", "asked": (256, MiB), "allocated": (1024, MiB), "elsewhere": (384, KiB)},
    ),
    "MPS, one buffer": ("RuntimeError: Invalid buffer size: 20.00 GB", {"backend": "MPS", "asked": (20.0, GiB)}),
    "CPU": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to "
        "allocate 35184372088832 bytes. Error code 12 (Cannot allocate memory)",
        {"backend": "CPU", "asked": 35184372088832},
    ),
    "CPU, Windows": (
        "RuntimeError: [enforce fail at ..\\c10\\core\\impl\\alloc_cpu.cpp:72] data. "
        "DefaultCPUAllocator: not enough memory: you tried "
        "to allocate 1207959552 bytes. Buy new RAM!",
        {"backend": "CPU", "asked": 1207959552},
    ),
    "numpy": (
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 14.9 GiB for an array with "
        "shape (2000000000,) and data type "
        "float64",
        {"backend": "numpy", "asked": (14.9, GiB, 1)},
    ),
}  # fmt: skip


def interval(number: float, unit: int, digits: int = 2) -> Amount:
    half = 0.5 * 10**-digits * unit
    return Amount(round(number * unit - half), round(number * unit + half))


def about(found: Amount, meant: object) -> bool:
    """Whether an amount is the interval that these digits stand for, to a byte of rounding at either end."""
    if isinstance(meant, int):
        return found == exactly(meant)
    expected = interval(*meant)  # type: ignore[misc]
    ends = abs(found.low_bytes - max(expected.low_bytes, 0)), abs(found.high_bytes - expected.high_bytes)
    return max(ends) <= 1


@pytest.mark.parametrize("version", WORDINGS)
def test_every_wording_is_read_to_its_digits(version):
    text, said = WORDINGS[version]
    found = read_message(text)
    said = {"backend": "CUDA", **said}
    others = said.pop("others", {})
    assert dict.fromkeys(others, True) == {pid: about(size, others[pid]) for pid, size in found.others}
    for name in ("backend", "device"):
        assert getattr(found, name) == said.pop(name, None)
    assert {name: about(getattr(found, name), meant) for name, meant in said.items()} == dict.fromkeys(said, True)
    derived = {"reserved", "cached"} if found.reserved is not None else set()
    silent = set(Message.__slots__) - {"backend", "device", "others", "notes", "count"} - set(said) - derived
    assert {name: getattr(found, name) for name in silent} == dict.fromkeys(silent)


@pytest.mark.parametrize("version", WORDINGS)
def test_a_message_is_found_in_a_log_with_colours_ranks_and_broken_lines(version):
    text, _ = WORDINGS[version]
    broken = re.sub(r"(\w) (\w)", "\\1\n[rank3]:   \\2", text, count=3)
    log = f"Traceback (most recent call last):\n  File 'x.py'\n\x1b[31m{broken}\x1b[0m\nCUDA kernel errors might be"
    assert read_message(log) == read_message(text)
    assert is_out_of_memory(log)


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("RuntimeError: cuda runtime error (2) : out of memory at /opt/conda/THC/generic/THCStorage.cu:58", "CUDA"),
        ("RuntimeError: CUDA error: out of memory", "CUDA"),
        ("RuntimeError: CUDA driver error: out of memory", "CUDA"),
        ("RuntimeError: HIP error: out of memory", "HIP"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUDA"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "CUDA"),
        ("torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory", "CUDA"),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", "CUDA"),
    ],
)
def test_messages_without_sizes_are_known_and_say_none(text, backend):
    found = read_message(text)
    assert (found.backend, found.asked, found.free, found.capacity) == (backend, None, None, None)
    assert not found.has_sizes


def test_what_an_old_and_a_new_wording_leave_out_is_derived():
    new, old = read_message(WORDINGS["2.1"][0]), read_message(WORDINGS["1.4"][0])
    assert new.reserved == new.allocated + new.cached
    assert old.cached.low_bytes == old.reserved.low_bytes - old.allocated.high_bytes
    assert old.cached.high_bytes == old.reserved.high_bytes - old.allocated.low_bytes


def test_sizes_that_a_failed_counter_gives_are_no_sizes():
    text = (
        WORDINGS["2.12"][0]
        .replace("1.99 GiB memory", "17179869184.00 GiB memory")
        .replace("1.00 GiB", "17179869184.00 GiB")
    )
    found = read_message(text)
    assert found.process is None
    assert [pid for pid, _ in found.others] == [71]


def test_of_several_messages_the_last_with_sizes_counts():
    first, last = WORDINGS["1.3"][0], WORDINGS["2.12"][0]
    found = read_message(f"{first}\nDuring handling of the above\n{last}\nRuntimeError: CUDA error: out of memory")
    assert (found.device, found.count) == (1, 3)
    assert read_message(f"{last}\n[rank1]: {last}").count == 1


def test_a_message_without_its_first_words_is_read():
    text = WORDINGS["1.4"][0]
    assert read_message(text[text.index("Tried") :]) == read_message(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the text is empty"),
        ("  \n ", "the text is empty"),
        ("IndexError: list index out of range", "no message of out-of-memory in 'IndexError: list index out of range'"),
        ("out of memory", "paste the line that begins with"),
        ("triton OutOfResources: out of resource: shared memory, Required: 1, Limit: 2", "inside one kernel's block"),
        ("Bus error. ... insufficient shared memory (shm)", "/dev/shm"),
    ],
)
def test_what_is_no_out_of_memory_is_refused_in_one_clear_line(text, says):
    with pytest.raises(MemlabError, match=re.escape(says)) as caught:
        read_message(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert not is_out_of_memory(text)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate " + "9" * 5000 + " GiB",
        "CUDA out of memory. " * 3000,
        "Process 1 has " * 5000 + "CUDA out of memory",
        "CUDA out of memory. Tried to allocate 1.2.3 GiB \x00\x1b[2J\ud800 " + "(" * 10_000,
        "Unable to allocate " * 10_000,
        "Unable to allocate " + "x" * 1_000_000,
    ],
)
def test_a_hostile_text_is_read_or_refused_and_never_crashes(text):
    try:
        found = read_message(text)
    except MemlabError:
        return
    assert found.backend == "CUDA"


@given(st.integers(0, (1 << 58) - 1))
def test_the_interval_of_a_size_as_pytorch_writes_it_holds_the_size(count):
    """PyTorch's own rule: bytes up to 1024, then the next unit where that is reached, with two decimals."""
    unit = next((u for u, limit in (("bytes", KiB), ("KiB", MiB), ("MiB", GiB)) if count <= limit), "GiB")
    scale = {"bytes": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB}[unit]
    number = str(count) if unit == "bytes" else f"{count / scale:.2f}"
    found = amount(number, unit)
    # Above 2**53 bytes PyTorch's own division loses the last bytes.
    slack = 0 if count < 1 << 50 else count >> 50
    assert found.low_bytes - slack <= count <= found.high_bytes + slack
    assert found.high_bytes - found.low_bytes <= 0.01 * scale


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text):
    for words in (text, f"CUDA out of memory. {text}", f"Tried to allocate {text} GiB"):
        with contextlib.suppress(MemlabError):
            read_message(words)
