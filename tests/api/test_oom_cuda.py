"""Out-of-memory errors of PyTorch's real allocator on the simulated GPU: reports against its counters and driver.

Each scenario is a process with a card of its own: it runs out of memory and prints what was told and what the authorities say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from kernel import kernel
from simulated_machines import machine_at

pytestmark = pytest.mark.simulated

ROOT = Path(__file__).resolve().parents[2]
MiB, GiB = 1 << 20, 1 << 30

START = """
import gc, json, sys
import torch
import memlab
from memlab.api import oom

def grow(count, size, into):
    for _ in range(count):
        into.append(torch.empty(size, dtype=torch.uint8, device="cuda"))

def fill():
    held = []
    grow(100, 100 << 20, held)

def fragment():
    small = []
    grow(900, 1536 << 10, small)
    held = small[::2]
    del small
    fragment.at = state()
    torch.empty(600 << 20, dtype=torch.uint8, device="cuda")

def state():
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    return {"allocated": stats["allocated_bytes.all.current"], "reserved": stats["reserved_bytes.all.current"],
            "free": free, "total": total}

def fails(function, **tracked):
    run = None
    try:
        if tracked:
            with memlab.track(show=False, **tracked) as run:
                function()
        else:
            function()
    except torch.OutOfMemoryError as error:
        sys.last_value = sys.last_exc = error
        sys.last_traceback = error.__traceback__
    else:
        raise AssertionError("it did not run out of memory")
    return oom.note_oom(sys.last_value, run)

def say(found, **more):
    told = found.explanation
    terms = {t.name: [t.amount.low, t.amount.high] for t in told.terms}
    actions = [[a.text, a.gives.low, a.gives.high, a.is_estimate, a.is_enough] for a in told.actions]
    named = {one.path: [one.nbytes, one.category, one.count] for one in told.named}
    shares = {share.by: dict(share) for share in told.shares}
    print(json.dumps({"text": found.text, "verdict": told.verdict, "terms": terms, "actions": actions, "named": named,
                      "alive": told.alive_bytes, "shares": shares, "gaps": told.gaps, **more}))
"""


def card(tmp_path: Path, total_mb: int = 2048) -> dict[str, str]:
    """The environment of processes that share a card of this size."""
    return {**os.environ, **machine_at(tmp_path / "gpu", total_mb)}


def scenario(tmp_path: Path, code: str, total_mb: int = 2048, **environment: str) -> dict[str, Any]:
    """What a process says that runs out of memory on a card of this size."""
    program = tmp_path / "program.py"
    program.write_text(START + textwrap.dedent(code))
    env = card(tmp_path, total_mb) | environment | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, program]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


TRAINING = """
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(20)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
def step(batch):
    loss = model(torch.randn(batch, 1024, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("how", ["", "name='mine'"])
def test_the_numbers_are_the_allocators_and_the_drivers(tmp_path, how):
    said = scenario(
        tmp_path,
        f"""
        kept = []
        def cell():
            grow(9, 100 << 20, kept)
            at = state()
            kept.append(at)
            torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        found = fails(cell, {how})
        say(found, at=kept.pop())
        """,
    )
    at, terms = said["at"], said["terms"]
    assert said["verdict"] == "full"
    exact = {"allocated": at["allocated"], "reserved": at["reserved"], "free": at["free"]}
    for name, count in (exact | {"capacity": at["total"], "asked": GiB}).items():
        low, high = terms[name]
        assert low <= count <= high
        assert low == high or (not how or name in ("asked", "capacity")), name  # tracked: to the byte
    assert terms["process"][0] <= at["total"] - at["free"] <= terms["process"][1]
    assert said["named"] == {"kept": [900 * MiB, "other", 9]}
    (action,) = said["actions"]
    assert action[1:] == [900 * MiB, 900 * MiB, False, None], (
        "made by the failed cell itself: nothing shows that it is enough"
    )
    assert "memlab · mine · cuda:0 ran out" in said["text"] or not how


def test_a_tracked_training_step_tells_names_categories_and_lines(tmp_path):
    said = scenario(
        tmp_path,
        TRAINING
        + """
sizes = [1000, 1000, 1 << 20]
def cell():
    for size in sizes:
        step(size)
found = fails(cell, name="training")
objects = {"parameter": sum(p.nbytes for p in model.parameters()),
           "optimizer": sum(v.nbytes for s in optimizer.state.values() for v in s.values() if v.is_cuda)}
say(found, objects=objects)
""",
    )
    categories = said["shares"]["category"]
    assert {name: categories[name] for name in said["objects"]} == said["objects"]
    assert said["terms"]["allocated"] == [sum(categories.values())] * 2
    assert set(said["shares"]) == {"category", "line", "module"}
    assert any("program.py:" in line for line in said["shares"]["line"])
    assert {"model", "optimizer.state"} <= set(said["named"])
    assert said["named"]["model"][:2] == [said["objects"]["parameter"], "parameter"]
    assert said["gaps"] == []


def test_losses_that_keep_their_graphs_are_named_and_deleting_them_gives_what_was_said(tmp_path):
    said = scenario(
        tmp_path,
        TRAINING
        + """
losses = []
def cell():
    while True:
        losses.append(model(torch.randn(2000, 1024, device="cuda")).sum())
found = fails(cell, name="leak")
oom.release()
before = torch.cuda.memory_allocated()
losses.clear()
gc.collect()
say(found, gave=before - torch.cuda.memory_allocated())
""",
    )
    advice = {action[0].split()[0]: action for action in said["actions"]}
    text, low, high, is_estimate, is_enough = advice["`losses`"]
    assert "autograd graphs" in text
    assert (is_estimate, is_enough) == (False, True)
    # The allocator's rounding is given back besides.
    assert low == high <= said["gave"] <= 1.05 * high
    assert any("inference_mode" in one for one in advice.values() for one in one[:1])


def test_pieces_that_do_not_fit_are_fragmentation(tmp_path):
    said = scenario(tmp_path, "say(fails(fragment), at=fragment.at)")
    assert said["at"]["free"] < 600 * MiB < said["at"]["reserved"] - said["at"]["allocated"]
    assert said["verdict"] == "fragmentation"
    assert "The largest piece of the cache was" in said["text"]
    assert any("expandable_segments:True" in action[0] for action in said["actions"])


def test_with_expandable_segments_on_they_are_not_advised(tmp_path):
    said = scenario(tmp_path, "say(fails(fragment))", PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert said["verdict"] == "fragmentation"
    assert not any("expandable_segments" in action[0] for action in said["actions"])
    assert "Expandable segments are already on" in said["text"]


def test_another_process_on_the_card_is_told_with_its_bytes(tmp_path):
    other = "import torch, sys; x = torch.empty(900 << 20, dtype=torch.uint8, device='cuda'); print('ready', flush=True); input()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": card(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", other], text=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        said = scenario(tmp_path, "say(fails(fill))")
        process.communicate("\n", timeout=300)
    (action,) = [one for one in said["actions"] if "end other processes" in one[0]]
    assert said["verdict"] == "others"
    assert action[1] == action[2] == said["terms"]["others"][0] >= 900 * MiB
    assert action[4] is True


def test_a_limit_of_the_process_is_told_apart_from_the_card(tmp_path):
    said = scenario(tmp_path, "torch.cuda.set_per_process_memory_fraction(0.25); say(fails(fill))")
    assert said["verdict"] == "limit"
    assert said["terms"]["allowed"][0] <= 512 * MiB <= said["terms"]["allowed"][1]
    assert any("set_per_process_memory_fraction" in action[0] for action in said["actions"])


def test_the_other_allocator_of_pytorch_is_understood(tmp_path):
    said = scenario(tmp_path, "say(fails(fill))", PYTORCH_ALLOC_CONF="backend:cudaMallocAsync")
    assert said["verdict"] == "full"
    low, high = said["terms"]["asked"]
    assert low <= 100 * MiB <= high


def test_in_the_phases_of_a_step_gradients_and_temporaries_are_told(tmp_path):
    said = scenario(
        tmp_path,
        TRAINING
        + """
step(1000)
for p in model.parameters():
    p.grad = torch.zeros_like(p)
found = fails(lambda: step(1 << 18))
say(found, gradients=sum(p.grad.nbytes for p in model.parameters()))
""",
    )
    (action,) = [one for one in said["actions"] if "zero_grad" in one[0]]
    assert action[1] == said["gradients"]


def test_a_failed_cell_is_noted_and_released_in_a_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv(*machine_at(tmp_path / "gpu", 2048).popitem())
    with kernel(tmp_path, START, "%load_ext memlab") as notebook:
        notebook.run("weights = torch.zeros(1000, device='cuda')\nbefore = torch.cuda.memory_allocated()")
        assert notebook.run("fill()").error == "OutOfMemoryError"
        held = notebook.value("torch.cuda.memory_allocated() - before")
        assert held > GiB
        notebook.run("noted = oom.note_oom(sys.last_value).explanation")
        said = notebook.value("[a.gives.low for a in noted.actions if 'release' in a.text]")
        freed = notebook.value("oom.release().released.levels[-1].freed_bytes")
        assert said == [held] == [freed]
        assert notebook.value("torch.cuda.memory_allocated() == before") is True
        after = notebook.run("again = torch.empty(1 << 30, dtype=torch.uint8, device='cuda')")
        assert after.status == "ok"


def test_enough_is_said_of_a_name_only_where_its_blocks_share_no_segment(tmp_path):
    """Half of the blocks of each segment: more bytes than were short, of which the driver gets none back."""
    said = scenario(
        tmp_path,
        """
        kept, every = [], []
        grow(340, 4 << 20, every)
        kept, others = every[::2], every[1::2]
        del every
        def cell():
            torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
        found = fails(cell, name="mine")
        kept.clear()
        try:
            cell()
        except torch.OutOfMemoryError:
            say(found, again=True)
        else:
            say(found, again=False)
        """,
    )
    action = next(one for one in said["actions"] if "`kept`" in one[0] or "`others`" in one[0])
    assert action[1] == 680 * MiB
    assert said["again"] is True and action[4] is None


def test_what_frames_hold_of_a_name_goes_with_a_release(tmp_path, monkeypatch):
    monkeypatch.setenv(*machine_at(tmp_path / "gpu", 2048).popitem())
    with kernel(tmp_path, START, "%load_ext memlab") as notebook:
        notebook.ok("xs = [torch.zeros(300 << 18, device='cuda') for _ in range(3)]")
        cell = "%%memtrack --no-live\ndef step(xs):\n    y = xs[0] * 2\n    return torch.cat([y, y, y])\nstep(xs)"
        assert notebook.run(cell).error == "OutOfMemoryError"
        assert "del xs" not in notebook.ok("%memoom").out, "the cell needs it"
        notebook.ok("del xs")
        assert notebook.value("torch.cuda.memory_allocated() >> 20") == 1200, "the failed cell's frames hold it still"
        notebook.ok("%memoom release")
        assert notebook.value("torch.cuda.memory_allocated()") == 0
        notebook.ok("xs = [torch.zeros(300 << 18, device='cuda')]")
        notebook.ok(cell)


# --- half the batch ---

# Each scenario runs out of memory under a limit; then the limit is lifted, and the same work runs twice from the start, with the
# whole batch and with half of it in the step that failed. The saving is the difference of the levels at the failed allocation.
HALVED = """
import numpy as np
from torch import nn
from memlab.trace.columns import Kind, deltas

def births(trace):
    is_birth = (trace.events.kind == Kind.ALLOC) & (trace.events.device == 0)
    is_birth[:trace.first_row] = False
    return np.flatnonzero(is_birth)

def work(make, sizes, limit=1.0):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit)
    step = make()
    with memlab.track(show=False) as run:
        work.run = run
        for size in sizes:
            step(size)

def fails(make, sizes, limit):
    try:
        work(make, sizes, limit)
    except torch.OutOfMemoryError as error:
        return oom.failure_facts(error, work.run), oom.note_oom(error, work.run)
    raise AssertionError("it did not run out of memory")

def level(make, sizes, number):
    work(make, sizes)
    trace = work.run.trace
    return int(np.cumsum(deltas(trace.events, "allocated"))[births(trace)[number]])

def compare(make, sizes, limit):
    work(make, sizes[:2])  # the libraries take their workspaces once and keep them
    failure, told = fails(make, sizes, limit)
    moment = failure.moment
    number, wanted = int((births(work.run.trace) < moment.row).sum()), moment.allocated_bytes + moment.asked_bytes
    oom.release()
    sizes = sizes[:getattr(compare, "at", None)]
    work(make, sizes)  # the workspaces again, which were given back
    full, less = level(make, sizes, number), level(make, [*sizes[:-1], sizes[-1] // 2], number)
    saves = failure.half_the_batch()
    advice = [[a.gives.low, a.gives.high, a.is_enough] for a in told.explanation.actions if "half" in a.text]
    print(json.dumps({"low": saves.low, "high": saves.high, "real": full - less, "full": full, "wanted": wanted,
                      "advice": advice, "phase": moment.phase.name, "activations": failure.bytes_of("activation")}))
"""


def halved(tmp_path: Path, code: str) -> dict[str, Any]:
    said = scenario(tmp_path, HALVED + code, 6144)
    # The same allocation; what is cached decides which blocks get up to 1 MiB more.
    assert abs(said["full"] - said["wanted"]) <= 4 * MiB
    return said


CONV = """
def make():
    layers = [m for i in range(6) for m in (nn.Conv2d(32 if i else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    def step(batch):
        x, y = torch.randn(batch, 3, 64, 64, device="cuda"), torch.zeros(batch, dtype=torch.long, device="cuda")
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return step
compare(make, [8, 8, 300], 0.28)
"""

TRANSFORMER = """
def make():
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    net = nn.Sequential(nn.Embedding(4000, 256), nn.TransformerEncoder(layer, 3), nn.Linear(256, 4000)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    def step(batch):
        t = torch.zeros(batch, 128, dtype=torch.long, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled={amp}):
            loss = nn.functional.cross_entropy(net(t).flatten(0, 1), t.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return step
compare(make, [4, 4, {batch}], {limit})
"""

KEPT = """
losses = []
def make():
    net = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(10)]).cuda()
    losses.clear()
    def step(batch):
        compare.at = len(losses) + 1
        losses.append(net(torch.randn(batch, 1024, device="cuda")).sum())
    return step
compare(make, [2000] * 9, 0.15)
"""

TWO_VIEWS = """
def make():
    net = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)]).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    def step(batch):
        one, other = (net(torch.randn(batch, 1024, device="cuda")) for _ in range(2))
        ((one - other) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step
sizes = [8, 8, 12000]
work(make, sizes)
compare(make, sizes, 0.9 * work.run.peak_allocated_bytes / (6 << 30))
"""


@pytest.mark.parametrize(
    ("code", "phase"),
    [
        (CONV, "FORWARD"),
        (CONV.replace("0.28", "0.335"), "BACKWARD"),
        (TRANSFORMER.format(amp=False, batch=200, limit=0.2), "FORWARD"),
        (TRANSFORMER.format(amp=True, batch=300, limit=0.2), "FORWARD"),
    ],
    ids=["conv", "conv, backward", "transformer", "transformer with autocast"],
)
def test_half_the_batch_saves_what_was_said(tmp_path, code, phase):
    said = halved(tmp_path, code)
    assert said["phase"] == phase
    assert said["low"] <= said["real"] <= said["high"]
    assert said["high"] - said["low"] < 0.1 * said["real"]
    assert [said["low"], said["high"]] in [one[:2] for one in said["advice"]]


def test_what_a_list_keeps_of_earlier_steps_is_not_promised(tmp_path):
    said = halved(tmp_path, KEPT)
    assert said["low"] <= said["real"] <= said["high"]
    assert said["high"] < 0.05 * said["activations"]
    assert said["advice"] == []


def test_where_a_module_is_called_twice_and_the_loss_is_no_module_it_is_a_wide_range(tmp_path):
    said = halved(tmp_path, TWO_VIEWS)
    assert said["phase"] == "OTHER"
    assert said["low"] <= said["real"] <= said["high"] < 1.1 * said["real"]
    assert [said["low"], said["high"]] in [one[:2] for one in said["advice"]]


def test_a_block_of_a_script_that_failed_can_be_explained_afterwards(tmp_path):
    said = scenario(
        tmp_path,
        """
        try:
            with memlab.track("mine", show=False):
                fill()
        except torch.OutOfMemoryError:
            found = memlab.explain_oom()
        say(found)
        """,
    )
    assert said["text"].startswith("memlab · mine · cuda:0 ran out of memory: 100.0 MiB requested, ")
    assert said["shares"]["line"] and said["alive"] > GiB
