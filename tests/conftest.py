"""What every test gets: proof that it left nothing behind, and a reason where it cannot run."""

from __future__ import annotations

import collections
import functools
import gc
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch  # here, so that `leftovers` knows torch's functions before any test could have replaced them
from browser.lab import chromium
from leftovers import leftovers, record

from memlab.__main__ import main


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails the test that leaves a thread, hook, mode, handler or recording behind; set up first, so it looks last."""
    before = record()
    yield
    left = leftovers(before)
    assert not left, "the test did not clean up:\n  " + "\n  ".join(left)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several would wait for each other on a busy machine; memory is the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command of memlab that has to end with a status and with one line on stderr alone; the line."""

    def line_of(status: int, *words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        out, err = capsys.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (status, "", 1), err
        return err

    return line_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--release", action="store_true", help="also what only runs before a release: CI takes a sample")


QUICK = {"allocator", "analysis", "trace", "views", "test_units.py", "test_architecture.py", "test_language.py"}
"""Folders and files of tests that start no process and train nothing."""


CASES = pytest.StashKey[collections.Counter[str]]()
"""How many cases of each test that has a sample have been collected."""

_LIST = Path(__file__).with_name("slow_tests.txt")
SLOW = frozenset(_LIST.read_text().splitlines() if _LIST.exists() else ())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What runs after each change does not import the other tests."""
    places = collection_path.relative_to(Path(__file__).parent).parts[:1]
    return True if config.getoption("markexpr") == "quick" and not QUICK.issuperset(places) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what `make test` leaves to CI, and what `make test-quick` runs."""
    path = item.path.relative_to(Path(__file__).parent)
    if f"{path.as_posix()}::{getattr(item, 'originalname', item.name)}" in SLOW:
        item.add_marker("slow")
    if sample := item.get_closest_marker("sample"):
        cases = item.session.stash.setdefault(CASES, collections.Counter())
        if cases[item.nodeid.partition("[")[0]] % sample.args[0]:
            item.add_marker("release")
        cases[item.nodeid.partition("[")[0]] += 1
    place = path.parts[0]
    if place in QUICK and not any(item.get_closest_marker(marker) for marker in ("slow", *NEEDS)):
        item.add_marker("quick")


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is for a release, and skips what this machine cannot run: it is only asked about what was chosen to run."""
    left_out = [item for item in items if item.get_closest_marker("release") and not config.getoption("--release")]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        for marker, why_not in NEEDS.items():
            if item.get_closest_marker(marker) and (reason := why_not()):
                item.add_marker(pytest.mark.skip(reason=reason))


@functools.cache
def device_name() -> str:
    """The first CUDA device, or nothing. NVML answers the first question, so that no test finds CUDA initialized."""
    if not torch.cuda.is_available():
        return ""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except pynvml.NVMLError:
        return torch.cuda.get_device_name(0)


def no_simulated_gpu() -> str:
    """Why tests for the simulated GPU cannot run here."""
    from memlab.trace.trace import is_simulated_gpu

    found = device_name()
    return "" if is_simulated_gpu(found) else f"needs the simulated GPU: the first device is {found or 'none'}"


def no_gpu() -> str:
    """Why tests for a real GPU cannot run here."""
    from memlab.trace.trace import is_simulated_gpu

    found = device_name()
    return f"needs a real GPU: the first device is {found or 'none'}" if not found or is_simulated_gpu(found) else ""


def no_browser() -> str:
    """Why browser tests cannot run here."""
    lacking = [name for name in ("playwright", "jupyterlab") if importlib.util.find_spec(name) is None]
    lacking += [] if chromium() else ["chromium"]
    return f"needs {', '.join(lacking)}" if lacking else ""


def pytest_collection_finish() -> None:
    """Refuses tensors that test modules made when they were imported: they would be part of every peak that is measured."""
    shapes = [tuple(one.shape) for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    if shapes:
        raise pytest.UsageError(f"{len(shapes)} tensors are there before any test: make them in tests. {shapes[:5]}")
    gc.freeze()  # torch and the tests themselves, which half of all time would go into looking through again and again


NEEDS = {"simulated": no_simulated_gpu, "gpu": no_gpu, "browser": no_browser}
