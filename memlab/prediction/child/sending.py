"""Send values of a notebook to a spawned process, by cloudpickle: its functions and classes are sent as code.

The names that code needs are read from the code; names made by `exec` or `globals()` are not found. Parameters and GPU
tensors are sent as shape, dtype and storage, without values: a prediction needs no more. The child unpickles bytes from this
process, never the other way round.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import io
import linecache
import pickle
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import cloudpickle
import torch

from memlab.errors import PredictionError
from memlab.torch_internals.traceback import running_shell

SMALL_BYTES = 1 << 16
"""Smaller parameters are sent with their values."""
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "DELETE_GLOBAL")
_WORD = re.compile(r"[^\W\d]\w*")


def names_of_code(code: types.CodeType) -> Iterator[str]:
    """The global names that a function's code reads, including nested code."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_of_code(constant)


def names_of_cell(source: str, known: Collection[str]) -> list[str]:
    """The known names that a cell (as Python, after IPython's transformations) reads before it binds them itself, in order."""
    bound: set[str] = set()
    needed: dict[str, None] = {}
    for statement in ast.parse(source).body:
        needed |= dict.fromkeys(name for name in _read_by(statement) if name in known and name not in bound)
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            inside = (node for target in targets for node in ast.walk(target))
            bound |= {node.id for node in inside if isinstance(node, ast.Name)}
    return list(needed)


def _read_by(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Call) and "get_ipython()" in ast.unparse(node.func):
            for inner in ast.walk(node):  # the statement of a magic
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield from _WORD.findall(inner.value)


def send(first: Any, work: Any, names: Iterable[str], space: Mapping[str, Any]) -> bytes:
    """Pickle `first`, then the work and the named values, which `receive_names` loads in the spawned process."""
    named = {name: space[name] for name in names if name in space}
    sender = _Sender(space)
    why = sender.why_not(first) or sender.why_not((work, named))
    if not why:
        sender.dump((sender.sources, sender.unsent_bytes))
        return sender.file.getvalue()
    refused = {
        name: found
        for name in sorted(_needed(work, named, space))
        # A function fails because of a name that it reads, which is listed itself.
        if not isinstance(space[name], types.FunctionType) and (found := _Sender(space).why_not(space[name]))
    }
    listed = "; ".join(f"{name}: {found}" for name, found in refused.items()) or why
    raise PredictionError(
        f"not everything that the code names can be sent to a new process, and none can be forked here: {listed[:600]}. "
        "Create it inside the code that is predicted."
    )


def _needed(work: Any, names: Iterable[str], space: Mapping[str, Any]) -> set[str]:
    todo, seen = [work, *(space[name] for name in names)], set(names)
    while todo:
        value = todo.pop()
        if isinstance(value, functools.partial):
            todo += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.FunctionType) and value.__globals__ is space:
            new = {name for name in names_of_code(value.__code__) if name in space} - seen
            seen |= new
            todo += [space[name] for name in new]
    return seen


class _MainNames(dict[str, Any]):
    """Replaces the notebook's names in a pickle: in the child its functions read those of `__main__`."""

    def __reduce__(self) -> Any:
        return _main_names, ()


def _main_names() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


class _Sender(cloudpickle.Pickler):
    """A pickler that omits values of large parameters, and collects the sources of functions for tracebacks."""

    def __init__(self, space: Mapping[str, Any]) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file)
        self.globals_ref[id(space)] = _MainNames()
        self.sources: dict[str, list[str]] = {}
        self.unsent_bytes = 0
        self._storages: dict[int, tuple[torch.UntypedStorage, bool]] = {}  # kept alive, so that ids stay unique

    def why_not(self, value: Any) -> str:
        """Pickle a value; return the reason if that fails, else ""."""
        try:
            self.dump(value)
        except Exception as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition("\n")[0]
            return type(value).__name__ + (f" ({reason})" if reason else "")
        return ""

    def reducer_override(self, value: Any) -> Any:
        """How a value is rebuilt; by default as cloudpickle does."""
        kind = type(value)
        if value is not None and value is running_shell():
            return running_shell, ()
        if issubclass(kind, torch.Tensor):
            return self._tensor(value)
        if id(value) in self._storages:
            return self._storage(value)
        if kind is types.CellType:
            contents = []
            with contextlib.suppress(ValueError):  # an empty one
                contents.append(value.cell_contents)
            return types.CellType, (), tuple(contents), None, None, _fill_cell
        reduced = super().reducer_override(value)
        if kind is types.FunctionType and reduced is not NotImplemented:
            file = value.__code__.co_filename
            self.sources.setdefault(file, linecache.getlines(file))
            # cloudpickle (3.1) gives each function its own cells: `nonlocal` would not be shared.
            if value.__closure__:
                make, (*arguments, _), *rest = reduced
                return make, (*arguments, value.__closure__), *rest
        return reduced

    def _tensor(self, value: torch.Tensor) -> Any:
        if value.grad_fn is not None:
            raise pickle.PicklingError(
                "it has a graph of autograd behind it, which cannot leave its process; detach() it"
            )
        kind = type(value)
        is_parameter = issubclass(kind, torch.nn.Parameter)
        if value.layout is not torch.strided or value.is_quantized or not (is_parameter or kind is torch.Tensor):
            return NotImplemented
        storage = value.untyped_storage()
        by_shape = value.is_cuda or value.is_meta or (is_parameter and storage.nbytes() > SMALL_BYTES)
        self._storages.setdefault(id(storage), (storage, by_shape))
        place = (storage, value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
        state = {"grad": value.grad} if value.grad is not None else None
        return _rebuilt, (kind if is_parameter else None, value.requires_grad, *place), state, None, None, _set_all

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        if self._storages[id(storage)][1]:
            if storage.device.type != "meta":  # which has no values
                self.unsent_bytes += storage.nbytes()
            return _storage_without_values, (storage.nbytes(), str(storage.device))
        return _storage_of, (torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes(),)


# --- in the spawned process ---


def receive_names(unpickler: pickle.Unpickler) -> tuple[Any, int]:
    """Load the work, the named values into `__main__`, and the sources; return the work and the bytes sent without values."""
    work, named = unpickler.load()
    _main_names().update(named)
    sources, unsent_bytes = unpickler.load()
    for file, lines in sources.items():
        linecache.cache.setdefault(file, (sum(map(len, lines)), None, lines, file))
    return work, int(unsent_bytes)


def _fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    for value in contents:
        cell.cell_contents = value


def _storage_without_values(nbytes: int, device: str) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def _storage_of(data: bytes) -> torch.UntypedStorage:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage() if data else torch.UntypedStorage(0)


def _rebuilt(kind: type | None, requires_grad: bool, storage: Any, dtype: torch.dtype, *place: Any) -> torch.Tensor:
    shape, stride, offset = place
    data = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
    return data.requires_grad_(requires_grad) if kind is None else kind(data, requires_grad)


def _set_all(made: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(made, name, value)
