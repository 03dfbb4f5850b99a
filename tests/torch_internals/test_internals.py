"""Each private hook of torch, IPython and ipykernel: is it there, and does it behave as memlab believes?

A failure here names what a new version changed, before anything else gets strange. The tests of allocator history need
CUDA, on the simulated GPU.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memlab import torch_internals
from memlab.torch_internals import compiler, dispatch, shell

MiB = 1 << 20


# --- the autograd engine ---


def test_every_way_into_the_engine_goes_through_its_entry():
    original, calls = torch_internals.engine_entry(), []

    def entry(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return original(*args, **kwargs)

    torch_internals.replace_engine_entry(entry)
    try:
        assert torch_internals.engine_entry() is entry
        x = torch.ones(2, requires_grad=True)
        (x * 2).sum().backward()
        torch.autograd.backward((x * 2).sum())
        torch.autograd.grad((x * 2).sum(), x)
        assert len(calls) == 3
        torch.utils.checkpoint.checkpoint(lambda y: y * 2, x, use_reentrant=True).sum().backward()
        assert len(calls) == 5  # the outer pass, and the one that it runs inside
    finally:
        torch_internals.replace_engine_entry(original)


def test_a_backward_that_raised_is_forgotten_when_the_next_begins():
    def fails():
        first, second = (torch.ones(1000, requires_grad=True) for _ in range(2))
        found.append([weakref.ref(first), weakref.ref(second)])
        for one in (first, second):
            one.register_hook(refuse)
        (2 * first + 3 * second).sum().backward()

    def refuse(grad):
        raise ValueError("on purpose")

    found: list[list[weakref.ref]] = []
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with pytest.raises(ValueError, match="on purpose"):
            fails()
        gc.collect()
        assert any(ref() is not None for ref in found[-1]), (
            "autograd frees it by itself: the workaround is no longer needed"
        )
        with mode():
            torch_internals.forget_unfinished_backward()
        gc.collect()
        assert not any(ref() is not None for ref in found[-1])


# --- the dispatcher ---


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_operators_between_push_and_remove_wherever_it_lies():
    low, high = Counting(), Counting()
    assert (dispatch.mode_count(), dispatch.top_mode()) == (0, None)
    dispatch.push_mode(low)
    dispatch.push_mode(high)
    try:
        assert (dispatch.mode_count(), dispatch.top_mode()) == (2, high)
        torch.ones(2)
        assert dispatch.remove_mode(low)
        assert dispatch.top_mode() is high
        torch.ones(2)
    finally:
        dispatch.remove_mode(low)
        assert dispatch.remove_mode(high)
    torch.ones(2)
    assert not dispatch.remove_mode(high)
    assert dispatch.may_remove(False) and dispatch.may_remove(True)
    with torch.inference_mode():  # it may go where inference mode is as it was
        assert dispatch.may_remove(True) and not dispatch.may_remove(False)
    assert (low.seen, high.seen) == (["aten.ones.default"], ["aten.ones.default"] * 2)


@pytest.mark.parametrize("base, is_left", [(dispatch.OperatorMode, True), (TorchDispatchMode, False)])
def test_an_operator_mode_leaves_compiled_code_compiled(base: type, is_left: bool):
    graphs = []

    def handler(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    mode = type("Watching", (base,), {"__torch_dispatch__": handler})
    assert (mode.__torch_dispatch__ is handler) == is_left  # PyTorch wraps the handler of its own
    torch.compiler.reset()
    try:
        with mode():
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        assert len(graphs) == is_left
    finally:
        torch.compiler.reset()


def test_function_modes_are_counted_and_can_be_held_off_and_subclasses_are_not_asked():
    class Loud(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise RuntimeError("called")

    class Lying(torch.Tensor):
        @property
        def is_leaf(self) -> bool:
            raise RuntimeError("asked")

    assert dispatch.function_mode_count() == 0
    tensor, lying = torch.ones(1), torch.ones(1).as_subclass(Lying)
    with Loud():
        assert dispatch.function_mode_count() == 1
        with pytest.raises(RuntimeError, match="called"):
            tensor.untyped_storage()
        with dispatch.DisableTorchFunction():
            assert dispatch.TensorBase.untyped_storage(tensor).nbytes() == 4
            assert dispatch.TensorBase.is_leaf.__get__(lying) is True


def test_what_the_handler_asks_of_operators_is_there():
    func = torch.ops.aten.add.Tensor
    assert func._op(torch.ones(1), torch.ones(1)).item() == 2
    assert func._schema.name == "aten::add"
    assert issubclass(dispatch.HigherOrderOperator, object)
    assert torch.Tensor.__torch_dispatch__ is dispatch.plain_torch_dispatch


def test_the_node_of_the_graph_is_known_inside_backward_alone():
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            seen.append(dispatch.current_autograd_node())
            return gradient

    assert dispatch.current_autograd_node() is None
    Look.apply(torch.ones(1, requires_grad=True)).backward()
    assert seen[0] is not None
    assert dispatch.current_autograd_node() is None


def test_whether_something_was_compiled_is_asked_without_loading_the_compiler(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert dispatch.compiled_something() is False
    assert "torch._dynamo.utils" not in sys.modules
    counters = {"frames": {"ok": 1}}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=counters))
    assert dispatch.compiled_something() is True


# --- the compiler ---


def test_hooks_are_called_around_every_module_until_they_are_hidden():
    calls = []
    compiler.show_module_hooks(
        -7, lambda module, args: calls.append("before"), lambda module, args, *more: calls.append(len(more))
    )
    try:
        torch.nn.Linear(1, 1)(torch.ones(1))
        with pytest.raises(RuntimeError):
            torch.nn.Linear(1, 1)(torch.ones(3))
    finally:
        compiler.hide_module_hooks(-7)
    torch.nn.Linear(1, 1)(torch.ones(1))
    # Also after a forward that raised; then PyTorch 2.11 to 2.15 leave the named arguments out.
    assert calls == ["before", 2, "before", 1]
    compiler.hide_module_hooks(-7)
    assert isinstance(compiler.HIDES_HOOKS, bool)


def test_hooks_are_hidden_for_a_while_and_shown_again():
    calls = []
    compiler.show_module_hooks(-7, lambda *_: calls.append("before"), lambda *_: calls.append("after"))
    try:
        with compiler.without_module_hooks():
            torch.nn.Identity()(1)
        assert calls == []
        torch.nn.Identity()(1)
        assert calls == ["before", "after"]
    finally:
        compiler.hide_module_hooks(-7)


def test_what_dynamo_knows_of_functions_tensors_and_packages():
    import torch._dynamo

    assert any(torch.relu in table for table in compiler.known_to_dynamo())
    kinds, wrap = compiler.tensor_classes()
    assert kinds[torch.Tensor] is wrap
    rules = torch._dynamo.trace_rules
    trace_again = compiler.skip_packages("memlab.probes", "memlab.no_such_package")
    assert rules.check_file(compiler.__file__.replace("torch_internals/compiler", "probes/marks")).skipped
    trace_again()
    assert not rules.check_file(compiler.__file__.replace("torch_internals/compiler", "probes/marks")).skipped
    assert compiler.traceable(lambda x: x + 1)(1) == 2
    run = torch._dynamo.disable(lambda x: x)
    compiler.stand_for(run, lambda x: x + 1)
    assert torch.compile(lambda x: run(x), backend="eager", fullgraph=True)(torch.ones(1)) == 2
    callback = torch._dynamo.optimize("inductor").callback
    assert compiler.backend_of(callback)[1] is False
    held = torch.ones(1)
    assert (compiler.is_static(torch.nn.Parameter(held)), compiler.is_static(held)) == (True, False)
    torch._dynamo.mark_static_address(held)
    assert compiler.is_static(held)


def test_compilations_are_told_and_forgotten():
    import torch._dynamo

    assert compiler.compiler_is_loaded()
    frames = compiler.eval_frame()
    assert type(torch.compile(torch.nn.Identity(), backend="eager")) is frames.OptimizedModule
    assert frames._callback_from_stance(None) is None
    module = torch.nn.Identity()
    assert compiler.call_of(module)(1) == 1
    for mode, has_graphs in ((None, False), ("reduce-overhead", True), ("max-autotune-no-cudagraphs", False)):
        callback = torch.compile(torch.nn.Identity(), mode=mode).dynamo_ctx.callback
        assert compiler.backend_of(callback) == ("inductor", has_graphs)
    compiler.set_compiled_call(module, lambda x: x + 1)
    assert module(1) == 2
    begun, ended = [], []

    def begin(arguments: object) -> None:
        begun.append(arguments)

    def end(arguments: object) -> None:
        ended.append(arguments)

    handler = compiler.watch_compilations(begin, end)
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        assert (len(begun), len(ended)) == (1, 1)
        assert dispatch.compiled_something()
    finally:
        compiler.forget_compilations(handler, begin, end)
        compiler.forget_compilations(handler, begin, end)  # twice is no error: the user may have reset Dynamo
        torch._dynamo.reset()
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    torch._dynamo.reset()
    assert len(begun) == 1


def test_a_compiler_that_is_not_loaded_is_not_watched(monkeypatch):
    monkeypatch.setitem(sys.modules, compiler.COMPILER_MODULE, None)
    assert compiler.watch_compilations(print, print) is None


# --- the kernel ---


def test_clicks_are_let_through_only_where_the_attribute_means_something():
    routed, other = (SimpleNamespace(comm=SimpleNamespace(**names)) for names in ({"_reply_subshell_for": "main"}, {}))
    for widget in (routed, other, SimpleNamespace(comm=None), object()):
        torch_internals.let_clicks_through(widget)
    assert (vars(routed.comm), vars(other.comm)) == ({"_reply_subshell_for": None}, {})
    ipykernel = pytest.importorskip("ipykernel")
    if tuple(map(int, ipykernel.__version__.split(".")[:2])) < (7, 4):
        pytest.skip("only ipykernel 7.4 routes clicks so")
    import inspect

    from ipykernel.comm import comm

    assert "_reply_subshell_for" in inspect.getsource(comm)


def test_a_shell_of_a_notebook_is_told_from_a_terminal(monkeypatch):
    assert not torch_internals.is_kernel(None)
    assert not torch_internals.is_kernel(SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    assert torch_internals.is_kernel(SimpleNamespace(kernel=1))
    monkeypatch.delitem(sys.modules, "ipykernel")
    assert not torch_internals.is_kernel(SimpleNamespace(kernel=1))


def test_a_result_that_nobody_takes_is_told_from_one_that_is_kept():
    class Shell:
        def run_line_magic(self) -> None:
            said.append(shell.is_result_dropped())

    said, here = list[bool](), Shell()
    here.run_line_magic()
    kept = here.run_line_magic()
    kept = [here.run_line_magic()]
    for _ in range(2):
        here.run_line_magic()
    assert (said, kept) == ([True, False, False, True, True], [None])
    assert not shell.is_result_dropped()


# --- CUDA: before it is up ---


def test_a_call_waits_for_cuda_and_can_be_taken_back():
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is up")
    before = list(torch.cuda._queued_calls)

    def action() -> None:
        raise AssertionError("called")

    torch_internals.when_cuda_starts(action)
    assert len(torch.cuda._queued_calls) == len(before) + 1
    torch_internals.forget_when_cuda_starts(action)
    assert torch.cuda._queued_calls == before
    assert torch_internals.has_primary_context(0) is False


def test_the_switch_of_history_is_what_users_call():
    original = torch_internals.history_switch()
    assert original is torch.cuda.memory._record_memory_history
    torch_internals.replace_history_switch(print)
    try:
        assert torch.cuda.memory._record_memory_history is print
    finally:
        torch_internals.replace_history_switch(original)


# --- CUDA: up ---


@pytest.fixture
def up():
    torch.cuda.init()
    torch.empty(1, device="cuda")


@pytest.mark.simulated
def test_history_goes_on_and_off_and_forgets(up):
    assert not torch_internals.history_is_on()
    torch_internals.record_history(1000)
    try:
        assert torch_internals.history_is_on()
        kept = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")
        del kept
        (trace,) = torch_internals.snapshot()["device_traces"][:1]
        alloc = next(entry for entry in trace if entry["action"] == "alloc")
        assert (alloc["size"], alloc["addr"] > 0, alloc["stream"], alloc["time_us"] > 0) == (3 * MiB, True, 0, True)
        assert alloc["frames"][0]["filename"]
        assert {"free_requested", "free_completed"} <= {entry["action"] for entry in trace}
        torch_internals.record_history(1000)
        assert torch_internals.snapshot()["device_traces"][0] == []  # what an earlier recording left is dropped
    finally:
        torch_internals.stop_history()
    assert not torch_internals.history_is_on()


@pytest.mark.simulated
def test_snapshots_counters_and_devices(up):
    kept = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")
    before = torch_internals.cuda_stats(0)["allocated_bytes"]["all"]["current"]
    small = torch.empty(MiB, dtype=torch.uint8, device="cuda")  # a larger one may get a rest with it
    shot, stats = torch_internals.snapshot(), torch_internals.cuda_stats(0)
    blocks = [block for segment in shot["segments"] for block in segment["blocks"]]
    mine = next(block for block in blocks if block["address"] == kept.data_ptr())
    assert (mine["requested_size"], mine["state"]) == (3 * MiB, "active_allocated")
    assert shot["allocator_settings"]
    assert stats["allocated_bytes"]["all"]["current"] - before == small.nbytes
    assert stats["reserved_bytes"]["all"]["peak"] >= 3 * MiB
    assert {"num_ooms", "num_alloc_retries"} <= set(stats)
    assert torch_internals.device_count() == torch.cuda.device_count()
    assert torch_internals.has_primary_context(0) is True
    called = []
    torch_internals.when_cuda_starts(lambda: called.append(1))
    assert called == [1]  # at once, when CUDA is up


@pytest.mark.parametrize("config", ["", ":4096:8", ":16:8:4096:2"])
def test_the_size_of_a_workspace_follows_its_variable(monkeypatch, config):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    sizes = {"": {8519680, 33554432}, ":4096:8": {33554432}, ":16:8:4096:2": {8519680}}
    assert torch_internals.blas_workspace_sizes() == sizes[config]
    if not config:
        of = {7: {8519680}, 8: {8519680}, 9: {33554432}, 10: sizes[""], 12: sizes[""]}
        assert {major: torch_internals.blas_workspace_sizes({major}) for major in of} == of
        assert torch_internals.blas_workspace_sizes({8, 9}) == sizes[""]


@pytest.mark.simulated
def test_cublas_gives_its_workspaces_back_where_no_graph_can_use_them():
    square = torch.ones(64, 64, device="cuda")
    torch_internals.clear_cublas_workspaces()
    before = torch.cuda.memory_allocated()
    square @ square
    graph = torch.cuda.CUDAGraph()
    torch_internals.clear_cublas_workspaces()
    kept = torch.cuda.memory_allocated()
    del graph
    torch_internals.clear_cublas_workspaces()
    assert kept > before + (1 << 20) and torch.cuda.memory_allocated() == before
