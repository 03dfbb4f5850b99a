"""Fake CUDA: code written for "cuda" runs on tensors without data, and every allocation is logged.

    with FakeCuda(gpu) as fake:
        model = Net().to("cuda"); ...
    fake.log, fake.assumptions

Made for a child process: tensors that became fake stay fake.

Limits: one at a time per process; work of other threads is seen where fake CUDA tensors are involved. Compiled code runs as
eager code. Whatever depends on values is assumed (see `data_dependent`), and listed in `assumptions`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from memlab.allocator import CachingAllocator
from memlab.errors import PredictionError
from memlab.fake_cuda import (  # noqa: F401  # some are imported for the rules they register
    attention,
    autocast,
    ctc,
    data_dependent,
    deferred_init,
    devices,
    dispatcher,
    flex,
    gradient_accumulation,
    identity,
    kernels,
    matmuls,
    places,
    process_groups,
    recurrent,
    sharding,
    sorting,
)  # fmt: skip
from memlab.fake_cuda.allocation_log import AllocationLog
from memlab.fake_cuda.patches import Patches
from memlab.fake_cuda.tensors import State
from memlab.torch_internals import cuda_names

__all__ = ["FakeCuda"]

INSTALLERS = (
    devices.exchange_devices, identity.identify, dispatcher.watch_devices, data_dependent.answer_loops, devices.put_composite_rules,
    recurrent.flatten_weights, autocast.autocast_as_cuda, process_groups.form_groups,
    sharding.follow_resizes, flex.run_flex_attention,
)  # fmt: skip
"""The patches applied while fake CUDA is active, in order: functions of (dispatcher, patches)."""


class FakeCuda:
    """A context in which there is a CUDA device, `gpu`, without data.

    `conf` is the value of PYTORCH_CUDA_ALLOC_CONF. If the GPU is full the code gets the error that it would get, or, with
    `raises_oom=False`, continues as if there were memory. `log` has allocations and frees in order, `assumptions` the
    assumptions in order, with their counts. `job` says which rank of a distributed job this is.
    """

    def __init__(
        self, gpu: Any, conf: str = "", *, raises_oom: bool = True, job: process_groups.ThisRank | None = None
    ) -> None:
        self.gpu = gpu
        self.assumptions: Counter[str] = Counter()
        context = sum(gpu.context_bytes) // 2
        allocator = CachingAllocator(gpu.usable_bytes, conf, context, torch_version=torch.__version__)
        self.log = AllocationLog(allocator, raises_oom)
        self.dispatcher = dispatcher.OpDispatcher(gpu, self.log, self.assumptions)
        self.dispatcher.groups = self.groups = process_groups.Groups(job)

    def __enter__(self) -> FakeCuda:
        if State.active is not None:
            raise PredictionError("a prediction is running in this process already: end it before starting another.")
        with Patches() as patches:
            default = torch.get_default_device() if cuda_names.has_default_device() else None
            patches.callback(torch.set_default_device, default)
            patches.callback(self._forget)
            State.active = self
            State.device_count = self.groups.job.local_world_size if self.groups.job is not None else 1
            cuda_names.lift_only_host_tensors(patches)
            for install in INSTALLERS:
                install(self.dispatcher, patches)
            patches.enter_context(self.dispatcher.mode)
            dispatcher.follow_threads(self.dispatcher.mode, patches)
            self._patches = patches.pop_all()
        return self

    @property
    def is_on(self) -> bool:
        """Whether this instance is active."""
        return State.active is self

    def __exit__(self, *error):
        places.explain(error[1])
        self.log.record_frees()
        self._patches.__exit__(*error)

    @staticmethod
    def _forget() -> None:
        State.active, State.device_count = None, 1
        places.Reads.keys.clear()
        devices.Current.of_thread.__dict__.clear()
        deferred_init.forget()
