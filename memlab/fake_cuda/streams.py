"""Streams, events and contexts of devices, which replace those of `torch.cuda`: work finishes at once.

Memory belongs to the stream that requested it, and each thread has a current stream for each GPU.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch

from memlab.fake_cuda import gpus
from memlab.fake_cuda.cuda_graphs import Capture
from memlab.fake_cuda.gpus import GPUS, State, with_index
from memlab.fake_cuda.patches import constant, nothing

_numbers = itertools.count(1)


class StreamContext:
    """`with torch.cuda.stream(s):`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:  # it returns None, like PyTorch's
        self._before = gpus.current()
        if self.stream is not None:
            self._stream_before = Current.get(self.stream.device)
        Current.set(self.stream)

    def __exit__(self, *error):
        if self.stream is not None:
            Current.set(self._stream_before)
        gpus.choose(self._before)


class Stream(StreamContext):
    """Replaces `torch.cuda.Stream`, which is a context manager in its generic form `torch.Stream`, too."""

    stream: Any = property(lambda self: self)
    synchronize = staticmethod(nothing)
    query = staticmethod(constant(True))
    priority_range = staticmethod(constant((0, -5)))

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        number = kwargs.get("stream_id", kwargs.get("stream_ptr"))
        self.cuda_stream = next(_numbers) if number is None else number
        self.device = with_index("cuda" if device is None else device)
        self.stream_id, self.device_index, self.priority = self.cuda_stream, self.device.index, priority
        self.device_type, self._as_parameter_ = 1, self.cuda_stream

    def __enter__(self) -> Stream:
        super().__enter__()
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.cuda_stream, self.device) == (other.cuda_stream, other.device)

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    def record_event(self, event: Any = None) -> Event:
        """An event at the end of its work."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Wait for an event; if that belongs to a capture of a graph, the stream takes part in it."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Wait for all work of another stream."""
        self.wait_event(stream.record_event())

    def is_capturing(self) -> bool:
        """Whether it takes part in a capture."""
        return self.cuda_stream in Capture.underway


class Event:
    """Replaces `torch.cuda.Event`; it is always complete, and no time passes between two events."""

    synchronize = staticmethod(nothing)
    query = staticmethod(constant(True))
    elapsed_time = staticmethod(constant(1.0))  # not zero, as code divides by it
    device, cuda_event = GPUS[0], 0
    _capture: Capture | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """At the end of the work of a stream."""
        if Capture.underway:
            self._capture = Capture.underway.get((stream or Current.get()).cuda_stream)

    def wait(self, stream: Any = None) -> None:
        """A stream waits for it."""
        if self._capture is not None and self._capture.streams:
            self._capture.join((stream or Current.get()).cuda_stream)


class Current:
    """The current streams of each thread, by GPU."""

    of_thread = threading.local()

    @staticmethod
    def default(device: Any = None) -> Stream:
        """The default stream of a GPU."""
        return Stream(device, stream_id=0)

    @classmethod
    def get(cls, device: Any = None) -> Stream:
        """The stream of this thread."""
        number = with_index("cuda" if device is None else device).index
        found: Stream | None = getattr(cls.of_thread, f"gpu{number}", None)
        return cls.default(number) if found is None else found

    @classmethod
    def set(cls, stream):
        """Make this stream the current one, and its GPU the current one."""
        if stream is not None:
            setattr(cls.of_thread, f"gpu{stream.device_index}", stream)
            gpus.choose(stream.device_index)
            if State.active is not None:
                State.active.log.switch_stream(stream.cuda_stream, stream.device_index)


class DeviceContext:
    """`with torch.cuda.device(1):`, or `device_of(tensor)`, which is nothing for one of the host."""

    def __init__(self, device: Any = None) -> None:
        if isinstance(device, torch.Tensor):
            device = device.device if device.is_cuda else None
        elif type(device) is int and device < 0:
            device = None
        self._number = None if device is None else with_index(device).index

    def __enter__(self) -> None:
        self._before = gpus.current()
        if self._number is not None:
            gpus.choose(self._number)

    def __exit__(self, *error: object) -> None:
        gpus.choose(self._before)
