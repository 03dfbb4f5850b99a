from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tallying import KB, Counting, curve, rise, tally

from memlab.probes.tally import Tally

# --- whatever users do ------------------------------------------------------------------------------------------------


def net() -> tuple[torch.nn.Module, torch.Tensor]:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)), torch.ones(8, 64)


def checkpointed(reentrant: bool) -> Callable[[], Any]:
    model, x = net()
    x.requires_grad_()

    def work() -> None:
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        model.zero_grad(set_to_none=True)
        x.grad = None

    return work


def double_backward() -> Callable[[], Any]:
    model, x = net()
    x.requires_grad_()

    def work() -> None:
        (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        grad.sum().backward()
        model.zero_grad(set_to_none=True)
        x.grad = None

    return work


def no_graph(context: Callable[[], Any]) -> Callable[[], Any]:
    model, x = net()

    def work() -> None:
        with context():
            model(x)

    return work


def functional() -> None:
    torch.func.vmap(torch.func.grad(lambda x: x.sin().sum()))(torch.ones(4, 8))


def loader() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=4):
        batch.sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda: checkpointed(True),
        lambda: checkpointed(False),
        double_backward,
        lambda: no_graph(torch.no_grad),
        lambda: no_graph(torch.inference_mode),
        lambda: no_graph(lambda: torch.autocast("cpu", torch.bfloat16)),
        lambda: functional,
        lambda: loader,
    ],
)
def test_nothing_is_left_alive_that_the_work_let_go(make: Callable[[], Callable[[], Any]]) -> None:
    gc.collect()
    work = make()
    work()
    peak, left = rise(work)
    assert peak > 0
    assert left == 0


def test_tensors_that_only_an_older_graph_held_are_adopted_in_backward() -> None:
    x = torch.ones(1000, requires_grad=True)
    loss = (x * 2).exp().sum()  # the result of exp is kept by the graph alone
    with tally() as probe:
        assert probe.current_bytes == probe.base_bytes
        known = probe.base_bytes
        loss.backward()
    assert probe.base_bytes - known >= KB
    assert (curve(probe.columns()) >= 0).all()
    assert curve(probe.columns()).max() == probe.peak_bytes


def test_sees_the_inside_of_subclasses_that_unwrap() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    assert rise(lambda: TwoTensor(torch.ones(1000), torch.ones(1000)))[0] == 2 * KB
    pair = TwoTensor(torch.ones(1000), torch.ones(1000))
    assert rise(lambda: pair * 2) == (2 * KB, 2 * KB)
    with tally() as probe:
        assert probe.block_of(pair) == -1  # what wraps two tensors has a size, and no memory
    with Counting(), tally() as probe:
        assert (pair * 2).a[0] == 2  # the mode below may want to see the pair first
    assert any("operators of TwoTensor while another mode is on" in what for what in probe.overlooked.unseen)


def test_counts_a_subclass_that_only_renames_tensor() -> None:
    class Named(torch.Tensor):
        pass

    x = torch.ones(1000).as_subclass(Named)
    assert rise(lambda: (x * 2).add_(1)) == (KB, KB)


def test_fake_tensors_have_no_bytes_whichever_comes_first() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def inside() -> None:
        with FakeTensorMode():
            torch.nn.Linear(1000, 1000)(torch.ones(1, 1000)).sum().backward()

    inside()
    assert rise(inside)[1] == 0
    with FakeTensorMode():
        assert rise(lambda: torch.ones(1000) * 2) == (0, 0)


def test_sparse_and_nested_tensors_go_on_working_and_are_named() -> None:
    with tally() as probe:
        sparse = torch.eye(3).to_sparse()
        assert (sparse @ torch.ones(3, 3)).sum() == 9
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        assert (jagged * 2).values().sum() == 10
        strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        assert (strided * 2).to_padded_tensor(0.0).sum() == 10
    assert any("sparse" in what for what in probe.overlooked.unseen)
    assert any(name == "unseen" and "sparse" in text for name, text in probe.gaps())


def test_lives_with_the_users_own_modes() -> None:
    with Counting() as outer, tally() as probe, Counting() as inner:
        x = torch.ones(1000) * 2
    assert outer.seen == inner.seen == 2
    assert probe.current_bytes - probe.base_bytes == KB
    del x


def test_function_modes_do_not_hear_of_it() -> None:
    class Ear(torch.overrides.TorchFunctionMode):
        heard: list[str]

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.heard.append(func.__name__)
            return func(*args, **kwargs or {})

    ear = Ear()
    ear.heard = []
    with tally() as probe, ear:
        x = torch.ones(1000)
    assert ear.heard == ["ones"]
    assert probe.current_bytes - probe.base_bytes == KB
    del x


def test_keeps_no_tensor_alive_and_no_storage() -> None:
    with tally() as probe:
        x = torch.ones(1000)
        seen, storage = weakref.ref(x), weakref.ref(x.untyped_storage())
        del x
        assert seen() is None
        assert storage() is None
    assert probe.current_bytes == probe.base_bytes


def test_gradients_are_stolen_and_not_copied_as_without_it() -> None:
    weight, grad = torch.ones(1000, requires_grad=True), torch.ones(1000)
    with tally() as probe:
        (weight * 1).backward(grad.clone())
    assert probe.peak_bytes - probe.base_bytes <= 3 * KB
    assert probe.current_bytes - probe.base_bytes == KB


def test_scanning_asks_no_object_what_it_is() -> None:
    class Proxy:
        @property
        def __class__(self) -> type:
            raise RuntimeError("touched")

        @property
        def grad(self) -> None:
            raise RuntimeError("touched")

    proxy = [Proxy()]
    with tally() as probe:
        pass
    assert not [
        one for one in probe.overlooked.unseen if "older" not in one
    ]  # PyTorch itself keeps a nested tensor as a dummy
    del proxy


def test_a_tally_that_another_thread_stopped_goes_with_the_next_run():
    left = Tally()
    left.start()
    thread = threading.Thread(target=left.stop)
    thread.start()
    thread.join()
    following = Tally()
    following.start()
    following.stop()
    assert not torch._C._len_torch_dispatch_stack()
