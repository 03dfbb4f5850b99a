"""Messages of out-of-memory as PyTorch has worded them: each is read to the digits that it gives, and no further."""

from __future__ import annotations

import contextlib
import re

import pytest
from analysis.oom_messages import WORDINGS, GiB, KiB, MiB
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.analysis.oom.text import Message, amount, is_out_of_memory, read_message
from memlab.errors import MemlabError
from memlab.units import ByteRange


def interval(number: float, unit: int, digits: int = 2) -> ByteRange:
    half = 0.5 * 10**-digits * unit
    return ByteRange(round(number * unit - half), round(number * unit + half))


def about(found: ByteRange, meant: object) -> bool:
    """Whether an amount is the interval that these digits stand for, to a byte of rounding at either end."""
    if isinstance(meant, int):
        return found == ByteRange.exact(meant)
    expected = interval(*meant)  # type: ignore[misc]
    ends = abs(found.low - max(expected.low, 0)), abs(found.high - expected.high)
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


def test_what_an_old_and_a_new_wording_leave_out_is_derived():
    new, old = read_message(WORDINGS["2.1"][0]), read_message(WORDINGS["1.4"][0])
    assert new.reserved == new.allocated + new.cached
    assert old.cached.low == old.reserved.low - old.allocated.high
    assert old.cached.high == old.reserved.high - old.allocated.low


def test_sizes_that_a_failed_counter_gives_are_no_sizes():
    text, failed = WORDINGS["2.12"][0], "17179869184.00 GiB"
    found = read_message(text.replace("1.99 GiB memory", f"{failed} memory").replace("1.00 GiB", failed))
    assert found.process is None
    assert [pid for pid, _ in found.others] == [71]


def test_of_several_messages_the_last_with_sizes_counts():
    first, last = WORDINGS["1.3"][0], WORDINGS["2.12"][0]
    found = read_message(f"{first}\nDuring handling of the above\n{last}\nRuntimeError: CUDA error: out of memory")
    assert (found.device, found.count) == (1, 3)
    assert read_message(f"{last}\n[rank1]: {last}").count == 1
    text = WORDINGS["1.4"][0]  # without its first words
    assert read_message(text[text.index("Tried") :]) == read_message(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the text is empty"),
        ("  \n ", "the text is empty"),
        ("IndexError: list index out of range", "no out-of-memory message in 'IndexError: list index out of range'"),
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
        "CUDA out of memory. " * 300,
        "Process 1 has " * 5000 + "CUDA out of memory",
        "CUDA out of memory. Tried to allocate 1.2.3 GiB \x00\x1b[2J\ud800 " + "(" * 10_000,
        "Unable to allocate " * 2_000,
        "Unable to allocate " + "x" * 1_000_000,
    ],
)
def test_a_hostile_text_is_read_or_refused_and_never_crashes(text):
    try:
        found = read_message(text)
    except MemlabError:
        return
    assert found.backend == "CUDA"


@settings(deadline=None, max_examples=50)
@given(st.integers(0, (1 << 58) - 1))
def test_the_interval_of_a_size_as_pytorch_writes_it_holds_the_size(count):
    """PyTorch's own rule: bytes up to 1024, then the next unit where that is reached, with two decimals."""
    unit = next((u for u, limit in (("bytes", KiB), ("KiB", MiB), ("MiB", GiB)) if count <= limit), "GiB")
    scale = {"bytes": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB}[unit]
    number = str(count) if unit == "bytes" else f"{count / scale:.2f}"
    found = amount(number, unit)
    # Above 2**53 bytes PyTorch's own division loses the last bytes.
    slack = 0 if count < 1 << 50 else count >> 50
    assert found.low - slack <= count <= found.high + slack
    assert found.high - found.low <= 0.01 * scale


@settings(deadline=None, max_examples=30)
@given(st.text(max_size=100))
def test_any_text_is_read_or_refused(text):
    for words in (text, f"CUDA out of memory. {text}", f"Tried to allocate {text} GiB"):
        with contextlib.suppress(MemlabError):
            read_message(words)
