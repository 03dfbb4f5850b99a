from __future__ import annotations

import json
import xml.etree.ElementTree as tree

import pytest
import torch
from torch import nn

import memlab
from memlab.errors import MemlabError
from memlab.lesson import sweep as module
from memlab.lesson.sweep import Sweep
from memlab.units import MiB
from memlab.views.shown import PLOTLY, SVG


def run(rows: int) -> memlab.Run:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    with memlab.track(f"{rows} rows", device="cpu", show=False) as measured:
        model(torch.randn(rows, 64)).square().mean().backward()
    memlab.runs.discard(measured)
    return measured


@pytest.fixture(scope="module")
def measured() -> dict[int, memlab.Run]:
    return {rows: run(rows) for rows in (64, 256, 1024)}


def test_bars_sum_to_the_peaks(measured):
    sweep = Sweep("rows", measured)
    assert sweep.peaks == {rows: one.peak_allocated_bytes for rows, one in measured.items()}
    table = sweep.to_pandas()
    assert (table.drop(columns="peak_bytes").fillna(0).sum(axis=1) == table["peak_bytes"]).all()


def test_the_sentence_the_text_and_the_bars_follow_the_selection(measured):
    sweep = Sweep("rows", measured)
    assert sweep.sentence.startswith("rows: the lowest peak is ") and " at 64, the highest " in sweep.sentence
    assert all(trace["marker"]["opacity"] == [1, 1, 1] for trace in sweep.bundle()[PLOTLY]["data"])
    assert sweep.select(256).sentence.startswith("rows 256: peak ") and "times that of 64." in sweep.sentence
    assert sweep.turn(256).at == sweep.selected == 256  # as it was called before
    assert next(line for line in str(sweep).splitlines() if line.startswith("  > ")).split()[1] == "256"
    bundle = sweep.bundle()
    assert all(trace["marker"]["opacity"] == [0.35, 1.0, 0.35] for trace in bundle[PLOTLY]["data"])
    assert set(bundle) == {PLOTLY, SVG, "text/plain"}
    tree.fromstring(bundle[SVG])
    assert len(json.dumps(bundle)) < 20_000 and "showlegend" not in bundle[PLOTLY]["layout"]


def test_the_picture_follows_the_slider(measured, monkeypatch):
    sweep, shown = Sweep("rows", measured), []

    class Handle:
        def update(self, bundle, raw):
            shown.append((len(bundle), bundle["text/plain"].splitlines()[0]))

    monkeypatch.setattr(module, "display", lambda bundle, **options: Handle())
    sweep._ipython_display_()
    slider = sweep.slider()
    slider.value = 1024
    assert (
        sweep.selected == 1024 and shown == [(1, sweep.sentence), (3, sweep.sentence)] and "rows 1024" in sweep.sentence
    )
    slider.close()


def test_numbers_of_bytes_do_and_texts_are_escaped():
    sweep = Sweep("dtype", {"float32": 4 * MiB, "<b>": 2 * MiB})
    assert sweep.bundle()[PLOTLY]["layout"]["showlegend"] is False  # "other" alone explains nothing
    assert list(sweep.to_pandas().columns) == ["peak_bytes", "other"] and "2.00 times as much" in sweep.sentence
    assert "<b>" not in sweep.bundle()[SVG] and "<b>" not in json.dumps(sweep.bundle()[PLOTLY])


@pytest.mark.parametrize(
    "runs", [{}, {1: 5}, {1: 5, 2: "5"}, {1: 5, 2: True}, {1: 5, 2: -1}, {n: n for n in range(30)}]
)
def test_what_is_no_sweep(runs):
    with pytest.raises(MemlabError, match="sweep"):
        Sweep("rows", runs)


def test_a_value_that_it_does_not_have():
    with pytest.raises(MemlabError, match="has the values 1, 2; got 3"):
        Sweep("rows", {1: 0, 2: 6}).select(3)


def test_a_minimum_between_the_ends_is_named():
    sweep = Sweep("segments", {5: 58 * MiB, 25: 21 * MiB, 250: 68 * MiB})
    expected = "segments: the lowest peak is 21.00 MiB at 25, the highest 68.00 MiB at 250: 3.24 times as much."
    assert sweep.sentence == expected
