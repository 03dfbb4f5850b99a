"""Run operators: on host tensors for real, on fake CUDA tensors by rule or shape function, with a log of allocations."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from memlab.allocator import OutOfMemory
from memlab.errors import PredictionError
from memlab.fake_cuda import cuda_graphs, data_dependent, deferred_init, gpus, sparse
from memlab.fake_cuda.allocation_log import AllocationLog
from memlab.fake_cuda.assumed import AssumedValue
from memlab.fake_cuda.gpus import CUDA0, GPUS, with_index
from memlab.fake_cuda.kernel_rules import RULES, bytes_of, flat, is_composite, name_of, operators, resolved
from memlab.fake_cuda.patches import Patches
from memlab.fake_cuda.shape_inference import ALIAS, Fresh, Shapes, made
from memlab.fake_cuda.sparse import FakeSparseTensor
from memlab.fake_cuda.tensors import FakeCudaTensor, is_fake, new_tensor, without_frames, wrapped
from memlab.torch_internals import cuda_names, dispatch
from memlab.torch_internals.dispatch import TensorBase
from memlab.torch_internals.objects import function_of, schema_if_any, schema_of

OF_INTEREST = operators((
    "mm.default", "mm.dtype", "addmm.default", "bmm.default", "baddbmm.default", "addmv.default", "mv.default", "dot.default",
    "_addmm_activation.default", "addbmm.default", "_scaled_mm.default", "_int_mm.default", "_cudnn_rnn.default",
    "_cudnn_rnn_backward.default", "linalg_vector_norm.default",
))  # fmt: skip
"""Operators for which a library may allocate a workspace: they are logged, as convolutions are by their rules."""

_REFUSED = {
    "this kind of sparse tensors cannot be predicted: use COO, or dense ones (sparse=False in an embedding)": (
        "_sparse", "sparse_", "to_sparse", "_to_sparse", "_coalesce", "_embedding_bag_sparse",
    ),
    "nested tensors cannot be predicted: use padded ones with a mask": ("_nested", "nested_"),
    "quantized tensors cannot be predicted: leave them out": (
        "quantize_", "_make_per_", "fake_quantize_", "dequantize",
    ),
}  # fmt: skip
_RESIZERS = ("resize_", "resize_as_", "set_", "resize", "_resize_output_", "set_data")
_ACROSS = ("copy_", "_to_copy", "_foreach_", "_amp_foreach_", "_fused_", "resize_as_", "set_data", "is_same_size")
"""Operators whose tensors may lie on several GPUs."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Facts:
    """Cached facts about an operator."""

    def __init__(self, func: Any, rule: Any) -> None:
        schema, name = schema_of(func), name_of(func)
        arguments = [one.alias_info for one in schema.arguments]
        results = [one.alias_info for one in schema.returns]
        self.is_in_place = any(one is not None and one.is_write for one in arguments)
        self.rule, self.after = rule, data_dependent.AFTER.get(func)
        self.is_composite = is_composite(func)
        self.is_alias = any(one is not None for one in arguments) and all(one is not None for one in results)
        is_foreach = name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        self.is_foreach_in_place = self.is_in_place and not results and is_foreach
        self.resizes = self.is_in_place and (name in _RESIZERS or any(one.is_out for one in schema.arguments))
        self.of_interest = func in OF_INTEREST
        self.may_draw = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        # Libraries bring shape functions for operators of theirs with such names (bitsandbytes::quantize_4bit).
        is_own = schema.name.startswith(("aten::", "quantized::"))
        refusals = (text for text, prefixes in _REFUSED.items() if is_own and name.startswith(prefixes))
        self.refusal = next(refusals, "")


class OpDispatcher:
    """Runs every operator on fake CUDA tensors; rules receive it as `cuda`."""

    def __init__(self, gpu: Any, log: AllocationLog) -> None:
        self.gpu, self.log, self.assumptions = gpu, log, Counter[str]()
        self.hold, self.release = log.hold, log.release
        self.shapes, self.mode = Shapes(), FakeCudaMode(self)
        self._rules, self.composite_rules = resolved()
        self._facts: dict[Any, Facts] = {}
        self.groups: Any = None
        self.has_dropout_states: set[int] = set()  # the GPUs on which cuDNN has made them
        self.compiles = False  # whether the program called torch.compile
        self.graph_trees: Any = None  # those of compiled code, once there are any
        self.dynamo: Any = None  # what traces compiled functions, once there are any
        self.changes: list[Any] = []  # the patches of fake CUDA
        self.assumed: dict[str, AssumedValue] = {}
        self.given: Mapping[str, Any] = {}
        self.torch_version: str = torch.__version__

    def op(self, func, *args, **kwargs):
        """Run an operator by its shape function; new results are logged in their order."""
        facts = self.facts(func)
        if facts.of_interest:
            self.note(func, args)
        if facts.is_foreach_in_place:
            return None
        if facts.is_alias or facts.is_in_place:
            return self._on_storages(func, facts, args, kwargs)
        answer = self.shapes.answer(func, args, kwargs)
        if answer is ALIAS:
            facts.is_alias = True
            return self._on_storages(func, facts, args, kwargs)
        return made(answer, args, kwargs, lambda tensor, fresh: self._born(tensor, fresh, func))

    def empty(self, shape, dtype, stride=None, op="aten.empty"):
        """A new fake CUDA tensor, logged."""
        strides = stride or cuda_names.make_contiguous_strides_for(tuple(shape))
        tensor = new_tensor(tuple(shape), strides, dtype)
        storage = TensorBase.untyped_storage(tensor)
        self.log.allocated(storage, storage.nbytes(), op, dtype)
        return tensor

    @contextlib.contextmanager
    def held(self, *sizes: int, op: Any = "scratch", in_order: bool = False) -> Iterator[None]:
        """Allocate memory without a tensor for the duration of a `with` block, released in reverse order, or `in_order`."""
        blocks: list[int] = []
        try:
            for size in sizes:
                blocks.append(self.hold(size, op))
            yield
        finally:
            for block in blocks if in_order else reversed(blocks):
                self.release(block)

    def scratch(self, *sizes: int, op: Any = "scratch") -> None:
        """Allocate and release scratch memory of a kernel, several pieces at once in this order."""
        if sizes:
            with self.held(*sizes, op=op):
                pass

    def contiguous(self, *tensors: Any, form: torch.memory_format = torch.contiguous_format) -> Any:
        """Allocate what `contiguous()` needs for non-contiguous tensors, during a `with` block."""
        odd = [bytes_of(one) for one in tensors if not one.is_contiguous(memory_format=form)]
        return self.held(*odd, op="aten.contiguous")

    def note(self, func, args):
        """Log an operator for which a library may allocate a workspace."""
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        # In backward, on CUDA, it runs on another thread with its own handles.
        in_backward = dispatch.current_autograd_node() is not None
        self.log.note(str(func), in_backward, tuple(tuple(one.shape) for one in tensors), dtype)

    def assume(self, text: str) -> None:
        """Record an assumption."""
        self.assumptions[text] += 1

    @property
    def seen(self) -> list[Any]:
        """The operators logged so far."""
        return list(self._facts)

    def facts(self, func: Any) -> Facts:
        """The facts about an operator."""
        facts = self._facts.get(func)
        if facts is None:
            rule = self._rules.get(func) or RULES.get(str(func).replace(".", "::", 1))  # of a library that came later
            facts = self._facts[func] = Facts(func, rule)
        return facts

    def dispatch(self, func, types, args, kwargs):
        """Run one operator, with the errors that code written for CUDA expects."""
        try:
            kwargs = gpu_for_meta(kwargs) if kwargs else {}
            facts = self._facts.get(func) or self.facts(func)
            is_sparse = FakeSparseTensor in types
            if facts.refusal and not (is_sparse or facts.rule is not None or facts.is_composite):
                raise PredictionError(f"{facts.refusal} ({func}).")
            if facts.is_composite:  # in inference mode operators are not decomposed before they arrive here
                dispatch.push_mode(self.mode)
                try:
                    if facts.rule is None:
                        return func.decompose(*args, **kwargs)
                    return facts.rule(self, func, *args, **kwargs)
                finally:
                    dispatch.remove_mode(self.mode)
            if is_sparse:
                return sparse.run(self, func, args, kwargs)
            if kwargs and facts.rule is None and kwargs.get("layout") not in (None, torch.strided):
                return sparse.factory(self, func, args, kwargs)
            out = self.op(func, *args, **kwargs) if facts.rule is None else facts.rule(self, func, *args, **kwargs)
            if facts.after is not None:
                facts.after(func, args, out)
            if facts.may_draw:
                cuda_graphs.drawn(func, args, kwargs)
            if args and type(args[0]) is FakeCudaTensor and "known" in args[0].__dict__:
                data_dependent.follow(func, args, kwargs, out)
            return out
        except OutOfMemory as full:
            raise torch.OutOfMemoryError(str(full)) from None
        except cuda_names.UNPREDICTABLE as error:
            raise PredictionError(
                f"{func} cannot be predicted: its result depends on values, or PyTorch has no shape function for it "
                f"({type(error).__name__}). Leave this part out of the prediction, or register one with "
                "torch.library.register_fake."
            ) from None

    def _born(self, tensor: Any, fresh: Fresh, func: Any) -> None:
        self.log.allocated(TensorBase.untyped_storage(tensor), fresh.nbytes, func, fresh.dtype)

    def _on_storages(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Any:
        """Views and operators in place, on the storages themselves."""
        if facts.is_in_place:
            data_dependent.check_devices(func, args)
        try:
            with cuda_names.meta_kernels():
                out = function_of(func)(*args, **kwargs)
        except NotImplementedError:
            if facts.is_alias and facts.is_in_place:
                return args[0]  # no meta kernel: it changes only values
            answer = self.shapes.answer(func, args, kwargs)
            return made(answer, args, kwargs, lambda tensor, fresh: self._born(tensor, fresh, func))
        out = self._wrapped(out, func, facts)
        for one in (*args, *kwargs.values()) if facts.resizes else ():
            if is_fake(one):
                storage = TensorBase.untyped_storage(one)
                self.log.resized(storage, storage.nbytes(), func, one.dtype)
        return out

    def _wrapped(self, out: Any, func: Any, facts: Facts) -> Any:
        """Results of a meta kernel as fake CUDA tensors; those on a new storage are logged."""
        kind = type(out)
        if kind is tuple or kind is list:
            return kind([self._wrapped(one, func, facts) for one in out])
        if not issubclass(kind, torch.Tensor) or is_fake(out) or not TensorBase.is_meta.__get__(out):
            return out
        tensor = wrapped(out)
        storage = TensorBase.untyped_storage(tensor)
        if not facts.is_alias and not self.log.is_known(storage):
            if gpus.current():  # meta kernels make their results on the first
                tensor = new_tensor(out.shape, out.stride(), out.dtype)
                storage = TensorBase.untyped_storage(tensor)
            self.log.allocated(storage, storage.nbytes(), func, tensor.dtype)
        return tensor


def gpu_for_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """C++ requests new tensors on meta, the device it sees: that means the GPU."""
    device = kwargs.get("device")
    if device is None or device.type not in ("meta", "cuda") or device == CUDA0:
        return kwargs
    return {**kwargs, "device": GPUS[device.index or 0] if device.type == "meta" else with_index(device)}


class SeveralGpus(OpDispatcher):
    """Runs every operator on the GPU of its tensors, as the device guards of CUDA's kernels do; rules know of one GPU."""

    def dispatch(self, func, types, args, kwargs):
        """Run one operator on the GPU that its `device` names, else on that of its tensors, which are on one."""
        device = gpu_for_meta(kwargs).get("device") if kwargs else None
        given = flat((*args, *kwargs.values()) if kwargs else args)
        found = dict.fromkeys(gpus.number_on(one) for one in given if is_fake(one))
        facts = self.facts(func)
        if len(found) > 1 and not (facts.is_composite or name_of(func).startswith(_ACROSS)):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(f'cuda:{one}' for one in [*found][:2])}! (when checking arguments of {func})"
            )
        number = device.index if device is not None and device.type == "cuda" else next(iter(found), gpus.current())
        with gpus.on(number):
            return super().dispatch(func, types, args, kwargs)


class FakeCudaMode(cuda_names.TorchDispatchMode):
    """Sees every operator of its thread that no other mode handled."""

    supports_higher_order_operators = True
    calls_for_meta = 0
    """The number of active user calls that name the meta device."""

    def __init__(self, dispatcher: OpDispatcher) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self._kinds: dict[Any, str] = {(): "host"}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the handler, 1 microsecond per operator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo trace compiled functions while it is on."""
        return True

    @without_frames
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Route an operator."""
        kind = self._kinds.get(types) or self._kind(types)
        if kind == "fake":
            return self.dispatcher.dispatch(func, types, args, kwargs)
        if kind == "foreign":
            return NotImplemented
        kwargs = kwargs or {}
        if schema_if_any(func) is None:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and self.dispatcher.facts(func).is_composite:
            return self.dispatcher.dispatch(func, types, args, kwargs)  # nothing has decomposed it yet
        device = kwargs.get("device")
        if device is not None and device.type != "cpu" and self._is_for_gpu(device, args):
            return self.dispatcher.dispatch(func, types, args, kwargs)
        return deferred_init.on_host(func, args, kwargs, self.dispatcher)

    def _kind(self, types: Any) -> str:
        """Route by tensor class: those of other libraries unwrap themselves first."""
        others = [one for one in types if one not in _PLAIN and not issubclass(one, FakeCudaTensor)]
        if any(one.__torch_dispatch__ is not dispatch.plain_torch_dispatch for one in others):
            kind = "foreign"
        else:
            kind = "fake" if any(issubclass(one, FakeCudaTensor) for one in types) else "host"
        self._kinds[types] = kind
        return kind

    def _is_for_gpu(self, device: Any, args: Any) -> bool:
        """Whether a tensor on "cuda" or "meta" is one of the GPU.

        C++ makes tensors "on the device of this one", and takes fake CUDA tensors for meta ones; user code may really mean meta.
        """
        if device.type != "meta":
            return bool(device.type == "cuda")
        if dispatch.current_autograd_node() is not None:
            return True
        return not (self.calls_for_meta or any(isinstance(one, torch.Tensor) for one in args))


def watch_devices(cuda: OpDispatcher, patches: Patches) -> None:
    """Make PyTorch's factories and `with torch.device(...)` note when the meta device is named.

    They give their device an index: C++ would ask the driver for it (ATen/native/TensorConversions.cpp).
    """

    def called(device, function, /, *args, **kwargs):
        cuda.mode.calls_for_meta += device.type == "meta"
        try:
            return function(*args, **kwargs)
        finally:
            cuda.mode.calls_for_meta -= device.type == "meta"

    def watched(function):
        def factory(*args, **kwargs):
            if kwargs.get("device") is None:
                return function(*args, **kwargs)
            kwargs["device"] = device = with_index(kwargs["device"])
            return called(device, function, *args, **kwargs)

        factory.__name__, factory.__doc__ = function.__name__, function.__doc__
        return factory

    for function in cuda_names._device_constructors():
        name = getattr(function, "__name__", "")
        if vars(torch).get(name) is function:
            patches.put(torch, **{name: watched(function)})
    as_tensor = torch.as_tensor

    @functools.wraps(as_tensor)
    def keeping(data, dtype=None, device=None):
        """An existing tensor (torch/csrc/utils/tensor_new.cpp)."""
        if is_fake(data) and (device is None or with_index(device).type == "cuda"):
            return data if dtype is None else data.to(dtype)
        return as_tensor(data, dtype=dtype, device=device)

    patches.put(torch, as_tensor=keeping)
    context = cuda_names.DeviceContext
    begin, handle = context.__init__, context.__torch_function__
    patches.put(
        context,
        __init__=lambda self, device: begin(self, with_index(device)),
        __torch_function__=lambda self, *args: called(self.device, handle, self, *args),
    )


def follow_threads(mode: FakeCudaMode, patches: Patches) -> None:
    """Modes are per thread: new threads get it too (`_bootstrap_inner` of Python 3.11 to 3.13)."""
    run_thread: Callable[[Any], None] = vars(threading.Thread)["_bootstrap_inner"]

    def bootstrap(thread):
        with contextlib.ExitStack() as stack:
            cuda_names.lift_only_host_tensors(stack)
            dispatch.push_mode(mode)
            stack.callback(dispatch.remove_mode, mode)
            run_thread(thread)

    patches.put(threading.Thread, _bootstrap_inner=bootstrap)
