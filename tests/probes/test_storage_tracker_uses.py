from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from probes.module_uses import WORKS
from processes import python
from storage_tracking import KB, Counting, block_of, curve, rise, tracker

# --- whatever users do ------------------------------------------------------------------------------------------------


def no_graph(context: Callable[[], Any]) -> Callable[[], Any]:
    def work() -> None:
        model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()), torch.ones(8, 64)
        with context():
            model(x)

    return work


def loader() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=4):
        batch.sum()


@pytest.mark.parametrize(
    "work",
    [
        *WORKS,
        no_graph(torch.no_grad),
        no_graph(torch.inference_mode),
        no_graph(lambda: torch.autocast("cpu", torch.bfloat16)),
        loader,
    ],
)
def test_nothing_is_left_alive_that_the_work_let_go(work: Callable[[], Any]) -> None:
    work()
    gc.collect()
    peak, left = rise(lambda: work() and None)  # without the tensors that it gives
    assert peak > 0
    assert left == 0


def test_tensors_that_only_an_older_graph_held_are_preexisting_in_backward() -> None:
    x = torch.ones(1000, requires_grad=True)
    loss = (x * 2).exp().sum()  # the result of exp is kept by the graph alone
    with tracker() as probe:
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
    with tracker() as probe:
        assert block_of(probe, pair) == -1  # what wraps two tensors has a size, and no memory
    with Counting(), tracker() as probe:
        assert (pair * 2).a[0] == 2  # the mode below may want to see the pair first
    assert any("operators of TwoTensor while another mode is on" in what for what in probe.unseen)


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
    with tracker() as probe:
        sparse = torch.eye(3).to_sparse()
        assert (sparse @ torch.ones(3, 3)).sum() == 9
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        assert (jagged * 2).values().sum() == 10
        strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        assert (strided * 2).to_padded_tensor(0.0).sum() == 10
    assert any("sparse" in what for what in probe.unseen)
    assert any(gap.name == "unseen" and "sparse" in gap.text for gap in probe.gaps())


def test_lives_with_the_users_own_modes() -> None:
    with Counting() as outer, tracker() as probe, Counting() as inner:
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
    with tracker() as probe, ear:
        x = torch.ones(1000)
    assert ear.heard == ["ones"]
    assert probe.current_bytes - probe.base_bytes == KB
    del x


def test_keeps_no_tensor_alive_and_no_storage() -> None:
    with tracker() as probe:
        x = torch.ones(1000)
        seen, storage = weakref.ref(x), weakref.ref(x.untyped_storage())
        del x
        assert seen() is None
        assert storage() is None
    assert probe.current_bytes == probe.base_bytes


def test_gradients_are_stolen_and_not_copied_as_without_it() -> None:
    weight, grad = torch.ones(1000, requires_grad=True), torch.ones(1000)
    with tracker() as probe:
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
    with tracker() as probe:
        pass
    assert not [one for one in probe.unseen if "older" not in one]  # PyTorch itself keeps a nested tensor as a dummy
    del proxy


FSDP = """
import re, threading, torch, torch.distributed as dist, memlab
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method="file://{file}", rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
for part in (*model, model):
    fully_shard(part)
with memlab.track(show=False) as run:
    for _ in range(2):
        model(torch.ones(4, 64)).sum().backward()
assert re.search("bytes,? exact", str(run.report())) and "resized unseen" not in [gap.name for gap in run.gaps]
assert sum(run.breakdown().values()) == run.peak_allocated_bytes > 2 * 64 * 64 * 4, run.breakdown()

with memlab.track(show=False) as plain:
    torch.nn.Linear(64, 64)(torch.ones(4, 64)).sum().backward()
    torch.add(torch.ones(9), 1, out=torch.empty(0))
    torch.ones(3).resize_(99)
assert re.search("bytes,? exact", str(plain.report())) and "resized unseen" not in [gap.name for gap in plain.gaps]
dist.destroy_process_group()

with memlab.track(show=False) as unseen:
    resized = torch.ones(1000)
    resizer = threading.Thread(target=resized.untyped_storage().resize_, args=(8000,))
    resizer.start()
    resizer.join()
assert "resized unseen" in [gap.name for gap in unseen.gaps], unseen.gaps
report = str(unseen.report())
assert not re.search("bytes,? exact", report) and "\u2265" in report, report
"""


def test_the_word_exact_stands_where_resized_storages_were_followed_and_only_there(tmp_path):
    python("-c", FSDP.format(file=tmp_path / "store"))
