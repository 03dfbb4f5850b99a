"""Everything that is known of a model before it is put into figures, still in tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from memlab.sizes.belongings import Belonging
from memlab.sizes.gradients import Gradient
from memlab.sizes.layers import Layers
from memlab.sizes.rehearsal import Rehearsed
from memlab.sizes.standins import StandIns
from memlab.sizes.states import States


@dataclass(slots=True)
class Found:
    """`gradients` go along with `mine`; `inputs` are stand-ins, `states` None where no optimizer was chosen."""

    layers: Layers
    mine: list[Belonging]
    standins: StandIns
    inputs: list[Tensor]
    rehearsed: Rehearsed
    gradients: list[Gradient | None]
    input_gradient_bytes: int
    states: States | None
