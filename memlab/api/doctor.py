"""`memlab.doctor()`: what memlab can and cannot see on this machine, each proven by a small self-test."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memlab import torch_internals
from memlab.analysis.timeline import timeline
from memlab.probes import cuda
from memlab.probes.counters import Nvml
from memlab.probes.host import HostMemory
from memlab.probes.measurement import Measurement, Target
from memlab.torch_internals import private_names
from memlab.torch_internals.traceback import running_shell
from memlab.trace.trace import CPU, SIMULATED_GPU, is_simulated_gpu
from memlab.units import MiB, format_bytes
from memlab.views.page import Page
from memlab.views.shown import Shown, marimo_notebook
from memlab.views.table import Column, Table


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. `state` is "ok", "absent" (not available here) or "wrong" (its figures cannot be
    trusted)."""

    what: str
    state: str
    text: str


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(Shown):
    """All findings, as text or as a table."""

    findings: tuple[Finding, ...]

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.state != "wrong" for finding in self.findings)

    @property
    def page(self) -> Page:
        """What is shown."""
        columns = (Column("state"), Column("what"), Column("", limit=500, wraps=True))
        rows = tuple((finding.state, finding.what, finding.text) for finding in self.findings)
        return Page("memlab doctor", (Table("", columns, rows),))

    def to_pandas(self) -> Any:
        """One row per finding."""
        import pandas

        return pandas.DataFrame([{"what": f.what, "state": f.state, "text": f.text} for f in self.findings])


def doctor() -> Diagnosis:
    """Check this machine. If CUDA is initialized, a few MiB are allocated for a moment; it is not initialized for this."""
    findings: list[Finding] = []
    for check in (versions, cpu_tracker, _cuda_history, _nvml, _host, _prediction, _notebook):
        try:
            findings.extend(check())
        except Exception as error:
            what = check.__name__.strip("_").replace("_", " ")
            findings.append(Finding(what, "wrong", f"the self-test raised {type(error).__name__}: {error}"))
    return Diagnosis(tuple(findings))


def versions() -> Iterator[Finding]:
    """The versions, and what memlab needs and this PyTorch lacks."""
    text = f"memlab {_version('memlab')}, torch {torch.__version__}, Python {platform.python_version()}, {sys.platform}"
    yield Finding("versions", "ok", text)
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not (2, 11) <= release < (2, 16):
        yield Finding("torch", "wrong", f"memlab was tested with torch 2.11 to 2.15, this is {torch.__version__}")
    for name in private_names.missing():
        yield Finding("torch", "wrong", f"this version lacks {name}")


def _prediction() -> Iterator[Finding]:
    """Run the self-test in a child process, like predictions."""
    from memlab.prediction import selftest
    from memlab.prediction.cards import cards
    from memlab.prediction.child import Child

    outcome = Child(60).run(lambda channel: "\n".join(selftest.problems()).encode())
    if outcome.result is None:
        why = outcome.error or outcome.ended or "the child process ended without a result"
        yield Finding("prediction", "wrong", f"nothing can be predicted here: {why}")
    elif outcome.result:
        yield Finding("prediction", "wrong", f"PyTorch {torch.__version__}: {outcome.result.decode()}")
    else:
        yield Finding("prediction", "ok", f"fake CUDA works in a child process; {len(cards)} cards are known")


def cpu_tracker() -> Iterator[Finding]:
    """Whether a known program is measured to the byte on the CPU."""
    yield from _measured("CPU tensor tracker", "cpu")


def _cuda_history() -> Iterator[Finding]:
    if not cuda.is_possible():
        why = "no CUDA device is visible" if torch.backends.cuda.is_built() else "this PyTorch is built without CUDA"
        yield Finding("CUDA history", "absent", f"{why}: CUDA runs cannot be measured here")
    elif not torch.cuda.is_initialized():
        yield Finding("CUDA history", "absent", "CUDA is not up yet; call memlab.doctor() again after the first tensor")
    else:
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            what = f"; {SIMULATED_GPU}" if is_simulated_gpu(device.name) else ""
            yield Finding(f"cuda:{index}", "ok", f"{device.name}, {format_bytes(device.total_memory)}{what}")
        yield from _measured("CUDA history", "cuda")


def _measured(what: str, target: str) -> Iterator[Finding]:
    """Measure work that needs 3 MiB at its peak."""
    measurement = Measurement(Target.parse(target))
    measurement.start()
    try:
        for size in (3 * MiB, 2 * MiB):
            torch.empty(size, dtype=torch.uint8, device=target)
    finally:
        trace = measurement.stop()
    # Requested bytes: the allocator may return a larger block from its cache.
    line = timeline(trace, CPU if target == "cpu" else torch.cuda.current_device(), "requested")
    rise = int(line.bytes.max()) - line.start_bytes
    if rise == 3 * MiB:
        yield Finding(what, "ok", "exact: a tensor of known size was measured to the byte")
    else:
        yield Finding(what, "wrong", f"a tensor of {3 * MiB} bytes was measured as {rise}")
    yield from (Finding(what, "absent", f"{gap.name}: {gap.text}") for gap in trace.gaps)


def _nvml() -> Iterator[Finding]:
    if not cuda.is_possible():
        return
    with Nvml.open() as nvml:
        if torch.cuda.is_initialized():
            reading = nvml.read(torch.cuda.current_device())
            if reading.used_bytes is not None:
                yield Finding("device used", "ok", f"{format_bytes(reading.used_bytes)} in use on the whole device")
        yield from (Finding("NVML", "absent", gap.text) for gap in nvml.gaps)


def _host() -> Iterator[Finding]:
    host = HostMemory().read()
    text = f"{format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)} left (limit: {host.limit_source})"
    yield Finding("host memory", "ok", text)


def _notebook() -> Iterator[Finding]:
    shell = running_shell()
    if marimo_notebook() is not None:
        yield Finding("notebook", "ok", "marimo: memlab.track() and results show themselves; it has no magics")
    elif shell is None:
        yield Finding("notebook", "absent", "not inside IPython: memlab.track() works, reports are text")
    elif not torch_internals.is_kernel(shell):
        yield Finding("notebook", "absent", "a terminal: %%memtrack works, reports are text")
    else:
        versions = ", ".join(f"{name} {_version(name)}" for name in ("ipykernel", "anywidget"))
        yield Finding("notebook", "ok", f"live view and figures ({versions})")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
