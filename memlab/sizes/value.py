"""What a model comes to, part by part and layer by layer: plain figures, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SAVED, OUTPUT, OTHER = "saved", "output", "other"
"""Why a storage is there between forward and backward: kept by autograd, returned, or held by something else."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One storage that the forward made and that is alive when it has ended; charged to the layer that saved it first."""

    why: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    layer: str
    made_in: str
    operator: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One module by its path, with what is charged to itself and not to those below it."""

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

    @property
    def is_empty(self) -> bool:
        """Whether nothing is charged to it."""
        return not any(getattr(self, name) for name in SUMS)


SUMS = (
    "parameter_count", "parameter_bytes", "buffer_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes",
    "classic_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Term:
    """One reason why the classic estimate is not what is kept: adding `nbytes` corrects it."""

    nbytes: int
    text: str


@dataclass(frozen=True, slots=True)
class Classic:
    """The estimate of the classic write-ups: four bytes for each element that a layer puts out, twice for backward.

    With `terms` added, `with_backward_bytes` becomes `kept_bytes`, which is what the forward leaves behind.
    """

    parameter_bytes: int
    without_backward_bytes: int
    kept_bytes: int
    terms: tuple[Term, ...]

    @property
    def with_backward_bytes(self) -> int:
        """Twice the intermediate results, as the classic has it."""
        return 2 * self.without_backward_bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a training step of a model takes. Each storage counts once, in the first part that it belongs to.

    `output_bytes` are outputs that autograd does not keep anyway, `other_bytes` what the forward left behind elsewhere.
    `elsewhere_bytes` lie on another device than the model and are in no other figure.
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

    def _kept_bytes(self, why: str) -> int:
        return sum(one.nbytes for one in self.kept if one.why == why)

    @property
    def activation_bytes(self) -> int:
        """What autograd keeps for backward and neither parameter, buffer nor input is."""
        return self._kept_bytes(SAVED)

    @property
    def output_bytes(self) -> int:
        """Outputs, as far as they are not among the activations."""
        return self._kept_bytes(OUTPUT)

    @property
    def other_bytes(self) -> int:
        """What else of the forward is alive: caches, attributes, what custom functions hold."""
        return self._kept_bytes(OTHER)

    @property
    def model_bytes(self) -> int:
        """Parameters and buffers: what the model takes by itself."""
        return self.parameter_bytes + self.buffer_bytes

    @property
    def kept_bytes(self) -> int:
        """By how much the forward raises the level: activations, outputs and the rest."""
        return sum(one.nbytes for one in self.kept)

    @property
    def before_backward_bytes(self) -> int:
        """All that is alive between forward and backward once the optimizer has its state; gradients set to None."""
        return self.model_bytes + self.input_bytes + self.optimizer_bytes + self.kept_bytes

    @property
    def at_optimizer_bytes(self) -> int:
        """All that is alive when the optimizer steps, its temporaries apart."""
        return self.model_bytes + self.input_bytes + self.optimizer_bytes + self.gradient_bytes

    @property
    def total_bytes(self) -> int:
        """All parts of a training step together."""
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
