"""Capturing a graph: what CUDA refuses meanwhile is refused, PyTorch raises its own error, and the process goes on."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from memlab.units import MiB

pytestmark = pytest.mark.simulated
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT = range(900, 907)
WRONG_THREAD = 908
WAIT_EXTERNAL = 1


def capture(work: Callable[[], object], mode: str = "global") -> None:
    """Capture some work and replay it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        work()
    graph.replay()


@pytest.fixture
def x() -> Iterator[torch.Tensor]:
    """A tensor; PyTorch stays on the stream of a capture that failed, so that is set back.

    Before 2.12 its random numbers stay in such a capture, too, and fail outside of one, until a capture ends well.
    """
    before = torch.cuda.current_stream()
    tensor = torch.ones(100, device="cuda")
    yield tensor
    torch.cuda.set_stream(before)
    capture(lambda: tensor + 1)


def test_what_needs_no_waiting_is_captured(x):
    capture(lambda: (x + 1).sum())
    capture(lambda: torch.empty(30 * MiB, device="cuda"))


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: torch.nonzero(x),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.current_stream().query(),
    ],
    ids=["item", "nonzero", "synchronize", "stream", "query"],
)
def test_waiting_spoils_the_capture(x, work):
    with pytest.raises(RuntimeError, match="operation failed due to a previous error during capture"):
        capture(lambda: work(x))
    capture(lambda: x + 1)
    assert (x + 1).sum().item() == 0
    torch.cuda.synchronize()


def test_the_call_itself_fails_and_so_does_what_follows(x):
    texts: list[str] = []

    def work() -> None:
        for call in (lambda: x.sum().item(), lambda: x + 1):
            try:
                call()
            except RuntimeError as error:
                texts.append(str(error).partition("\n")[0])

    with pytest.raises(RuntimeError):
        capture(work)
    assert texts[0] == "CUDA error: operation not permitted when stream is capturing"
    # Since 2.14 the allocator asks for the state of the capture first.
    assert "failed due to a previous error during capture" in texts[1] or "CaptureStatusInvalidated" in texts[1]


def test_an_event_of_a_capture_cannot_be_waited_for(x):
    event = torch.cuda.Event()

    def work() -> None:
        event.record()
        event.synchronize()

    with pytest.raises(RuntimeError):
        capture(work)
    torch.cuda.current_stream().wait_event(event)  # it belongs to no capture any more
    assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize(("mode", "is_spoilt"), [("global", True), ("thread_local", False), ("relaxed", False)])
def test_another_thread_may_allocate_unless_the_mode_is_global(x, mode, is_spoilt):
    errors: list[str] = []

    def allocate() -> None:
        try:
            torch.empty(50 * MiB, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            errors.append(str(error).partition("\n")[0])

    def work() -> None:
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()

    torch.cuda.empty_cache()
    if is_spoilt:
        with pytest.raises(RuntimeError):
            capture(work, mode)
    else:
        capture(work, mode)
    assert errors == ["CUDA error: operation not permitted when stream is capturing"] * is_spoilt


def test_a_whole_step_is_captured():
    model = nn.Linear(10, 10, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    batch = torch.randn(4, 10, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    capture(step)
    torch.cuda.make_graphed_callables(model, (batch,))(batch).sum().backward()


# --- handles of libraries ---

FIRST_USE = """
import sys, torch
from torch import nn
x, images = torch.ones(8, 8, device="cuda"), torch.ones(1, 3, 8, 8, device="cuda")
weights = torch.ones(4, 3, 3, 3, device="cuda")
sparse = torch.eye(8).to_sparse_csr().cuda()
work = {"matmul": lambda: x @ x, "conv": lambda: nn.functional.conv2d(images, weights), "sparse": lambda: sparse @ x}[sys.argv[1]]
if sys.argv[3] == "warm":
    work()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=sys.argv[2]):
        work()
    print("captured")
except RuntimeError as error:
    for each in (error.__context__, error):
        print(str(each).partition(chr(10))[0])
"""


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("matmul", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        ("conv", "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        ("sparse", "CUDA error: initialization error when calling `cusparseCreate(handle)`"),
    ],
)
def test_a_handle_made_during_a_capture_is_refused(work, said):
    def lines(mode: str, before: str) -> list[str]:
        command = [sys.executable, "-c", FIRST_USE, work, mode, before]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert not done.returncode, done.stderr[-2000:]
        return done.stdout.splitlines()

    assert lines("global", "cold") == [
        said,
        "CUDA error: operation failed due to a previous error during capture",
    ]
    assert lines("global", "warm") == ["captured"]
    assert lines("relaxed", "cold") == ["captured"]


# --- streams that depend on each other ---


def test_work_that_was_not_captured_cannot_be_waited_for(x):
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        x + 1
    with pytest.raises(RuntimeError, match="operation failed due to a previous error") as refused:
        capture(lambda: torch.cuda.current_stream().wait_stream(beside))
    assert "dependency created on uncaptured work in another stream" in str(refused.value.__context__)


def test_the_default_stream_cannot_wait_for_captured_work(x):
    with pytest.raises(RuntimeError, match="operation failed due to a previous error") as refused:
        capture(lambda: torch.cuda.default_stream().wait_stream(torch.cuda.current_stream()))
    assert "operation would make the legacy stream depend on a capturing" in str(refused.value.__context__)
    x + 1  # it takes part in no capture
    torch.cuda.synchronize()


@pytest.mark.parametrize("streams", [1, 2])
def test_work_of_a_stream_that_does_not_join_again_spoils_the_capture(x, streams):
    """One that is joined by way of another stream has joined."""
    others = [torch.cuda.Stream() for _ in range(streams)]

    def work(is_joined: bool) -> None:
        main = torch.cuda.current_stream()
        before = main
        for stream in others:
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                x + 1
            before = stream
        if is_joined:
            main.wait_stream(before)

    capture(lambda: work(is_joined=True))
    with pytest.raises(RuntimeError, match="capturing stream has unjoined work"):
        capture(lambda: work(is_joined=False))
    capture(lambda: x + 1)


def test_work_after_a_stream_has_joined_is_unjoined_again(x):
    beside = torch.cuda.Stream()

    def work() -> None:
        main = torch.cuda.current_stream()
        beside.wait_stream(main)
        main.wait_stream(beside)
        with torch.cuda.stream(beside):
            x + 1

    with pytest.raises(RuntimeError, match="capturing stream has unjoined work"):
        capture(work)


@pytest.mark.usefixtures("x")
def test_backward_of_what_was_made_on_the_default_stream_is_refused():
    """As on a real GPU: the gradient's stream is the one of the forward pass. PyTorch 2.14 asks before the driver refuses."""
    leaf = torch.ones(4, device="cuda", requires_grad=True)
    y = leaf * 2
    with pytest.raises(RuntimeError) as refused:
        capture(lambda: (y * 3).sum().backward())
    texts = f"{refused.value} {refused.value.__context__}"
    by_driver = "operation would make the legacy stream depend on a capturing" in texts
    assert by_driver or "has a stale reference to the default stream" in texts


# --- the calls themselves ---


class Cuda:
    """CUDA's runtime, with two streams and an event."""

    def __init__(self) -> None:
        torch.cuda.init()
        self.calls = ctypes.CDLL("libcudart.so.13")
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.first, self.second, self.event = (ctypes.c_void_p() for _ in range(3))
        for stream in (self.first, self.second):
            assert self.calls.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
        assert self.calls.cudaEventCreateWithFlags(ctypes.byref(self.event), 0) == 0

    def begin(self, stream: ctypes.c_void_p, mode: int = GLOBAL) -> None:
        assert self.calls.cudaStreamBeginCapture(stream, mode) == 0

    def end(self, stream: ctypes.c_void_p) -> int:
        graph = ctypes.c_void_p()
        error = int(self.calls.cudaStreamEndCapture(stream, ctypes.byref(graph)))
        assert bool(graph) == (error == 0)
        self.calls.cudaGraphDestroy(graph)
        return error

    def wait(self, stream: ctypes.c_void_p, flags: int = 0) -> int:
        return int(self.calls.cudaStreamWaitEvent(stream, self.event, flags))

    def record(self, stream: ctypes.c_void_p) -> int:
        return int(self.calls.cudaEventRecord(self.event, stream))


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    made = Cuda()
    yield made
    for stream in (made.first, made.second):
        made.calls.cudaStreamDestroy(stream)
    made.calls.cudaEventDestroy(made.event)
    made.calls.cudaGetLastError()  # else PyTorch would raise it at its next launch


def unsafe_calls(cuda: Cuda) -> dict[str, int]:
    """What calls answer that a capture has to do with, whatever their streams."""
    place, image = ctypes.c_void_p(), ctypes.create_string_buffer(64)
    host = ctypes.addressof(image)
    return {
        "cudaMalloc": cuda.calls.cudaMalloc(ctypes.byref(place), ctypes.c_size_t(MiB)),
        "cudaFree": cuda.calls.cudaFree(place),
        "cudaMemcpyToSymbol": cuda.calls.cudaMemcpyToSymbol(image, ctypes.c_void_p(host), ctypes.c_size_t(4), 0, 1),
        "cudaEventQuery": cuda.calls.cudaEventQuery(cuda.event),
        "cuModuleLoadData": cuda.driver.cuModuleLoadData(ctypes.byref(place), image),
        "cuModuleUnload": cuda.driver.cuModuleUnload(place),
    }


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_calls_that_a_relaxed_capture_alone_allows(cuda, mode):
    expected = 0 if mode == RELAXED else UNSUPPORTED
    cuda.begin(cuda.first, mode)
    assert set(unsafe_calls(cuda).values()) == {expected}
    assert cuda.end(cuda.first) == (expected and INVALIDATED)
    assert set(unsafe_calls(cuda).values()) == {0}


def test_a_thread_that_relaxes_its_own_mode_is_allowed_them(cuda):
    """As PyTorch's allocator does it."""
    mode = ctypes.c_int(RELAXED)
    cuda.begin(cuda.first)
    assert cuda.calls.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0 and mode.value == GLOBAL
    assert set(unsafe_calls(cuda).values()) == {0}
    assert cuda.calls.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0 and mode.value == RELAXED
    assert cuda.end(cuda.first) == 0


def test_callbacks_are_not_captured(cuda):
    calls: list[int] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(lambda *_: calls.append(1))
    cuda.begin(cuda.first, RELAXED)
    assert cuda.calls.cudaStreamAddCallback(cuda.first, callback, None, 0) == UNSUPPORTED
    assert cuda.end(cuda.first) == INVALIDATED and not calls
    assert cuda.calls.cudaStreamAddCallback(cuda.first, callback, None, 0) == 0 and calls == [1]


def test_two_captures_stay_apart(cuda):
    cuda.begin(cuda.first)
    cuda.begin(cuda.second)
    assert cuda.record(cuda.first) == 0
    assert cuda.wait(cuda.second) == MERGE
    assert cuda.record(cuda.second) == INVALIDATED
    assert cuda.end(cuda.first) == cuda.end(cuda.second) == INVALIDATED


def test_an_event_from_outside_is_waited_for_if_that_is_said(cuda):
    cuda.begin(cuda.first)
    assert cuda.wait(cuda.first) == 0, "one that was never recorded is nothing to wait for"
    assert cuda.end(cuda.first) == 0
    assert cuda.record(cuda.second) == 0
    cuda.begin(cuda.first)
    assert cuda.wait(cuda.first, WAIT_EXTERNAL) == 0
    assert cuda.wait(cuda.first) == ISOLATION
    assert cuda.wait(cuda.first) == INVALIDATED
    assert cuda.end(cuda.first) == INVALIDATED


def test_a_capture_ends_in_the_stream_where_it_began(cuda):
    cuda.begin(cuda.first)
    assert cuda.record(cuda.first) == cuda.wait(cuda.second) == 0
    assert cuda.end(cuda.second) == UNMATCHED
    assert cuda.end(cuda.first) == INVALIDATED


@pytest.mark.parametrize(("mode", "expected"), [(GLOBAL, WRONG_THREAD), (THREAD_LOCAL, WRONG_THREAD), (RELAXED, 0)])
def test_a_capture_ends_in_the_thread_that_began_it_unless_it_is_relaxed(cuda, mode, expected):
    ended: list[int] = []
    cuda.begin(cuda.first, mode)
    thread = threading.Thread(target=lambda: ended.append(cuda.end(cuda.first)))
    thread.start()
    thread.join()
    assert ended == [expected]
    if expected:
        assert cuda.end(cuda.first) == INVALIDATED
