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
from collections.abc import Mapping
from typing import Any

import torch

from memlab.allocator import CachingAllocator
from memlab.errors import PredictionError
from memlab.fake_cuda import (  # noqa: F401  # some are imported for the rules they register
    attention,
    autocast,
    compiled,
    copies,
    ctc,
    data_dependent,
    deferred_init,
    devices,
    dispatcher,
    flex,
    gpus,
    gradient_accumulation,
    identity,
    kernels,
    matmuls,
    process_groups,
    recurrent,
    sharding,
    sorting,
    sparse,
    sparse_operators,
    streams,
)  # fmt: skip
from memlab.fake_cuda.allocation_log import AllocationLog
from memlab.fake_cuda.assumed import AssumedValue, explain
from memlab.fake_cuda.gpus import State
from memlab.fake_cuda.patches import Patches
from memlab.torch_internals import cuda_names

__all__ = ["FakeCuda"]

INSTALLERS = (
    devices.exchange_devices, compiled.compile_functions,
    identity.identify, sparse.make_factories, dispatcher.watch_devices, data_dependent.answer_loops, devices.put_composite_rules,
    recurrent.flatten_weights, autocast.autocast_as_cuda, process_groups.form_groups,
    sharding.follow_resizes, flex.run_flex_attention,
)  # fmt: skip
"""The patches applied while fake CUDA is active, in order: functions of (dispatcher, patches)."""


class FakeCuda:
    """A context in which there is a CUDA device, `gpu`, without data, or several of it.

    `conf` is the value of PYTORCH_CUDA_ALLOC_CONF. If the GPU is full the code gets the error that it would get, or, with
    `raises_oom=False`, continues as if there were memory. `log` has allocations and frees in order, `assumptions` the
    assumptions with their counts, and `assumed` the values among them by key; `given` sets some. `job` says which rank of a
    distributed job this is, `torch_version` whose allocator it has: this PyTorch's if empty.
    """

    def __init__(
        self,
        gpu: Any,
        conf: str = "",
        *,
        raises_oom: bool = True,
        job: process_groups.ThisRank | None = None,
        given: Mapping[str, Any] | None = None,
        torch_version: str = "",
        devices: int = 1,
    ) -> None:
        self.gpu, self.devices, self.torch_version = gpu, devices, torch_version or torch.__version__
        context = sum(gpu.context_bytes) // 2
        allocators = [
            CachingAllocator(gpu.usable_bytes, conf, context, torch_version=self.torch_version, device=number)
            for number in range(devices)
        ]
        self.log = AllocationLog(allocators, raises_oom)
        kind = dispatcher.OpDispatcher if devices == 1 else dispatcher.SeveralGpus
        self.dispatcher = kind(gpu, self.log)
        self.dispatcher.given, self.dispatcher.torch_version = given or {}, self.torch_version
        self.dispatcher.groups = self.groups = process_groups.Groups(job)

    @property
    def assumed(self) -> dict[str, AssumedValue]:
        """The values that were assumed, by key."""
        return self.dispatcher.assumed

    @property
    def assumptions(self) -> Counter[str]:
        """All assumptions in words, with how often each was made."""
        return self.dispatcher.assumptions + Counter({one.text: one.count for one in self.assumed.values()})

    def __enter__(self) -> FakeCuda:
        if State.active is not None:
            raise PredictionError("a prediction is running in this process already: end it before starting another.")
        with Patches() as patches:
            default = torch.get_default_device() if cuda_names.has_default_device() else None
            patches.callback(torch.set_default_device, default)
            patches.callback(self._forget)
            State.active = self
            State.device_count = self.groups.job.local_world_size if self.groups.job is not None else self.devices
            State.devices = self.devices
            cuda_names.lift_only_host_tensors(patches)
            for install in INSTALLERS:
                install(self.dispatcher, patches)
            patches.enter_context(self.dispatcher.mode)
            dispatcher.follow_threads(self.dispatcher.mode, patches)
            self.dispatcher.changes = patches.changes
            self._patches = patches.pop_all()
        return self

    @property
    def is_on(self) -> bool:
        """Whether this instance is active."""
        return State.active is self

    def __exit__(self, *error):
        explain(error[1], self.assumed)
        self.log.record_frees()
        self._patches.__exit__(*error)

    @staticmethod
    def _forget() -> None:
        gpus.forget()
        streams.Current.of_thread.__dict__.clear()
        deferred_init.forget()
