"""Streams and events of the pretend card: work finishes at once, and memory knows which stream asked for it."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from memlab.predictor.pretend.log import Log
from memlab.predictor.pretend.tensors import CUDA0

_numbers = itertools.count(1)


class Stream:
    """Stands for `torch.cuda.Stream`, which is a context manager in its generic form `torch.Stream`, too."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        number = kwargs.get("stream_id", kwargs.get("stream_ptr"))
        self.cuda_stream = next(_numbers) if number is None else number
        self.stream_id, self.device, self.device_index, self.priority = self.cuda_stream, CUDA0, 0, priority
        self.device_type, self._as_parameter_ = 1, self.cuda_stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device=cuda:0 cuda_stream={self.cuda_stream:#x}>"

    def __enter__(self) -> Stream:
        self._context = StreamContext(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def record_event(self, event: Any = None) -> Event:
        """An event at the end of its work."""
        return event or Event()

    def query(self) -> bool:
        """Its work is done."""
        return True

    def synchronize(self, *args: Any) -> None:
        """Its work is done."""

    wait_event = wait_stream = synchronize

    def is_capturing(self) -> bool:
        """No graph is captured."""
        return False

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """As on current cards."""
        return 0, -5


class Event:
    """Stands for `torch.cuda.Event`; between two of them no time passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device, self.cuda_event = CUDA0, 0

    def record(self, stream: Any = None) -> None:
        """It has happened."""

    wait = record

    def synchronize(self) -> None:
        """It has happened."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Nothing runs, so no time passes; not zero, for rates that are computed from it."""
        return 1.0


class Current:
    """Which stream each thread works on."""

    log: Log | None = None
    default = Stream(stream_id=0)
    of_thread = threading.local()

    @classmethod
    def get(cls, device: Any = None) -> Stream:
        """The stream of this thread."""
        return getattr(cls.of_thread, "stream", cls.default)

    @classmethod
    def set(cls, stream: Any) -> None:
        """Work on this stream from here on."""
        if stream is None:
            return
        cls.of_thread.stream = stream
        if cls.log is not None:
            cls.log.stream_now = stream.cuda_stream


class StreamContext:
    """`with torch.cuda.stream(s):`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._before = Current.get()
        Current.set(self.stream)

    def __exit__(self, *error: Any) -> None:
        Current.set(self._before)
