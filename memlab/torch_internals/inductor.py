"""The compiler of `torch.compile` for a GPU that is not there: its partitioner, its fusion and its plan of buffers.

AOTAutograd's partitioner decides what the forward keeps, and inductor lowers, fuses and schedules both halves and writes the
Python that requests, reuses and frees buffers. Only what would ask the GPU or Triton is replaced; no kernel is built.
Read in torch/_inductor (compile_fx.py, graph.py, scheduler.py) and torch/_functorch (partitioners.py) of 2.12 and 2.13.
"""

from __future__ import annotations

import ast
import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx

from memlab.torch_internals.cuda_names import _disable_current_modes, without_autocast
from memlab.torch_internals.fakes import FakeTensor, FakeTensorMode, tree_leaves
from memlab.torch_internals.private_names import private

_HOST, _GPU = torch.device("cpu"), torch.device("cuda", 0)


class Halves(NamedTuple):
    """The code of the forward and, with gradients, of the backward, and the places of the inputs that the forward writes to."""

    codes: list[ast.Module]
    written: list[int]


def compiled(
    graph: fx.Graph,
    mode: FakeTensorMode,
    inputs: Sequence[Any],
    tangents: Sequence[Any],
    fixed: Sequence[int],
    results: int,
    properties: Any,
) -> Halves:
    """Compile a graph of ATen operators; return its code.

    The graph's placeholders are `inputs`, then `tangents`, the gradients of its results, as FakeTensors of this mode. It returns
    its results, as many as `results` says, then a gradient or None for each input. `fixed` are the places of parameters, and
    `properties` those of the GPU. The forward gives the results, then what backward takes before the tangents.
    """
    examples = [*inputs, *tangents]
    with _for_gpu(mode, properties):
        joint, written = _decomposed(fx.GraphModule(torch.nn.Module(), graph), examples, keeps_writes=not tangents)
        if not tangents:
            joint = private("torch._inductor.compile_fx._recursive_joint_graph_passes")(joint)
            return Halves([_lowered(joint, is_inference=True)[0]], written)
        for number, node in enumerate(_placeholders(joint)):
            is_input = number < len(inputs)  # the partitioner tells them by name
            node.target = node.name = f"primals_{number + 1}" if is_input else f"tangents_{number + 1 - len(inputs)}"
        joint.recompile()
        forward, backward = private("torch._inductor.compile_fx.partition_fn")(
            joint, examples, num_fwd_outputs=results, static_lifetime_input_indices=list(fixed)
        )
        donated = _donated(forward, backward, results)
        code, strides = _lowered(forward, results)
        for node, stride in zip(_placeholders(backward), strides[results:], strict=False):
            value = node.meta["val"]  # inductor may pad rows: backward gets them as they are
            if stride is not None and value.stride() != stride:
                node.meta["val"] = value.as_strided(value.shape, stride)
        with mock.patch.object(private("torch._inductor.graph"), "get_donated_idxs", lambda: donated):
            return Halves([code, _lowered(backward, is_backward=True)[0]], written)


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _donated(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> list[int]:
    """The places of what the forward keeps for backward alone, which may write over it."""
    values = [[node.meta["val"] for node in _placeholders(forward)]]
    for module in (forward, backward):
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        values.append([node.meta["val"] if isinstance(node, fx.Node) else None for node in output.args[0]])
    taken, made, gradients = values
    collect = private("torch._functorch._aot_autograd.graph_compile.collect_fw_donated_buffer_idxs")
    found: list[int] = collect(taken, made[:results], gradients, made[results:])
    return found


def _decomposed(module: fx.GraphModule, examples: list[Any], keeps_writes: bool) -> tuple[fx.GraphModule, list[int]]:
    """The graph without writes in place, in the operators that inductor takes, and which of its inputs it wrote to;
    AOTAutograd's functionalisation."""
    utils = private("torch._functorch._aot_autograd.functional_utils")
    written: list[int] = []

    def functional(*tensors: Any) -> list[Any]:
        with private("torch._subclasses.functional_tensor.FunctionalTensorMode")():
            wrapped = [utils.to_fun(one) for one in tensors]
            with fx.traceback.preserve_node_meta():  # which of them belong to a checkpoint
                found = tree_leaves(fx.Interpreter(module).run(*wrapped), is_leaf=lambda one: one is None)
            written[:] = [place for place, wrapper in enumerate(wrapped) if utils.has_data_mutation(wrapper)]
            if keeps_writes:
                for place in written:
                    tensors[place].copy_(utils.from_fun(wrapped[place]))
            return [None if one is None else utils.from_fun(one) for one in found]

    table = private("torch._inductor.decomposition.select_decomp_table")()
    made: fx.GraphModule = private("torch.fx.experimental.proxy_tensor.make_fx")(functional, decomposition_table=table)(
        *examples
    )
    for node in made.graph.nodes:  # C++ sees fakes on meta (`type_as`)
        if (device := node.kwargs.get("device")) is not None and device.type == "meta":
            node.kwargs = {**node.kwargs, "device": _GPU}
        elif node.target is torch.ops.prims.device_put.default and node.args[1].type == "meta":
            node.replace_all_uses_with(node.args[0])
            made.graph.erase_node(node)
    return made, written


def _lowered(
    module: fx.GraphModule, visible: int | None = None, is_backward: bool = False, is_inference: bool = False
) -> tuple[ast.Module, list[Any]]:
    """What inductor writes for one half, without the sources of its kernels, and the strides of the results.

    Of these so many, or all, are seen outside and keep their layout; it may pad rows of others.
    """
    compile_fx, virtual = private("torch._inductor.compile_fx"), private("torch._inductor.virtualized.V")
    examples = [node.meta["val"] for node in _placeholders(module)]
    compile_fx.view_to_reshape(module)
    compile_fx.fake_tensor_prop(module, examples)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    seen = output.args[0][:visible]
    output.meta["user_visible_output_idxs"] = [place for place, one in enumerate(seen) if isinstance(one, fx.Node)]
    compile_fx.record_original_output_strides(module)
    compile_fx._recursive_post_grad_passes(module, is_inference=is_inference)
    lowering = private("torch._inductor.graph.GraphLowering")(
        module, example_inputs=examples, is_backward=is_backward, is_inference=is_inference
    )
    with virtual.set_graph_handler(lowering):
        lowering.run(*examples)
        are_tensors = [getattr(one, "has_tensor_output", lambda: False)() for one in lowering.graph_outputs]
        pairs = zip(lowering.graph_outputs, are_tensors, strict=True)
        strides = [tuple(map(int, one.get_stride())) if is_tensor else None for one, is_tensor in pairs]
        written = ast.parse(lowering.codegen()[0].value).body
    runs = [one for one in written if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) in ("runner", "call")]
    kept = [one for one in written if isinstance(one, ast.ClassDef | ast.FunctionDef) or one in runs]
    return ast.Module(kept, []), strides


@contextlib.contextmanager
def _for_gpu(mode: FakeTensorMode, properties: Any) -> Iterator[None]:
    """Inductor writes code for a GPU with Triton, both of which it would ask."""
    # Before its other modules: they start processes that build kernels. Whether to pad matrices would be timed on the GPU.
    settings = private("torch._inductor.config").patch(shape_padding=False, compile_threads=1)
    with settings:
        yield from _replaced(mode, properties)


def _replaced(mode: FakeTensorMode, properties: Any) -> Iterator[None]:
    folder = private("torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder")
    interface = private("torch._dynamo.device_interface.CudaInterface")
    virtual = private("torch._inductor.virtualized.V")
    always: Callable[..., Any] = lambda *args, **kwargs: True  # noqa: E731
    deduce = folder._deduce_value

    def on_host(self: Any, node: fx.Node) -> Any:
        """It computes constants, where they would be."""
        given = node.kwargs
        if given.get("device") is not None:
            node.kwargs = {**given, "device": _HOST}
        try:
            return deduce(self, node)
        finally:
            node.kwargs = given

    with contextlib.ExitStack() as stack:
        if gc.isenabled():  # graphs are full of cycles: a tenth of the time
            gc.disable()
            stack.callback(gc.enable)

        def put(owner: Any, **values: Any) -> None:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))

        put(private("torch._inductor.scheduler"), has_triton=always)
        put(private("torch.utils._triton"), triton_hash_with_backend=lambda *args: "")
        for owner in (interface, interface.Worker):
            put(owner, get_device_properties=staticmethod(lambda device=None: properties))
        put(folder, _deduce_value=on_host)
        # In fake CUDA, C++ takes fakes for meta tensors, which inductor leaves to ATen.
        put(FakeTensor, is_meta=property(lambda one: False), is_cuda=property(lambda one: one.device.type == "cuda"))
        stack.enter_context(private("torch._inductor.debug.DebugContext")())
        stack.enter_context(virtual.set_fake_mode(mode))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(without_autocast())
        stack.enter_context(torch.no_grad())
        stack.enter_context(mode)
        yield
