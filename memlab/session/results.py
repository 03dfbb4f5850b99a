"""What a run's result is noted as: plain JSON with values up to 1 MiB, above that a digest, statistics and a sample.

Nothing noted refers to an object of the user's. Copies are made where no tally counts them, and without taking memory of a
device: a CUDA tensor comes to the host as it lies.

Limits: of tensors and arrays behind the first 64 MiB only a few values are read, as even a digest of all would take long.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from memlab.analysis.noted import MAX_DEPTH, MAX_PARTS, STORED, VERSION, devices_of, digest_of, positions, value_of
from memlab.analysis.results import CLOSE, ResultCheck, check, not_checked
from memlab.errors import MemlabError
from memlab.seams import dispatch
from memlab.trace.trace import CPU, Trace
from memlab.units import MiB

RESULT = "result"
"""The key of a trace's notes."""
LIMIT_BYTES = 1 * MiB
READ_BYTES = 64 * MiB
SAMPLE, SMALL_SAMPLE = 4096, 256
"""Of how many values those that are not kept whole leave a sample: of numbers that are read, and of those that are not."""
_CHUNK = 1 << 20
MAX_ITEMS = 1_000_000
_PRETEND = "FakeGPU"


class Refused(MemlabError):
    """A value that cannot be noted."""


def noted(value: Any) -> dict[str, Any]:
    """The note of a result; MemlabError where it holds something else than tensors, numbers, texts, dicts, lists."""
    with _unwatched():
        try:
            return _Noter().note(value)
        except MemlabError:
            raise
        except Exception as error:
            raise Refused(f"this result cannot be noted: {type(error).__name__}: {error!s:.200}") from None


def noted_if_possible(value: Any) -> dict[str, Any] | None:
    """The same of a value that nobody asked to note: None where that cannot be, or where somebody does not want to wait."""
    try:
        return noted(value)
    except (Exception, KeyboardInterrupt):  # the cell has ended: an interrupt must not cost its report
        return None


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Without the dispatch modes of this thread, ours or the user's: what is copied here is nobody's memory."""
    held = dispatch.modes()
    with dispatch.DisableTorchFunction(), torch.no_grad():
        for mode in reversed(held):
            dispatch.remove_mode(mode)
        try:
            yield
        finally:
            for mode in held:
                dispatch.push_mode(mode)


class _Noter:
    """One noting of one value: first all of its parts, then what is kept of each."""

    def __init__(self) -> None:
        self.parts = 0
        self.leaves: list[tuple[int, dict[str, Any], Any]] = []
        self.devices: set[str] = set()

    def note(self, value: Any) -> dict[str, Any]:
        node = self._node(value, 0)
        room, to_read = LIMIT_BYTES, READ_BYTES
        if sum(size for size, *_ in self.leaves) > LIMIT_BYTES:
            room = LIMIT_BYTES // 2  # the other half is for samples
        for size, leaf, source in sorted(self.leaves, key=lambda one: one[0]):
            is_whole, is_read = size <= room, size <= to_read
            room, to_read = room - size * is_whole, to_read - size * is_read
            share = max(16, min(SAMPLE, LIMIT_BYTES // 2 // 8 // len(self.leaves)))
            leaf.update(_kept(source, is_whole, is_read, share))
        return {"version": VERSION, "value": node, "devices": sorted(self.devices)}

    def _node(self, value: Any, depth: int) -> dict[str, Any]:
        self.parts += 1
        if depth > MAX_DEPTH or self.parts > MAX_PARTS:
            raise Refused(f"a result has at most {MAX_PARTS:,} parts and {MAX_DEPTH} levels: note less of it.")
        if value is None:
            return {"kind": "none"}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, str | bytes | bytearray):
            return self._text(value)
        if isinstance(value, bool | int | float | complex | numpy.generic | numpy.ndarray):
            return self._array(value)
        if isinstance(value, dict):
            return {"kind": "dict", "items": [[_key(key), self._node(one, depth + 1)] for key, one in _pairs(value)]}
        if isinstance(value, list | tuple):
            return self._series(value, depth)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
            return {"kind": "dict", "items": [[name, self._node(one, depth + 1)] for name, one in fields]}
        what = f"{type(value).__module__}.{type(value).__qualname__}"
        raise Refused(f"a result is a tensor, number or text, or a dict, list or tuple of them, got {what:.200}.")

    def _series(self, value: Any, depth: int) -> dict[str, Any]:
        if len(value) > MAX_ITEMS:
            raise Refused(f"a result has lists of at most {MAX_ITEMS:,} items, got {len(value):,}: note less of it.")
        if len(value) > 64 and {type(one) for one in value} in ({float}, {int}):  # as many parts would be far longer
            array = numpy.array(list(value), "f8" if type(value[0]) is float else "i8")
            return self._leaf(array.nbytes, f"list of {type(value[0]).__name__}", array.shape, array)
        items = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
        return {"kind": "list", "items": [self._node(one, depth + 1) for one in items]}

    def _text(self, value: str | bytes | bytearray) -> dict[str, Any]:
        if len(value) > READ_BYTES:
            raise Refused(
                f"a result has texts of at most {READ_BYTES:,} characters, got {len(value):,}: note less of it."
            )
        content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        node: dict[str, Any] = {"kind": "text", "of": "text" if isinstance(value, str) else "bytes"}
        if isinstance(value, str) and len(content) <= LIMIT_BYTES // 64:
            return {**node, "text": str(value)}
        return {**node, "sha256": digest_of(content)}

    def _array(self, value: Any) -> dict[str, Any]:
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            return self._text(hex(value))
        array = numpy.asarray(value)
        stored = array.dtype.newbyteorder("<")
        if stored.str not in STORED:
            raise Refused(f"a result has numbers, got an array of {array.dtype!s:.80}.")
        is_numpy = isinstance(value, numpy.generic | numpy.ndarray)
        dtype = (
            stored.name if is_numpy else next(k for k in (bool, int, float, complex) if isinstance(value, k)).__name__
        )
        return self._leaf(array.nbytes, dtype, array.shape, array)

    def _tensor(self, value: torch.Tensor) -> dict[str, Any]:
        _check_dense(value)
        if value.device.type == "cuda":
            self.devices.add(torch.cuda.get_device_name(value.device))
        size = value.numel() * value.element_size()
        return self._leaf(size, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.detach())

    def _leaf(self, size: int, dtype: str, shape: tuple[int, ...], source: Any) -> dict[str, Any]:
        node = {"kind": "numbers", "dtype": dtype, "shape": [int(one) for one in shape]}
        self.leaves.append((int(size), node, source))
        return node


def _key(key: Any) -> str | int | float | bool | None:
    if key is None or type(key) in (str, int, float, bool):
        return key
    raise Refused(f"the keys of a result are texts or numbers, got {type(key).__name__}.")


def _pairs(value: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The items, past what a class derived from dict makes of `items`."""
    return iter(dict.items(value))


def _check_dense(value: torch.Tensor) -> None:
    """Only values that lie in memory as they are can be read."""
    is_plain = type(value).__torch_dispatch__ is dispatch.plain_torch_dispatch
    if not is_plain or value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
        what = f"{type(value).__name__} on {value.device} ({value.layout})".replace("torch.", "")
        raise Refused(f"a result has tensors whose values lie in memory, got {what:.120}.")


# --- what is kept of numbers -----------------------------------------------------------------------------------------


def _kept(source: Any, is_whole: bool, is_read: bool, share: int) -> dict[str, Any]:
    if isinstance(source, torch.Tensor):
        host = _on_host(source) if is_read else None
        if host is None:
            return _few(source)
        flat, raw = host.reshape(-1), host.reshape(-1).view(torch.uint8).numpy()
        stored = _storable(flat if is_whole else flat[torch.from_numpy(positions(len(flat), min(len(flat), share)))])
        everything = () if is_whole else (_storable(flat[i : i + _CHUNK]) for i in range(0, len(flat), _CHUNK))
        head = f"{source.dtype}{tuple(source.shape)}".removeprefix("torch.")
    else:
        if not is_read:
            places = numpy.unravel_index(positions(source.size, SMALL_SAMPLE), source.shape)
            return {"sha256": "", **_written("sample", source[places])}
        whole = numpy.ascontiguousarray(source, source.dtype.newbyteorder("<")).reshape(-1)
        raw, head = whole.view("u1") if whole.size else whole, f"{whole.dtype.name}{tuple(source.shape)}"
        stored = whole if is_whole else whole[positions(len(whole), min(len(whole), share))]
        everything = () if is_whole else (whole[i : i + _CHUNK] for i in range(0, len(whole), _CHUNK))
    digest = hashlib.sha256(head.encode())
    digest.update(raw)  # type: ignore[arg-type]  # arrays are buffers
    facts = {"sha256": digest.hexdigest(), "nans": int(numpy.isnan(stored).sum()) if is_whole else None}
    return {
        **facts,
        **_written("data" if is_whole else "sample", stored),
        **({} if is_whole else _statistics(everything)),
    }


def _written(name: str, array: numpy.ndarray[Any, Any]) -> dict[str, Any]:
    """Numbers as text, little-endian."""
    plain = numpy.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"stored": plain.dtype.str, name: base64.b64encode(plain.tobytes()).decode()}


def _statistics(chunks: Any) -> dict[str, Any]:
    """NaN, the largest finite value and the norm of numbers that come in pieces."""
    nans, largest, squares = 0, 0.0, 0.0
    for chunk in chunks:
        if chunk.dtype.kind not in "fc":
            return {}
        is_finite = numpy.isfinite(chunk)
        nans += int(numpy.isnan(chunk).sum())
        size = numpy.abs(chunk[is_finite]).astype("f8")
        largest, squares = max(largest, float(size.max(initial=0.0))), squares + float(size @ size)
    return {"nans": nans, "largest": largest, "norm": math.sqrt(squares)}


def _on_host(value: torch.Tensor) -> torch.Tensor | None:
    """The values in order, in host memory; a strided CUDA tensor comes with what lies between: its device must not make room.

    None where too much lies between them.
    """
    if value.device.type == "cpu":
        return value.contiguous().resolve_conj().resolve_neg()
    if not value.numel():
        return torch.empty(value.shape, dtype=value.dtype)
    span = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    if span * value.element_size() > READ_BYTES:
        every = range(value.numel())
        return _one_by_one(value, numpy.array(every)).reshape(value.shape) if len(every) <= SAMPLE else None
    host = _bare(value).as_strided((span,), (1,), value.storage_offset()).cpu()
    return _as_seen(host.as_strided(value.shape, value.stride(), 0).contiguous(), value)


def _bare(value: torch.Tensor) -> torch.Tensor:
    """What lies in memory: a conjugated or negated view would be worked out on the device before it is copied."""
    storage, offset = value.untyped_storage(), value.storage_offset()
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(storage, offset, value.shape, value.stride())


def _as_seen(host: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What is read of the bytes of a view."""
    host = host.conj().resolve_conj() if value.is_conj() else host
    return -host if value.is_neg() else host


def _few(value: torch.Tensor) -> dict[str, Any]:
    """A few values of a tensor that is too large to be read."""
    some = _one_by_one(value, positions(value.numel(), SMALL_SAMPLE))
    return {"sha256": "", **_written("sample", _storable(some))}


def _one_by_one(value: torch.Tensor, places: numpy.ndarray[Any, Any]) -> torch.Tensor:
    """The values at these places, flat: an index for all at once would take memory of the device."""
    bare, indices = _bare(value), zip(*numpy.unravel_index(places, tuple(value.shape)), strict=True)
    return _as_seen(torch.stack([bare[tuple(map(int, index))].cpu() for index in indices]), value)


def _storable(flat: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """As numpy has it; what it lacks (bfloat16, float8) fits into a wider form, bit by bit."""
    if flat.dtype.is_complex and flat.dtype.itemsize < 8:
        return flat.to(torch.complex64).numpy()
    if flat.dtype.is_floating_point and flat.dtype.itemsize < 4 and flat.dtype is not torch.float16:
        return flat.float().numpy()
    return flat.numpy()


# --- two runs ----------------------------------------------------------------------------------------------------------


def check_results(a: Trace, b: Trace, names: tuple[str, str], tolerance: float = CLOSE) -> ResultCheck:
    """Whether the results of two runs agree, as far as their traces tell and anything was computed at all."""
    if (reason := _unchecked(a, b, names)) is not None:
        return reason
    try:
        first, second = (value_of(trace.notes[RESULT]) for trace in (a, b))
    except MemlabError as error:
        return not_checked(str(error), "unreadable")
    return check(first, second, tolerance, tuple(_engines(a, b)))


def _unchecked(a: Trace, b: Trace, names: tuple[str, str]) -> ResultCheck | None:
    """Why nothing can be compared."""
    for trace, name in zip((a, b), names, strict=True):
        if "prediction" in trace.notes:
            return not_checked(f"{name!r} was predicted: nothing was computed in it", "predicted")
    if other := _other_work(a, b):
        return not_checked(other, "other work")
    for trace, name in zip((a, b), names, strict=True):
        if RESULT not in trace.notes:
            how = "run.result(value), or an expression at the end of the cell"
            return not_checked(f"{name!r} has no result: note one with {how}", "no result")
        if is_pretend(trace):
            return not_checked(f"{name!r} ran on a pretend device, which computes nothing", "pretend device")
    return None


def is_pretend(trace: Trace) -> bool:
    """Whether a run was on the pretend device, where values and times mean nothing."""
    names = (*(device.name for device in trace.made_by.devices), *devices_of(trace.notes.get(RESULT)))
    return any(name.startswith(_PRETEND) for name in names)


def _other_work(a: Trace, b: Trace) -> str:
    """What two trials do not share, so that their results have nothing to do with each other."""
    first, second = a.notes.get("trial"), b.notes.get("trial")
    if not isinstance(first, dict) or not isinstance(second, dict):
        return ""
    for what in ("workload", "size", "settings", "steps"):
        if first.get(what) != second.get(what):
            return f"they did other work: {what} {first.get(what)!s:.80} and {second.get(what)!s:.80}"
    return ""


def _engines(a: Trace, b: Trace) -> Iterator[str]:
    on = [any(index != CPU for index in trace.device_indices) for trace in (a, b)]
    if on[0] != on[1]:
        yield "one ran on the CPU and the other on CUDA: their engines add in another order, and round accordingly"
