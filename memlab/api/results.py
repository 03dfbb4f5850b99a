"""The result of a run as plain JSON: values up to 1 MiB, above that a digest, statistics and a sample.

No object of the user's is kept alive. Copies are not seen by the storage tracker and use no device memory: a CUDA tensor is
copied to the host with its storage layout.

Limits: beyond the first 64 MiB, tensors and arrays have a small sample and no digest, which would take too long.
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

from memlab.analysis.results import (
    CLOSE,
    MAX_DEPTH,
    MAX_PARTS,
    STORED,
    VERSION,
    ResultCheck,
    check,
    devices_of,
    digest_of,
    not_checked,
    positions,
    read_result,
)
from memlab.errors import MemlabError
from memlab.torch_internals import dispatch
from memlab.torch_internals.traceback import running_shell
from memlab.trace.trace import CPU, Trace, is_simulated_gpu
from memlab.units import MiB

RESULT = "result"
"""The key in a trace's notes."""
LIMIT_BYTES = 1 * MiB
READ_BYTES = 64 * MiB
SAMPLE, SMALL_SAMPLE = 4096, 256
"""The sample sizes of parts that are not kept whole: of those that are read, and of those that are not."""
_CHUNK = 1 << 20
MAX_ITEMS = 1_000_000


def serialized(value: Any) -> dict[str, Any]:
    """Serialize a result as plain JSON; MemlabError if it contains something that cannot be recorded."""
    with _untracked():
        try:
            return ResultSerializer().serialize(value)
        except MemlabError:
            raise
        except Exception as error:
            raise MemlabError(f"this result cannot be recorded: {type(error).__name__}: {error!s:.200}") from None


@contextlib.contextmanager
def _untracked() -> Iterator[None]:
    """Leave all dispatch modes of this thread, ours and the user's: these copies must not be counted."""
    held = dispatch.modes()
    with dispatch.DisableTorchFunction(), torch.no_grad():
        try:
            for mode in reversed(held):
                dispatch.remove_mode(mode)
            yield
        finally:
            still_on = {id(mode) for mode in dispatch.modes()}  # an interrupt may come before all are left
            for mode in held:
                if id(mode) not in still_on:
                    dispatch.push_mode(mode)


class ResultSerializer:
    """Serializes one value: first the tree of its parts, then the numbers in it, the smallest first."""

    def __init__(self) -> None:
        self.parts = 0
        self.leaves: list[tuple[dict[str, Any], torch.Tensor]] = []
        self.devices: set[str] = set()

    def serialize(self, value: Any) -> dict[str, Any]:
        """The result as plain JSON."""
        node = self._node(value, 0)
        leaves = sorted(self.leaves, key=lambda one: one[1].nbytes)
        is_all_kept = sum(tensor.nbytes for _, tensor in leaves) <= LIMIT_BYTES
        room, to_read = LIMIT_BYTES if is_all_kept else LIMIT_BYTES // 2, READ_BYTES  # the other half is for samples
        share = max(16, min(SAMPLE, LIMIT_BYTES // 2 // 8 // max(len(leaves), 1)))
        for leaf, tensor in leaves:
            is_whole, is_read = tensor.nbytes <= room, tensor.nbytes <= to_read
            room, to_read = room - tensor.nbytes * is_whole, to_read - tensor.nbytes * is_read
            host = _on_host(tensor) if is_read else None
            leaf.update(_few(tensor, share) if host is None else _numbers(host, is_whole, share))
        return {"version": VERSION, "value": node, "devices": sorted(self.devices)}

    def _node(self, value: Any, depth: int) -> dict[str, Any]:
        self.parts += 1
        if depth > MAX_DEPTH or self.parts > MAX_PARTS:
            raise _refused(f"at most {MAX_PARTS:,} parts and {MAX_DEPTH} levels: record less of it")
        if value is None:
            return {"kind": "none"}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, str | bytes | bytearray):
            return _text(value)
        if isinstance(value, bool | int | float | complex | numpy.generic | numpy.ndarray):
            return self._array(value)
        if isinstance(value, list | tuple):
            return self._series(value, depth)
        if isinstance(value, dict):
            pairs = list(dict.items(value))  # bypass an `items` overridden in a subclass of dict
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            pairs = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        else:
            what = f"{type(value).__module__}.{type(value).__qualname__}"
            allowed = "a result is a tensor, number or text, or a dict, list or tuple of them"
            raise MemlabError(f"{allowed}, got {what:.200}.")
        for key, _ in pairs:
            if key is not None and type(key) not in (str, int, float, bool):
                raise MemlabError(f"the keys of a result are texts or numbers, got {type(key).__name__}.")
        return {"kind": "dict", "items": [[key, self._node(one, depth + 1)] for key, one in pairs]}

    def _series(self, value: Any, depth: int) -> dict[str, Any]:
        if len(value) > MAX_ITEMS:
            raise _refused(f"lists of at most {MAX_ITEMS:,} items, got {len(value):,}: record less of it")
        if len(value) > 64 and {type(one) for one in value} in (
            {float},
            {int},
        ):  # as separate parts it would be far longer
            array = numpy.array(list(value), "f8" if type(value[0]) is float else "i8")
            return self._leaf(f"list of {type(value[0]).__name__}", torch.from_numpy(array))
        items = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
        return {"kind": "list", "items": [self._node(one, depth + 1) for one in items]}

    def _array(self, value: Any) -> dict[str, Any]:
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            return _text(hex(value))
        array = numpy.asarray(value)
        little = array.dtype.newbyteorder("<")
        if little.str not in STORED:
            raise _refused(f"numbers, got an array of {array.dtype!s:.80}")
        kind = little.name
        if not isinstance(value, numpy.generic | numpy.ndarray):
            kind = next(one for one in (bool, int, float, complex) if isinstance(value, one)).__name__
        if array.nbytes > READ_BYTES:  # read in place: as a tensor it might have to be copied whole
            places = numpy.unravel_index(positions(array.size, SMALL_SAMPLE), array.shape)
            few = torch.from_numpy(numpy.require(array[places], little, ["C", "W"]))
            return {"kind": "numbers", "dtype": kind, "shape": list(array.shape), **_sampled(few)}
        return self._leaf(kind, torch.from_numpy(numpy.require(array, little, ["C", "W"])))

    def _tensor(self, value: torch.Tensor) -> dict[str, Any]:
        is_plain = type(value).__torch_dispatch__ is dispatch.plain_torch_dispatch
        if not is_plain or value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            what = f"{type(value).__name__} on {value.device} ({value.layout})".replace("torch.", "")
            raise _refused(f"dense tensors, got {what:.120}")
        if value.device.type == "cuda":
            self.devices.add(torch.cuda.get_device_name(value.device))
        return self._leaf(str(value.dtype).removeprefix("torch."), value.detach())

    def _leaf(self, dtype: str, tensor: torch.Tensor) -> dict[str, Any]:
        node = {"kind": "numbers", "dtype": dtype, "shape": [int(one) for one in tensor.shape]}
        self.leaves.append((node, tensor))
        return node


def _refused(allowed: str) -> MemlabError:
    return MemlabError(f"a result has {allowed}.")


def _text(value: str | bytes | bytearray) -> dict[str, Any]:
    is_text = isinstance(value, str)
    if len(value) > READ_BYTES:
        raise _refused(f"texts of at most {READ_BYTES:,} characters, got {len(value):,}: record less of it")
    content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    kept = {"text": str(value)} if is_text and len(content) <= LIMIT_BYTES // 64 else {"sha256": digest_of(content)}
    return {"kind": "text", "of": "text" if is_text else "bytes", **kept}


def _few(tensor: torch.Tensor, share: int) -> dict[str, Any]:
    """Serialize a tensor that is too large to be read: a sample."""
    try:
        return _sampled(_as_seen(_picked(tensor, positions(tensor.numel(), min(share, SMALL_SAMPLE))), tensor))
    except (NotImplementedError, TypeError):  # a dtype whose values cannot be read: its shape is kept
        return {"sha256": "", "stored": "|u1", "sample": ""}


def _picked(tensor: torch.Tensor, numbers: numpy.ndarray[Any, Any]) -> torch.Tensor:
    """These raw values, copied to the host one by one, as their device may be full."""
    bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    bare = bare.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    places = numpy.unravel_index(numbers, tuple(tensor.shape))
    values = [bare[index].reshape(1).cpu() for index in zip(*(one.tolist() for one in places), strict=True)]
    return torch.cat([one.view(torch.uint8) for one in values]).view(tensor.dtype)


def _sampled(few: torch.Tensor) -> dict[str, Any]:
    kept = _storable(few)
    return {"sha256": "", "stored": kept.dtype.str, "sample": base64.b64encode(kept.tobytes()).decode()}


def _numbers(host: torch.Tensor, is_whole: bool, share: int) -> dict[str, Any]:
    """Serialize the values of a tensor that was read."""
    flat = host.reshape(-1)
    digest = hashlib.sha256(f"{host.dtype}{tuple(host.shape)}".removeprefix("torch.").encode())
    raw = flat.view(torch.uint8).numpy()
    digest.update(raw)  # type: ignore[arg-type]  # arrays are buffers
    if not is_whole:  # by their bytes, as some dtypes cannot be indexed
        few = raw.reshape(len(flat), -1)[positions(len(flat), min(len(flat), share))]
    kept = _storable(flat if is_whole else torch.from_numpy(few.reshape(-1)).view(flat.dtype))
    facts = {"sha256": digest.hexdigest(), "stored": kept.dtype.str}
    facts["data" if is_whole else "sample"] = base64.b64encode(kept.tobytes()).decode()
    if is_whole:
        return {**facts, "nans": int(numpy.isnan(kept).sum())}
    if kept.dtype.kind not in "fc":
        return facts
    nans, largest, squares = 0, 0.0, 0.0
    for start in range(0, len(flat), _CHUNK):
        chunk = _storable(flat[start : start + _CHUNK])
        size = numpy.abs(chunk[numpy.isfinite(chunk)]).astype("f8")
        nans += int(numpy.isnan(chunk).sum())
        largest, squares = max(largest, float(size.max(initial=0.0))), squares + float(size @ size)
    return {**facts, "nans": nans, "largest": largest, "norm": math.sqrt(squares)}


def _storable(flat: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """A numpy array; dtypes that numpy lacks (bfloat16, float8) are widened without loss."""
    if flat.dtype.is_complex and flat.dtype.itemsize < 8:
        return flat.to(torch.complex64).numpy()
    if flat.dtype.is_floating_point and flat.dtype.itemsize < 4 and flat.dtype is not torch.float16:
        return flat.float().numpy()
    return flat.numpy()


def _on_host(value: torch.Tensor) -> torch.Tensor | None:
    """The values in order, in host memory; None if there are too many, or the gaps between them are too large.

    A strided CUDA tensor is copied with its gaps, and a conjugated or negated view without resolving it: resolving would
    allocate memory on its device.
    """
    if value.device.type == "cpu":
        return value.contiguous().resolve_conj().resolve_neg()
    if not value.numel():
        return torch.empty(value.shape, dtype=value.dtype)
    storage, offset, shape, stride = value.untyped_storage(), value.storage_offset(), value.shape, value.stride()
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if span * value.element_size() <= READ_BYTES:
        bare = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage, offset, (span,), (1,))
        host = bare.cpu().as_strided(shape, stride, 0).contiguous()
    elif value.numel() <= SAMPLE:
        host = _picked(value, numpy.arange(value.numel())).reshape(shape)
    else:
        return None
    return _as_seen(host, value)


def _as_seen(host: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Resolve the values of a conjugated or negated view."""
    host = host.conj().resolve_conj() if value.is_conj() else host
    return -host if value.is_neg() else host


# --- two runs ---


def check_results(a: Trace, b: Trace, names: tuple[str, str], tolerance: float = CLOSE) -> ResultCheck:
    """Whether the results of two runs agree, as recorded in their traces."""
    both = ((a, names[0]), (b, names[1]))
    for trace, name in both:
        if "prediction" in trace.notes:
            return not_checked(f"{name!r} was predicted: nothing was computed in it", "predicted")
        if is_simulated(trace):
            return not_checked(f"{name!r} ran on a simulated GPU, which computes nothing", "simulated GPU")
    mine, other = a.noted("trial"), b.noted("trial")
    for what in ("workload", "size", "settings", "steps") if mine and other else ():
        if mine.get(what) != other.get(what):
            why = f"they did other work: {what} {mine.get(what)!s:.80} and {other.get(what)!s:.80}"
            return not_checked(why, "other work")
    for trace, name in both:
        if RESULT not in trace.notes:
            how = "call run.result(value) inside `with memlab.track() as run:`"
            how = f"end its cell with an expression, or {how}" if running_shell() is not None else how
            return not_checked(f"{name!r} has no result: {how}", "no result")
    try:
        first, second = (read_result(trace.notes[RESULT]) for trace in (a, b))
    except MemlabError as error:
        return not_checked(str(error), "unreadable")
    on_cuda = [any(index != CPU for index in trace.device_indices) for trace in (a, b)]
    engines = "one ran on the CPU and the other on CUDA: they sum in another order and round differently"
    return check(first, second, tolerance, (engines,) if on_cuda[0] != on_cuda[1] else ())


def is_simulated(trace: Trace) -> bool:
    """Whether a run was on a simulated GPU, where values and times mean nothing."""
    names = (*(device.name for device in trace.made_by.devices), *devices_of(trace.notes.get(RESULT)))
    return any(map(is_simulated_gpu, names))
