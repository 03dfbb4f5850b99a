"""Whose memory a DTensor's is: the parameter's own path and category, not those of a tensor inside it."""

from __future__ import annotations

import textwrap

from processes import python


def test_shards_are_listed_by_the_names_of_their_parameters():
    printed = python(
        "-c",
        textwrap.dedent("""
        import warnings; warnings.simplefilter("ignore")
        import torch, torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        model = nn.Linear(64, 64, bias=False)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        from memlab.references.live_storages import live_storages
        for one in live_storages().storages:
            if one.nbytes == 64 * 64 * 4 // 2:
                print(one.category, one.path, one.shape)
    """),
    )
    assert sorted(printed.splitlines()) == [
        "gradient model.weight.grad (2048,)",
        "optimizer optimizer.state[model.weight]['exp_avg'] (32, 64)",
        "optimizer optimizer.state[model.weight]['exp_avg_sq'] (32, 64)",
        "parameter model.weight (32, 64)",
    ]
