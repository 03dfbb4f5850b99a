"""`memlab.predict`, `max_batch` and `fit` as a user calls them: in a real child process, without a GPU."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import memlab
from memlab.errors import MemlabError, PredictionError
from memlab.trace import Trace
from memlab.units import GiB, MiB

WIDTH = 1024
PARAMETER = (WIDTH * WIDTH + WIDTH) * 4
WORKSPACE = 8_519_680
CARD = memlab.Card(
    "a card", 8 * GiB, (8, 0), context_bytes=(100 * MiB, 200 * MiB), usable_bytes=8 * GiB, usable_high_bytes=8 * GiB
)


def training(batch: int = 64, layers: int = 4):
    """A step that builds and trains on "cuda"."""

    def step() -> None:
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)]).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            model(torch.ones(batch, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


@pytest.fixture(scope="module")
def prediction() -> memlab.Prediction:
    return memlab.predict(training(), CARD, name="training")


def test_a_prediction_is_a_run_with_intervals(prediction):
    assert memlab.runs["training"] is prediction
    assert prediction.fits == "yes"
    assert prediction.card == CARD
    held = 4 * PARAMETER * 3  # parameters, gradients, momentum
    assert held + 2 * WORKSPACE < prediction.peak_allocated_bytes < held + 2 * WORKSPACE + 8 * MiB
    low, high = prediction.peak_device_bytes
    assert prediction.peak_reserved_bytes + 90 * MiB < low < high < prediction.peak_reserved_bytes + 220 * MiB
    assert prediction.margin_bytes == (8 * GiB - high, 8 * GiB - low)
    shares = prediction.breakdown()
    assert shares["parameter"] == shares["optimizer"] == 4 * PARAMETER
    assert sum(shares.values()) == prediction.peak_allocated_bytes
    assert prediction.breakdown(by="tensor")["workspace of cuBLAS"] == 2 * WORKSPACE


def test_it_says_that_it_is_one_and_what_it_assumed(prediction):
    text = str(prediction)
    assert "Predicted, nothing ran on a card: fits on a card" in text
    assert "pretend CUDA" in text
    assert "assumed:" in text
    assert repr(prediction).startswith("<Prediction 'training': fits on a card: needs ")
    assert prediction.report().title == "training · predicted for a card"
    assert "image/svg+xml" in prediction.report().figure_bundle()


def test_it_is_kept_in_a_file(prediction, tmp_path):
    again = memlab.load(prediction.save(tmp_path / "p.memlab"))
    assert isinstance(again, memlab.Prediction)
    assert (again.fits, again.peak_device_bytes, again.card) == (prediction.fits, prediction.peak_device_bytes, CARD)
    with pytest.raises(PredictionError, match="predict it again"):
        again.for_card("T4")


def test_another_card_is_foretold_from_the_same_requests(prediction):
    small = memlab.Card("small", 64 * MiB, (8, 0), 0, 64 * MiB, 64 * MiB)
    other = prediction.for_card(small)
    assert other.fits == "no"
    assert other.allocated_bytes == prediction.allocated_bytes
    assert "CUDA out of memory" in other.out_of_memory
    assert "does not fit on small" in str(other)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    parts = [tensor.detach().numpy().tobytes() for tensor in tensors] + [torch.get_rng_state().numpy().tobytes()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_what_the_step_uses_stays_as_it_is():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    before, weight = state_of(model, optimizer), model.weight
    kept = []

    def step() -> None:
        kept.append(torch.randn(3))
        model.to("cuda")
        model(torch.ones(1, 8, device="cuda")).sum().backward()
        optimizer.step()

    assert memlab.predict(step, CARD).peak_allocated_bytes > 0
    assert state_of(model, optimizer) == before
    assert model.weight is weight
    assert weight.device.type == "cpu"
    assert not kept


def test_a_step_that_fails_gives_one_line_and_its_traceback():
    def step() -> None:
        torch.ones(2, device="cuda") @ torch.ones(3, device="cuda")

    with pytest.raises(PredictionError, match="failed where it was rehearsed: RuntimeError") as raised:
        memlab.predict(step, CARD)
    assert "\n" not in str(raised.value).strip()
    assert any("in step" in note for note in raised.value.__notes__)


def test_where_the_card_is_full_it_goes_on_or_meets_the_error():
    small = memlab.Card("small", 256 * MiB, (8, 0), 0, 256 * MiB, 256 * MiB)

    def step() -> None:
        try:
            torch.ones(400 * MiB, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            torch.ones(40 * MiB, dtype=torch.uint8, device="cuda")

    assert memlab.predict(step, small).fits == "no"
    caught = memlab.predict(step, small, raises_oom=True)
    assert caught.fits == "yes"
    assert caught.peak_allocated_bytes == 40 * MiB
    assert caught.allocated_bytes == (40 * MiB, 40 * MiB)
    assert "fits on small, as it catches 1 out-of-memory error" in str(caught)


def test_a_step_that_never_asks_the_card_is_told_so():
    found = memlab.predict(lambda: torch.ones(1000, 1000) @ torch.ones(1000, 1000), CARD)
    assert 'asked nothing of a card: is it written for "cuda"?' in str(found)
    assert "fits on" not in str(found)
    with pytest.raises(PredictionError, match="with a batch of 1 the step asked nothing"):
        memlab.max_batch(lambda batch: lambda: torch.ones(batch), CARD)


async def pauses() -> None:
    """A step that would never be awaited."""


def yields():
    """A step that would never be gone through."""
    yield


@pytest.mark.parametrize(
    ("step", "card", "text"),
    [
        (None, "T4", "needs a function without arguments, got NoneType"),
        (lambda: None, "no such card", "no card is known as 'no such card'"),
        (lambda: None, 8, "no card is known|below"),
        (pauses, "T4", "has `async` or `yield` does nothing"),
        (yields, "T4", "has `async` or `yield` does nothing"),
    ],
)
def test_bad_input_is_refused_in_one_line(step, card, text):
    with pytest.raises(MemlabError, match=text):
        memlab.predict(step, card)


@pytest.mark.parametrize(
    ("conf", "text"),
    [("hello", "not an allocator setting"), (3, "conf is a text"), ("backend:cudaMallocAsync", "not sim")],
)
def test_a_setting_that_makes_no_sense_is_no_failure_of_the_step(conf, text):
    with pytest.raises(PredictionError, match=f"^conf:? .*{text}|^{text}"):
        memlab.predict(lambda: None, CARD, conf=conf)


def test_the_environments_setting_is_named(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "no_such_thing:1")
    with pytest.raises(PredictionError, match="PYTORCH_CUDA_ALLOC_CONF: unknown allocator setting"):
        memlab.predict(lambda: None, CARD)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "no_such_thing:2")
    with pytest.raises(PredictionError, match="PYTORCH_ALLOC_CONF: unknown allocator setting"):
        memlab.predict(lambda: None, CARD)


@pytest.mark.fakegpu
@pytest.mark.parametrize("said", ["True", "False"])
def test_of_two_settings_in_the_environment_the_one_that_counts_is_read(monkeypatch, said):
    """The authority is PyTorch's own CUDA allocator."""
    other = {"True": "False", "False": "True"}[said]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{said}")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{other}")
    ask = "import torch; torch.empty(1, device='cuda'); print(torch.cuda.memory._snapshot()['allocator_settings'])"
    there = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert f"'expandable_segments': {said}" in there
    assert memlab.predict(lambda: None, CARD).conf == f"expandable_segments:{said}"


def test_what_every_child_needs_is_imported_once_before():
    code = "import sys, memlab; memlab.predict(lambda: None, 'T4'); print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"


def test_a_hanging_step_ends_at_its_limit():
    def step() -> None:
        while True:
            pass

    with pytest.raises(PredictionError, match="stopped after"):
        memlab.predict(step, CARD, limit_s=1.5)


def test_the_largest_batch_is_the_last_that_fits():
    card = memlab.Card("small", 512 * MiB, (8, 0), 0, 512 * MiB, 512 * MiB)

    def make_step(batch: int):
        return lambda: torch.ones(batch * MiB, dtype=torch.uint8, device="cuda")

    before = list(memlab.runs)
    found = memlab.max_batch(make_step, card)
    assert list(memlab.runs) == before  # its trials are nobody's runs
    assert 512 * 0.97 < int(found) <= found.perhaps <= 512 * 1.03
    answers = {one.batch: one.fits for one in found.tried}
    assert answers[found.batch] == "yes"
    assert answers[found.batch + 1] != "yes"
    assert len(answers) < 30
    assert str(found).startswith(f"largest batch on small: {found.batch}")
    assert "no more were tried" not in str(found)
    few = memlab.max_batch(make_step, card, at_most=3)
    assert few.batch == 3
    assert str(few).splitlines()[0] == "largest batch on small: 3 (no more were tried: at_most is 3)"
    assert memlab.max_batch(lambda batch: make_step(600), card).batch == 0


def test_a_batch_that_fails_is_named():
    def make_step(batch: int):
        return lambda: torch.ones(1 // (batch < 2), device="cuda")

    with pytest.raises(
        PredictionError, match="with a batch of 2 the step failed where it was rehearsed: ZeroDivisionError"
    ):
        memlab.max_batch(make_step, CARD)
    with pytest.raises(PredictionError, match=r"make_step\(1\) must give a function to predict, got NoneType"):
        memlab.max_batch(lambda batch: None, CARD)


def test_a_run_against_all_cards(prediction):
    table = memlab.fit(prediction)
    assert len(table) == len(memlab.cards)
    usable = [row.usable_bytes for row in table.rows]
    assert usable == sorted(usable)
    assert table["T4"].fits == "yes"
    frame = table.to_pandas()
    assert list(frame["fits"]) == [row.fits for row in table.rows]
    assert np.array_equal(frame["margin_low_bytes"], frame["usable_low_bytes"] - frame["needs_high_bytes"])
    assert "too close" not in str(memlab.fit(prediction, ["T4"]))


def test_a_run_of_the_cpu_is_not_fitted():
    with memlab.track("on the cpu", show=False) as run:
        torch.ones(10)
    with pytest.raises(PredictionError, match="measured on the CPU"):
        memlab.fit(run)
    assert isinstance(run.trace, Trace)


def test_a_prediction_becomes_a_snapshot_of_pytorch_and_comes_back(prediction, tmp_path):
    path = prediction.save(tmp_path / "foretold.pickle")
    again = memlab.load(path)
    assert again.peak_allocated_bytes == prediction.peak_allocated_bytes
    assert again.peak_reserved_bytes == prediction.peak_reserved_bytes
    assert again.breakdown()["parameter"] == 4 * PARAMETER


@pytest.mark.fakegpu
def test_what_lies_on_a_real_card_is_on_the_predicted_one_and_stays_as_it_is():
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    whole = torch.ones(64, WIDTH, device="cuda")
    part = whole[:32]

    def step() -> None:
        model(part).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # autograd's thread for the card is not in the child: there a real tensor's backward would wait for ever
    graph = model(whole).sum()
    before = torch.cuda.memory_stats(), [one.data_ptr() for one in model.parameters()], whole.data_ptr()
    found = memlab.predict(step, CARD, limit_s=60)
    assert before == (torch.cuda.memory_stats(), [one.data_ptr() for one in model.parameters()], whole.data_ptr())
    assert found.breakdown()["parameter"] == PARAMETER
    assert found.breakdown()["optimizer"] == 2 * PARAMETER
    del graph
    with memlab.track("measured", show=False) as measured:
        step()
    assert abs(found.peak_allocated_bytes - measured.peak_allocated_bytes) < 1 * MiB
    assert any("CUDA tensors that were there before" in text for text in found.assumptions)
    assert any("no backward through it" in text for text in found.assumptions)


def test_an_averaged_model_is_on_the_card():
    def step() -> None:
        model = nn.Linear(WIDTH, WIDTH).cuda()
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for _ in range(2):
            average.update_parameters(model)

    assert memlab.predict(step, CARD).peak_allocated_bytes >= 2 * PARAMETER


def test_an_out_of_memory_that_is_the_last_thing_is_in_the_trace():
    small = memlab.Card("small", 256 * MiB, (8, 0), 0, 256 * MiB, 256 * MiB)

    def step() -> None:
        torch.ones(100 * MiB, dtype=torch.uint8, device="cuda")
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            torch.ones(400 * MiB, dtype=torch.uint8, device="cuda")

    found = memlab.predict(step, small, raises_oom=True)
    assert found.trace.made_by.device(0).num_ooms == 1


def test_who_would_hold_the_device() -> None:
    found = memlab.predict(lambda: torch.empty(8 << 20, device="cuda"), card="RTX 4060")
    shares = found.breakdown(of="device")
    assert sum(shares.values()) == found.peak_device_bytes[0]
    assert shares["context"] == found.peak_device_bytes[0] - found.peak_reserved_bytes > 0
