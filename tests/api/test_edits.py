"""Techniques as edits of a cell: each changed cell is run on the CPU, with real values, and compared with the cell as it was."""

from __future__ import annotations

import ast
import copy
import functools
import gc
import linecache
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import memlab
from memlab.analysis.timeline import timeline
from memlab.api.advise.edits import EDITS, edited
from memlab.api.advise.observed import Observer

MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)
"""
TRAINS = """
torch.manual_seed(1)
model = Net(LAYERS)
optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=1e-3,  # as in the paper
)
x, y = torch.randn(512, 64), torch.randint(10, (512,))
for step in range(2):
    optimizer.zero_grad(set_to_none=False)
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    optimizer.step()
del x, y
"""
SERVES = """
torch.manual_seed(1)
model = Net(LAYERS)
model.eval()
answers = []
# four batches
for _ in range(4):
    answers.append(model(torch.randn(512, 64)))
loss = torch.cat(answers).square().mean()
"""
BLOCKS = "*(Block() for _ in range(6)), nn.Linear(64, 10)"
CHAIN = "*(one for _ in range(12) for one in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 10)"
TRAINING = {
    "checkpoint": (BLOCKS, 0.8),
    "selective_checkpoint": (BLOCKS, 0.9),
    "checkpoint_sequential": (CHAIN, 0.9),
    "sqrt_segments": (CHAIN, 0.9),
    "in_place": (CHAIN, 1.0),
    "autocast_bf16": (BLOCKS, 0.9),
    "offload": (BLOCKS, 1.2),  # here the host's copies are in the memory that is measured
    "retain_graph": (BLOCKS, 1.0),
    "set_to_none": (BLOCKS, 1.0),
    "foreach_off": (BLOCKS, 1.0),
    "fused": (BLOCKS, 1.0),
    "step_in_backward": (CHAIN, 1.0),
}
"""Technique -> layers of the model, and what share of the peak is left on the CPU at most."""
SERVING = {"no_grad": 0.5, "inference_mode": 0.5, "half_inference": 0.8}


namespaces: list[dict[str, Any]] = []


def namespace() -> dict[str, Any]:
    """Names in which a cell can be run, with its model's class."""
    namespaces.append({})
    exec(MODEL, namespaces[-1])
    return namespaces[-1]


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    gc.freeze()  # what is there by now: garbage is collected often here
    yield
    # The hooks of a parameter refer to functions, and these to the names: the collector does not look there.
    for names in namespaces:
        names.clear()
    namespaces.clear()
    observed.cache_clear()
    gc.unfreeze()
    gc.collect()


def run(cell: str, observer: Observer | None = None) -> tuple[dict[str, Any], int]:
    """The names that a cell leaves, and its peak above what was there before; its text is known, as that of a notebook's cell."""
    names, file = namespace(), "<the cell>"
    linecache.cache[file] = len(cell), None, cell.splitlines(keepends=True), file
    code = compile(cell, file, "exec")
    gc.collect()
    with memlab.track(show=False) as found:
        if observer is None:
            exec(code, names)
        else:
            with observer.on():
                exec(code, names)
    return names, found.peak_allocated_bytes - timeline(found.trace, found.trace.device_indices[0]).start_bytes


@functools.cache
def observed(cell: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is known of a cell once it has run, and what that left."""
    observer = Observer()
    names, peak = run(cell, observer)
    return observer.facts(names), names | {"peak": peak}


def changed(cell: str, *names: str) -> tuple[str, dict[str, Any]]:
    """The cell with these techniques, and what the cell as it was left."""
    facts, before = observed(cell)
    text, done = edited(cell, facts, names)
    assert set(done) == set(names), text
    return text, before


@pytest.mark.parametrize("name", TRAINING)
def test_a_changed_cell_trains_to_the_same_weights_with_less(name: str):
    layers, share = TRAINING[name]
    cell = TRAINS.replace("LAYERS", layers)
    if name == "step_in_backward":  # it needs one backward for each step, and no gradient of the step before
        cell = cell.replace("retain_graph=True", "").replace("set_to_none=False", "")
    text, before = changed(cell, name)
    after, peak = run(text)
    near = 0.05 if name == "autocast_bf16" else 1e-5
    torch.testing.assert_close(after["loss"], before["loss"], rtol=near, atol=near)
    if name != "autocast_bf16":
        pairs = zip(after["model"].parameters(), before["model"].parameters(), strict=True)
        assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in pairs)
    assert peak <= share * before["peak"]


@pytest.mark.parametrize("name", TRAINING)
def test_a_changed_cell_that_is_run_again_frees_what_it_made(name: str):
    cell = TRAINS.replace("LAYERS", TRAINING[name][0])
    if name == "step_in_backward":
        cell = cell.replace("retain_graph=True", "").replace("set_to_none=False", "")
    text, names = changed(cell, name)[0], namespace()
    exec(text, names)
    made = [weakref.ref(one) for one in names["model"].parameters()]
    exec(text, names)
    gc.collect()
    assert not any(one() is not None for one in made)


def test_with_the_step_in_backward_a_schedule_and_a_saved_state_are_as_before():
    cell = """
torch.manual_seed(1)
model = nn.Linear(64, 10)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
for step in range(4):
    loss = F.cross_entropy(model(torch.ones(8, 64)), torch.ones(8, dtype=int))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
saved = optimizer.state_dict()
"""
    text, before = changed(cell, "step_in_backward")
    after, _ = run(text)
    torch.testing.assert_close(after["model"].weight, before["model"].weight)
    torch.testing.assert_close(after["saved"], before["saved"])


@pytest.mark.parametrize("name", SERVING)
def test_a_changed_cell_answers_the_same_with_less(name: str):
    text, before = changed(SERVES.replace("LAYERS", BLOCKS), name)
    after, peak = run(text)
    assert after["loss"].item() == pytest.approx(before["loss"].item(), rel=0.05 if name == "half_inference" else 1e-6)
    assert not after["loss"].requires_grad or name == "half_inference"
    assert peak <= SERVING[name] * before["peak"]
    assert "\nmodel.eval()" in text


FORWARD_IS_CHANGED = ["checkpoint", "selective_checkpoint", "checkpoint_sequential", "sqrt_segments", "autocast_bf16"]


@pytest.mark.parametrize("name", [*FORWARD_IS_CHANGED, "offload", "half_inference"])
def test_a_deep_copy_of_a_changed_model_runs_its_own_weights(name: str):
    cell = TRAINS.replace("LAYERS", TRAINING[name][0]) if name in TRAINING else SERVES.replace("LAYERS", BLOCKS)
    text, before = changed(cell, name)
    twin, plain = copy.deepcopy(run(text)[0]["model"]).eval(), copy.deepcopy(before["model"]).eval()
    for one in twin.parameters():
        nn.init.normal_(one, std=0.05)
    plain.load_state_dict(twin.state_dict())
    x, near = torch.randn(8, 64), 0.05 if name in ("autocast_bf16", "half_inference") else 1e-5
    torch.testing.assert_close(twin(x).float(), plain(x), rtol=near, atol=near)


FITS = """
def make():
    torch.manual_seed(1)
    return Net(*(Block() for _ in range(6)), nn.Linear(64, 10))

def fit(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=None)
    for _ in range(2):
        loss = F.cross_entropy(model(torch.ones(512, 64)), torch.ones(512, dtype=int))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, loss
"""
OVER = ["checkpoint", "selective_checkpoint", "autocast_bf16", "offload", "step_in_backward", "foreach_off"]


@pytest.mark.parametrize(
    "ends",
    [
        "model, optimizer, loss = fit(make())",
        "model = make()\nmodel, optimizer, loss = fit(model)\nmodel.eval()",
        "model, optimizer, loss = fit(make())\nfit(model)",
        "model = make(); loss = fit(model)[-1]",
    ],
)
def test_an_edit_that_would_come_after_the_training_is_not_made(ends: str):
    assert edited(FITS + ends, observed(FITS + ends)[0], OVER) == (FITS + ends, ())


@pytest.mark.parametrize("made", ["model = make(); count = 2", "model = make(); places = [\n    model]"])
def test_a_model_is_edited_behind_the_line_that_makes_it(made: str):
    text, before = changed(f"{FITS}{made}\nloss = fit(model)[-1]", "checkpoint")
    assert f"{made}\nfrom functools import partial\n" in text
    after, peak = run(text)
    torch.testing.assert_close(after["loss"], before["loss"])
    assert peak < 0.8 * before["peak"]


EVALUATES = """
def make():
    torch.manual_seed(1)
    return Net(*(Block() for _ in range(6))).eval()

def evaluate(model, count):
    \"\"\"The mean over
    some batches.\"\"\"
    return torch.stack([model(torch.ones(512, 64) + one).mean() for one in range(count)]).mean()

def predict():
    return evaluate(model, 4)

"""


@pytest.mark.parametrize("name", ["no_grad", "inference_mode"])
@pytest.mark.parametrize(
    ("ends", "within"),
    [
        ("model = make()\nloss = evaluate(model, 4)", "    loss = evaluate(model, 4)\n"),
        ("model = make()\nloss = evaluate(count=4, model=model)", "    loss = evaluate(count=4, model=model)\n"),
        ("model = make()\nfor _ in (1, 2):\n    loss = predict()", "    for _ in (1, 2):\n        loss = predict()\n"),
        ("model = make()\nevaluate(model, 4)", "    shown = evaluate(model, 4)\nshown\n"),
    ],
)
def test_a_function_that_runs_the_model_keeps_no_graph(name: str, ends: str, within: str):
    text, before = changed(EVALUATES + ends, name)
    assert text.endswith(f"with torch.{name}():\n{within}")
    after, peak = run(text)
    assert peak < 0.5 * before["peak"]
    if "loss" in before:
        torch.testing.assert_close(after["loss"], before["loss"].detach())


@pytest.mark.parametrize("ends", ["model, _, loss = fit(make())", "model = make()\nfit(model)"])
def test_a_function_that_calls_backward_keeps_its_graph(ends: str):
    reasons = observed(FITS + ends)[0]["reasons"]
    assert reasons["no_grad"] == reasons["inference_mode"] == "this calls backward, and it is for inference"


@pytest.mark.parametrize("ends", ["model = make(); loss = predict()", "model = [model := make(), predict()][0]"])
def test_a_statement_that_cannot_stand_in_a_block_is_left(ends: str):
    text = EVALUATES + ends
    assert edited(text, observed(text)[0], ["no_grad", "inference_mode"]) == (text, ())


TEACHES = """
torch.manual_seed(1)
model = nn.Sequential(nn.Embedding(5000, 32), nn.Linear(32, 5000))
criterion = nn.CrossEntropyLoss(SETTINGS)
tokens = torch.randint(5000, (400,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outputs = model(tokens)
loss = criterion(outputs, TARGETS)
loss.backward()
optimizer.step()
"""


def test_the_loss_of_a_loss_module_is_chunked():
    text, before = changed(TEACHES.replace("SETTINGS", "").replace("TARGETS", "tokens"), "chunked_loss", "foreach_off")
    assert "loss = chunked_cross_entropy(outputs, tokens, model[1])" in text
    after, peak = run(text)
    torch.testing.assert_close(after["loss"], before["loss"])
    torch.testing.assert_close(after["model"][1].weight, before["model"][1].weight)
    assert peak < 0.5 * before["peak"]
    # Everywhere else the model makes logits as before: what evaluates, copies or saves it need not know.
    for model in (after["model"], copy.deepcopy(after["model"]), pickle.loads(pickle.dumps(after["model"]))):
        torch.testing.assert_close(model(before["tokens"]), before["model"](before["tokens"]))


@pytest.mark.parametrize(
    "ends",
    [
        "accuracy = outputs.argmax(-1) == tokens",
        "outputs = model(tokens)\naccuracy = outputs.argmax(-1) == tokens",
        "outputs, other = model(tokens), 1",
        "outputs += 1",
        "for outputs in (1, 2):\n    pass",
    ],
)
def test_logits_that_are_used_or_made_anywhere_else_are_left(ends: str):
    text = TEACHES.replace("SETTINGS", "").replace("TARGETS", "tokens") + ends
    assert edited(text, observed(text)[0], ["chunked_loss"]) == (text, ())


def test_the_loss_of_a_call_is_chunked_where_it_stands_and_only_there():
    ends = "with torch.no_grad():\n    right = (model(tokens).argmax(-1) == tokens).sum()\n"
    cell = TEACHES.replace("outputs = model(tokens)\n", "").replace(
        "criterion(outputs, TARGETS)", "F.cross_entropy(model(tokens), tokens)"
    )
    text, before = changed(cell.replace("SETTINGS", "") + ends, "chunked_loss")
    assert "loss = chunked_cross_entropy(hidden_of(model, model[1], tokens), tokens, model[1])" in text
    after, _ = run(text)
    assert after["right"] == before["right"]


@pytest.mark.parametrize(
    ("settings", "targets"),
    [("label_smoothing=0.1", "tokens"), ('reduction="sum"', "tokens"), ("", "F.one_hot(tokens, 5000).float()")],
)
def test_a_loss_that_is_another_one_is_left(settings: str, targets: str):
    text = TEACHES.replace("SETTINGS", settings).replace("TARGETS", targets)
    assert edited(text, observed(text)[0], ["chunked_loss"]) == (text, ())


def test_several_edits_of_one_cell_are_made_together():
    text, before = changed(TRAINS.replace("LAYERS", BLOCKS), "checkpoint", "foreach_off", "retain_graph", "set_to_none")
    assert "    lr=1e-3, foreach=False)" in text or "lr=0.001, foreach=False)" in text
    assert "loss.backward()" in text and "optimizer.zero_grad()" in text
    assert run(text)[1] < 0.8 * before["peak"]


def test_a_file_is_mapped(tmp_path):
    path = str(tmp_path / "weights.pt")
    torch.save({"a": torch.ones(1000)}, path)
    text, done = edited(f"weights = torch.load({path!r})\n", {}, ["mmap_loading"])
    assert done == ("mmap_loading",) and text == f"weights = torch.load({path!r}, mmap=True)\n"
    assert run(text)[0]["weights"]["a"].sum() == 1000
    assert edited(text, {}, ["mmap_loading"]) == (text, ())


NORMED = "*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(6)), nn.Linear(64, 10)"
AGAIN = "F.cross_entropy(model(torch.ones(1, 64)), torch.ones(1, dtype=int)).backward()\n"
UNWRITABLE = {
    "two optimizers": ("fused", TRAINS + "other = torch.optim.SGD(model.parameters(), lr=1.0)\nother.step()\n"),
    "gradients that are clipped": ("step_in_backward", TRAINS + "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"),
    "two backwards for a step": ("step_in_backward", TRAINS + AGAIN),
    "layers that keep statistics": ("checkpoint_sequential", TRAINS.replace("LAYERS", NORMED)),
    "two models": ("offload", TRAINS + "twin = nn.Linear(64, 64)\ntwin(torch.ones(1, 64))\n"),
    "a text over several lines": (
        "no_grad",
        SERVES.replace("    answers", '    """\n    a batch\n    """\n    answers'),
    ),
    "a keyword that is there": ("set_to_none", TRAINS.replace("set_to_none=False", "")),
}


@pytest.mark.parametrize(("name", "cell"), UNWRITABLE.items())
def test_what_cannot_be_written_leaves_the_cell_as_it_was(name: str, cell: tuple[str, str]):
    technique, text = cell
    text = text.replace("LAYERS", BLOCKS)
    assert edited(text, observed(text)[0], [technique]) == (text, ()), name


def test_every_edit_is_tried_here_or_with_a_language_model():
    assert {*TRAINING, *SERVING, "mmap_loading", "chunked_loss"} == EDITS.keys()


@pytest.mark.parametrize("text", ["model(x", "%time model(x)", "", "\0"])
def test_a_cell_that_is_no_python_is_left_as_it_is(text: str):
    assert edited(text, {}, list(EDITS)) == (text, ())
    with pytest.raises((SyntaxError, ValueError)):
        ast.parse(text or "(")
