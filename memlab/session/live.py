"""Feeds the live view: turns each sample of a running measurement into points, phases and a peak so far."""

from __future__ import annotations

import signal
import threading
import time

from memlab.probes.host import Growth, HostReading, low_memory
from memlab.probes.marks import marker
from memlab.probes.measurement import Measurement
from memlab.probes.sampler import NOT_READ, Reading, Sample
from memlab.trace.columns import Phase
from memlab.trace.spans import MarkStack
from memlab.trace.trace import CPU
from memlab.views import theme
from memlab.views.live import LiveView

_CODE_OF_PHASE = {phase: theme.PHASES.index(phase.name.lower()) for phase in Phase}


class LiveFeed:
    """Called by the sampler's thread, once per tick. `notes` collects the warnings that were shown."""

    def __init__(self, view: LiveView | None, measurement: Measurement) -> None:
        self.view = view
        self.notes: dict[str, None] = {}
        self._measurement = measurement
        self._growth = Growth()
        self._phases = PhaseFeed(threading.get_ident())
        self._highest_bytes = 0

    def tick(self, sample: Sample) -> None:
        """Show one sample."""
        warning = self._warning(sample)
        if self.view is None or not sample.readings:
            return
        shown = self._shown(sample)
        elapsed_s = sample.time_ns / 1e9
        values = {"allocated": shown.allocated_bytes, "reserved": shown.reserved_bytes, "used": shown.used_bytes}
        if shown.device == CPU:
            values = {"allocated": shown.allocated_bytes, "rss": shown.own_bytes}
        peak_bytes, is_exact = self._measurement.peak_so_far(shown)
        self._highest_bytes = max(self._highest_bytes, peak_bytes)
        self.view.push(
            [elapsed_s],
            {name: [float(value)] for name, value in values.items() if value != NOT_READ},
            phases=self._phases.since_last(self._measurement.start_ns),
            peak_bytes=self._highest_bytes,
            peak_is_exact=is_exact,
            elapsed_s=elapsed_s,
            notes=(warning,) if warning else (),
        )

    def _shown(self, sample: Sample) -> Reading:
        """The device that the cell uses: the accelerator with most allocated, or the host."""
        if self._measurement.uses_accelerator:
            on_device = [reading for reading in sample.readings if reading.device != CPU]
            if on_device:
                return max(on_device, key=lambda reading: reading.allocated_bytes)
        return next((reading for reading in sample.readings if reading.device == CPU), sample.readings[0])

    def _warning(self, sample: Sample) -> str | None:
        host = next((r for r in sample.readings if r.device == CPU and r.available_bytes != NOT_READ), None)
        if host is None:
            return None
        rate = self._growth.update(sample.time_ns / 1e9, host.available_bytes)
        reading = HostReading(host.own_bytes, host.available_bytes, host.used_bytes + host.available_bytes)
        warning = low_memory(reading, rate)
        if warning:
            self.notes.setdefault(f"While it ran: {warning}" if not self.notes else next(iter(self.notes)))
        return warning


class PhaseFeed:
    """The stretches of phases that began or ended since it was last asked, in seconds since the start."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._stack = MarkStack()
        self._seen = 0
        self._begun_s = 0.0

    def since_last(self, start_ns: int) -> list[tuple[float, float, int]]:
        """(begin, end, code of the theme) of each stretch; the last one goes on, and comes again with a later end."""
        marker.collect()
        count, now_ns = marker.count, time.time_ns()
        marks = marker.columns(start_ns, now_ns, self._owner, since=self._seen)
        self._seen = count
        stretches = []
        for moment, kind, name in zip(marks.time_ns.tolist(), marks.kind.tolist(), marks.name.tolist(), strict=True):
            before = self._stack.phase
            self._stack.step(kind, marks.texts[name])
            if self._stack.phase != before:
                moment_s = (moment - start_ns) / 1e9
                stretches.append((self._begun_s, moment_s, _CODE_OF_PHASE[before]))
                self._begun_s = moment_s
        stretches.append((self._begun_s, (now_ns - start_ns) / 1e9, _CODE_OF_PHASE[self._stack.phase]))
        return stretches


def interrupt_main() -> None:
    """What the Stop button does: the KeyboardInterrupt of the notebook's own interrupt button."""
    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, signal.SIGINT)  # also wakes a sleep, which a pending flag would not
    else:
        import _thread

        _thread.interrupt_main()
