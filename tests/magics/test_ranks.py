"""The ranks that a tracked cell starts, in a real kernel with real gloo processes: each is measured, and the cell shows all."""

from __future__ import annotations

import pytest
from rank_functions import KEPT_BYTES

from memlab.units import format_bytes

SETUP = (
    "%load_ext memlab",
    "import os, sys, torch, torch.multiprocessing as mp, rank_functions, memlab",
    # A thread of zmq's that stays from the first large message on, as a live view sends.
    "from zmq.utils.garbage import gc as of_zmq; of_zmq.start()",
    "entry = sys.modules['torch.multiprocessing.spawn']._wrap",
)
ELASTIC = """
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
config = LaunchConfig(1, 1, 2, run_id='a', rdzv_backend='c10d', rdzv_endpoint='localhost:0', start_method='fork', max_restarts=0)
import signal
handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)}
try:
    results = elastic_launch(config, rank_functions.elastic)()
finally:
    [signal.signal(*one) for one in handlers.items()]  # it leaves its own
dict(sorted(results.items()))
"""
"""As accelerate's notebook_launcher does it."""
FORK = (
    "mp.start_processes(rank_functions.train, (os.path.abspath('store'), 2, {fails!r}), nprocs=2, start_method='fork')"
)
SPAWN = "mp.spawn(rank_functions.train, (os.path.abspath('store'),), nprocs=2)"
RECORD = """
from memlab.views import live
told, push = [], live.LiveView.push
live.LiveView.push = lambda self, *args, **kwargs: (told.extend(kwargs['notes']), push(self, *args, **kwargs))[1]
"""


@pytest.fixture(autouse=True)
def nothing_is_left(notebook, leaves_the_kernel_as_it_was):
    yield
    assert notebook.value("sys.modules['torch.multiprocessing.spawn']._wrap is entry")
    # The store of gloo is the test's own.
    notebook.ok("[os.unlink(name) for name in os.listdir() if name.startswith(('store', 'job'))]")
    code = (
        "import glob, tempfile; print(glob.glob(os.path.join(tempfile.gettempdir(), f'memlab-ranks-{os.getpid()}-*')))"
    )
    assert notebook.ok(code).stdout.strip() == "[]"


def run(notebook, how: str, options: str = ""):
    return notebook.run(f"%%memtrack --name job {options}\n{how}")


def peaks(notebook) -> list[int]:
    """The peaks by rank of the one job of the last run."""
    code = "[[one.peak.low for one in ranks.ranks] for ranks in memlab.runs['job'].started_ranks]"
    (found,) = notebook.value(code)
    return found


@pytest.mark.parametrize("how", [SPAWN, FORK.format(fails=""), ELASTIC])
def test_each_rank_is_measured_and_the_cell_shows_all(notebook, how):
    reply = run(notebook, how)
    assert (reply.status, reply.out) == ("ok", "{0: 0, 1: 1}" if "elastic" in how else None), reply.said
    first, second = peaks(notebook)
    assert second - first == KEPT_BYTES
    figure, ranks, parent = reply.shown
    assert {"image/svg+xml", "application/vnd.plotly.v1+json"} <= set(figure)
    assert ranks["text/plain"].startswith("job · 2 ranks · measured · peak allocated 4.0")
    assert "DistributedDataParallel.module.0" in ranks["text/plain"] and "text/html" in ranks
    assert "started 2 ranks, each measured by itself" in parent["text/plain"]


def test_a_rank_that_raises_is_named_and_the_error_is_that_of_torch(notebook):
    reply = run(notebook, FORK.format(fails="raises"))
    assert reply.error == "ProcessRaisedException" and "MemoryError: planted on rank 1" in reply.traceback
    assert "Rank 1 failed first" in reply.shown[1]["text/plain"]
    assert peaks(notebook)[1] > KEPT_BYTES


def test_a_rank_that_is_killed_is_read_as_far_as_it_came(notebook):
    reply = run(notebook, FORK.format(fails="killed"))
    assert reply.error == "ProcessExitedException"
    text = reply.shown[1]["text/plain"]
    assert "cut off" in text and "Rank 0 failed first" not in text


def test_while_they_run_there_is_a_line_for_each(notebook):
    notebook.ok(RECORD)
    try:
        assert run(notebook, FORK.format(fails="sleeps")).status == "ok"
        for rank, peak in enumerate(peaks(notebook)):
            lines = notebook.value(f"sorted({{line for line in told if line.startswith('rank {rank}: ')}})")
            assert f"peak {format_bytes(peak)}" in " ".join(lines)
    finally:
        notebook.ok("live.LiveView.push = push; del told, push, live")


def test_a_saved_run_has_the_files_of_its_ranks_next_to_it(notebook):
    assert run(notebook, FORK.format(fails=""), "--save job.memlab --quiet").shown == []
    files = notebook.value("sorted(name for name in os.listdir() if name.startswith('job'))")
    assert files == ["job.memlab", "job.rank0.memlab", "job.rank1.memlab"]
    assert notebook.value("[one.peak.low for one in memlab.ranks('.').ranks]") == peaks(notebook)


def test_without_a_tracked_cell_nothing_is_measured(notebook):
    assert notebook.ok(FORK.format(fails="")).shown == []
