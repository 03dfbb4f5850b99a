"""Weights from a file: into a model that has some already (twice the bytes), into one on the meta device, or mapped into memory.

A mapped file is read page by page when a weight is used, and the system can take the pages back: the host counts them as
file-backed, not as the process's own. A weight that is written to becomes ordinary memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.saving_techniques.demos import linear_stack
from memlab.saving_techniques.patching import must_happen
from memlab.saving_techniques.technique import Demo, described
from memlab.workloads.job import Job, Parts

State = dict[str, Tensor]


@contextlib.contextmanager
def _stored(state: State) -> Iterator[Callable[[torch.device, bool], State]]:
    """Write the state to a file that is deleted at the end; yield a function that reads it (a mapped file lives until unmapped)."""
    with tempfile.TemporaryDirectory(prefix="memlab-") as folder:
        path = Path(folder) / "weights.pt"
        try:
            torch.save(state, path)
        except (RuntimeError, NotImplementedError, TypeError):  # fake tensors have no numbers to write
            sizes = {name: (one.shape, one.dtype) for name, one in state.items()}
            yield lambda device, mapped: {
                name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in sizes.items()
            }
        else:
            state.clear()
            yield lambda device, mapped: torch.load(path, map_location=device, mmap=mapped or None, weights_only=True)


def _baseline(job: Job) -> None:
    """The usual way: a model with random weights, its state from a file, then `load_state_dict`."""
    with _stored(job.model.state_dict()) as read:
        job.model.load_state_dict(read(job.device, False))


def _reload(mapped: bool, job: Job) -> None:
    """Write the weights to a file, free them, and use the loaded tensors as parameters."""
    model = job.model
    names: dict[int, list[str]] = {}  # several for one parameter where modules share it
    for name, one in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    if not names:
        raise DoesNotApply("the model has no parameters to load.")
    del one  # it would keep the last weight alive while the file is read
    groups = job.optimizer.param_groups if job.optimizer is not None else []
    trained = [[names.get(id(one), [one])[0] for one in group["params"]] for group in groups]
    with _stored(model.state_dict()) as read:
        for group in groups:  # it would keep the weights alive
            group["params"] = []
        _free_weights(model)
        model.load_state_dict(read(job.device, mapped), assign=True)
    for first, *others in names.values():  # assign=True makes a parameter for every name: tie the shared ones again
        for name in others:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, model.get_parameter(first))
    for group, own in zip(groups, trained, strict=True):
        group["params"] = [model.get_parameter(one) if isinstance(one, str) else one for one in own]


def _free_weights(model: nn.Module) -> None:
    """Move to meta. Buffers that are not in the state stay, as rotary tables: no file would bring them back."""
    in_state = model.state_dict(keep_vars=True).keys()
    own = [
        (module, name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if f"{path}.{name}".lstrip(".") not in in_state
    ]
    model.to("meta")
    for module, name, buffer in own:
        setattr(module, name, buffer)


@contextlib.contextmanager
def _patch() -> Iterator[None]:
    """Make every torch.load map its file, if possible."""
    load = torch.load

    def mapping(file: Any, *args: Any, **settings: Any) -> Any:
        if settings.get("mmap") is None and isinstance(file, str | os.PathLike):  # an open file has no name to map
            with contextlib.suppress(RuntimeError, ValueError):  # a file of before 1.6
                loaded = load(file, *args, **{**settings, "mmap": True})
                mapped.append(True)
                return loaded
        return load(file, *args, **settings)

    otherwise = "no file was loaded that could be mapped and is not."
    with must_happen(otherwise) as mapped, mock.patch.object(torch, "load", mapping):
        yield


def large_inference() -> Parts:
    """Almost nothing but weights, without training."""
    model, _, batch, _ = linear_stack(8, 256, 4)
    return model.requires_grad_(False), None, batch[:1], None


TECHNIQUES = tuple(
    described(name, Demo(large_inference), functools.partial(_reload, mapped), baseline_pattern=_baseline, patch=patch)
    for name, mapped, patch in (("meta_init", False, None), ("mmap_loading", True, _patch))
)
