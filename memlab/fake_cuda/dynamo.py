"""Dynamo on fake CUDA tensors: it traces compiled functions, and breaks and guards their graphs, as on a GPU.

Read in torch/_dynamo (variables/builder.py, trace_rules.py, convert_frame.py) of 2.12 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memlab.fake_cuda.dispatcher import gpu_for_meta
from memlab.fake_cuda.patches import Patches, suspended
from memlab.fake_cuda.tensors import FakeCudaParameter, FakeCudaTensor, is_fake
from memlab.torch_internals import compiler
from memlab.torch_internals.cuda_names import _disable_current_modes
from memlab.torch_internals.fakes import FakeTensorMode
from memlab.torch_internals.private_names import private, private_error

_OWN = ("memlab.fake_cuda", "memlab.torch_internals", "memlab.allocator", "memlab.probes", "memlab.prediction")


class Dynamo:
    """Dynamo, which knows fake CUDA until `close`."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self.callbacks: list[Any] = []  # of what is traced for the fake GPU
        with suspended(cuda.changes), _disable_current_modes():  # its tables have PyTorch's own functions
            self._optimize = private("torch._dynamo.optimize")
            self.internal_error = private_error("torch._dynamo.exc.InternalTorchDynamoError")
            known = compiler.known_to_dynamo()
        self._patches = Patches()
        for table in known:
            for _, _, before, value in cuda.changes:
                if callable(before) and callable(value) and _is_in(before, table) and not _is_in(value, table):
                    self._patches.put_item(table, value, table[before])
        kinds, wrap = compiler.tensor_classes()
        for kind in (FakeCudaTensor, FakeCudaParameter):
            self._patches.put_item(kinds, kind, wrap)
        builder = private("torch._dynamo.variables.builder")
        infer = builder.infer_subclass_type
        self._patches.put(builder, infer_subclass_type=lambda value: None if is_fake(value) else infer(value))
        # Graphs name the classes of their inputs.
        self._patches.put(torch, FakeCudaTensor=FakeCudaTensor)
        self._patches.put(torch.nn.parameter, FakeCudaParameter=FakeCudaParameter)
        self._trace_own = compiler.skip_packages(*_OWN)
        self._convert()
        # In what is not part of a graph it would trace the code that is memlab's, and below.
        self._patches.put(cuda, dispatch=untraced(cuda.dispatch))

    def close(self) -> None:
        """Let it forget fake CUDA."""
        self._patches.close()
        self._trace_own()

    def traced(
        self, function: Callable[..., Any], backend: Callable[..., Any], dynamic: bool | None, is_skipped: bool
    ) -> Any:
        """The function as Dynamo runs it: `backend(graph, examples)` makes what is called for each graph.

        `is_skipped`: Dynamo would skip its frame, as it does those of torch.nn, and trace only what that calls.
        """
        if is_skipped:
            function = compiler.traceable(function)
        context = self._optimize(backend, dynamic=dynamic)
        self.callbacks.append(context.callback)
        return context(function)

    def callback(self, backend: Callable[..., Any]) -> Any:
        """What Dynamo calls for each frame of a function."""
        self.callbacks.append(self._optimize(backend).callback)
        return self.callbacks[-1]

    def _convert(self) -> None:
        """While it traces there are no hooks of memlab, and what C++ requests on meta is on the GPU (as in `FakeGpuMode`)."""
        kind = private("torch._dynamo.convert_frame.ConvertFrame")
        convert, run = kind.__call__, FakeTensorMode.dispatch

        def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return run(mode, func, types, args, gpu_for_meta(kwargs or {}))

        def converted(*args: Any, **kwargs: Any) -> Any:
            with compiler.without_module_hooks(), Patches() as patches:
                patches.put(FakeTensorMode, dispatch=dispatch)
                return convert(*args, **kwargs)

        self._patches.put(kind, __call__=converted)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, of which Dynamo traces nothing."""
    switch = private("torch._C._dynamo.eval_frame.set_eval_frame")

    def call(*args: Any) -> Any:
        prior = switch(None)
        try:
            return function(*args)
        finally:
            switch(prior)

    return call


def _is_in(function: Any, table: Any) -> bool:
    try:
        return function in table
    except TypeError:  # some cannot be hashed
        return False
