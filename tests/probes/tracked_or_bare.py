"""Every program of `programs` in one process, tracked or bare; prints what was found as JSON.

In the bare process memlab is not imported: PyTorch's counters, reset before each program, say what the peaks were.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import sys
from typing import Any

import torch
from probes.programs import PROGRAMS, Body


def run(body: Body) -> None:
    with contextlib.suppress(KeyboardInterrupt, torch.cuda.OutOfMemoryError):
        body()


def tracked(body: Body) -> dict[str, Any]:
    from memlab.analysis.peak import peak
    from memlab.analysis.timeline import timeline
    from memlab.probes.cuda import CudaProbe, recorder
    from memlab.trace import Kind

    probe = CudaProbe()
    probe.start()
    devices = recorder.devices
    run(body)
    trace = probe.stop()
    lines = {of: [timeline(trace, index, of) for index in trace.device_indices] for of in ("allocated", "reserved")}
    peaks = {of: [peak(trace, index, of) for index in trace.device_indices] for of in lines}
    events = trace.events.rows(slice(trace.first_row, None))
    return {
        "events": {of: [int(line.bytes.max()) for line in lines[of]] for of in lines},
        "ends": {of: [line.end_bytes for line in lines[of]] for of in lines},
        "peaks": {of: [peak.low_bytes for peak in peaks[of]] for of in peaks},
        "is_exact": all(peak.is_exact for of in peaks for peak in peaks[of]),
        "inconsistencies": sum(history.blocks.inconsistencies for history in devices),
        # Which thread's work it was changes no peak.
        "gaps": [gap.text for gap in trace.gaps if gap.name != "other threads' work"],
        "ooms": [int((events.kind == Kind.OOM).sum()), sum(device.num_ooms for device in trace.made_by.devices)],
        "retries": sum(device.num_alloc_retries for device in trace.made_by.devices),
        "pending": int((events.kind == Kind.FREE_PENDING).sum()),
    }


def bare(body: Body) -> dict[str, Any]:
    devices = range(torch.cuda.device_count())
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    run(body)
    return {
        "peaks": {
            "allocated": [torch.cuda.max_memory_allocated(device) for device in devices],
            "reserved": [torch.cuda.max_memory_reserved(device) for device in devices],
        },
        "ends": {
            "allocated": [torch.cuda.memory_allocated(device) for device in devices],
            "reserved": [torch.cuda.memory_reserved(device) for device in devices],
        },
    }


class Stats:
    """All of PyTorch's counters. `never_reset` is what they would say had nobody reset the peaks."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        devices = range(torch.cuda.device_count())
        return {f"{i}.{name}": value for i in devices for name, value in torch.cuda.memory_stats(i).items()}

    def never_reset(self) -> dict[str, int]:
        now = self.read()
        peaks = {name: max(value, self.peaks.get(name, 0)) for name, value in now.items() if name.endswith(".peak")}
        self.peaks = peaks
        return {**now, **peaks}


def main(how: str) -> None:
    importlib.import_module("torch._dynamo")  # the first optimizer would

    gc.disable()  # both processes must collect at the same points
    gc.freeze()  # and quickly
    torch.cuda.init()
    stats, found = Stats(), {}
    for name, setup in PROGRAMS.items():
        body = setup()
        stats.never_reset()
        found[name] = (tracked if how == "tracked" else bare)(body)
        found[name]["stats"] = stats.never_reset()
        del body
        gc.collect()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
