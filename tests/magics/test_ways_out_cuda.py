"""Ways out of an out-of-memory error, each followed: the changed cell ends on the simulated GPU, and the next size does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernel import Kernel, kernel
from simulated_machines import machine_at

pytestmark = pytest.mark.simulated

START = """
import torch
%load_ext memlab
import memlab
import memlab.api.ways_out
memlab.api.ways_out.LIMIT_S = 60.0  # what is tested are the answers, not how many there are in time on a busy machine

class Net(torch.nn.Module):
    def __init__(self, depth=24, width=1024):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())
                                            for _ in range(depth)))
    def forward(self, x):
        return self.layers(x).square().mean()
"""
TRAIN = """
net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(2):
    net(torch.randn(batch, 512, 1024, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FORGET = """
%memoom release
for name in ("net", "optimizer", "held", "out", "x", "loss", "logits", "inputs", "outputs", "targets", "tokens"):
    globals().pop(name, None)
import gc; gc.collect(); torch.cuda.empty_cache()
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("ways")
    machine = machine_at(folder / "machine.json", total_mb=1536, context_mb=128)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine.items():
            patch.setenv(name, value)
        with kernel(folder, START) as notebook:
            yield notebook


def failed(notebook: Kernel, cell: str) -> list[tuple[str, str, int]]:
    """The ways out that are offered for a cell that runs out of memory: kind, change, what it needs at most."""
    reply = notebook.run(f"%%memtrack --no-live --quiet\n{cell}")
    assert reply.error == "OutOfMemoryError", reply.said or reply.stdout
    assert "running out" not in reply.report
    return notebook.value("[(way.kind, way.change, way.needs.high) for way in memlab.explain_oom().ways.ways]")


def ends(notebook: Kernel, cell: str) -> bool:
    """Whether a changed cell ends, run as a user would after `%memoom release`; else it is out of memory again."""
    notebook.ok("%memoom release")
    reply = notebook.run(cell)
    assert reply.status == "ok" or reply.error == "OutOfMemoryError", reply.said
    return reply.status == "ok"


def batch_of(ways: list[tuple[str, str, int]]) -> tuple[int, int | None]:
    """The batch that is said to fit, and the next one if that is said not to."""
    change = next(change for kind, change, _ in ways if kind == "batch")
    fits, _, over = change.rpartition("; ")
    assert re.fullmatch(r"\d+ (does not fit|is too close to call)", over), change
    return int(re.findall(r"\d+", fits)[0]), int(over.split()[0]) if "does not" in over else None


def test_the_batch_of_the_cell_fits_and_the_next_does_not(notebook: Kernel):
    ways = failed(notebook, "batch = 32" + TRAIN)
    size, too_large = batch_of(ways)
    assert 1 <= size < 32 and [kind for kind, _, _ in ways][-1] == "gpu"
    assert ends(notebook, f"batch = {size}" + TRAIN)
    assert not ends(notebook, f"batch = {too_large or 2 * size}" + TRAIN)


def test_fit_predicts_the_rest_of_a_cell_that_ran_out_of_memory(notebook: Kernel):
    notebook.ok(FORGET)
    cell = "batch = 32" + TRAIN
    notebook.ok(f"%%memtrack --predict T4 --quiet --name whole\n{cell}")
    assert notebook.run(f"%%memtrack --no-live --quiet --name cut\n{cell}").error == "OutOfMemoryError"
    notebook.ok("cut, whole = (memlab.fit(memlab.runs[name], ['T4', 'GTX 1660']).rows[0] for name in ('cut', 'whole'))")
    cut, whole = notebook.value("([*cut.needs_bytes], [*whole.needs_bytes])")
    assert notebook.value("cut.fits == whole.fits == 'yes'")
    # Kernels are those of another GPU, and the cell's own net is still there, until it makes a new one.
    assert all(abs(a - b) < 0.05 * b for a, b in zip(cut, whole, strict=True)), (cut, whole)


def test_techniques_are_switched_on_for_the_same_batch(notebook: Kernel):
    ways = failed(notebook, "batch = 12" + TRAIN)
    kind, change, _ = next(way for way in ways if way[0] in ("technique", "slower"))
    assert (kind == "slower" and "checkpoint" in change) or "segments" in change, change


def test_the_changed_cell_can_be_run(notebook: Kernel):
    notebook.ok(FORGET)
    notebook.ok("""
class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda: torch.nn.Sequential(torch.nn.Linear(768, 768), torch.nn.GELU(), torch.nn.Linear(768, 768))
        self.blocks = torch.nn.ModuleList(block() for _ in range(12))
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()
""")
    cell = """
net = Stack().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(2):
    x = torch.randn(BATCH, 512, 768, device="cuda")
    loss = net(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""".replace("BATCH", "24")
    failed(notebook, cell)
    found = notebook.value("[(way.diff, way.cell) for way in memlab.explain_oom().ways.ways if way.diff]")
    assert found, notebook.ok("%memoom").out
    assert [diff for diff, _ in found if "checkpoint" in diff and diff.count("\n+") > 2], found
    for _, changed in found:
        assert ends(notebook, changed), changed


TUTORIALS = {
    "classifies images": """
from torch import nn, optim
net = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
).cuda()
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
images, labels = torch.randn(96, 3, 128, 128), torch.randint(10, (96,))
for epoch in range(2):
    inputs, targets = images.cuda(), labels.cuda()
    optimizer.zero_grad()
    outputs = net(inputs)
    loss = criterion(outputs, targets)
    loss.backward()
    optimizer.step()
""",
    "learns words": """
from torch import nn
net = nn.Sequential(nn.Embedding(30000, 256), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 30000)).cuda()
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
tokens = torch.randint(30000, (4097,), device="cuda")
for _ in range(2):
    logits = net(tokens[:-1])
    loss = loss_fn(logits, tokens[1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "keeps the graph of what it predicts": """
from torch import nn
net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU()))).cuda()
net.eval()
out = []
for _ in range(10):
    out.append(net(torch.randn(4096, 1024, device="cuda")).mean(0))
""",
    "has a large optimizer": """
from torch import nn
net = nn.Sequential(nn.Linear(4096, 9216), nn.ReLU(), nn.Linear(9216, 4096)).cuda()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(2):
    loss = net(torch.randn(16, 4096, device="cuda")).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}


@pytest.mark.parametrize("kind", TUTORIALS)
def test_every_changed_cell_of_a_tutorial_can_be_run(notebook: Kernel, kind: str):
    notebook.ok(FORGET)
    failed(notebook, TUTORIALS[kind])
    found = notebook.value("[way.cell for way in memlab.explain_oom().ways.ways if way.diff]")
    assert found, notebook.ok("%memoom").out
    for changed in found:
        assert ends(notebook, changed), changed


def changed_batch(notebook: Kernel) -> str:
    """The changed cell of the batch that is offered."""
    return notebook.value("next(way.cell for way in memlab.explain_oom().ways.ways if way.kind == 'batch')")


def test_a_batch_that_an_earlier_cell_made(notebook: Kernel):
    notebook.ok("size_of_batch = bs = 32")
    size, _ = batch_of(failed(notebook, TRAIN.replace("batch", "bs")))
    assert f"bs = {size}\n" in changed_batch(notebook)
    assert ends(notebook, changed_batch(notebook))  # as it was predicted
    notebook.ok(f"bs = {size}")
    assert ends(notebook, TRAIN.replace("batch", "bs"))


def test_a_loader_that_an_earlier_cell_made(notebook: Kernel):
    notebook.ok(FORGET)
    notebook.ok("loader = torch.utils.data.DataLoader(torch.zeros(64, 512, 1024), batch_size=32)")
    cell = TRAIN.replace("_ in range(2)", "x in loader").replace(
        'torch.randn(batch, 512, 1024, device="cuda")', "x.cuda()"
    )
    batch_of(failed(notebook, cell))
    assert ends(notebook, changed_batch(notebook))
    notebook.ok("del loader")


def test_smaller_batches_are_not_offered_where_each_step_keeps_more(notebook: Kernel):
    notebook.ok(FORGET)
    cell = """
gelu, out = torch.nn.GELU(), []
with torch.no_grad():
    for _ in range(16):
        out.append(gelu(torch.randn(64, 512, 1024, device="cuda")))
"""
    assert "batch" not in [kind for kind, _, _ in failed(notebook, cell)]
    (why,) = notebook.value("[one for one in memlab.explain_oom().ways.not_enough if 'batch' in one]")
    assert re.search(
        "a batch of .* fits for as many steps as now, and not for the same data. Grows by 128.0 MiB .* kept by `out`.",
        why,
    )


def test_what_changes_the_depth_of_the_model_is_no_batch(notebook: Kernel):
    notebook.ok(FORGET)
    cell = TRAIN.replace("Net()", "Net(n)").replace("batch", "n")
    assert "batch" not in [kind for kind, _, _ in failed(notebook, "n = 24" + cell)]
    found = failed(notebook, "n = 32" + TRAIN.replace("Net()", "Net(24)").replace("batch", "n"))
    assert batch_of(found)[0] >= 1


def test_tensors_that_an_earlier_cell_made(notebook: Kernel):
    notebook.ok(FORGET)
    notebook.ok('x = torch.randn(32, 512, 1024, device="cuda"); y = torch.randn(32, device="cuda")')
    cell = TRAIN.replace('torch.randn(batch, 512, 1024, device="cuda")', "x")
    size, _ = batch_of(failed(notebook, cell))
    change = notebook.value("next(way.change for way in memlab.explain_oom().ways.ways if way.kind == 'batch')")
    how = re.search("first frees, by `(.*?)`", change)
    assert changed_batch(notebook) == "" and how, change  # no change of the cell is shown, and so it is said how
    assert ends(notebook, how[1] + cell.replace("net(x)", f"net(x[:{size}])"))
    notebook.ok("del x, y")


def test_what_earlier_cells_hold_is_to_be_deleted_first(notebook: Kernel):
    notebook.ok(FORGET)
    notebook.ok('old = [torch.empty(100 << 20, dtype=torch.uint8, device="cuda") for _ in range(11)]')
    kind, change, _ = failed(notebook, "batch = 4" + TRAIN)[0]
    said = "`del old`, if not needed any more, and `%memoom release`, then the same cell again"
    assert kind == "free" and change.startswith(said)
    notebook.ok("del old")
    notebook.ok("%memoom release")
    assert notebook.run("batch = 4" + TRAIN).status == "ok"


def test_the_batch_of_a_changed_cell_fits_after_the_cell_that_failed(notebook: Kernel):
    """Its blocks are smaller than those that the failed cell left in PyTorch's cache."""
    notebook.ok(FORGET)
    cell = """
def train():
    net = Net(width=512).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        x = torch.randn(14336, 512, device="cuda")
        loss = net(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
train()
"""
    ways = failed(notebook, cell)
    (change,) = (change for kind, change, _ in ways if kind == "batch")
    size = int(re.findall(r"a batch of (\d+): `x = torch.randn\(\1, 512, device", change)[0])
    changed = notebook.value("next(way.cell for way in memlab.explain_oom().ways.ways if way.kind == 'batch')")
    assert changed == cell.replace("14336", str(size))
    assert ends(notebook, changed)


def test_advice_on_a_run_that_raised_does_not_count_what_its_frames_hold(notebook: Kernel):
    notebook.ok(FORGET)
    cell = "def step(batch):" + TRAIN.replace("\n", "\n    ") + "\nstep(32)"
    failed(notebook, cell.replace("\nstep", "\n\nstep"))
    whole = notebook.value("[*memlab.explain_oom().ways.needs]")
    notebook.ok("advice = memlab.advise(memlab.last_run(), '1400MiB', limit_s=90, techniques=['expandable_segments'])")
    low, high = notebook.value("[*advice.before.peak_device_bytes]")
    # The context is assumed there, and known here.
    assert whole[0] <= low <= whole[0] + (200 << 20) and whole[1] <= high <= whole[1] + (450 << 20), (low, high, whole)


def test_what_a_function_of_the_cell_reads_is_not_to_be_deleted(notebook: Kernel):
    notebook.ok(FORGET)
    notebook.ok('kept = torch.empty(900 << 20, dtype=torch.uint8, device="cuda")\ndef read():\n    return kept')
    ways = failed(notebook, "batch = 4\nread()" + TRAIN)
    assert ways and not [change for _, change, _ in ways if "kept" in change]
    notebook.ok("del kept")


def test_what_the_frames_of_a_failed_cell_hold(notebook: Kernel):
    notebook.ok(FORGET)
    fails = "def fill():\n    held = [torch.empty(1200 << 20, dtype=torch.uint8, device='cuda')]\n    1 / 0\nfill()"
    assert notebook.run(fails).error == "ZeroDivisionError"
    ways = failed(notebook, "batch = 4" + TRAIN)
    assert [change for _, change, _ in ways] == ["`%memoom release`, then the same cell again"]
    notebook.ok("%memoom release")
    assert notebook.run("batch = 4" + TRAIN).status == "ok"


def test_a_cell_without_backward_may_need_no_graph(notebook: Kernel):
    notebook.ok(FORGET)
    cell = 'net = Net().cuda()\nout = net(torch.randn(16, 512, 1024, device="cuda"))'
    kind, change, _ = failed(notebook, cell)[0]
    assert kind == "technique" and re.match("`(no_grad|inference_mode)`: ", change)
    assert ends(notebook, f"with torch.no_grad():\n    {cell.replace(chr(10), chr(10) + '    ')}")


def test_techniques_are_on_from_the_start_of_a_training_that_returns_its_model(notebook: Kernel):
    notebook.ok(FORGET)
    body = "".join(f"    {line}\n" for line in TRAIN.strip().splitlines())
    notebook.ok(f"def train(batch):\n{body}    return net")
    failed(notebook, "net = train(12)")
    found = notebook.value("[(way.kind, way.diff) for way in memlab.explain_oom().ways.ways]")
    assert ("slower", "") in found, found


def test_a_cell_that_starts_programs_is_not_run_again(notebook: Kernel, tmp_path: Path):
    notebook.ok(FORGET)
    file = tmp_path / "count"
    reply = notebook.run(f"%%memtrack --no-live --quiet\n!echo again >> {file}\nbatch = 32" + TRAIN)
    assert reply.error == "OutOfMemoryError"
    assert file.read_text() == "again\n"
    assert notebook.value("memlab.explain_oom().ways.ways") == ()
    assert (
        "as it could not be predicted: the cell failed when it was run again: PredictionError: it starts programs"
        in notebook.run("%memoom").out
    )
    assert "What to do" in notebook.run("%memoom").out  # what the facts alone suggest


def test_it_stands_before_the_traceback_and_the_next_cell_finds_everything_as_it_was(notebook: Kernel):
    notebook.ok(FORGET)
    notebook.ok("names = sorted(globals()); bytes_before = torch.cuda.memory_allocated()")
    reply = notebook.run("%%memtrack --no-live --quiet\nbatch = 32" + TRAIN)
    assert [kind for kind in reply.order if kind in ("display_data", "error")] == ["display_data", "error"]
    made = {"batch", "net", "optimizer", "names", "bytes_before"}  # by the cells themselves
    assert set(notebook.value("[one for one in globals() if one not in names and one[0] != '_']")) <= made
    notebook.ok(FORGET)
    assert notebook.value("torch.cuda.memory_allocated() == bytes_before") is True
    assert notebook.value("__import__('psutil').Process().children()") == []


INTERRUPT = """
import os, psutil, signal, threading, time
def interrupt_when_a_child_runs():
    while not psutil.Process().children():
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt_when_a_child_runs, daemon=True).start()
"""


def test_an_interrupt_ends_the_search_and_keeps_the_answer(notebook: Kernel):
    notebook.ok(FORGET)
    reply = notebook.run(f"%%memtrack --no-live --quiet\n{INTERRUPT}\nbatch = 32{TRAIN}")
    assert reply.error == "OutOfMemoryError"
    assert "The search for ways out was interrupted." in notebook.ok("%memoom").out
    assert notebook.value("1 + 1") == 2
