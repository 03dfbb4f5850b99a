"""`torch.compile`: Dynamo traces a function; its graphs are recorded, compiled by PyTorch, and run without kernels.

Dynamo breaks and guards the graphs as on the GPU; what lies between them runs as eager. The first call of a graph with new
shapes runs it on tensors that nobody logs; the operators that it calls, forward and backward, become one graph of ATen's. What
inductor makes of it requests, reuses and frees buffers as it would on the GPU; its kernels do nothing.

Limits: a graph that copies to the host is predicted as eager, and so is all compiled code in a distributed job and on several
GPUs. Where Dynamo fails here, a function is one graph. Every combination of shapes is compiled by itself. What Triton requests
while it times kernels for the first time is left out.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from memlab.allocator import CachingAllocator
from memlab.fake_cuda.allocation_log import AllocationLog
from memlab.fake_cuda.dynamo import Dynamo, untraced
from memlab.fake_cuda.gpus import CUDA0, State
from memlab.fake_cuda.graph_recorder import GraphRecorder, NotOneGraph
from memlab.fake_cuda.graph_trees import IN_GRAPHS, WITHOUT_GRAPHS, GraphTrees, wants_graphs
from memlab.fake_cuda.patches import Patches, constant, nothing
from memlab.fake_cuda.shape_inference import FakeGpuMode, twin
from memlab.fake_cuda.tensors import FakeCudaTensor, is_fake, new_tensor
from memlab.torch_internals import compiler, inductor
from memlab.torch_internals.cuda_names import NO_SHAPES, _disable_current_modes, tree_map_only
from memlab.torch_internals.fakes import FakeTensor, tree_leaves, tree_map

COMPILED = (
    f"compiled code: the graphs that Dynamo makes, by the compiler of PyTorch {torch.__version__}; what Triton requests while it "
    "times new kernels is left out"
)
SKIPPED = (
    "model.compile() leaves a module of torch.nn as it is, and compiles modules of other classes in it; torch.compile(model) "
    "would compile all of it"
)
WHOLE = "a compiled function is predicted as one graph, wherever PyTorch ends one, as Dynamo stopped at "
EAGER = "compiled code is predicted as eager: "
TUNED = (
    "mode='max-autotune' times kernels on the GPU and takes the fastest: predicted with those that are chosen without it, and "
    "without what is requested while they are timed"
)
MATMULS = ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "_int_mm", "_scaled_mm")


def compile_functions(cuda: Any, patches: Patches) -> None:
    """Let `torch.compile` compile for the fake GPU."""

    def compiled(
        model: Any = None,
        *,
        backend: Any = "inductor",
        mode: Any = None,
        options: Any = None,
        disable: bool = False,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        how: dict[str, Any] = {"fullgraph": fullgraph, "dynamic": dynamic}
        if model is None:
            return functools.partial(
                compiled, backend=backend, mode=mode, options=options, disable=disable, **how, **kwargs
            )
        if disable or getattr(model, "__name__", "") == "_flex_attention_hop_wrapper":  # which PyTorch always compiles
            return model
        cuda.compiles = True
        if backend != "inductor":
            cuda.assume(f"{EAGER}its backend is {backend!r:.80}")
            return model
        in_graphs = wants_graphs(mode, options)
        if str(mode).startswith("max-autotune"):
            cuda.assume(TUNED)
        if isinstance(model, torch.nn.Module):
            function = Function(cuda, compiler.call_of(model), in_graphs, **how, is_skipped=_is_skipped(model))
            compiler.set_compiled_call(model, function.call)
            return model
        call = Function(cuda, model, in_graphs, **how).call
        run = functools.wraps(model)(lambda *args, **kwargs: call(*args, **kwargs))
        compiler.stand_for(run, model)  # where a compiled function calls it
        return run

    patches.put(torch, compile=compiled)
    patches.put(
        torch.nn.Module,
        compile=lambda module, *args, **kwargs: _compile_in_place(cuda, module, compiled, *args, **kwargs),
    )
    patches.put(torch.compiler, cudagraph_mark_step_begin=lambda: graph_trees(cuda).mark_step())
    patches.callback(lambda: cuda.dynamo is not None and cuda.dynamo.close())
    if compiler.compiler_is_loaded():
        _divert(cuda, patches)


def _compile_in_place(cuda: Any, module: Any, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """`module.compile()`: Dynamo skips the code of torch.nn, and compiles what that calls of the user's (trace_rules.py)."""
    if not _is_skipped(module):
        compiled(module, *args, **kwargs)
        return
    cuda.assume(SKIPPED)
    for child in module.children():
        _compile_in_place(cuda, child, compiled, *args, **kwargs)


def _is_skipped(module: Any) -> bool:
    return bool(type(module).forward.__module__.startswith("torch.nn."))


def _divert(cuda: Any, patches: Patches) -> None:
    """What was compiled before the prediction is compiled for the fake GPU, too."""
    frames = compiler.eval_frame()
    chosen = frames._callback_from_stance
    callbacks: dict[Any, Any] = {}

    def for_fake_gpu(callback: Any) -> Any:
        if callback in (None, False) or (cuda.dynamo is not None and callback in cuda.dynamo.callbacks):
            return chosen(callback)
        name, in_graphs = compiler.backend_of(callback)
        if name != "inductor":
            cuda.assume(f"{EAGER}its backend is {name!r:.80}")
            return None
        if callback not in callbacks:
            callbacks[callback] = dynamo(cuda).callback(Function(cuda, None, in_graphs).graph)
        return chosen(callbacks[callback])

    patches.put(frames, _callback_from_stance=for_fake_gpu)


class Function:
    """A compiled function: Dynamo makes its graphs; with `fullgraph`, or where it cannot, it is one."""

    def __init__(
        self,
        cuda: Any,
        function: Any,
        in_graphs: bool = False,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        is_skipped: bool = False,
    ) -> None:
        self.cuda, self.function, self.in_graphs = cuda, function, in_graphs
        self._how: dict[str, Any] = {"dynamic": dynamic, "is_skipped": is_skipped}
        self._traced = TracedGraph(cuda, function, in_graphs).call if fullgraph else None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, compiled if it can be."""
        if GraphRecorder.is_on or State.active is None or self.cuda.groups.job is not None:
            return self.function(*args, **kwargs)
        if State.devices > 1:
            self.cuda.assume(f"{EAGER}there are several GPUs")
            return self.function(*args, **kwargs)
        if self._traced is None:
            self._traced = dynamo(self.cuda).traced(self.function, self.graph, **self._how)
        if self.cuda.graph_trees is not None:
            self.cuda.graph_trees.step += 1
        try:
            return self._traced(*args, **kwargs)
        except dynamo(self.cuda).internal_error as error:
            self.cuda.assume(f"{WHOLE}{str(error).splitlines()[0]:.120}")
            traceback.clear_frames(error.__traceback__)
        self._traced = TracedGraph(self.cuda, self.function, self.in_graphs).call
        return self._traced(*args, **kwargs)

    def graph(self, module: Any, examples: Any) -> Any:
        """What is called for a graph that Dynamo made."""
        return TracedGraph(self.cuda, module, self.in_graphs).call


def dynamo(cuda: Any) -> Dynamo:
    """That of this prediction."""
    if cuda.dynamo is None:
        cuda.dynamo = Dynamo(cuda)
    found: Dynamo = cuda.dynamo
    return found


class TracedGraph:
    """A graph, and what was made of it for each kind of arguments."""

    def __init__(self, cuda: Any, function: Callable[..., Any], in_graphs: bool) -> None:
        self.cuda, self.function, self.in_graphs = cuda, function, in_graphs
        self._known: dict[Any, CompiledGraph | None] = {}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, compiled if it can be."""
        given = getattr(self.function, "__self__", None), args, kwargs
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        key = str((tree_map(_described, given), torch.is_grad_enabled(), autocast))
        graph = self._known.get(key)
        if key not in self._known or (graph is not None and graph.is_outdated(args, kwargs)):
            graph = self._known[key] = self._compiled(args, kwargs)
        if graph is None:
            return self.function(*args, **kwargs)
        return graph.run(args, kwargs)

    def _compiled(self, args: Any, kwargs: Any) -> CompiledGraph | None:
        """None if it cannot be compiled as one graph."""
        graph = None
        with _unlogged(self.cuda) as spare:
            try:
                with compiler.without_module_hooks():  # what a graph takes is the input of the module it was made of
                    graph = CompiledGraph(self.cuda, self.function, args, kwargs)
                self.cuda.assume(COMPILED)
            except (NotOneGraph, Exception) as error:  # one of the function itself comes again as eager
                line = (str(error).strip() or "no reason given").splitlines()[0]
                is_compiler = not isinstance(error, NotOneGraph)
                why = f"the compiler stopped at {type(error).__name__}: {line:.120}" if is_compiler else line
                self.cuda.assume(f"{EAGER}{why}")
                traceback.clear_frames(error.__traceback__)
        self.cuda.log.adopt(spare)
        if graph is not None and self.in_graphs:
            graph.use_cuda_graphs(self.cuda)
        return graph


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, str(leaf.device), leaf.requires_grad
    if isinstance(leaf, torch.nn.Module):
        return id(leaf), [one.training for one in leaf.modules()]
    return leaf if isinstance(leaf, int | float | bool | str | None) else id(leaf)


@contextlib.contextmanager
def _unlogged(cuda: Any) -> Iterator[AllocationLog]:
    """Within it requests go to another GPU without limits, whose log has what is alive afterwards: state that the function made
    when it was called for the first time."""
    log = cuda.log
    allocator = CachingAllocator(1 << 50, "", 0, torch_version=torch.__version__)
    cuda.log = spare = AllocationLog([allocator], raises_oom=False)
    cuda.hold, cuda.release = spare.hold, spare.release
    try:
        yield spare
    finally:
        cuda.log, cuda.hold, cuda.release = log, log.hold, log.release


class CompiledGraph:
    """A function for one kind of arguments, compiled."""

    def __init__(self, cuda: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        recorder, root = GraphRecorder(cuda), torch.ones((), requires_grad=True)
        parted = {id(one): _Parted.apply(root, one.detach()) for one in tree_leaves((args, kwargs)) if _is_made(one)}
        args, kwargs = tree_map(lambda one: parted.get(id(one), one), (args, kwargs))
        given = tree_leaves((args, kwargs))
        for one in given:
            if is_fake(one):
                recorder.node_of(one)
        with recorder.on():
            out = function(*args, **kwargs)
            results = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor) and recorder.knows(one)]
            tangents, gradients = _backward(recorder, results)
        inputs = recorder.inputs
        places = {id(one): place for place, one in enumerate(given)}
        nodes = [None if one is None else recorder.node_of(one) for one in gradients]
        mode = _Mode(cuda)
        halves = inductor.compiled(
            recorder.end(([recorder.node_of(one) for one in results], nodes)),
            mode,
            [twin(one, mode) for one in inputs],
            [twin(one, mode) for one in tangents],
            [place for place, one in enumerate(inputs) if compiler.is_static(one)],
            len(results),
            torch.cuda.get_device_properties(0),
        )
        self.forward, *backward = (_runnable(cuda, code) for code in halves.codes)
        self._written = halves.written
        if not results and not self._written:
            raise NotOneGraph("it neither returns a tensor that it made nor writes to one that it was given")
        self._static = [place for place, one in enumerate(inputs) if id(one) not in places or compiler.is_static(one)]
        self._on_host = any(not is_fake(one) for one in inputs)
        self.trees: GraphTrees | None = None
        self.backward = backward[0] if backward else None
        self.needs_grad = [one.requires_grad and bool(tangents) for one in results]
        self.strides = [one.stride() for one in tangents]
        self._given: list[int | None] = [places.get(id(one)) for one in inputs]
        # Nothing else may hold what was computed on the host.
        self._captured = [weakref.ref(one) if is_fake(one) else constant(one) for one in inputs]
        numbers = {id(one): _Result(number) for number, one in enumerate(results)}
        self._out = tree_map(lambda one: numbers.get(id(one), one), out)

    def use_cuda_graphs(self, cuda: Any) -> None:
        """Run it in CUDA graphs, if inductor would (cudagraph_utils.py)."""
        fixed = self._static
        if not set(self._written) <= set(fixed):
            cuda.assume(f"{WITHOUT_GRAPHS}it writes to an argument")
            return
        if self._on_host:
            cuda.assume(f"{WITHOUT_GRAPHS}an argument is on the CPU")
            return
        cuda.assume(IN_GRAPHS)
        trees = self.trees = graph_trees(cuda)
        kind = "inference" if self.backward is None else "forward"
        forward, backward, numbers = self.forward, self.backward, (trees.number(), trees.number())
        self.forward = lambda inputs: trees.run(numbers[0], forward, inputs, fixed, kind, _unlogged)
        if backward is not None:
            tangents = len(self.strides)
            self.backward = lambda inputs: trees.run(
                numbers[1], backward, inputs, range(len(inputs) - tangents), "backward", _unlogged
            )

    def _inputs(self, args: Any, kwargs: Any) -> list[Any]:
        leaves = tree_leaves((args, kwargs))
        pairs = zip(self._given, self._captured, strict=True)
        return [captured() if place is None else leaves[place] for place, captured in pairs]

    def is_outdated(self, args: Any, kwargs: Any) -> bool:
        """Whether a tensor that the function found for itself is gone."""
        return any(one is None for one in self._inputs(args, kwargs))

    def run(self, args: Any, kwargs: Any) -> Any:
        """Call it."""
        inputs = self._inputs(args, kwargs)
        if self.backward is not None:
            results = _Differentiable.apply(self, *inputs)
        else:
            with torch.no_grad():
                results = self.forward(inputs)
        return tree_map(lambda one: results[one.number] if isinstance(one, _Result) else one, self._out)


def graph_trees(cuda: Any) -> GraphTrees:
    """Those of this prediction."""
    if cuda.graph_trees is None:
        cuda.graph_trees = GraphTrees(cuda)
    found: GraphTrees = cuda.graph_trees
    return found


def _backward(recorder: GraphRecorder, results: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[Any]]:
    """Record backward: gradients that are given for results, and those that it finds for inputs."""
    wanted = [one for one in recorder.inputs if one.requires_grad]
    differentiable = [one for one in results if one.requires_grad]
    if not wanted or not differentiable:
        return [], []
    with torch.no_grad():
        tangents = [_like(one, one.stride()) for one in differentiable]
    for one in tangents:
        recorder.placeholder(one)
    recorder.in_backward = True
    found = torch.autograd.grad(differentiable, wanted, tangents, allow_unused=True)
    gradients = dict(zip(map(id, wanted), found, strict=True))
    return tangents, [gradients.get(id(one)) for one in recorder.inputs]


class _Mode(FakeGpuMode):
    """Operators without a shape function, such as the cells of recurrent layers, are asked of the rules for their kernels."""

    def __init__(self, cuda: Any) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._cuda = cuda

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator for its shapes."""
        try:
            return super().dispatch(func, types, args, kwargs)
        except NO_SHAPES:
            with _disable_current_modes():
                on_gpu = lambda one: new_tensor(one.shape, one.stride(), one.dtype)  # noqa: E731
                out = self._cuda.dispatch(func, types, *tree_map_only(FakeTensor, on_gpu, (args, kwargs or {})))
                return tree_map_only(FakeCudaTensor, lambda one: twin(one, self), out)


def _is_made(leaf: Any) -> bool:
    return is_fake(leaf) and leaf.grad_fn is not None


class _Parted(torch.autograd.Function):
    """A tensor without the graph that made it, which backward of a recording would run and free.

    It is no leaf: it may be written to.
    """

    @staticmethod
    def forward(ctx: Any, root: Any, tensor: Any) -> Any:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


class _Result:
    """The place of a result in what the function returned."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Differentiable(torch.autograd.Function):
    """A compiled forward and its backward, which frees what was kept as it goes (torch/_functorch, runtime_wrappers.py)."""

    @staticmethod
    def forward(ctx: Any, graph: CompiledGraph, *inputs: Any) -> Any:
        out = graph.forward(list(inputs))
        results, kept = out[: len(graph.needs_grad)], out[len(graph.needs_grad) :]
        ctx.save_for_backward(*kept)
        ctx.graph = graph
        ctx.mark_non_differentiable(*[one for one, needs in zip(results, graph.needs_grad, strict=True) if not needs])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        graph = ctx.graph
        wanted = [grad for grad, needs in zip(grads, graph.needs_grad, strict=True) if needs]
        pairs = zip(wanted, graph.strides, strict=True)  # in the layout that backward was compiled for
        laid_out = (grad if grad.stride() == stride else _like(grad, stride).copy_(grad) for grad, stride in pairs)
        given = [*ctx.saved_tensors, *laid_out]
        ctx.maybe_clear_saved_tensors()
        del wanted, grads, pairs, laid_out
        return None, *graph.backward(given)


def _like(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=CUDA0)


def _runnable(cuda: Any, code: Any) -> Callable[[list[Any]], Any]:
    """The code of one half as a function of its tensors, which it takes out of their list."""
    names = _Names(
        torch=torch, device=torch.device, aten=torch.ops.aten, inductor_ops=torch.ops.inductor,
        extern_kernels=_Extern(cuda), get_raw_stream=constant(0),
        empty_strided_cuda=lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=CUDA0),
        empty_strided_cpu=lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
        reinterpret_tensor=lambda one, size, stride, start=0: one.as_strided(size, stride, one.storage_offset() + start),
    )  # fmt: skip
    exec(compile(code, "<compiled by inductor>", "exec"), names)
    return untraced(names["call"])


class _Names(dict[str, Any]):
    """The names in inductor's code; those of kernels and of its checks are made as they are met."""

    def __missing__(self, name: str) -> Any:
        if name.startswith("triton_"):
            return SimpleNamespace(run=nothing)  # it does nothing
        if name.startswith("assert_"):  # each release has others
            return nothing
        raise KeyError(name)


class _Extern:
    """Operators that write where they are told; cuBLAS may take a workspace for some."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def __getattr__(self, name: str) -> Any:
        packet = getattr(torch.ops.aten, name)
        if name not in MATMULS:
            return packet

        def multiply(*args: Any, out: Any, **kwargs: Any) -> Any:
            self._cuda.note(packet.out, args)
            return out

        return multiply
