"""Engines of ipyparallel in a tracked cell, in a real kernel with two real engines: each is measured, and the cell shows all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel import Kernel, kernel

from memlab.units import format_bytes

pytest.importorskip("ipyparallel")
START = """
import ipyparallel, memlab
cluster = ipyparallel.Cluster(n=2, log_level=40)
client = cluster.start_and_connect_sync()
names = ("send_execute_request", "send_apply_request", "close")
view, methods = client[:], [vars(ipyparallel.Client)[name] for name in names]
"""
JOB = """%%px
import os, time, torch, torch.distributed as dist
def train(rank, store, rows=100, seconds=0):
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
    for _ in range(3):
        model(torch.ones(rows * (rank + 1), 100)).sum().backward()
    time.sleep(seconds)
    return rank
before = {*globals()}
"""
BOTH = "[client[n].apply_async(ipyparallel.Reference('train'), n, os.path.abspath('store'){more}) for n in client.ids]"
RECORD = """
from memlab.views import live
told, push = [], live.LiveView.push
live.LiveView.push = lambda self, *args, **kwargs: (told.extend(kwargs['notes']), push(self, *args, **kwargs))[1]
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("engines"), "%load_ext memlab", "import os", START) as found:
        found.ok(JOB)
        yield found
        found.ok("cluster.stop_cluster_sync()")


@pytest.fixture(autouse=True)
def nothing_is_left(notebook: Kernel) -> Iterator[None]:
    yield
    assert notebook.value("methods == [vars(ipyparallel.Client)[name] for name in names] and not client.outstanding")
    left = "str(torch.utils._python_dispatch._get_current_dispatch_mode()), [name for name in globals() if 'memlab' in name]"
    assert notebook.value(f"view.apply_sync(lambda: ({left}))") == [("None", []), ("None", [])]


def peaks(notebook: Kernel, name: str) -> list[int]:
    (found,) = notebook.value(f"[[one.peak.low for one in job.ranks] for job in memlab.runs[{name!r}].started_ranks]")
    return found


def test_each_engine_is_a_rank_and_the_cell_shows_them_while_they_run(notebook):
    notebook.ok(RECORD)
    try:
        cell = f"%%memtrack --name job\nresults = {BOTH.format(more=', 200, 2')}\n[one.get() for one in results]"
        reply = notebook.run(cell)
        assert (reply.status, reply.out) == ("ok", "[0, 1]"), reply.said
        first, second = peaks(notebook, "job")
        assert second > first > 0
        ranks = reply.shown[1]["text/plain"]
        assert ranks.startswith("job · 2 ranks · measured") and "DistributedDataParallel" in ranks
        for rank, peak in enumerate((first, second)):
            lines = notebook.value(f"sorted({{line for line in told if line.startswith('rank {rank}: ')}})")
            assert f"peak {format_bytes(peak)}" in " ".join(lines)
    finally:
        notebook.ok("live.LiveView.push = push; del told, push, live")


def test_results_errors_outputs_and_histories_are_as_without_memlab(notebook):
    there = "view.apply_sync(lambda: sorted(name for name in globals() if name[0] != '_'))"
    plain = []
    for how in ("", "%%memtrack --name magic\n"):
        notebook.ok("had = len(client.history), len(view.history)")
        reply = notebook.run(f"{how}%px print('seen'); torch.ones(10, 10).sum().item()")
        failed = notebook.run(f"{how}%px 1 / 0")
        grown = notebook.value("(len(client.history) - had[0], len(view.history) - had[1])")
        plain.append((reply.status, reply.stdout, failed.error, grown, notebook.value(there)))
    assert plain[0] == plain[1]
    assert len(peaks(notebook, "magic")) == 2


def test_a_client_that_the_cell_closes(notebook):
    work = "lambda: __import__('torch').ones(1000, 1000).sum().item()"
    cell = f"with ipyparallel.Cluster(n=1, log_level=40) as mine:\n    mine[:].apply_sync({work})"
    assert notebook.run(f"%%memtrack --name closed\n{cell}").status == "ok"
    assert peaks(notebook, "closed")[0] >= 4_000_000


def test_what_an_engine_still_works_on_is_not_waited_for(notebook):
    work = "client[0].apply_async(lambda: (time.sleep(3), torch.ones(10).sum().item())[1])"
    reply = notebook.run(f"%%memtrack --name late\nresult = {work}\nresult.ready()")
    assert (reply.status, reply.out) == ("ok", "False")
    assert notebook.value("memlab.runs['late'].started_ranks") == ()
    assert notebook.value("(result.get(), client.wait(timeout=300))[0]") == 10
