"""`memlab.doctor()`: what the engines of this machine can and cannot see, each proven by a small self-test."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import torch

from memlab import seams
from memlab.analysis.timeline import timeline
from memlab.probes import cuda
from memlab.probes.host import HostMemory
from memlab.probes.measurement import Measurement, Target
from memlab.probes.nvml import Nvml
from memlab.trace.trace import Trace
from memlab.units import MiB, format_bytes


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `state` is "ok", "absent" (nothing to see here) or "wrong" (a figure is not to be
    trusted)."""

    what: str
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings; prints as text, shows itself as a table."""

    findings: tuple[Finding, ...]

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.state != "wrong" for finding in self.findings)

    def __str__(self) -> str:
        width = max(len(finding.what) for finding in self.findings)
        return "\n".join(f"{f.state:<6}  {f.what:<{width}}  {f.text}" for f in self.findings)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{f.state}</td><th style='text-align:left'>{escape(f.what)}</th>"
            f"<td style='text-align:left'>{escape(f.text)}</td></tr>"
            for f in self.findings
        )
        return f"<table>{rows}</table>"

    def to_pandas(self) -> Any:
        """One row per finding."""
        import pandas

        return pandas.DataFrame([{"what": f.what, "state": f.state, "text": f.text} for f in self.findings])


def doctor() -> Diagnosis:
    """Look at this machine. Where CUDA is up, a few MiB are allocated on it for a moment; it is not brought up for this."""
    checks = (_versions, _cpu_tally, _cuda_history, _nvml, _host, _prediction, _notebook)
    return Diagnosis(tuple(finding for check in checks for finding in _guarded(check)))


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:
        what = check.__name__.strip("_").replace("_", " ")
        yield Finding(what, "wrong", f"the self-test raised {type(error).__name__}: {error}")


def _versions() -> Iterator[Finding]:
    text = f"memlab {_version('memlab')}, torch {torch.__version__}, Python {platform.python_version()}, {sys.platform}"
    yield Finding("versions", "ok", text)
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not (2, 11) <= release < (2, 16):
        yield Finding("torch", "wrong", f"memlab was tested with torch 2.11 to 2.15, this is {torch.__version__}")


def _prediction() -> Iterator[Finding]:
    """In a child process, as predictions are."""
    from memlab.predictor import child, selftest
    from memlab.predictor.cards import cards

    outcome = child.run(lambda channel: "\n".join(selftest.problems()).encode(), limit_s=60)
    if outcome.result is None:
        why = outcome.error or outcome.ended or "the child process ended without a result"
        yield Finding("prediction", "wrong", f"no cell can be predicted here: {why}")
    elif outcome.result:
        yield Finding("prediction", "wrong", f"PyTorch {torch.__version__}: {outcome.result.decode()}")
    else:
        yield Finding("prediction", "ok", f"pretend CUDA works in a child process; {len(cards)} cards are known")


def _measured(target: str, work: Callable[[], None]) -> Trace:
    measurement = Measurement(Target.parse(target))
    measurement.start()
    try:
        work()
    finally:
        trace = measurement.stop()
    return trace


def _cpu_tally() -> Iterator[Finding]:
    def work() -> None:
        first = torch.empty(3 * MiB, dtype=torch.uint8)
        del first
        torch.empty(2 * MiB, dtype=torch.uint8)

    trace = _measured("cpu", work)
    state, text = _compare(_rise(trace, -1), 3 * MiB)
    yield Finding("CPU tally", state, text)
    yield from (Finding("CPU tally", "absent", f"{gap.name}: {gap.text}") for gap in trace.gaps)


def _cuda_history() -> Iterator[Finding]:
    if not cuda.is_possible():
        why = "no CUDA device is visible" if torch.backends.cuda.is_built() else "this PyTorch is built without CUDA"
        yield Finding("CUDA history", "absent", f"{why}: CUDA runs cannot be measured here")
        return
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if _cuda_is_up() else []
    yield from (
        Finding(f"cuda:{i}", "ok", f"{device.name}, {format_bytes(device.total_memory)}")
        for i, device in enumerate(names)
    )
    if not names:
        yield Finding("CUDA history", "absent", "CUDA is not up yet; call memlab.doctor() again after the first tensor")
        return
    trace = _measured("cuda", _three_mebibytes)
    device = trace.made_by.devices[torch.cuda.current_device()]
    state, text = _compare(_rise(trace, device.index), 3 * MiB)
    yield Finding("CUDA history", state, text)
    yield from (Finding("CUDA history", "absent", f"{gap.name}: {gap.text}") for gap in trace.gaps)


def _three_mebibytes() -> None:
    torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")


def _cuda_is_up() -> bool:
    return torch.cuda.is_initialized()


def _rise(trace: Trace, device: int) -> int:
    """By how much the requested bytes rose: the allocator may hand out a larger block that it has in its cache."""
    line = timeline(trace, device, "requested")
    return int(line.bytes.max()) - line.start_bytes


def _compare(found: int, expected: int) -> tuple[str, str]:
    if found == expected:
        return "ok", "exact: a tensor of known size was found to the byte"
    return "wrong", f"a tensor of {expected} bytes was measured as {found}"


def _nvml() -> Iterator[Finding]:
    if not cuda.is_possible():
        return
    with Nvml.open() as nvml:
        if _cuda_is_up():
            reading = nvml.read(torch.cuda.current_device())
            if reading.used_bytes is not None:
                yield Finding("device used", "ok", f"{format_bytes(reading.used_bytes)} in use on the whole device")
        yield from (Finding("NVML", "absent", gap.text) for gap in nvml.gaps)


def _host() -> Iterator[Finding]:
    host = HostMemory().read()
    text = f"{format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)} left (limit: {host.limit_source})"
    yield Finding("host memory", "ok", text)


def _notebook() -> Iterator[Finding]:
    from memlab.session.show import ipython

    shell = ipython()
    if shell is None:
        yield Finding("notebook", "absent", "not inside IPython: memlab.track() works, reports are text")
        return
    if not seams.is_kernel(shell):
        yield Finding("notebook", "absent", "a terminal: %%memtrack works, reports are text")
        return
    version = importlib.metadata.version("ipykernel")
    yield Finding("notebook", "ok", f"live view and figures (ipykernel {version}, anywidget {_version('anywidget')})")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
