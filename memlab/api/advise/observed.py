"""What the unchanged work shows about itself: techniques that cannot apply to it, and what edits of its text need to know.

Observed in the child process of the first run, so that no further run is spent on a technique that would only find nothing
to change.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import linecache
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, autograd, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from memlab.errors import DoesNotApply
from memlab.saving_techniques import techniques
from memlab.saving_techniques.checkpoint import blocks, longest_chain
from memlab.saving_techniques.in_place import changeable
from memlab.torch_internals.layers import BatchNorm, NormWithStatistics
from memlab.torch_internals.objects import storage_id

OBSERVED = "observed"
"""The message of a child that ran the unchanged work."""
NO_GRAPH = frozenset({"no_grad", "inference_mode"})
FOR_INFERENCE = NO_GRAPH | {"half_inference", "int8_weights", "conv_bn_fusion", "repvgg_merge", "acnet_merge"}
_Made = tuple[weakref.ref[nn.Module], weakref.ref[Tensor]]
"""A module, and what its forward returned."""


class Observer:
    """Watches one run; `facts` are plain values.

    "reasons" has why techniques do not apply, "models" what edits need of each, "used_in" the statements of the cell that run a
    model or take a step.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        self._uses: dict[tuple[int, str, int], weakref.ref[Any]] = {}
        self._applies: dict[str, list[str]] = {}
        self._depth = 0
        self._outermost: weakref.ref[nn.Module] | None = None
        self._last: _Made | None = None  # a Linear layer that may make logits
        self._whole: _Made | None = None  # a model whose output they are
        self._heads: set[tuple[int, int]] | None = None
        self.backwards, self._steps = 0, list[weakref.ref[Optimizer]]()
        self.retains = self.loads = self.concatenates = self.has_batch_norm = False

    @contextlib.contextmanager
    def on(self) -> Iterator[Observer]:
        """Watch modules, backward, losses and loaded files."""
        backward, load, loss, cat = autograd.backward, torch.load, functional.cross_entropy, torch.cat

        def called(*args: Any, **kwargs: Any) -> Any:
            self.backwards += 1
            self.retains |= bool(kwargs.get("retain_graph") or args[2:3] == (True,))
            return backward(*args, **kwargs)

        def loaded(*args: Any, **kwargs: Any) -> Any:
            self.loads = True
            return load(*args, **kwargs)

        def concatenated(*args: Any, **kwargs: Any) -> Any:
            self.concatenates = True
            return cat(*args, **kwargs)

        def lost(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            of_classes = isinstance(target, Tensor) and not target.is_floating_point()
            self._note_loss(input if of_classes else None)
            return loss(input, target, *args, **kwargs)

        hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
            register_optimizer_step_pre_hook(self._steps_with),
        ]
        try:
            with (
                mock.patch.object(autograd, "backward", called),
                mock.patch.multiple(torch, load=loaded, cat=concatenated),
                mock.patch.object(functional, "cross_entropy", lost),
            ):
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _note_use(self, used: Any) -> None:
        """Note which line of the cell leads here; what a thread of its own calls, as autograd does, comes after that."""
        frame = sys._getframe(1)
        while frame.f_code.co_name != "<module>":
            if frame.f_back is None:
                return
            frame = frame.f_back
        self._uses[id(used), frame.f_code.co_filename, frame.f_lineno] = weakref.ref(used)

    def _steps_with(self, optimizer: Optimizer, *_: Any) -> None:
        self._steps.append(weakref.ref(optimizer))
        self._note_use(optimizer)

    def _before(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._note_use(module)
        self._outermost = weakref.ref(module)
        # A loss has nothing to change. A block that is recomputed in backward is part of a model that was called before.
        if _has_tensors(module) and not any(known is not None and module in known.modules() for known in self._known()):
            self._models.append(weakref.ref(module))
            self.has_batch_norm |= any(isinstance(one, BatchNorm) for one in module.modules())
            for name, why in _not_changeable(module).items():
                self._applies.setdefault(name, []).append(why)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if type(module) is nn.Linear and module.out_features > module.in_features and isinstance(output, Tensor):
            self._last = weakref.ref(module), weakref.ref(output)
        if self._depth == 0:
            logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
            whole = isinstance(logits, Tensor) and _shares(logits, self._last)
            self._whole = (weakref.ref(module), weakref.ref(logits)) if whole and logits is not None else None

    def _note_loss(self, input: Any) -> None:
        """Note which model and layer made the input of a loss, if nothing was computed with it since."""
        pair = (0, 0)
        if self._last is not None and _shares(input, self._last):
            outermost = self._outermost() if self._depth and self._outermost is not None else None
            if outermost is not None and _has_tensors(outermost):  # the model computes its own loss
                pair = id(outermost), id(self._last[0]())
            elif self._whole is not None and _shares(input, self._whole):
                pair = id(self._whole[0]()), id(self._last[0]())
        self._heads = (self._heads or set()) | {pair}

    def _known(self) -> list[nn.Module | None]:
        return [one() for one in self._models]

    def facts(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """Everything as plain values; `names` are those of the cell."""
        # Of several models one that can be changed is enough.
        reasons = {name: why[0] for name, why in self._applies.items() if why and all(why)}
        if self.backwards:
            reasons |= dict.fromkeys(FOR_INFERENCE, "this calls backward, and it is for inference")
            if not self.retains:
                reasons["retain_graph"] = "no backward retains its graph"
        if not self.loads:
            reasons["mmap_loading"] = "no file is loaded"
        if not self.has_batch_norm:
            reasons["recomputed_norm"] = "there is no BatchNorm"
            if not self.concatenates:
                reasons["densenet"] = "there is no BatchNorm and no concatenation"
        models = {name: one for name, one in names.items() if isinstance(one, nn.Module) and one in self._known()}
        stepped = {id(one()) for one in self._steps}
        optimizers = {name: one for name, one in names.items() if id(one) in stepped}
        return {
            "reasons": reasons,
            "models": {name: self._of_model(one) for name, one in models.items()},
            "losses": [name for name, one in names.items() if isinstance(one, nn.CrossEntropyLoss) and _is_plain(one)],
            "optimizers": {name: type(one).__name__ for name, one in optimizers.items()},
            "used_in": {name: self._used_in(one) for name, one in {**models, **optimizers}.items()},
            "steps_after_each_backward": len(self._steps) == self.backwards,
        }

    def _used_in(self, used: Any) -> list[int]:
        """The statements of the cell that run a model or a part of it, or take a step: how many follow each of them.

        Counted from the end, as a line may be put before the cell; none where its text is unknown.
        """
        found, parts = set(), list(used.modules()) if isinstance(used, nn.Module) else [used]
        for (_, file, line), kept in self._uses.items():
            if any(kept() is one for one in parts):
                body = ast.parse("".join(linecache.getlines(file))).body
                found |= {sum(line < one.lineno for one in body)} if body else set()
        return sorted(found)

    def _of_model(self, model: nn.Module) -> dict[str, Any]:
        """What edits need: its blocks, and the layer that makes the logits of every loss."""
        paths = {id(one): path for path, one in model.named_modules()}
        found = blocks(model)
        head = ""
        if self._heads is not None and len(self._heads) == 1:
            of, layer = next(iter(self._heads))
            head = paths.get(layer, "") if of == id(model) else ""
        chain = None
        with contextlib.suppress(DoesNotApply):
            chain = longest_chain(model)
        if chain is not None and any(isinstance(one, NormWithStatistics) for one in chain.modules()):
            chain = None
        first = next(model.parameters(), None)
        return {
            "chain": (paths[id(chain)], len(chain)) if chain is not None else (),
            "in_place": [paths[id(one)] for one in changeable(model)],
            "device": first.device.type if first is not None else "",
            "blocks": [paths[id(one)] for one in found],
            "has_statistics": any(isinstance(one, NormWithStatistics) for top in found for one in top.modules()),
            "head": head,
            "is_transformers": callable(getattr(model, "gradient_checkpointing_enable", None)),
        }


def _not_changeable(model: nn.Module) -> dict[str, str]:
    """Technique -> why it finds nothing to change in the model, "" if it does: tried on a copy without memory."""
    found = {}
    for one in techniques.values():
        if one.change is None:
            continue
        try:
            tensors = (*model.parameters(), *model.buffers())
            blank: dict[int, Any] = {id(it): _blank(it) for it in tensors}
            one.change(copy.deepcopy(model, blank))
            found[one.name] = ""
        except DoesNotApply as error:
            found[one.name] = str(error).rstrip(".")
        except Exception:  # it cannot be copied: then it is tried
            found[one.name] = ""
    return found


def _has_tensors(module: nn.Module) -> bool:
    return any(True for tensors in (module.parameters(), module.buffers()) for _ in tensors)


def _is_plain(loss: nn.CrossEntropyLoss) -> bool:
    """Whether it computes what `cross_entropy(input, target)` does."""
    given = (loss.weight, loss.ignore_index, loss.reduction, loss.label_smoothing)
    return given == (None, -100, "mean", 0.0)


def _blank(tensor: Tensor) -> Tensor:
    other = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other


def _shares(tensor: Any, made: _Made | None) -> bool:
    """Whether a tensor is all of what a layer returned, or a view of it."""
    other = made[1]() if made is not None else None
    if not isinstance(tensor, Tensor) or other is None:
        return False
    return bool(storage_id(tensor.untyped_storage()) == storage_id(other.untyped_storage()))
