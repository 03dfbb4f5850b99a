"""Programs that use CUDA memory in every way that matters; `tracked_or_bare` runs each of them tracked and bare."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

MiB = 1 << 20
Body = Callable[[], object]
PROGRAMS: dict[str, Callable[[], Body]] = {}


def program(setup: Callable[[], Body]) -> Callable[[], Body]:
    """What `setup` does happens before the track; the function it returns is the cell."""
    PROGRAMS[setup.__name__] = setup
    return setup


def cell(body: Body) -> Body:
    """A program without a setup."""
    PROGRAMS[body.__name__] = lambda: body
    return body


def take(size: int, device: str = "cuda") -> torch.Tensor:
    """So many bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def network(width: int = 256, depth: int = 3) -> torch.nn.Sequential:
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(depth)]
    return torch.nn.Sequential(*layers).cuda()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, width: int = 256) -> None:
    optimizer.zero_grad()
    model(torch.empty(300, width, device="cuda")).sum().backward()
    optimizer.step()


# --- training ---------------------------------------------------------------------------------------------------------


@program
def steady_training():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    return lambda: [step(model, optimizer) for _ in range(3)]


@cell
def foreach_and_fused_optimizers():
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        model = network(512)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        for _ in range(2):
            step(model, optimizer, 512)


@cell
def mixed_precision():
    model, scaler = network(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.empty(300, 256, device="cuda")).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@cell
def checkpoints():
    model = network(depth=4)
    for reentrant in (False, True):
        x = torch.empty(2000, 256, device="cuda", requires_grad=True)
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        x.sum().backward()


@cell
def double_backward():
    x = torch.ones(1000, 500, device="cuda", requires_grad=True)
    (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    grad.pow(2).sum().backward()


@cell
def convolution_and_attention():
    torch.nn.Conv2d(3, 16, 3).cuda()(torch.empty(4, 3, 64, 64, device="cuda")).sum().backward()
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).cuda()
    layer(torch.empty(4, 32, 64, device="cuda")).sum().backward()


# --- sizes --------------------------------------------------------------------------------------------------------------


@cell
def sizes_at_every_border():
    borders = [1024, 4096, 512 * 1024, 1 * MiB, 2 * MiB, 10 * MiB, 20 * MiB, 32 * MiB, 50 * MiB]
    kept = [take(border + by) for border in borders for by in (-513, -512, -1, 0, 1, 511, 512)]
    del kept[::2]
    kept += [take(border // 2 + 7) for border in borders]


@cell
def nothing_and_almost_nothing():
    kept = [take(0), take(1), torch.empty(3, 0, 5, device="cuda"), take(0)]
    kept[1].untyped_storage().resize_(5000)
    kept[1].untyped_storage().resize_(0)


@cell
def no_device_memory():
    torch.empty(1000)


@cell
def pinned_memory():
    host = torch.empty(3 * MiB, dtype=torch.uint8, pin_memory=True)
    host.to("cuda", non_blocking=True)
    torch.empty(5 * MiB, dtype=torch.uint8, pin_memory=True)


@cell
def remainders_are_used_again():
    big = take(60 * MiB)
    del big
    kept = [take(size * MiB) for size in (7, 13, 19, 3, 5)]
    del kept[1], kept[2]
    kept.append(take(11 * MiB))


# --- what was there before -------------------------------------------------------------------------------------------------


@program
def an_earlier_higher_peak():
    take(400 * MiB)
    return lambda: [take(30 * MiB), take(40 * MiB)]


@program
def memory_of_before_is_freed():
    held = [take(17 * MiB), take(3000), take(40 * MiB)]

    def body():
        held.pop(0)
        held.append(take(16 * MiB + 5))
        held.clear()

    return body


# --- streams, graphs, pools, threads ------------------------------------------------------------------------------------------


@cell
def streams_share_a_block():
    side = torch.cuda.Stream()
    for size in (3 * MiB, 25 * MiB, 700):
        block = take(size)
        block.record_stream(side)
        del block
        with torch.cuda.stream(side):
            other = take(size)
            other.record_stream(torch.cuda.default_stream())
            del other
        take(size + 100)


@program
def freed_while_another_stream_uses_it():
    side, held = torch.cuda.Stream(), [take(30 * MiB)]
    held[0].record_stream(side)

    def body():
        held.clear()
        return take(30 * MiB), take(2 * MiB)

    return body


@program
def frees_are_completed_later():
    side, held = torch.cuda.Stream(), [take(30 * MiB), take(3 * MiB), take(100)]

    def body():
        held.extend([take(25 * MiB), take(2 * MiB)])
        for block in held:
            block.record_stream(side)
        del block
        held.clear()  # five requests in a row; the next allocation completes them
        return take(30 * MiB)

    return body


@program
def graphs_have_a_pool():
    static, graph = torch.zeros(MiB, device="cuda"), torch.cuda.CUDAGraph()

    def body():
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = (static * 2 + 1).relu()
        graph.replay()
        take(5 * MiB)
        del result
        graph.reset()

    return body


@cell
def a_pool_of_ones_own():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = [take(3 * MiB), take(30 * MiB), take(2000)]
    outside = take(3 * MiB)
    del kept[0], outside
    with torch.cuda.use_mem_pool(pool):
        kept.append(take(2 * MiB))


@cell
def threads_allocate():
    def work(size: int) -> None:
        kept = [take(size + 512 * index) for index in range(20)]
        del kept[::2]

    # One after the other: which bytes are there at once must not depend on luck.
    for size in (1000, MiB, 3 * MiB):
        thread = threading.Thread(target=work, args=(size,))
        thread.start()
        thread.join()
    model = network()
    thread = threading.Thread(target=lambda: model(torch.empty(300, 256, device="cuda")).sum().backward())
    thread.start()
    thread.join()


@cell
def both_devices():
    last = torch.cuda.device_count() - 1
    kept = [take(30 * MiB, f"cuda:{last}"), take(20 * MiB, "cuda:0")]
    kept.append(kept[0].to("cuda:0"))
    torch.nn.Linear(500, 500, device=f"cuda:{last}")(torch.empty(9, 500, device=f"cuda:{last}")).sum().backward()
    del kept[0]
    take(35 * MiB, f"cuda:{last}")


# --- the cache, and when memory runs out ---------------------------------------------------------------------------------------


@cell
def the_cache_is_emptied():
    kept = [take(size * MiB) for size in (3, 30, 5, 60)]
    del kept[1]
    torch.cuda.empty_cache()
    kept.append(take(31 * MiB))
    del kept[:2]
    torch.cuda.empty_cache()
    take(1000)


@cell
def the_allocator_tries_again():
    room = torch.cuda.mem_get_info()[0]
    for share in (0.6, 0.7, 0.8):
        take(int(room * share))  # each time the one before lies in the cache and must go


@cell
def caught_out_of_memory():
    kept = take(50 * MiB)
    for size in (1 << 40, 1 << 39):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            take(size)
    return kept, take(20 * MiB)


@cell
def uncaught_out_of_memory():
    kept = take(50 * MiB)
    return kept, take(1 << 40)


@cell
def it_is_interrupted():
    model = network()
    model(torch.empty(300, 256, device="cuda")).sum().backward()
    raise KeyboardInterrupt(take(9 * MiB).shape)


@cell
def the_user_resets_counters():
    take(100 * MiB)
    torch.cuda.reset_accumulated_memory_stats()
    take(10 * MiB)


@cell
def cycles_are_collected():
    for _ in range(5):
        cycle: list[Any] = [take(8 * MiB)]
        cycle.append(cycle)
    del cycle
    gc.collect()
    take(3 * MiB)
