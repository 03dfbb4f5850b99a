"""`memlab.predict`, `max_batch` and `fit` as a user calls them: in a real child process, without a GPU."""

from __future__ import annotations

import contextlib
import gc
import re
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from processes import python
from torch import nn

import memlab
from memlab.api import largest_batch
from memlab.api import predict as step_module
from memlab.api.display import Progress
from memlab.api.predict import StepToPredict, predict_step
from memlab.api.prediction import smallest_card
from memlab.errors import MemlabError, PredictionError
from memlab.prediction import child, dry_run
from memlab.prediction.child import Child
from memlab.prediction.forecast import forecast
from memlab.units import UNBOUNDED, ByteRange, GiB, MiB

WIDTH = 1024
PARAMETER = (WIDTH * WIDTH + WIDTH) * 4
WORKSPACE = 8_519_680


def card_of(name: str, nbytes: int, context: object = 0, multiprocessors: int = 108) -> memlab.Card:
    return memlab.Card(name, nbytes, (8, 0), context, nbytes, nbytes, multiprocessors)


CARD = card_of("a card", 8 * GiB, (100 * MiB, 200 * MiB))


def takes(mib: int) -> Callable[[], object]:
    """A step that allocates so much on "cuda"."""
    return lambda: torch.ones(mib * MiB, dtype=torch.uint8, device="cuda")


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
    assert "fake CUDA" in text
    assert "assumed:" in text
    assert repr(prediction).startswith("<Prediction 'training': fits on a card: needs ")
    assert prediction.report().title == f"training · predicted: fits a card with {prediction.margin_bytes} to spare"
    assert "image/svg+xml" in prediction.report().figure_bundle()


def test_it_is_kept_in_a_file(prediction, tmp_path):
    again = memlab.load(prediction.save(tmp_path / "p.memlab"))
    assert isinstance(again, memlab.Prediction)
    assert (again.fits, again.peak_device_bytes, again.card) == (prediction.fits, prediction.peak_device_bytes, CARD)
    with pytest.raises(PredictionError, match="predict it again"):
        again.for_card("T4")


def test_another_card_is_predicted_from_the_same_requests(prediction):
    other = prediction.for_card(card_of("small", 64 * MiB))
    assert (other.fits, other.allocated_bytes) == ("no", prediction.allocated_bytes)
    assert "CUDA out of memory" in other.out_of_memory
    assert "does not fit on small" in str(other)


def test_a_step_that_fails_gives_one_line_and_its_traceback():
    def step() -> None:
        torch.ones(2, device="cuda") @ torch.ones(3, device="cuda")

    with pytest.raises(PredictionError, match="raised in the dry run: RuntimeError") as raised:
        memlab.predict(step, CARD)
    assert "\n" not in str(raised.value).strip()
    assert any("in step" in note for note in raised.value.__notes__)


@pytest.mark.parametrize(
    ("mib", "begins"),
    [
        (150, r"Fits small with 1\d\d\.\d to 1\d\d\.\d MiB to spare\. Predicted peak"),
        (254, r"Too close to call on small: [\d.]+ MiB missing to [\d.]+ MiB left\. Predicted peak"),
        (300, r"Does not fit small: 3\d\.\d\d to 5\d\.\d\d MiB missing\. Predicted peak"),
    ],
)
def test_the_first_line_is_the_verdict(mib, begins, tmp_path):
    found = memlab.predict(takes(mib), card_of("small", 256 * MiB))
    again = memlab.load(found.save(tmp_path / "p.memlab"))
    for report in (found.report(), again.report()):
        assert re.match(begins, report.text.splitlines()[0]), report.text.splitlines()[0]
        picture = report.figure_bundle()["image/svg+xml"]
        assert found.verdict in picture and "capacity 256.0 MiB" in picture


def test_the_verdict_on_what_raised_is_a_lower_bound_and_on_nothing_is_none():
    found = memlab.predict(takes(100), card_of("small", 256 * MiB))
    found.note("raised", True)
    assert found.verdict == "ended with an error: needs at least 98.00 MiB of the 256.0 MiB of small"
    assert str(memlab.predict(lambda: None, CARD)).startswith("Allocates nothing on a card")
    assert memlab.Run("measured").verdict == ""


def test_where_the_card_is_full_it_goes_on_or_meets_the_error():
    small = card_of("small", 256 * MiB)

    def step() -> None:
        try:
            takes(400)()
        except torch.cuda.OutOfMemoryError:
            takes(40)()

    assert memlab.predict(step, small).fits == "no"
    caught = memlab.predict(step, small, raises_oom=True)
    assert caught.fits == "yes"
    assert caught.peak_allocated_bytes == 40 * MiB
    assert caught.allocated_bytes == (40 * MiB, 40 * MiB)
    assert "fits on small, as it catches 1 out-of-memory error" in str(caught)


def test_an_error_that_ends_a_step_was_not_caught():
    with pytest.raises(PredictionError) as caught:
        memlab.predict(takes(300), card_of("small", 256 * MiB), raises_oom=True)
    assert "catches" not in str(caught.value)


def test_a_step_that_never_asks_the_card_is_told_so():
    found = memlab.predict(lambda: torch.ones(1000, 1000) @ torch.ones(1000, 1000), CARD)
    assert 'allocated nothing on a card: is it written for "cuda"?' in str(found)
    assert "fits on" not in str(found)
    with pytest.raises(PredictionError, match="with a batch of 1 the step allocated nothing"):
        memlab.max_batch(lambda batch: lambda: torch.ones(batch), CARD)


async def pauses() -> None: ...


def yields():
    yield


@pytest.mark.parametrize(
    ("step", "card", "text"),
    [
        (None, "T4", "needs a function without arguments, got NoneType"),
        (lambda: None, "no such card", "no card is known as 'no such card'"),
        (lambda: None, 8, "no card is known|below"),
        (pauses, "T4", "does nothing for `async` functions"),
        (yields, "T4", "does nothing for `async` functions"),
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


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_environments_setting_is_named(monkeypatch, name):
    monkeypatch.setenv(name, "no_such_thing:1")
    with pytest.raises(PredictionError, match=f"^{name}: unknown allocator setting"):
        memlab.predict(lambda: None, CARD)


@pytest.mark.simulated
@pytest.mark.parametrize("said", ["True", "False"])
def test_of_two_settings_in_the_environment_the_one_that_counts_is_read(monkeypatch, said):
    """The authority is PyTorch's own CUDA allocator."""
    other = {"True": "False", "False": "True"}[said]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{said}")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{other}")
    ask = "import torch; torch.empty(1, device='cuda'); print(torch.cuda.memory._snapshot()['allocator_settings'])"
    assert f"'expandable_segments': {said}" in python("-c", ask)
    assert memlab.predict(lambda: None, CARD).conf == f"expandable_segments:{said}"


def test_what_every_child_needs_is_imported_once_before():
    names = "'torch._dynamo', 'torch._decomp.decompositions_for_jvp'"
    code = f"import sys, memlab; memlab.predict(lambda: None, 'T4'); print({{{names}}} <= sys.modules.keys())"
    assert python("-c", code) == "True\n"


def test_a_hanging_step_ends_at_its_limit():
    def step() -> None:
        while True:
            pass

    with pytest.raises(PredictionError, match="stopped after"):
        memlab.predict(step, CARD, limit_s=1.5)


def test_the_largest_batch_is_the_last_that_fits():
    before = list(memlab.runs)
    found = memlab.max_batch(lambda batch: takes(16 * batch), card_of("small", 128 * MiB))
    assert list(memlab.runs) == before  # its trials are nobody's runs
    assert (int(found), found.perhaps) == (7, 8)  # 2 % of *reserved* are too close to call
    assert [(one.batch, one.fits) for one in found.tried] == [
        (1, "yes"), (7, "yes"), (8, "close"), (9, "no"), (16, "no")
    ]  # fmt: skip
    assert str(found).startswith("Largest batch on small: 7; 8 is too close to call\n")
    assert "128.0 MiB usable" in found.svg() and "largest: 7" in found.svg()
    assert found.scene().words == found.text
    marks = [one for one in found.figure.data if one.mode == "markers"]
    assert len(marks) == 5 and all(0 < one.y[0] < found.figure.layout.yaxis.range[1] for one in marks)


def test_while_it_searches_each_line_names_its_batch(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(Progress, "write", lambda self, line, more=None: lines.append(line))
    found = memlab.max_batch(lambda batch: takes(16 * batch), card_of("small", 128 * MiB))
    named = [re.findall(r"small with a batch of (\d+)", line) for line in lines]
    assert all(named) and {int(one) for (one,) in named} == {one.batch for one in found.tried}


@pytest.mark.parametrize(("yes", "close"), [(0, 0), (0, 1), (0, 5), (1, 1), (7, 9), (30, 100), (64, 64)])
def test_no_batch_is_predicted_that_is_larger_than_one_that_does_not_fit(monkeypatch, yes, close):
    failed: list[int] = []

    def predicted(make_step, batch, *rest):
        assert not failed or batch < min(failed)
        fits = "yes" if batch <= yes else "close" if batch <= close else "no"
        failed.extend([batch] * (fits == "no"))
        return SimpleNamespace(fits=fits, peak_device_bytes=ByteRange(batch, batch), trace=SimpleNamespace(notes={}))

    monkeypatch.setattr(largest_batch, "predicted_batch", predicted)
    found = memlab.max_batch(lambda batch: None, CARD)
    assert (found.batch, found.perhaps) == (yes, max(yes, close))
    title = str(found).splitlines()[0]
    assert title.startswith(f"Largest batch on a card: {yes}" if yes else "No batch fits on a card")
    assert (f"; {yes + 1} is too close" in title) == (close == yes + 1)
    failed.clear()
    few = memlab.max_batch(lambda batch: None, CARD, at_most=max(yes, 1))
    assert ("(no larger batch was tried: at_most is" in str(few)) == (yes > 0 or close > 0)


def test_a_card_without_multiprocessors_covers_what_similar_cards_would_take():
    """The scratch buffers of `sum(0)`, for the gradients of biases, depend on them: 26 % of *reserved* here."""

    def step() -> None:
        net = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024)).cuda()
        net(torch.ones(4096, 2048, device="cuda")).sum().backward()

    def on(multiprocessors: int) -> memlab.Prediction:
        card = memlab.Card("mine", 24 * GiB, (8, 9), 0, 24 * GiB, 24 * GiB, multiprocessors)
        return memlab.predict(step, card)

    unknown, fewest, most = on(0), on(58), on(128)  # L4 and RTX 4090
    assert fewest.reserved_bytes != most.reserved_bytes
    assert unknown.reserved_bytes.low <= fewest.reserved_bytes.low
    assert most.reserved_bytes.high <= unknown.reserved_bytes.high
    assert any("multiprocessors as" in text and ", or between " in text for text in unknown.assumptions)
    again = unknown.for_card(unknown.card)
    assert (again.reserved_bytes, again.allocated_bytes) == (unknown.reserved_bytes, unknown.allocated_bytes)
    assert again.for_card(unknown.card).reserved_bytes == unknown.reserved_bytes
    assert memlab.fit(unknown, [unknown.card]).rows[0].needs_bytes == unknown.peak_device_bytes


def test_a_cache_that_fills_what_is_free_covers_every_size_of_the_context():
    def fills() -> None:
        free, _ = torch.cuda.mem_get_info()
        torch.empty(free // 2, dtype=torch.uint8, device="cuda")

    def prints() -> None:
        print(torch.cuda.mem_get_info())
        torch.empty(MiB, device="cuda")

    card = card_of("mine", 8 * GiB, (200 * MiB, 600 * MiB))
    halves = ByteRange(4 * GiB - 300 * MiB, 4 * GiB - 100 * MiB)
    filled, printed = memlab.predict(fills, card), memlab.predict(prints, card)
    assert filled.allocated_bytes == halves
    assert printed.allocated_bytes == ByteRange(4 * MiB, 4 * MiB)
    told = [str(memlab.fit(one)) for one in (filled, printed)]
    assert ["by what is free on mine" in one for one in told] == [True, False]
    assert ["smallest GPU" in one for one in told] == [False, True]


def test_the_smallest_card_of_what_fills_what_is_free_was_predicted_there():
    def fills() -> None:
        weights = torch.empty(9 * GiB, dtype=torch.uint8, device="cuda")
        cache = torch.empty(torch.cuda.mem_get_info()[0] // 2, dtype=torch.uint8, device="cuda")
        del weights, cache

    found = smallest_card(memlab.predict(fills, "A100 40GB"), lambda card: memlab.predict(fills, card))
    assert found is not None and found.fits == "yes"
    smaller = [card for card in memlab.cards.values() if card.usable_bytes < found.card.usable_bytes]
    assert memlab.predict(fills, max(smaller, key=lambda card: card.usable_bytes)).fits != "yes"
    assert found.allocated_bytes.high < 12 * GiB  # as on that card, not on the one it was predicted for first


VAGUE = memlab.Card("mine", 24 * GiB, (8, 6), 0, 24 * GiB, 24 * GiB, 0)
"""Its multiprocessors are not known: two ends are predicted as well."""


def not_covered(prediction: memlab.Prediction) -> list[str]:
    return [note for note in prediction.trace.notes["notes"] if note.endswith("the range does not cover it.")]


def test_a_step_that_starts_programs_does_so_once():
    def step() -> None:
        subprocess.run(["sh", "-c", "true"], check=True)
        torch.ones(MiB, device="cuda")

    notes = not_covered(memlab.predict(step, VAGUE))
    assert len(notes) == 2
    assert all("multiprocessors it was not predicted, as the program started others" in note for note in notes)


def test_the_limit_is_for_all_children_together(monkeypatch):
    limits: list[float] = []
    run = Child.run
    monkeypatch.setattr(Child, "run", lambda child, *args: limits.append(child.limit_s) or run(child, *args))
    memlab.predict(takes(4), VAGUE, limit_s=100)
    assert limits[0] == 100 > limits[1] > limits[2] > 0
    clock = iter([0.0, 50.0, 101.0])
    monkeypatch.setattr(dry_run, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    limits.clear()
    (note,) = not_covered(memlab.predict(takes(4), VAGUE, limit_s=100))
    assert limits == [100, 50]
    assert note.partition(" multiprocessors ")[2] == "there was no time to predict it: the range does not cover it."


def test_news_of_every_child_go_to_who_asked_for_them(capsys):
    heard: list[int] = []
    step = lambda: child.current().send({"done": 1})  # noqa: E731
    predict_step(StepToPredict(step, VAGUE, None, "", on_news=lambda news: heard.append(news.get("done", 0))))
    assert sum(heard) == 3
    assert capsys.readouterr() == ("", "")


def test_the_limit_is_for_all_batches_together(monkeypatch):
    clock = iter([0.0, 0.0, 4.0, 11.0])
    monkeypatch.setattr(step_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    limits: list[float] = []

    def predicted(make_step, number, limit_s, predicting):
        limits.append(limit_s)
        return SimpleNamespace(fits="yes", peak_device_bytes=ByteRange.exact(number), trace=SimpleNamespace(notes={}))

    monkeypatch.setattr(largest_batch, "predicted_batch", predicted)
    with pytest.raises(PredictionError, match="limit_s of 10 s was over before a batch of 256 was predicted"):
        memlab.max_batch(lambda number: None, CARD, limit_s=10)
    assert limits == [10, 6]


def test_a_run_that_raised_fits_nowhere_for_certain():
    whole = memlab.predict(takes(300), "8GiB")
    assert whole.trace.notes["raised"] is False
    whole.note("raised", True)
    table = memlab.fit(whole, [memlab.Card("tiny", 256 * MiB, (8, 6), 0, multiprocessors=28), "T4", "H100"])
    assert [row.fits for row in table.rows] == ["no", "unknown", "unknown"]
    assert table["T4"].needs_bytes.high == UNBOUNDED
    title, advice = str(table).splitlines()[0], str(table).splitlines()[2]
    assert title.endswith("the run raised: too small are 1 of 3 GPUs, unknown the others")
    assert advice.startswith("Its whole step needs at least what is shown") and advice.endswith("then memlab fit.")
    assert "  fits" not in str(table)
    assert table.to_pandas()["needs_high_bytes"].isna().all()


def test_a_batch_that_fails_is_named():
    def make_step(batch: int):
        return lambda: torch.ones(1 // (batch < 2), device="cuda")

    with pytest.raises(PredictionError, match="with a batch of 16 the step raised in the dry run: ZeroDivisionError"):
        memlab.max_batch(make_step, CARD)
    with pytest.raises(PredictionError, match=r"make_step\(1\) must give a function to predict, got NoneType"):
        memlab.max_batch(lambda batch: None, CARD)


def test_the_smallest_gpu_has_kernels_like_those_that_were_predicted(prediction):
    """CARD has those of Ampere or newer: a T4 on which the same requests fit is in the table, and is no answer."""
    assert CARD.compute_capability >= (8, 0)
    table = memlab.fit(prediction, on=["GTX 1660", "T4", "RTX 4090"])
    assert {row.fits for row in table.rows} == {"yes"}
    assert "smallest GPU: RTX 4090" in str(table)
    assert "kernels of GPUs below compute capability 8.0 may need more: predict for one of them" in str(table)
    table = memlab.fit(prediction, on=["GTX 1660", "T4"])
    assert f"fits only GPUs that are older than {CARD.name}, whose kernels may need more: predict for one" in str(table)


def test_a_run_against_all_cards(prediction):
    table = memlab.fit(prediction)
    assert len(table) == len(memlab.cards)
    smallest, fits = table.rows[0], sum(row.fits == "yes" for row in table.rows)
    size = f"{smallest.card.total_bytes / GiB:g} GiB"
    assert str(table).startswith(f"training · smallest GPU: {smallest.card.name}, {size}; {fits} of {len(table)} fit\n")
    usable = [row.usable_bytes for row in table.rows]
    assert usable == sorted(usable)
    assert table["T4"].fits == "yes"
    frame = table.to_pandas()
    assert list(frame["fits"]) == [row.fits for row in table.rows]
    assert np.array_equal(frame["margin_low_bytes"], frame["usable_low_bytes"] - frame["needs_high_bytes"])
    assert "too close" not in str(memlab.fit(prediction, ["T4"]))


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "per_process_memory_fraction:0.5"])
def test_what_is_simulated_for_one_card_counts_for_others_only_where_it_is_the_same(conf):
    def step() -> None:
        for width in (900, 1300, 1700):  # the cache is too small for the next one, and is released on a full card
            weight = torch.zeros(width, 1024, 1024, device="cuda")
            (weight[: width // 2] * 2).sum().item()
            del weight

    found = memlab.predict(step, "RTX 4060")
    table = memlab.fit(found, conf=conf)
    assert {row.fits for row in table.rows} >= {"yes", "no"}
    for row in table.rows:
        alone = forecast(found.requests(), row.card, conf, others=found.others)
        assert (row.fits, row.needs_bytes, row.margin_bytes) == (alone.fits, alone.device_bytes, alone.margin_bytes)


def test_the_assumptions_of_the_dry_run_stand_below_the_table():
    def step() -> None:
        x = torch.ones(100, device="cuda")
        x[x > 0].sum()

    table = memlab.fit(memlab.predict(step, "8GiB"), ["T4"])
    assert "kernels are those of 8.00 GiB card" in str(table)
    assert "mask: assumed 100, at most 100" in str(table)
    assert "PyTorch sees 95%" not in str(table)  # which is about the card of the dry run


def test_a_run_of_the_cpu_is_not_fitted():
    with memlab.track("on the cpu", show=False) as run:
        torch.ones(10)
    with pytest.raises(PredictionError, match="measured on the CPU"):
        memlab.fit(run)


def test_a_prediction_becomes_a_snapshot_of_pytorch_and_comes_back(prediction, tmp_path):
    path = prediction.save(tmp_path / "predicted.pickle")
    again = memlab.load(path)
    assert again.peak_allocated_bytes == prediction.peak_allocated_bytes
    assert again.peak_reserved_bytes == prediction.peak_reserved_bytes
    assert again.breakdown()["parameter"] == 4 * PARAMETER


@pytest.mark.simulated
def test_what_lies_on_a_real_card_is_on_the_predicted_one_and_stays_as_it_is():
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    whole = torch.ones(64, WIDTH, device="cuda")
    part = whole[:32]

    def step() -> None:
        model(part).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # autograd's thread for the card is not in the child: there a real tensor's backward would wait forever
    graph = model(whole).sum()
    before = torch.cuda.memory_stats(), [one.data_ptr() for one in model.parameters()], whole.data_ptr()
    found = memlab.predict(step, CARD, limit_s=300)
    assert before == (torch.cuda.memory_stats(), [one.data_ptr() for one in model.parameters()], whole.data_ptr())
    assert found.breakdown()["parameter"] == PARAMETER
    assert found.breakdown()["optimizer"] == 2 * PARAMETER
    del graph
    with memlab.track("measured", show=False) as measured:
        step()
    assert abs(found.peak_allocated_bytes - measured.peak_allocated_bytes) < 1 * MiB
    assert any("CUDA tensors that were there before" in text for text in found.assumptions)
    assert any("no backward goes through it" in text for text in found.assumptions)


def test_an_averaged_model_is_on_the_card():
    def step() -> None:
        model = nn.Linear(WIDTH, WIDTH).cuda()
        swa = torch.optim.swa_utils
        average = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
        for _ in range(2):
            average.update_parameters(model)

    assert memlab.predict(step, CARD).peak_allocated_bytes >= 2 * PARAMETER


def test_an_out_of_memory_that_is_the_last_thing_is_in_the_trace():
    def step() -> None:
        takes(100)()
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            takes(400)()

    found = memlab.predict(step, card_of("small", 256 * MiB), raises_oom=True)
    assert found.trace.made_by.device(0).num_ooms == 1


def test_who_would_hold_the_device() -> None:
    found = memlab.predict(takes(32), card="RTX 4060")
    shares = found.breakdown(of="device")
    assert sum(shares.values()) == found.peak_device_bytes[0]
    assert shares["context"] == found.peak_device_bytes[0] - found.peak_reserved_bytes > 0


@pytest.mark.simulated
def test_what_only_a_graph_refers_to_lives_as_long_as_its_result():
    def made() -> dict[str, Any]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))).cuda()
        seen: list[Any] = []
        for layer in model:
            layer.register_forward_hook(lambda module, args, output: seen.append(output))
        out = model(torch.ones(4096, WIDTH, device="cuda"))
        seen.clear()  # PyTorch keeps the Python objects of what the graph saved
        return {"model": model, "out": out}

    def then(names: dict[str, Any], *gone: str) -> int:
        def step() -> None:
            for name in gone:
                del names[name]
            gc.collect()
            torch.empty(512 * MiB, dtype=torch.uint8, device="cuda")

        with memlab.track("measured", show=False) as measured:
            found = memlab.predict(step, CARD, limit_s=300).peak_allocated_bytes
            step()
        assert abs(found - measured.peak_allocated_bytes) < 17 * MiB  # workspaces of cuBLAS
        return found

    kept = then(made(), "model")  # its weights are in the graph
    assert abs(kept - then(made())) < MiB
    assert abs(then(made(), "out", "model") - 512 * MiB) < MiB


@pytest.mark.simulated
def test_what_the_graph_of_a_result_saved_is_on_the_predicted_card_until_the_result_goes():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))).cuda()
    batch = torch.ones(4096, WIDTH, device="cuda")
    made = [model(batch)]  # 16 activations, of which Python knows one

    def more() -> None:
        made.append(model(batch))

    def instead() -> None:
        made.clear()
        made.append(model(batch))

    both = memlab.predict(more, CARD, limit_s=300).peak_allocated_bytes
    one = memlab.predict(instead, CARD, limit_s=300).peak_allocated_bytes
    held = torch.cuda.memory_allocated()
    with memlab.track("measured", show=False) as measured:
        more()
    assert (
        abs(both - measured.peak_allocated_bytes) < 17 * MiB
    )  # workspaces of cuBLAS, of this thread and of autograd's
    assert held > 16 * batch.nbytes and both - one > 14 * batch.nbytes
