"""The memory of a training step, by part and layer: plain figures, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memlab.units import format_bytes, number_of

SAVED, OUTPUT, OTHER = "saved", "output", "other"
"""Why a storage is there between forward and backward: kept by autograd, returned, or held by something else."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One storage that `operator` made in the layer `made_in`, and that exists when the forward ends.

    It is charged to `layer`, the one that saved it first.
    """

    why: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    layer: str
    made_in: str
    operator: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One module by path, with what is charged to it and not to its submodules."""

    path: str
    type: str
    calls: int = 0
    shape: tuple[int, ...] | None = None
    parameter_count: int = 0
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    classic_bytes: int = 0


SUMS = (
    "parameter_count", "parameter_bytes", "buffer_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes",
    "classic_bytes",
)  # fmt: skip
"""The additive fields of a layer."""


@dataclass(frozen=True, slots=True)
class SizeTerm:
    """One reason why the classic estimate differs from what is kept: adding `nbytes` corrects it."""

    nbytes: int
    text: str


@dataclass(frozen=True, slots=True)
class Classic:
    """The estimate of the classic write-ups: four bytes per element of each layer's output, doubled for backward.

    With `terms` added, `with_backward_bytes` becomes `kept_bytes`, what the forward really keeps.
    """

    parameter_bytes: int
    without_backward_bytes: int
    kept_bytes: int
    terms: tuple[SizeTerm, ...]

    @property
    def with_backward_bytes(self) -> int:
        """Twice the intermediate results, as the classic estimate says."""
        return 2 * self.without_backward_bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """The memory of a training step. Each storage counts once, in the first part that it belongs to.

    `output_bytes` are outputs that autograd does not keep anyway, `other_bytes` what else the forward keeps.
    `elsewhere_bytes` are on another device than the model and in no other figure.
    """

    model: str
    device: str
    inputs: tuple[str, ...]
    is_training: bool
    optimizer: str
    parameter_count: int
    trainable_count: int
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    input_bytes: int
    kept: tuple[Kept, ...]
    elsewhere_bytes: int
    layers: tuple[Layer, ...]
    classic: Classic
    is_lower_bound: bool
    notes: tuple[str, ...]

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Any:
        """The value of which `dataclasses.asdict` went through JSON."""

        def made(kind: type, one: dict[str, Any]) -> Any:
            return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in one.items()})

        parts: dict[str, Any] = {}
        for name, kind in (("kept", Kept), ("layers", Layer)):
            parts[name] = tuple(made(kind, one) for one in facts[name])
        terms = tuple(SizeTerm(**one) for one in facts["classic"]["terms"])
        return made(cls, facts | parts | {"classic": Classic(**(facts["classic"] | {"terms": terms}))})

    def _kept_bytes(self, why: str) -> int:
        return sum(one.nbytes for one in self.kept if one.why == why)

    @property
    def activation_bytes(self) -> int:
        """What autograd keeps for backward, without parameters, buffers and inputs."""
        return self._kept_bytes(SAVED)

    @property
    def output_bytes(self) -> int:
        """Outputs that are not among the activations."""
        return self._kept_bytes(OUTPUT)

    @property
    def other_bytes(self) -> int:
        """What else the forward keeps: caches, attributes, tensors held by custom functions."""
        return self._kept_bytes(OTHER)

    @property
    def model_bytes(self) -> int:
        """Parameters and buffers: the model alone."""
        return self.parameter_bytes + self.buffer_bytes

    @property
    def kept_bytes(self) -> int:
        """The rise during the forward: activations, outputs and the rest."""
        return sum(one.nbytes for one in self.kept)

    @property
    def before_backward_bytes(self) -> int:
        """Alive between forward and backward once the optimizer has its state; gradients set to None."""
        return self.model_bytes + self.input_bytes + self.optimizer_bytes + self.kept_bytes

    @property
    def at_optimizer_bytes(self) -> int:
        """Alive during the optimizer's step, without its temporaries."""
        return self.model_bytes + self.input_bytes + self.optimizer_bytes + self.gradient_bytes

    @property
    def total_bytes(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    @property
    def parts(self) -> Mapping[str, int]:
        """Part -> bytes; they sum to `total_bytes`."""
        return {
            "parameters": self.parameter_bytes,
            "buffers": self.buffer_bytes,
            "gradients": self.gradient_bytes,
            "optimizer state": self.optimizer_bytes,
            "activations": self.activation_bytes,
            "outputs": self.output_bytes,
            "inputs": self.input_bytes,
            "held otherwise": self.other_bytes,
        }


# --- the classic estimate ------------------------------------------------------------------------------------------------

ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """One output that the classic estimate counts: of each leaf layer, the first time it is called.

    `nbytes` is four per element, `storages` are the numbers of the storages behind it.
    """

    path: str
    nbytes: int
    storages: tuple[int, ...]


def classic(parameter_count: int, outputs: Iterable[LayerOutput], kept: Mapping[int, Kept]) -> Classic:
    """The estimate, with one term per reason why it is off; `kept` is by storage number."""
    counted = list(outputs)
    total = sum(one.nbytes for one in counted)
    lost, again, seen, wider = [], [], set[int](), 0
    for one in counted:
        keys = {key for key in one.storages if key in kept}
        if keys <= seen if keys else not one.storages:  # without a storage of its own it is an input, or a parameter
            again.append(one)
        elif keys:
            wider += sum(kept[key].nbytes for key in keys - seen) - one.nbytes
        else:
            lost.append(one)
        seen |= keys
    unseen = [one for key, one in kept.items() if key not in seen]
    terms = [
        SizeTerm(-total, "backward was assumed to need everything twice; gradients of activations are temporary"),
        SizeTerm(-sum(one.nbytes for one in lost), _about(lost, "{} that nobody keeps, the largest of {} ({})")),
        SizeTerm(-sum(one.nbytes for one in again), _about(again, _SHARED)),
        SizeTerm(wider, "elements are not four bytes wide, or the storage behind an output is larger than the output"),
    ]
    if unseen:
        largest = max(unseen, key=lambda one: one.nbytes)
        what = f"{largest.operator.removeprefix('aten.').partition('.')[0]} in {largest.layer or 'the model itself'}"
        size = f"{'×'.join(map(str, largest.shape)) or 'one number'}, {format_bytes(largest.nbytes)}"
        count = number_of(len(unseen), "tensor")
        text = f"{count} kept that are no layer's output, the largest by {what} ({largest.dtype} of {size})"
        terms.append(SizeTerm(sum(one.nbytes for one in unseen), text))
    everything = sum(one.nbytes for one in kept.values())
    return Classic(parameter_count * ELEMENT_BYTES, total, everything, tuple(term for term in terms if term.nbytes))


_SHARED = "{} counted although it shares its memory with one before, the largest of {}"


def _about(outputs: list[LayerOutput], text: str) -> str:
    if not outputs:
        return ""
    largest = max(outputs, key=lambda one: one.nbytes)
    return text.format(number_of(len(outputs), "output"), largest.path, format_bytes(largest.nbytes))


# --- folding layers -------------------------------------------------------------------------------------------------------


def folded(layers: tuple[Layer, ...], limit: int) -> list[Layer]:
    """At most `limit` layers: if there are more, those below a depth are added to their parent."""

    def summed(path: str, kind: str, group: list[Layer]) -> Layer:
        own = next((layer for layer in group if layer.path == path), None)
        sums: dict[str, Any] = {name: sum(getattr(layer, name) for layer in group) for name in SUMS}
        shape = own.shape if own else None
        return dataclasses.replace(group[0], path=path, type=own.type if own else kind, shape=shape, **sums)

    depth = max((layer.path.count(".") + 1 for layer in layers), default=0)
    shown = list(layers)
    while len(shown) > limit and depth > 1:
        depth -= 1
        groups: dict[str, list[Layer]] = {}
        for layer in layers:
            groups.setdefault(".".join(layer.path.split(".")[:depth]), []).append(layer)
        shown = [one[0] if len(one) == 1 else summed(path, f"{len(one)} layers", one) for path, one in groups.items()]
    if len(shown) > limit:
        rest = shown[limit - 1 :]
        shown = [*shown[: limit - 1], summed("…", f"{len(rest)} more", rest)]
    return shown
