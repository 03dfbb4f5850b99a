"""A memory budget for tests: `@pytest.mark.memory_budget("2GiB", device="RTX 4060")`, and a baseline of peaks.

`device` is "cpu" or "cuda" (the test is measured), or a card (it is predicted: no GPU is needed, and the figure is the same each
time). With `--memlab-baseline FILE` the peaks of all marked tests, and of what the fixture `memory` measured, are compared
with those in the file; `--memlab-update` writes them. The file is JSON: sizes in bytes, and who held them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import unittest
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memlab.errors import MemlabError
from memlab.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memlab.api.run import Run  # torch is imported when a marked test runs, not with every pytest
    from memlab.api.track import Track

MARK = "memory_budget"
BY = ("module", "line", "category")
VERSION = 1
PEAKS = "memlab_peaks"
"""The key under which workers of pytest-xdist send what they found."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the baseline."""
    group = parser.getgroup("memlab", "memory of tests")
    compare = "compare the peaks of marked tests with those in this file"
    update = "write the peaks of this session to the baseline's file"
    group.addoption("--memlab-baseline", metavar="FILE", help=compare)
    group.addoption("--memlab-update", action="store_true", help=update)
    parser.addini("memlab_tolerance", "by how much a peak may grow over its baseline, as a share", default="0.02")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and read the baseline."""
    config.addinivalue_line(
        "markers", f'{MARK}(size, device="cpu"): fail above this peak of allocated memory; see memlab'
    )
    name = config.getoption("--memlab-baseline")
    if config.getoption("--memlab-update") and name is None:
        raise pytest.UsageError("--memlab-update needs the file: add --memlab-baseline FILE.")
    if name is not None:
        config.pluginmanager.register(Baseline(config), "memlab-baseline")


class Baseline:
    """The peaks of a file, and those of this session."""

    def __init__(self, config: pytest.Config) -> None:
        self.path = Path(config.getoption("--memlab-baseline"))
        self.updates = bool(config.getoption("--memlab-update"))
        self.found: dict[str, Any] = {}
        try:
            self.tolerance = float(config.getini("memlab_tolerance"))
        except ValueError:
            raise pytest.UsageError(
                f"memlab_tolerance is a share such as 0.02, got {config.getini('memlab_tolerance')!r}."
            ) from None
        self.known = self._read()

    def _read(self) -> dict[str, Any]:
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise pytest.UsageError(
                f"--memlab-baseline is a file in a folder that exists, got {str(self.path)!r:.200}."
            )
        if not self.path.exists():
            if self.updates:
                return {}
            raise pytest.UsageError(f"there is no baseline {str(self.path)!r}: write it once with --memlab-update.")
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            peaks = content["peaks"]
            if content["version"] != VERSION:
                raise MemlabError(f"its version is {content['version']!r:.20}, this memlab reads {VERSION}")
            if not all(type(one["peak_bytes"]) is int and type(one["by"]) is dict for one in peaks.values()):
                raise MemlabError("an entry has no peak")
        except (MemlabError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            how = "name another file, or remove it and write it anew with --memlab-update"
            raise pytest.UsageError(f"{str(self.path)!r} is no baseline of memlab ({error!s:.100}): {how}.") from None
        return dict(peaks)

    def compare(self, name: str, run: Run) -> str:
        """What is wrong with the peak of a run; "" if nothing is, or if the baseline is being written."""
        from memlab.api.regression import torch_version

        shares, version = {by: _shares(run, by) for by in BY}, torch_version(run.trace)
        # The GPU, and whether the peak was measured, predicted, or that of a simulated GPU.
        where = run.devices[0].device if run.devices else None
        device = "cpu"
        if where is not None and where.label != "cpu":
            device = f"{where.name}, {run.trace.remark or run.trace.provenance}"
        self.found[name] = {"peak_bytes": run.peak_bytes, "device": device, "torch": version, "by": shares}
        before = self.known.get(name)
        if self.updates or before is None:
            return ""
        if (of := before.get("device", device)) != device:  # files of early versions do not say
            return f"its baseline is of another device, {of!s:.100}; this is {device}: renew it with --memlab-update"
        growth = run.peak_bytes - before["peak_bytes"]
        if growth <= self.tolerance * before["peak_bytes"]:
            return ""
        sizes = f"{format_bytes(before['peak_bytes'])} -> {format_bytes(run.peak_bytes)} (+{format_bytes(growth)})"
        grew = f"the peak of allocated memory grew by more than {self.tolerance:.1%} over its baseline: {sizes}"
        return "\n".join([grew, *_culprits(run, before["by"])])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker of pytest-xdist has found."""
        self.found.update(getattr(node, "workeroutput", {}).get(PEAKS, {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name what the baseline does not know, which is compared with nothing, and the other PyTorch that it is of."""
        if self.updates or not self.found:
            return
        from memlab.api.regression import other_torch

        new = sorted(self.found.keys() - self.known.keys())
        if new:
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            terminalreporter.write_line(f"memlab: not in the baseline: {new[0]}{more}; --memlab-update adds them.")
        both = (
            (self.known[name].get("torch", ""), one["torch"]) for name, one in self.found.items() if name in self.known
        )
        for other in sorted({other_torch(str(before), now) for before, now in both} - {""}):
            terminalreporter.write_line(f"memlab: {other}; --memlab-update renews it.")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file if that was asked for; what this session did not run stays. Workers only hand on what they found."""
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output[PEAKS] = self.found
        elif self.updates and self.found:
            content = {"version": VERSION, "peaks": dict(sorted({**self.known, **self.found}.items()))}
            self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _shares(run: Run, by: str) -> dict[str, int]:
    """Who held the peak; nothing if the run does not know, where all of it would be "elsewhere"."""
    if by != "category" and not (getattr(run.trace.blocks, by) >= 0).any():
        return {}
    try:
        return dict(run.breakdown(by)) if run.devices else {}
    except MemlabError:  # what held the peak is unknown
        return {}


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Measure or predict a marked test."""
    mark = pyfuncitem.get_closest_marker(MARK)
    if mark is None:
        return (yield)
    budget, device = _asked(mark)
    if _is_measured(device):
        hint = " Name a card, and the test is predicted."
        with _tracked(pyfuncitem.name, device, hint, functions=[pyfuncitem.obj]) as run:
            result = yield
        _verdict(pyfuncitem, pyfuncitem.nodeid, run, budget)
        return result
    test: Callable[..., object] = pyfuncitem.obj
    runs: list[Run] = []

    def predicted(**arguments: Any) -> None:
        runs.append(_predicted(test, arguments, device, pyfuncitem.name, mark.kwargs.get("torch_version")))

    pyfuncitem.obj = predicted  # pytest calls it with the test's fixtures
    try:
        result = yield
    finally:
        pyfuncitem.obj = test
    _verdict(pyfuncitem, pyfuncitem.nodeid, runs[0], budget)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Measure a marked method of a unittest.TestCase, with its setUp and tearDown; these are no functions to predict."""
    mark = item.get_closest_marker(MARK)
    if mark is None or not issubclass(getattr(item, "cls", None) or object, unittest.TestCase):
        return (yield)
    budget, device = _asked(mark)
    if not _is_measured(device):
        raise _failed(f"{MARK}: a method of a TestCase can be measured, not predicted: make it a function of pytest.")
    with _tracked(item.name, device) as run:
        result = yield
    _verdict(item, item.nodeid, run, budget)
    return result


def _tracked(name: str, device: str, hint: str = "", **settings: Any) -> Track:
    from memlab.api.track import track

    try:
        return track(name, device=device, show=False, **settings)
    except MemlabError as error:
        raise _failed(f"{MARK}: {error}{hint}") from None


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Measure a part of a test: `with memory("forward", budget="1GiB") as run: ...`; its peak is in the baseline too."""
    from memlab.api.track import track

    @contextlib.contextmanager
    def part(name: str, budget: str | None = None, device: str | None = None) -> Iterator[Run]:
        limit = None if budget is None else parse_bytes(budget)
        with track(name, device=device, show=False) as run:
            yield run
        _verdict(request.node, f"{request.node.nodeid}::{name}", run, limit)

    return part


def _failed(text: str) -> BaseException:
    """What fails a test with these words and no traceback."""
    failure: BaseException = pytest.fail.Exception(text, pytrace=False)
    return failure


def _is_measured(device: str) -> bool:
    return device in ("cpu", "cuda") or device.startswith("cuda:")


def _asked(mark: pytest.Mark) -> tuple[int | None, str]:
    """The budget and the device of a marker."""
    if len(mark.args) > 1 or mark.kwargs.keys() - {"device", "torch_version"}:
        raise _failed(f'{MARK} takes a size, device= and torch_version=, as in {MARK}("2GiB", device="cpu").')
    device = mark.kwargs.get("device", "cpu")
    if not isinstance(device, str):
        raise _failed(f"{MARK}: device is cpu, cuda or the name of a card, got {device!r:.80}.")
    if "torch_version" in mark.kwargs and _is_measured(device):
        raise _failed(f"{MARK}: torch_version is for predictions on a card; on {device} it is the one installed here.")
    try:
        return (parse_bytes(mark.args[0]) if mark.args else None), device
    except MemlabError as error:
        raise _failed(f"{MARK}: {error}") from None


def _predicted(test: Callable[..., object], arguments: dict[str, Any], card: str, name: str, version: object) -> Run:
    """The prediction of a test on a card, for this PyTorch or another version; values mean nothing there.

    An error of the test fails it, and so does that it uses no GPU: its budget would say nothing.
    """
    from memlab.api.predict import StepToPredict, configured, predict_step
    from memlab.api.prediction import asks_for_nothing, verdict
    from memlab.prediction.cards import find
    from memlab.prediction.torch_versions import checked_version

    try:
        step, torch_version = functools.partial(test, **arguments), checked_version(version)
        conf = configured(None, torch_version)
        how: dict[str, Any] = {"functions": [test], "torch_version": torch_version}
        found = predict_step(StepToPredict(step, find(card), name, conf, **how))
    except MemlabError as error:
        raise _failed(f"{MARK}: {error}") from None
    if asks_for_nothing(found.forecast):
        raise _failed(f'{MARK}: it allocated nothing on {found.card.name}: let it use the device "cuda".')
    if found.fits == "no":
        raise _failed(f"{MARK}: it {verdict(found.forecast)}")
    return found


def _culprits(run: Run, before: dict[str, dict[str, int]] | None) -> Iterator[str]:
    """What holds most of the peak, or has grown most since a baseline, by module, line and category."""
    from memlab.api.regression import most_grown, why_unknown

    for by in BY:
        new, old = _shares(run, by), (before or {}).get(by, {})
        most = most_grown({one: new[one] - old.get(one, 0) for one in new})
        if most:
            was = "" if before is None else f"{format_bytes(old.get(most, 0))} -> "
            yield f"  {by}: {most} {was}{format_bytes(new[most])}"
        else:
            yield f"  {by}: not known, {why_unknown(by, run.trace.provenance == 'predicted')}"


def _verdict(node: Any, name: str, run: Run, budget: int | None) -> None:
    """Fail the test if its peak is above its budget or its baseline."""
    wrong = []
    if budget is not None and run.peak_bytes > budget:
        peak, most = format_bytes(run.peak_bytes), format_bytes(budget)
        above = f"the peak of allocated memory is {peak}, above the budget of {most}"
        wrong.append("\n".join([above, *_culprits(run, None)]))
    baseline = node.config.pluginmanager.get_plugin("memlab-baseline")
    if baseline is not None:
        wrong.append(baseline.compare(name, run))
    if any(wrong):
        text = "\n".join(filter(None, [*wrong, run.trace.remark]))
        raise _failed(text)
