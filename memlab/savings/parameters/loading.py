"""Weights from a file: into a model that has some already (twice the bytes), into one on the meta device, or mapped into memory.

A mapped file is read page by page when a weight is used, and the system can take the pages back: the host counts them as
file-backed, not as the process's own. A weight that is written to becomes an ordinary one.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.savings.optimizers.groups import replaced
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job, Parts

State = dict[str, Tensor]


def _loaded_over(job: Job) -> None:
    """As it is often written: a model with random weights, then its state from a file, then one into the other."""
    with stored(job.model) as read:
        job.model.load_state_dict(read(job.device, False))


@contextlib.contextmanager
def stored(model: nn.Module) -> Iterator[Callable[[torch.device, bool], State]]:
    """The state of the model in a file that goes at the end; gives what reads it (a mapped file stays until it is unmapped)."""
    state = model.state_dict()
    with tempfile.TemporaryDirectory(prefix="memlab-") as folder:
        path = Path(folder) / "weights.pt"
        try:
            torch.save(state, path)
        except (RuntimeError, NotImplementedError, TypeError):  # pretend tensors have no numbers to write
            sizes = {name: (one.shape, one.dtype) for name, one in state.items()}
            yield lambda device, mapped: {
                name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in sizes.items()
            }
            return
        del state
        yield lambda device, mapped: torch.load(path, map_location=device, mmap=mapped or None, weights_only=True)


def _reload(job: Job, mapped: bool) -> None:
    """Write the weights down, let them go, and make the parameters of what is read."""
    names = _names_by_tensor(job.model)
    if not names:
        raise DoesNotApply("the model has no parameters to load.")
    with stored(job.model) as read:
        old = dict(job.model.named_parameters(remove_duplicate=False))
        _to_meta(job.model)
        if job.optimizer is not None:
            replaced(job.optimizer, {id(one): job.model.get_parameter(name) for name, one in old.items()})
        meta = dict(job.model.named_parameters(remove_duplicate=False))
        del old
        job.model.load_state_dict(read(job.device, mapped), assign=True)
    _tie(job.model, names)
    if job.optimizer is not None:
        replaced(job.optimizer, {id(one): job.model.get_parameter(name) for name, one in meta.items()})


def _names_by_tensor(model: nn.Module) -> list[list[str]]:
    """The names of each parameter: several where modules share one."""
    names: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    return list(names.values())


def _to_meta(model: nn.Module) -> None:
    """Let go of parameters and of the buffers that a state has; others, as rotary tables, no file would bring back."""
    known = model.state_dict(keep_vars=True).keys()
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, one in list(module.named_parameters(recurse=False)):
            if id(one) not in made:
                made[id(one)] = nn.Parameter(torch.empty_like(one, device="meta"), requires_grad=one.requires_grad)
            setattr(module, name, made[id(one)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if f"{path}.{name}".lstrip(".") in known:
                setattr(module, name, torch.empty_like(buffer, device="meta"))


def _tie(model: nn.Module, names: list[list[str]]) -> None:
    """assign=True makes a parameter for every name: those that were one are made one again."""
    for first, *others in names:
        for name in others:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, model.get_parameter(first))


@contextlib.contextmanager
def _mapped_outside() -> Iterator[None]:
    """Every torch.load of a file maps it, where it can."""
    mapped: list[bool] = []
    load = torch.load

    def mapping(file: Any, *args: Any, **settings: Any) -> Any:
        if settings.get("mmap") is None and isinstance(file, str | os.PathLike):  # an open file has no name to map
            try:
                found = load(file, *args, **{**settings, "mmap": True})
                mapped.append(True)
                return found
            except (RuntimeError, ValueError):  # a file of before 1.6
                pass
        return load(file, *args, **settings)

    torch.load = mapping  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = load
    if not mapped:
        raise DoesNotApply("no file was loaded that could be mapped and is not.")


def large_inference() -> Parts:
    """Weights and next to nothing else, without training."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers).requires_grad_(False), None, (torch.randn(4, 256),), None


_LOADING = (
    "PyTorch tutorial, Tips for loading an nn.Module from a checkpoint, 2023, "
    "https://docs.pytorch.org/tutorials/recipes/recipes/module_load_state_dict_tips.html"
)
TECHNIQUES = (
    Technique(
        name="meta_init",
        idea="Build the model on the meta device, without memory, and make its parameters of what is loaded.",
        attacks=("parameter",),
        kind="saving",
        stage="model",
        equality=EXACT,
        price="buffers that no file has (persistent=False) must be made by hand; shared weights must be tied again",
        not_when="the peak is in training, which is far above twice the weights; nothing is loaded",
        code="""
with torch.device("meta"):
    model = Model()                                       # shapes, no bytes, no time for initialisation
state = torch.load("weights.pt", map_location="cuda", weights_only=True)
model.load_state_dict(state, assign=True)                 # the loaded tensors become the parameters
optimizer = torch.optim.AdamW(model.parameters())         # afterwards: these are other objects
""",
        references=(_LOADING,),
        shown=Shown(large_inference),
        habit=_loaded_over,
        apply=lambda job: _reload(job, mapped=False),
    ),
    Technique(
        name="mmap_loading",
        idea="Map the file of weights into memory instead of reading it: pages come when they are used, and can go again.",
        attacks=("parameter", "host memory"),
        kind="saving",
        stage="model",
        equality=EXACT,
        price="the first use of a weight waits for the disk; the file must stay where it is",
        slower=True,
        not_when="weights are trained on the host: what is written becomes ordinary memory; a file system over the network",
        code="""
with torch.device("meta"):
    model = Model()
state = torch.load("weights.pt", mmap=True, weights_only=True)
model.load_state_dict(state, assign=True)
""",
        references=(
            _LOADING,
            "PyTorch documentation, torch.load, 2026, https://docs.pytorch.org/docs/stable/generated/torch.load.html",
        ),
        shown=Shown(large_inference),
        tips=("F4",),
        habit=_loaded_over,
        apply=lambda job: _reload(job, mapped=True),
        outside=_mapped_outside,
    ),
)
