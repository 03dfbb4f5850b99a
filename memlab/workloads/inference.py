"""The same work without training: a workload's model in evaluation, with its inputs alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

from memlab.workloads.job import Parts


def inference(make: Callable[[], Parts]) -> Callable[[], Parts]:
    """What makes the parts of an inference, from what makes those of a training."""
    return functools.partial(_inferring, make)


def _inferring(make: Callable[[], Parts]) -> Parts:
    model, optimizer, batch, _ = make()
    return model.eval(), None, batch if optimizer is None else batch[:-1], None
