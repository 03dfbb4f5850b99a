"""Programs with CUDA graphs and memory pools, and their peaks: measured on a simulated GPU, or predicted.

python tests/graph_programs.py measured|predicted NAME     # prints JSON: [allocated, reserved, allocated and reserved at the end]
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from peaks_and_ends import Steps, measured, predicted, print_and_leave
from torch import nn

import memlab
from memlab.units import GiB, MiB

CARD = memlab.Card("a card", 8 * GiB, (8, 0), 0, 8 * GiB, 8 * GiB, 108)


def layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(
        *(part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.GELU()))
    ).cuda()


def blocks(mebibytes: int, count: int = 1) -> list[torch.Tensor]:
    return [torch.empty(mebibytes * MiB, dtype=torch.uint8, device="cuda") for _ in range(count)]


def warmed_up(work: Callable[[], Any], times: int = 3) -> None:
    """As PyTorch's notes on CUDA graphs do it: on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            work()
    torch.cuda.current_stream().wait_stream(side)


def inference() -> Any:
    model = layers(512, 2048, 2048, 512).eval()
    x = torch.randn(700, 512, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        warmed_up(lambda: model(x))
        with torch.cuda.graph(graph):
            y = model(x)
    for _ in range(3):
        x.copy_(torch.randn(700, 512, device="cuda"))
        graph.replay()
        kept = y.clone()
    return graph, kept


def without_warm_up() -> Any:
    """cuBLAS's workspace is made in the pool, and stays there when the graph is gone; its handle must be there before."""
    model, x = layers(256, 1024, 256), torch.randn(500, 256, device="cuda")
    x @ x.T
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x)
    graph.replay()
    del graph, y
    torch.cuda.empty_cache()
    return blocks(30)


def whole_step() -> Any:
    """Forward, backward and optimizer in one graph."""
    model = layers(512, 1024, 512)
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    x, y = torch.randn(600, 512, device="cuda"), torch.randn(600, 512, device="cuda")

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    warmed_up(step)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(3):
        x.copy_(torch.randn(600, 512, device="cuda"))
        graph.replay()
    return graph, loss, model


def partial_step() -> Any:
    """The middle of the model is graphed, the rest is not."""
    first, second, third = layers(256, 1024), layers(1024, 1024, 512), layers(512, 128)
    x, h = torch.randn(400, 256, device="cuda"), torch.randn(400, 1024, device="cuda", requires_grad=True)
    second = torch.cuda.make_graphed_callables(second, (h,))
    parameters = [*first.parameters(), *second.parameters(), *third.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        third(second(first(x))).square().mean().backward()
        optimizer.step()
    return first, second, third


def several_callables() -> Any:
    """Two modules and a loss, with dropout, in one pool."""
    first, second = (
        layers(300, 900, 300),
        nn.Sequential(nn.Linear(300, 700), nn.Dropout(0.3), nn.Linear(700, 60)).cuda(),
    )
    x, h = torch.randn(500, 300, device="cuda"), torch.randn(500, 300, device="cuda", requires_grad=True)
    out, y = torch.randn(500, 60, device="cuda", requires_grad=True), torch.randint(60, (500,), device="cuda")
    given = ((x,), (h,), (out, y))
    first, second, loss_of = torch.cuda.make_graphed_callables((first, second, nn.CrossEntropyLoss()), given)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(second(first(x)), y).backward()
        optimizer.step()
    return first, second


def shared_pool() -> Any:
    """Two graphs in one pool, as serving for two sizes of batch does: the second uses what is free of the first."""
    model = layers(512, 2048, 512).eval()
    graphs: list[Any] = []
    with torch.no_grad():
        warmed_up(lambda: model(torch.randn(900, 512, device="cuda")))
        for batch in (900, 300, 100):
            x = torch.randn(batch, 512, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=graphs[0][0].pool() if graphs else None):
                y = model(x)
            graphs.append((graph, x, y))
    for graph, _, _ in graphs:
        graph.replay()
    del graphs[0], graph
    torch.cuda.empty_cache()
    return graphs, blocks(15)


def pools_apart() -> Any:
    """Two graphs with a pool each; one is deleted, and its memory goes when the cache is emptied."""
    x = torch.randn(1000, 1000, device="cuda")
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    outs: list[Any] = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outs.append(((x * 2).sin() + (x * 3).cos()).sum(0))
    kept = blocks(25, 2)
    del kept
    torch.cuda.empty_cache()
    middle = torch.cuda.memory_reserved()
    del graph
    graphs.pop()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < middle
    outs.pop()
    torch.cuda.empty_cache()
    return graphs, outs, blocks(40)


def recaptured() -> Any:
    """A graph that is reset and captured again, for a larger batch."""
    graph, kept = torch.cuda.CUDAGraph(), []
    for size in (2, 5, 11):
        x = blocks(size)[0]
        with torch.cuda.graph(graph):
            y = x + 1
            z = (y * 2)[:MiB].clone()
        graph.replay()
        kept.append(z.clone())
        del x, y, z
        graph.reset()
    torch.cuda.empty_cache()
    return graph, kept, blocks(6, 3)


def forked_streams() -> Any:
    """A second stream takes part in the capture; a block that it used is not reused while the capture lasts."""
    x = torch.randn(3 * MiB, device="cuda")
    main, beside = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main):
        y = x * 2
        beside.wait_stream(main)
        with torch.cuda.stream(beside):
            z = y * 3
            y.record_stream(beside)
        ready = beside.record_event()
        del y
        again = x * 4
        main.wait_event(ready)
        out = again + z
    graph.replay()
    return graph, out, x * 5


def memory_pool() -> Any:
    """A MemPool for weights and activations; backward runs on another thread, which does not use it."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        model = layers(400, 1600, 400)
        x = torch.randn(800, 400, device="cuda")
        y = model(x)
    y.sum().backward()
    del y
    torch.cuda.empty_cache()
    kept = blocks(3, 4)
    with torch.cuda.use_mem_pool(pool):
        z = model(x)
    return model, z, kept, pool


def memory_pool_deleted() -> Any:
    """What is free in a pool goes with it, what is in use stays."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept, freed = blocks(30), blocks(45)
        small = torch.empty(1000, device="cuda")
    del freed
    other = blocks(40)
    torch.cuda.empty_cache()
    del pool
    more = blocks(45)
    del kept
    again = blocks(30)
    torch.cuda.empty_cache()
    return small, other, more, again


def pool_of_both() -> Any:
    """A graph captured into the pool of a MemPool, on a stream of its own."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.randn(2 * MiB, device="cuda")
        torch.randn(4 * MiB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        y = (x + 1) * 2
    handle = torch.cuda.graph_pool_handle()
    second, third = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    for one in (second, third):
        with torch.cuda.graph(one, pool=handle):
            z = (y + 1).sum()
    del graph, pool
    torch.cuda.empty_cache()
    return x, y, z, second, third


PROGRAMS: dict[str, Steps] = {
    one.__name__: one
    for one in (inference, without_warm_up, whole_step, partial_step, several_callables, shared_pool, pools_apart,
                recaptured, forked_streams, memory_pool, memory_pool_deleted, pool_of_both)
}  # fmt: skip


if __name__ == "__main__":
    way = {"measured": measured, "predicted": predicted}[sys.argv[1]]
    print_and_leave(way(PROGRAMS[sys.argv[2]], CARD))
