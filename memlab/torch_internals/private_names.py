"""The private names of PyTorch and IPython that memlab uses: what for, and in which versions each was seen.

One table. Code gets a name from `private`, so that it is in the table; if a version lacks it, memlab can still be imported,
and using the name raises `MissingPrivateName` with one line. `missing` checks all of them.
The table has what can be imported, and attributes of objects under their class (see `objects`).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

from memlab.errors import MemlabError


class MissingPrivateName(MemlabError, AttributeError):
    """The installed version of a library lacks a private name that memlab uses."""


MEASURING = {
    # the allocator, and the start of CUDA
    "torch._C._cuda_clearCublasWorkspaces": "let cuBLAS give back what it keeps between products",
    "torch._C._cuda_getDeviceCount": "count devices without initializing CUDA's runtime again",
    "torch._C._cuda_hasPrimaryContext": "ask whether a device has a context, without making one",
    "torch._C._cuda_isHistoryEnabled": "leave history that the user records alone",
    "torch._C._cuda_memorySnapshot": "read allocator history",
    "torch._C._cuda_memoryStats": "read the counters without flattening them",
    "torch.cuda._lazy_call": "start recording when CUDA comes up",
    "torch.cuda._queued_calls": "take that back where CUDA never came up",
    "torch.cuda.memory._record_memory_history": "share history with a user who records it",
    "torch.cuda.memory._record_memory_history_impl": "record history with Python frames",
    # modules, autograd, dispatch
    "torch.nn.modules.module._global_forward_hooks": "mark modules, with keys that Dynamo's guards know",
    "torch.nn.modules.module._global_forward_hooks_always_called": "mark the end of a forward that raised",
    "torch.nn.modules.module._global_forward_hooks_with_kwargs": "see inputs that are given by name",
    "torch.nn.modules.module._global_forward_pre_hooks": "mark the beginning of modules",
    "torch.autograd._engine_run_backward": "mark backward",
    "torch.autograd._get_sequence_nr": "number autograd nodes",
    "torch._C.DisableTorchFunction": "run no `__torch_function__` of the user's",
    "torch._C._FunctionBase": "read what an autograd.Function saved",
    "torch._C._functorch": "see through the wrappers of torch.func",
    "torch._C._data_address": "find a storage's address and leave lazy copies lazy",
    "torch._C.TensorBase._backward_hooks": "find references that hooks hold",
    "torch._C.TensorBase._base": "find the base of a view",
    "torch._C.TensorBase._indices": "list the parts of a sparse tensor",
    "torch._C.TensorBase._post_accumulate_grad_hooks": "find references that hooks hold",
    "torch._C.TensorBase._values": "list the parts of a sparse tensor",
    "torch._C._AutoDispatchBelowAutograd": "list those parts without autograd",
    "torch._C._DisableFuncTorch": "list those parts without torch.func",
    "torch._C._get_dispatch_mode": "know whether fake tensors are on",
    "torch._C._TorchDispatchModeKey": "know whether fake tensors are on",
    "torch._C._get_dispatch_stack_at": "find our mode among others",
    "torch._C._len_torch_dispatch_stack": "count dispatch modes",
    "torch._C._len_torch_function_stack": "count function modes",
    "torch._C._pop_torch_dispatch_stack": "take our mode off, wherever it lies",
    "torch._C._push_on_torch_dispatch_stack": "put our mode on without the flags of `__enter__`",
    "torch._C.PyTorchFileWriter": "let a child write its files elsewhere",
    "torch._ops.HigherOrderOperator": "tell operators that take functions",
    "torch.utils._python_dispatch.TorchDispatchMode": "watch operators (documented, in a private module)",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "tell tensors that wrap others",
    "torch.utils._mode_utils.no_dispatch": "run on real tensors inside fake ones",
    "torch._dynamo.callback.callback_handler": "hide hooks while Dynamo compiles",
    "torch._dynamo.utils.counters": "know whether anything was compiled",
    # attributes of objects: memlab/torch_internals/objects.py
    "torch._ops.OpOverload._schema": "what an operator returns, and writes to",
    "torch._ops.OpOverload._op": "call an operator without a Python frame",
    "torch.UntypedStorage._cdata": "tell storages apart",
    "torch.nn.Module._parameters": "a module's own parameters, a few hundred times after each backward",
    "torch.nn.Module._apply": "tell by a stack what a conversion of a module made",
    "torch.nn.Module._modules": "what torch.compile wraps, without `__getattr__` of the user's",
    "torch.nn.Module._forward_hooks": "layers whose output somebody looks at are not overwritten",
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod": "the module that the user wrote",
    # layers that have no public base class
    "torch.nn.modules.batchnorm._BatchNorm": "tell batch norms of any dimension",
    "torch.nn.modules.batchnorm._NormBase": "tell norms with running statistics",
    "torch.nn.modules.conv._ConvNd": "tell convolutions of any dimension",
    # IPython
    "IPython.core.interactiveshell.InteractiveShell._showtraceback": "pass errors of a cell on",
}
FAKE_CUDA = {
    "torch.Tensor._make_subclass": "tensors that C++ takes for meta ones and Python for CUDA ones",
    "torch.Tensor._make_wrapper_subclass": "tensors of a second GPU, which C++ tells from those of the first",
    "torch.autograd.graph.Node._input_metadata": "which GPU a node of the graph runs on",
    "torch._C._swap_tensor_impl": "a parameter that moves stays the same object",
    "torch._C._set_meta_in_tls_dispatch_include": "operators run their meta kernels",
    "torch._C._PreserveDispatchKeyGuard": "operators run their meta kernels",
    "torch._C._DisableTorchDispatch": "operators run their meta kernels; parts of sparse tensors are listed without modes",
    "torch._C._ExcludeDispatchKeyGuard": "autocast leaves what it has cast",
    "torch._C.DispatchKey": "autocast leaves what it has cast",
    "torch._C.DispatchKeySet": "autocast leaves what it has cast",
    "torch._C._dispatch_keys": "what C++ takes a tensor for",
    "torch._C._only_lift_cpu_tensors": "torch.tensor(..., device='cuda') starts on the CPU",
    "torch._C._set_only_lift_cpu_tensors": "torch.tensor(..., device='cuda') starts on the CPU",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "which operators are decomposed",
    "torch._C._current_autograd_node": "whether backward is on",
    "torch._C._cuda_getCurrentRawStream": "bitsandbytes takes it as it is imported: builds without CUDA get one",
    "torch._C._host_emptyCache": "torch.cuda.graph calls it: builds without CUDA get one",
    "torch.cuda.graphs._cuda_isCurrentStreamCapturing": "graphs and pools are made without CUDA",
    "torch.cuda.graphs._graph_pool_handle": "graphs and pools are made without CUDA",
    "torch.Tensor._use_count": "gradients are added in place",
    "torch.Tensor._is_view": "autocast keeps no copies of views",
    "torch._C._disabled_torch_function_impl": "no `__torch_function__` for fake CUDA tensors",
    "torch._C._storage_Use_Count": "gradients are added in place",
    "torch._C._get_sdp_priority_order": "which attention comes first",
    "torch._C._disabled_torch_dispatch_impl": "tensors of other libraries, and classes without a dispatch of their own",
    "torch._addmm_activation": "which kernel a linear layer takes",
    "torch._has_compatible_shallow_copy_type": "modules move by `.data =`",
    "torch._GLOBAL_DEVICE_CONTEXT": "the default device",
    "torch._prims_common.make_contiguous_strides_for": "how results lie",
    "torch._prims_common.make_channels_last_strides_for": "how results lie",
    "torch._prims_common.suggest_memory_format": "how results lie",
    "torch._decomp.decompositions_for_jvp": "scripts are made before names are exchanged",
    "torch.utils._pytree.tree_map": "tensors inside of arguments and results",
    "torch.utils._pytree.tree_map_only": "inputs of nn.DataParallel",
    "torch.utils._pytree.tree_leaves": "tensors inside of arguments and results",
    "torch._subclasses.fake_tensor": "shapes of results",
    "torch._subclasses.fake_tensor.FakeTensorMode": "shapes of results",
    "torch._subclasses.fake_tensor.FakeTensor": "shapes of results",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "shapes that depend on values",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "shapes that depend on values",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException": "operators without shapes",
    "torch._subclasses.fake_tensor.FakeTensorConverter.from_real_tensor": "stand in for a number whose value is known",
    "torch._subclasses.fake_tensor.init_gpu_context": "no CUDA context is made",
    "torch.optim.optimizer._foreach_supported_types": "optimizers take their CUDA defaults",
    "torch.optim.Optimizer._accelerator_graph_capture_health_check": "no driver is asked",
    "torch.nn.utils.clip_grad._has_foreach_support": "gradients are clipped as on CUDA",
    "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype": "gradients are clipped as on CUDA",
    "torch.amp.GradScaler._maybe_opt_step": "the step is not skipped",
    "torch.cuda.amp.common.amp_definitely_not_available": "autocast is on",
    "torch.cuda._lazy_init": "no CUDA context is made",
    "torch.nn.init._no_grad_trunc_normal_": "host tensors without data stay so",
    "torch.nn.parameter.UninitializedTensorMixin": "parameters without a shape yet",
    "torch.utils._python_dispatch._disable_current_modes": "functions run by themselves",
    "torch.utils._device._device_constructors": "who asks for the meta device",
    "torch.utils._device.DeviceContext": "who asks for the meta device",
    "torch._C._nn": "modules move to a GPU by its number",
    "torch.library.Library._destroy": "rules are taken away again",
    "torch._higher_order_ops.flex_attention": "attention with functions of scores is run, not traced",
}
DISTRIBUTED = {
    "torch.distributed.distributed_c10d": "process groups without other processes",
    "torch.distributed.distributed_c10d._new_process_group_helper": "every process group is one of the fake backend",
    "torch.distributed.distributed_c10d._get_default_timeout": "NCCL's, where this build has none",
    "torch.distributed.distributed_c10d._resolve_process_group": "which group an operator uses",
    "torch.distributed.distributed_c10d._get_default_group": "the group of a pipeline's stages",
    "torch.distributed.distributed_c10d._world": "a group says that it is of the backend that was asked for",
    "torch.distributed.device_mesh": "meshes make the default group",
    "torch.testing._internal.distributed.fake_pg.FakeStore": "nobody to meet",
    "torch.distributed.tensor.DTensor": "DTensors of fake CUDA tensors are on CUDA",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator": "DTensor derives shapes by fake tensors of its own",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached": "the same",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": "uneven shards are padded once",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.reset_sharded_param": "the same",
    "torch.distributed.tensor.DTensor._local_tensor": "the tensor of this rank",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._module_info": "whether a shard was replaced",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._sharded_param_data": "whether a shard was replaced",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": "FSDP2 refuses meta tensors",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._validate_no_meta_params": "the same",
    "torch.distributed.pipelining.stage": "stages of pipelines send each other shapes",
    "torch.distributed.pipelining.stage.PipelineStage._warmup_backward_result": "the vote on whether they have to",
    "torch.distributed.pipelining.stage.PipelineStage._send_meta": "what a stage sends on",
    "torch.distributed.pipelining.stage.PipelineStage._recv_meta": "what it gets",
    "torch.distributed.pipelining.stage.PipelineStage._user_meta": "which shapes a stage was given",
    "torch.distributed.pipelining.stage.PipelineStage._stage_meta": "the shapes of its outputs",
    "torch.distributed.pipelining.stage.InferenceMode": "whether a stage was given shapes",
    "torch.distributed.pipelining.stage._StageForwardMeta": "shapes of outputs",
    "torch.distributed.pipelining.stage._StageBackwardMeta": "shapes of gradients",
    "torch.distributed.pipelining.stage._TensorMeta": "the shape of one",
    "torch.distributed.pipelining.stage._derive_grad_metas": "gradients have the shapes of outputs",
    "torch.distributed._verify_params_across_processes": "DDP compares shapes with the other ranks",
    "torch._C._current_graph_task_id": "which backward a gradient is reduced in",
    "torch._C._distributed_c10d.ProcessGroup.unbox": "which group an operator uses",
    "torch._C._distributed_c10d._create_work_from_future": "collectives that have finished",
}
"""What the prediction of one rank of a job needs, and only that."""
COMPILER = {
    "torch._dynamo.device_interface.CudaInterface": "the properties of a GPU that is not there",
    "torch._C._dynamo.eval_frame.set_eval_frame": "operators of compiled code are not traced",
    "torch._dynamo.convert_frame.ConvertFrame": "Dynamo sees no hooks of memlab",
    "torch._dynamo.external_utils.wrap_inline": "models of torch.nn alone are compiled",
    "torch._dynamo.exc.InternalTorchDynamoError": "a function that Dynamo cannot trace here",
    "torch._dynamo.optimize": "the graphs of a function, as Dynamo makes them",
    "torch._dynamo.trace_rules": "which code Dynamo traces",
    "torch._dynamo.variables.builder": "what Dynamo takes for tensors",
    "torch._dynamo.variables.builder.VariableBuilder": "what Dynamo takes for tensors",
    "torch._dynamo.variables.torch": "which functions of PyTorch Dynamo knows",
    "torch._dynamo.eval_frame": "what was compiled before a prediction",
    "torch._dynamo.eval_frame.OptimizedModule": "what was compiled before a prediction",
    "torch._dynamo.eval_frame._callback_from_stance": "what was compiled before a prediction",
    "torch._functorch._aot_autograd.functional_utils": "graphs without writes in place",
    "torch._functorch._aot_autograd.graph_compile.collect_fw_donated_buffer_idxs": "what backward may write over",
    "torch._inductor.compile_fx": "passes over graphs",
    "torch._inductor.compile_fx._recursive_joint_graph_passes": "passes over a graph without gradients",
    "torch._inductor.compile_fx._recursive_post_grad_passes": "passes over each half",
    "torch._inductor.compile_fx.fake_tensor_prop": "shapes in each half",
    "torch._inductor.compile_fx.partition_fn": "what a compiled forward keeps for backward",
    "torch._inductor.compile_fx.view_to_reshape": "passes over each half",
    "torch._inductor.config": "nothing is timed",
    "torch._inductor.debug.DebugContext": "what the compiler asks for while it works",
    "torch._inductor.decomposition.select_decomp_table": "the operators that inductor takes",
    "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder": "constants are computed on the host",
    "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder._deduce_value": "constants are computed on the host",
    "torch._inductor.graph": "what backward may write over",
    "torch._inductor.graph.GraphLowering": "which buffers a compiled half requests and frees",
    "torch._inductor.scheduler": "it writes for Triton, which need not be there",
    "torch._inductor.virtualized.V": "the graph that inductor is at",
    "torch._subclasses.functional_tensor.FunctionalTensorMode": "graphs without writes in place",
    "torch.fx.experimental.proxy_tensor.make_fx": "a graph in other operators",
    "torch.utils._triton": "Triton is not asked",
    "torch.utils.checkpoint": "what compiled checkpoints recompute",
    "torch.utils.checkpoint._CachingTorchDispatchMode.policy_fn": "what compiled selective checkpoints keep",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator": "what compiled checkpoints recompute",
}
"""What the prediction of compiled code needs, and only that."""
_CUDA_BUILD = "a build for CUDA"
_PIPELINES = "torch.distributed.pipelining.stage"
NEEDS = (
    {name: _CUDA_BUILD for name in MEASURING | FAKE_CUDA if name.startswith("torch._C._cuda_")}
    | {
        "torch._C._host_emptyCache": _CUDA_BUILD,
        "torch._dynamo.callback.callback_handler": "torch._dynamo.callback",
        "torch._dynamo.utils.counters": "torch._dynamo.utils",
        "torch._dynamo.eval_frame.OptimizedModule._orig_mod": "torch._dynamo.eval_frame",
        "IPython.core.interactiveshell.InteractiveShell._showtraceback": "IPython",
    }
    | {name: _PIPELINES for name in DISTRIBUTED if name.startswith(_PIPELINES)}
    | dict.fromkeys(COMPILER, "torch._inductor.compile_fx")
)
"""Names that are asked for only in such builds, or where such a module is loaded."""
_SEEN = {
    "torch._C._cuda_hasPrimaryContext": "2.12",
    "torch.cuda._lazy_call": "1.0 to 2.15",
    "torch.cuda._queued_calls": "1.0 to 2.15",
    "torch.cuda.memory._record_memory_history_impl": "2.8 to 2.15",
    "torch.autograd._engine_run_backward": "2.3 to 2.15",
    "torch.Tensor._make_wrapper_subclass": "2.12 and 2.13",
    "torch.autograd.graph.Node._input_metadata": "2.12 and 2.13",
    "IPython.core.interactiveshell.InteractiveShell._showtraceback": "9.18",
} | dict.fromkeys([*(name for name in DISTRIBUTED if name.startswith(_PIPELINES)), *COMPILER], "2.12 and 2.13")
"""The versions of its library in which a name was seen, where those are not `USUAL`."""
USUAL = "2.11 to 2.15"


def table() -> dict[str, str]:
    """All names, with what they are used for."""
    return MEASURING | FAKE_CUDA | DISTRIBUTED | COMPILER


def private(name: str) -> Any:
    """What a name of the table stands for; where it is gone, a stand-in that says so as soon as it is used."""
    if name not in table():
        raise KeyError(f"{name} is not in the table of private names")
    found = find_name(name)
    return Gone(name) if found is None else found


def private_error(name: str) -> type[Exception]:
    """The same for what stands in an `except`: where it is gone, it is never raised."""
    found = private(name)
    return NeverRaised if isinstance(found, Gone) else found


def missing(names: dict[str, str] | None = None) -> list[str]:
    """Each name (all, or `FAKE_CUDA`) that the installed versions lack, with what it is used for; libraries that are not
    imported are not asked."""
    asked = table() if names is None else names
    return [f"{name} ({purpose})" for name, purpose in asked.items() if _is_expected(name) and find_name(name) is None]


def _is_expected(name: str) -> bool:
    needs = NEEDS.get(name)
    if needs == _CUDA_BUILD:
        import torch

        return torch.backends.cuda.is_built() and not torch.version.hip
    return needs is None or needs in sys.modules


def find_name(name: str) -> Any:
    """What a dotted name stands for; None if it is gone."""
    path, *parts = name.split(".")
    holder: Any = None
    thing: Any = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        # torch/optim/__init__.py takes the name of its module `optimizer` away.
        holder, thing = thing, getattr(thing, part, sys.modules.get(path))
        if thing is None:
            # A module that nothing has imported yet, as fake CUDA does before it needs it.
            with contextlib.suppress(ImportError):
                thing = importlib.import_module(path)
        if thing is None:
            return part if isinstance(holder, type) and _is_set_by(holder, part) else None
    return thing


def _is_set_by(kind: type, attribute: str) -> bool:
    """Whether instances have it, though the class does not: it is annotated there, or a method names it."""
    codes = (getattr(method, "__code__", None) for base in kind.__mro__ for method in vars(base).values())
    annotated = any(attribute in vars(base).get("__annotations__", ()) for base in kind.__mro__)
    return annotated or any(code is not None and attribute in code.co_names for code in codes)


class NeverRaised(Exception):
    """In an `except`, the place of an error that this version does not have."""


class Gone:
    """In the place of a name that is gone: whatever is done with it raises MissingPrivateName."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _say(self, *args: Any, **kwargs: Any) -> Any:
        library = self.name.partition(".")[0]
        version = getattr(sys.modules.get(library), "__version__", "")
        purpose, seen = table()[self.name], _SEEN.get(self.name, USUAL)
        raise MissingPrivateName(
            f"{library} {version} lacks {self.name} ({purpose}), which was seen in {seen}: "
            "install one of those versions, or a newer memlab."
        )

    __call__ = __getattr__ = __get__ = __enter__ = __exit__ = __iter__ = __contains__ = _say
    __instancecheck__ = __subclasscheck__ = __getitem__ = __setitem__ = _say

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Classes can be derived from it, and not be made instances of."""
        return (type("Gone", (), {"__new__": self._say}),)
