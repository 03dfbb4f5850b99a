"""Where CUDA is not up yet: each of these needs a process of its own, since CUDA never goes down again."""

from __future__ import annotations

import textwrap

import pytest
from processes import python

pytestmark = pytest.mark.simulated

BEFORE = """
import torch, threading
from memlab.analysis.peak import peak
from memlab.probes.cuda import CudaProbe, recorder
from memlab.probes.marks import marker

queue, switch = list(torch.cuda._queued_calls), torch.cuda.memory._record_memory_history
engine = torch.autograd._engine_run_backward

def take(mebibytes):
    return torch.empty(mebibytes << 20, dtype=torch.uint8, device="cuda")

def check_nothing_left():
    assert torch.cuda._queued_calls == queue and torch.cuda.memory._record_memory_history is switch
    assert torch.autograd._engine_run_backward is engine and not marker.users and not recorder.users
    native = torch.cuda.get_allocator_backend() == "native"
    assert not (native and torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled())

def check_exact(trace, mebibytes, of="allocated"):
    found = peak(trace, 0, of)
    assert found.is_exact and found.low_bytes == mebibytes << 20, found
    assert found.source.startswith("every event") and not trace.gaps, (found, trace.gaps)
"""


def start(code: str, **environment: str) -> None:
    """Run code on a device of its own."""
    python("-c", BEFORE + textwrap.dedent(code), **environment)


def test_a_cell_on_the_cpu_leaves_cuda_down_and_a_later_one_brings_it_up():
    start(
        """
        for _ in range(2):
            probe = CudaProbe()
            probe.start()
            inner = CudaProbe()
            inner.start()
            torch.nn.Linear(10, 10)(torch.ones(3, 10)).sum().backward()
            assert not inner.used_cuda
            assert not inner.stop().device_indices
            assert not len(probe.stop().events)
            assert not torch.cuda.is_initialized()
            check_nothing_left()

        outer, inner = CudaProbe(), CudaProbe()
        outer.start()
        inner.start()
        kept = take(30), take(20)
        del kept
        check_exact(inner.stop(), 50)
        kept = take(60)
        trace = outer.stop()
        check_exact(trace, 60)
        assert trace.first_row == 0 and trace.made_by.devices[0].start_allocated_bytes == 0
        check_nothing_left()
        """
    )


def test_a_cell_that_fails_before_and_after_cuda_comes_up():
    start(
        """
        for error in (KeyboardInterrupt, ZeroDivisionError):
            probe = CudaProbe()
            try:
                try:
                    probe.start()
                    raise error
                finally:
                    probe.stop()
            except error:
                check_nothing_left()
        assert not torch.cuda.is_initialized()
        probe = CudaProbe()
        probe.start()
        try:
            take(1 << 30)
        except torch.cuda.OutOfMemoryError:
            pass
        trace = probe.stop()
        check_nothing_left()
        assert trace.made_by.devices[0].num_ooms == 1 and (trace.events.kind == 8).sum() == 1
        """
    )


def test_cuda_comes_up_in_another_thread():
    start(
        """
        probe = CudaProbe()
        probe.start()
        thread = threading.Thread(target=lambda: take(40))
        thread.start()
        thread.join()
        check_exact(probe.stop(), 40)
        check_nothing_left()

        found = []
        def track():
            probe = CudaProbe()
            probe.start()
            torch.nn.Linear(2048, 2048, bias=False, device="cuda")
            take(3)
            found.append(probe.stop())
        thread = threading.Thread(target=track)
        thread.start()
        thread.join()
        check_exact(found[0], 2048 * 2048 * 4 >> 20)
        check_nothing_left()
        """
    )


def test_history_that_the_user_started_before_cuda_came_up_goes_on():
    start(
        """
        torch.cuda.memory._record_memory_history(max_entries=1000)
        started_cuda = torch.cuda.is_initialized()
        probe = CudaProbe()
        probe.start()
        assert torch.cuda.is_initialized() == started_cuda
        take(40)
        trace = probe.stop()
        assert peak(trace, 0).low_bytes == 40 << 20 and peak(trace, 0).is_exact
        assert [gap.name for gap in trace.gaps] == ["users history"]
        assert torch._C._cuda_isHistoryEnabled()
        take(10)
        actions = [e["action"] for e in torch.cuda.memory._snapshot()["device_traces"][0]]
        assert actions.count("alloc") == 2
        torch.cuda.memory._record_memory_history(None)
        check_nothing_left()
        """
    )


def test_an_allocator_without_history_is_a_gap_and_its_counters_speak():
    start(
        """
        probe = CudaProbe()
        probe.start()
        kept = take(40), take(20)
        trace = probe.stop()
        check_nothing_left()
        assert [gap.name for gap in trace.gaps][0] == "no history"
        assert peak(trace, 0).is_exact and peak(trace, 0).low_bytes == torch.cuda.max_memory_allocated()
        probe = CudaProbe()
        probe.start()
        del kept
        take(1)
        trace = probe.stop()
        found = peak(trace, 0)
        assert found.low_bytes >= 60 << 20 and found.high_bytes == torch.cuda.max_memory_allocated()
        assert trace.made_by.devices[0].end_allocated_bytes == torch.cuda.memory_allocated()
        check_nothing_left()
        """,
        PYTORCH_ALLOC_CONF="backend:cudaMallocAsync",
    )
