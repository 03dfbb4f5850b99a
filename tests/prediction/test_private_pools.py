"""Predictions of CUDA graphs and memory pools: what they hold is what the simulated GPU's allocator says."""

from __future__ import annotations

import json

import graph_programs
import pytest
import torch
from processes import python
from torch.nn.functional import scaled_dot_product_attention

import memlab
from memlab.allocator import CachingAllocator, OutOfMemory
from memlab.allocator.private_pools import in_pool
from memlab.allocator.rules import release
from memlab.errors import PredictionError
from memlab.units import GiB, MiB

CARD = graph_programs.CARD
TRUTH = {
    "inference": [56_110_080, 85_983_232, 18_473_984, 85_983_232],
    "without_warm_up": [42_591_232, 56_623_104, 39_976_960, 56_623_104],
    "whole_step": [61_791_744, 111_149_056, 44_069_888, 111_149_056],
    "partial_step": [82_295_296, 138_412_032, 71_261_184, 138_412_032],
    "several_callables": [54_183_936, 119_537_664, 44_648_448, 119_537_664],
    "shared_pool": [42_028_032, 106_954_752, 26_937_344, 106_954_752],
    "pools_apart": [58_536_448, 123_731_968, 41_948_160, 88_080_384],
    "recaptured": [39_846_912, 52_428_800, 22_020_096, 25_165_824],
    "forked_streams": [62_915_584, 77_594_624, 25_166_848, 77_594_624],
    "memory_pool": [55_931_904, 88_080_384, 55_931_904, 88_080_384],
    "memory_pool_deleted": [121_638_912, 155_189_248, 121_638_912, 123_731_968],
    "pool_of_both": [25_171_456, 83_886_080, 16_779_776, 67_108_864],
}
"""What torch 2.12.1 had on a simulated GPU of capability 8.0: the peaks of *allocated* and *reserved*, and both at the end.

Before, cuBLASLt had a workspace of its own, and graphs shared the seeds of their random numbers; from 2.14 on graphs without random
numbers have no seeds.
"""


@pytest.mark.simulated
@pytest.mark.timeout(900)
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", graph_programs.PROGRAMS)
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"], ids=["segments", "expandable"])
def test_graphs_and_pools_hold_what_they_hold_there(name, conf):
    given = {"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {}
    there, here = (json.loads(python(graph_programs.__file__, way, name, **given)) for way in ("measured", "predicted"))
    assert here == there
    assert conf or not (2, 12) <= release(torch.__version__) < (2, 14) or there == TRUTH[name]


@pytest.mark.parametrize("name", graph_programs.PROGRAMS)
def test_the_prediction_is_what_was_measured(name):
    assert graph_programs.predicted(graph_programs.PROGRAMS[name], CARD, torch_version="2.12") == TRUTH[name]


def captured(work) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@pytest.mark.parametrize(
    ("draws", "work"),
    [
        (True, lambda x: torch.native_dropout(x, 0.0, True)),
        (False, lambda x: torch.native_dropout(x, 0.5, False)),
        (True, lambda x: scaled_dot_product_attention(x, x, x, dropout_p=0.1)),
        (False, lambda x: scaled_dot_product_attention(x, x, x)),
        (True, lambda x: torch.rand_like(x)),
        (False, lambda x: x * 2),
    ],
)
def test_since_2_14_only_graphs_that_draw_random_numbers_have_seeds(draws, work):
    """As graphs of 2.12.1 and 2.14.1 on a simulated GPU."""

    def step() -> None:
        x = torch.ones(1, 4, 64, 64, device="cuda", dtype=torch.half)
        graph = captured(lambda: work(x))
        torch.empty(1 << 20, device="cuda")  # the peak, whatever was taken in the capture
        graph.replay()

    before, since = (memlab.predict(step, CARD, torch_version=one).peak_allocated_bytes for one in ("2.13", "2.14"))
    assert before - since == (0 if draws else 1024)


def test_reading_a_value_in_a_capture_is_refused_with_the_line():
    def step() -> None:
        x = torch.ones(4, device="cuda")
        captured(lambda: x.sum().item())

    with pytest.raises(
        PredictionError, match=r"not permitted when stream is capturing. \S*test_private_pools.py:\d+ reads"
    ):
        memlab.predict(step, CARD)


def test_the_state_of_a_capture_is_known():
    def step() -> None:
        graph, states = torch.cuda.CUDAGraph(), [torch.cuda.is_current_stream_capturing()]
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            graph.replay()
        with pytest.raises(RuntimeError, match="non-default stream"):
            graph.capture_begin()
        with torch.cuda.graph(graph):
            states.append(torch.cuda.is_current_stream_capturing())
            states.append(torch.cuda.default_stream().is_capturing())
        assert [*states, torch.cuda.is_current_stream_capturing()] == [False, True, False, False]
        with pytest.raises(RuntimeError, match="already owns a captured graph"), torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()

    memlab.predict(step, CARD)


def test_a_program_that_does_not_fit_beside_a_graph_says_what_its_pool_holds():
    def step() -> None:
        graph = captured(lambda: torch.empty(700 * MiB, dtype=torch.uint8, device="cuda"))
        torch.empty(500 * MiB, dtype=torch.uint8, device="cuda")
        graph.replay()

    found = memlab.predict(step, memlab.Card("small", GiB, (8, 0), 0, GiB, GiB, 108))
    assert found.fits == "no"
    assert "with 700.00 MiB allocated in private pools (e.g., CUDA Graphs), and" in found.out_of_memory
    assert found.reserved_bytes.high > 1200 * MiB


def test_the_same_graph_on_another_card():
    found = memlab.predict(graph_programs.shared_pool, memlab.Card("small", GiB, (8, 0), 0, GiB, GiB, 108))
    facts = found.for_card(CARD).trace.made_by.devices[0]
    assert [facts.end_peak_allocated_bytes, facts.end_peak_reserved_bytes] == TRUTH["shared_pool"][:2]


def test_pools_of_the_allocator_are_apart():
    allocator = CachingAllocator(100 * MiB)
    private, mine = allocator.private, in_pool(1, 0)
    private.begin(1)
    allocator.free(allocator.malloc(30 * MiB, mine))
    first = allocator.malloc(30 * MiB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(50 * MiB)
    private.end(1)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 60 * MiB, "in use by a graph"
    private.release(1)
    allocator.free(first)
    allocator.empty_cache(only=1)
    assert allocator.reserved_bytes == 30 * MiB
    allocator.empty_cache()
    assert not allocator.reserved_bytes


def test_a_pool_that_does_not_split():
    allocator = CachingAllocator(GiB)
    allocator.private.keep_whole(1)
    assert [allocator.malloc(2 * MiB, in_pool(pool, 0)).size // MiB for pool in (0, 1)] == [2, 20]


def test_what_another_stream_used_stays_while_a_graph_is_captured():
    allocator = CachingAllocator(GiB)
    allocator.private.begin(1)
    block = allocator.malloc(2 * MiB, in_pool(1, 5))
    allocator.record_stream(block, 5)
    assert block.uses is None, "its own stream"
    allocator.record_stream(block, 6)
    allocator.free(block)
    allocator.malloc(512)
    assert allocator.pending == (block,)
    allocator.private.end(1)
    allocator.malloc(512)
    assert allocator.pending == ()
