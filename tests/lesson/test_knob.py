from __future__ import annotations

import json
import xml.etree.ElementTree as tree

import pytest
import torch
from torch import nn

import memlab
from memlab.errors import MemlabError
from memlab.lesson.knob import Knob
from memlab.units import MiB
from memlab.views.bundle import PLOTLY, SVG


def run(rows: int) -> memlab.Run:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    with memlab.track(f"{rows} rows", device="cpu", show=False) as found:
        model(torch.randn(rows, 64)).square().mean().backward()
    memlab.runs.discard(found)
    return found


@pytest.fixture(scope="module")
def measured() -> dict[int, memlab.Run]:
    return {rows: run(rows) for rows in (64, 256, 1024)}


def test_bars_come_to_the_peaks(measured):
    knob = Knob("rows", measured)
    assert knob.peaks == {rows: one.peak_allocated_bytes for rows, one in measured.items()}
    table = knob.to_pandas()
    assert (table.drop(columns="peak_bytes").fillna(0).sum(axis=1) == table["peak_bytes"]).all()


def test_it_says_where_it_points(measured):
    knob = Knob("rows", measured)
    assert knob.sentence.startswith("rows from 64: ")
    assert knob.turn(256).sentence.startswith("rows 256: peak ") and "times that of 64." in knob.sentence
    assert next(line for line in str(knob).splitlines() if line.startswith("  > ")).split()[1] == "256"


def test_turning_makes_one_bar_strong(measured):
    knob = Knob("rows", measured).turn(256)
    assert all(trace["marker"]["opacity"] == [0.35, 1.0, 0.35] for trace in knob.bundle()[PLOTLY]["data"])
    assert all(trace["marker"]["opacity"] == [1, 1, 1] for trace in Knob("rows", measured).bundle()[PLOTLY]["data"])


def test_the_slider_turns_it_and_the_picture_follows(measured):
    knob, shown = Knob("rows", measured), []

    class Place:
        def update(self, bundle, raw):
            shown.append((len(bundle), bundle["text/plain"].splitlines()[0]))

    knob._place = Place()
    slider = knob.slider()
    slider.value = 1024
    assert knob.at == 1024 and shown == [(1, knob.sentence), (3, knob.sentence)] and "rows 1024" in knob.sentence
    slider.close()


def test_what_it_leaves_in_a_notebook(measured):
    bundle = Knob("rows", measured).turn(64).bundle()
    assert set(bundle) == {PLOTLY, SVG, "text/plain"}
    tree.fromstring(bundle[SVG])
    assert len(json.dumps(bundle)) < 20_000


def test_numbers_of_bytes_and_words_do():
    knob = Knob("dtype", {"float32": 4 * MiB, "<b>": 2 * MiB})
    assert knob.names == ["other"] and "0.50 times the peak" in knob.sentence
    assert "<b>" not in knob.bundle()[SVG] and "<b>" not in json.dumps(knob.bundle()[PLOTLY])


@pytest.mark.parametrize("runs", [{}, {1: 5}, {1: 5, 2: "5"}, {1: 5, 2: True}, {n: n for n in range(30)}])
def test_what_is_no_knob(runs):
    with pytest.raises(MemlabError, match="knob"):
        Knob("rows", runs)


def test_a_value_that_it_does_not_have():
    with pytest.raises(MemlabError, match="has the values 1, 2; got 3"):
        Knob("rows", {1: 5, 2: 6}).turn(3)
