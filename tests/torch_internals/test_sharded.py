"""The private attributes of torch.distributed: FSDP's and DistributedDataParallel's, on a group that connects nobody."""

from __future__ import annotations

import textwrap

import torch
from processes import python

from memlab.torch_internals import sharded
from memlab.torch_internals.replacement import Replacement

BEGIN = """
    import warnings; warnings.simplefilter("ignore")
    import torch, torch.distributed as dist
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from memlab.torch_internals import sharded
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model, seen = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {}
    def note(name, subject):
        for read, which in READS.items():
            if which == name:
                seen.setdefault(read.__name__, []).append(read(subject))
"""


def run(code: str) -> str:
    return python("-c", textwrap.dedent(BEGIN) + textwrap.dedent(code))


def test_fully_shard_shows_shards_and_flat_buffers():
    printed = run("""
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as Group
        originals = [vars(Group)[name] for module, holder, name in sharded.WATCHED if holder == "FSDPParamGroup"]
        READS = {sharded.gathered: "FSDPParamGroup.unshard", sharded.being_reduced: "FSDPParamGroup.post_backward"}
        after = lambda name, group: (note(name, group), tensors(name, group))
        def tensors(name, group):
            if name.endswith("wait_for_unshard"):
                seen["whole"] = [(name, tensor.numel()) for _, name, tensor in sharded.whole_parameters(group)]
            if name.endswith("post_backward"):
                seen["shards"] = [sharded.local_tensor(one).numel() for one in sharded.reduced_gradients(group)]
        def before(name, group):
            if name.endswith("post_backward"):
                seen["gradients"] = [tensor.numel() for _, _, tensor in sharded.whole_gradients(group)]
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
        wrapped = sharded.Wrapped(before, after)
        wrapped.install(), wrapped.install()
        model(torch.ones(2, 8)).sum().backward()
        wrapped.restore()
        assert originals == [vars(Group)[name] for module, holder, name in sharded.WATCHED if holder == "FSDPParamGroup"]
        print(seen["whole"] == [("weight", 64), ("bias", 8)] * 2, seen["gradients"], seen["shards"])
        print(seen["gathered"][0].numel(), seen["being_reduced"][-1].numel())
        weight = model[0].weight
        print(type(weight).__name__, sharded.is_parameter(weight), tuple(sharded.local_tensor(weight).shape))
        print(sharded.local_tensor(weight) is weight._local_tensor, sharded.modules_of is not None)
    """)
    assert printed.splitlines() == [
        "True [64, 8, 64, 8] [32, 4, 32, 4]",
        "144 144",
        "DTensor True (4, 8)",
        "True True",
    ]


def test_fsdp_shows_its_flat_parameter():
    printed = run("""
        from torch.distributed.fsdp import FullyShardedDataParallel
        READS = {}
        def around(name, handle):
            if name.endswith("unshard"):
                seen["whole"] = [one.numel() for one in sharded.whole_flat_parameter(handle)]
            else:
                seen.setdefault("gradients", []).append([one.numel() for one in sharded.flat_gradients(handle)])
            seen["module"] = type(sharded.module_of(handle)).__name__
        wrapped = sharded.Wrapped(around, around)
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        wrapped.install()
        model(torch.ones(2, 8)).sum().backward()
        wrapped.restore()
        print(seen)
    """)
    assert printed.strip() == "{'whole': [144], 'module': 'Sequential', 'gradients': [[144], [72]]}"


def test_data_parallel_tells_the_sizes_of_its_buckets():
    printed = run("""
        from torch.nn.parallel import DistributedDataParallel
        print(sharded.bucket_bytes(model))
        print(sharded.bucket_bytes(DistributedDataParallel(model)))
        print(sharded.bucket_bytes(DistributedDataParallel(model, gradient_as_bucket_view=True)))
    """)
    assert printed.splitlines() == ["None", "(576,)", "()"]


def test_a_function_that_somebody_has_wrapped_since_stays_and_only_forwards(monkeypatch):
    class Group:
        def unshard(self) -> str:
            return "theirs"

    calls: list[str] = []
    monkeypatch.setattr(sharded, "WATCHED", ((__name__, "Group", "unshard"), (__name__, "Group", "gone")))
    monkeypatch.setitem(globals(), "Group", Group)
    wrapped = sharded.Wrapped(lambda name, group: calls.append(name), lambda name, group: calls.append(name))
    wrapped.install()
    ours = Group.unshard
    Group.unshard = lambda self: ours(self)
    assert Group().unshard() == "theirs" and calls == ["Group.unshard"] * 2
    wrapped.restore()
    assert Group().unshard() == "theirs" and len(calls) == 2


def test_the_method_of_a_storage_is_put_back_as_it_was():
    replaced = Replacement(torch.UntypedStorage, "resize_", lambda storage, size: replaced.theirs(storage, size))
    replaced.put()
    storage = torch.ones(4).untyped_storage()
    storage.resize_(8)
    assert storage.nbytes() == 8
    over = Replacement(torch.UntypedStorage, "resize_", lambda *args: replaced.ours(*args))
    over.put()
    replaced.restore()
    assert torch.UntypedStorage.resize_ is over.ours
    over.restore()
    replaced.restore()
    assert "resize_" not in vars(torch.UntypedStorage) and torch.UntypedStorage.resize_ is replaced.theirs


def test_a_tensor_that_wraps_none_is_itself():
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    assert sharded.local_tensor(tensor) is tensor and not sharded.is_parameter(tensor)
    assert sharded.local_tensor(parameter) is parameter and sharded.is_parameter(parameter)
