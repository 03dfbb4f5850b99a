"""What each technique would save in a Lab, predicted in the background: the figures of its runs, when, and of which job."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from lab_samples import tiny

from memlab import Lab
from memlab.lab import estimates
from memlab.lab.estimates import Estimate, Estimates
from memlab.lab.state import LabChoices, LabState
from memlab.lab.technique_cards import TechniqueCards
from memlab.lab.widgets import close_all
from memlab.lab.worker import execution_lock
from memlab.saving_techniques import techniques
from memlab.units import ByteRange

SAVING = "checkpoint_sequential"
FEW = (SAVING, "accumulation", "in_place", "float32", "fsdp2")


@pytest.fixture(autouse=True)
def few_techniques(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a child process."""
    some = {name: techniques[name] for name in FEW}
    monkeypatch.setattr(estimates, "techniques", _Some(some))


class _Some(dict[str, Any]):
    said = staticmethod(techniques.said)


def made(make: Any = tiny, **state: Any) -> tuple[Estimates, LabState]:
    choices = LabChoices({"tiny": make})
    return Estimates(choices, lambda: None), choices.changed(
        choices.first(), {"card": "RTX 4060", "device": "cpu", **state}
    )


def finished(one: Estimates, state: LabState) -> None:
    one.want(state)
    until = time.monotonic() + 100
    while one.thread is not None and time.monotonic() < until:
        time.sleep(0.02)
    assert one.thread is None


@pytest.fixture(scope="module")
def known() -> Iterator[tuple[Estimates, LabState]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimates, "techniques", _Some({name: techniques[name] for name in FEW}))
        one, state = made()
        finished(one, state)
        yield one, state
        one.close()


def test_the_figures_are_those_of_the_labs_own_predictions(known):
    one, state = known
    lab = Lab(tiny, card="RTX 4060", steps=estimates.STEPS)
    lab.run(techniques=[SAVING])
    before, after = lab.rows
    found = one.of(state, [SAVING])
    assert (found.before_bytes, found.peak_bytes) == (before.peak_bytes, after.peak_bytes)
    assert found.saved_bytes == after.saved_bytes
    assert one.done(state) == (len(FEW), len(FEW))


def test_what_does_not_apply_and_what_replaces_a_pattern_say_so(known):
    one, state = known
    does_not = [one.of(state, [name]) for name in FEW if not one.of(state, [name]).applies]
    assert all(found.text.startswith("does not apply: ") for found in does_not)
    assert "where the pattern that it replaces is used" in one.of(state, ["float32"]).text
    assert one.best(state)[0] != "float32"


def test_the_sentence_follows_the_choice(known):
    one, state = known
    assert one.sentence(state).startswith("As it is: peak ")
    assert "predicted for RTX 4060" in one.sentence(state)
    chosen = dataclasses.replace(state, techniques=(SAVING,))
    assert one.sentence(chosen).startswith(f"With {SAVING}: peak ")
    both = dataclasses.replace(state, techniques=(SAVING, "accumulation"))
    assert one.sentence(both) == f"Predicting {SAVING} + accumulation …"
    finished(one, both)
    assert one.sentence(both).startswith(f"With {SAVING} + accumulation: peak ")


def test_other_settings_are_another_job(known):
    one, state = known
    other = dataclasses.replace(state, card="T4")
    assert one.of(other, []) is None
    assert one.sentence(other) == "Predicting what tiny needs …"


def test_nothing_is_predicted_while_a_cell_runs(monkeypatch):
    one, state = made()
    monkeypatch.setattr(type(execution_lock), "is_free", property(lambda _: False))
    one.want(state)
    time.sleep(0.3)
    assert one.done(state)[0] == 0
    monkeypatch.undo()
    one.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "memlab lab estimates"]


def test_a_child_that_hangs_is_given_up():
    def hanging() -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)  # all its threads

    def stopped() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.status() == psutil.STATUS_STOPPED]

    one, state = made(hanging)
    one.want(state)
    until = time.monotonic() + 100
    while not stopped() and time.monotonic() < until:
        time.sleep(0.05)
    thread = one.thread
    assert stopped()
    one.close()
    assert thread is not None
    assert not thread.is_alive()
    assert not stopped()


def test_work_that_cannot_be_predicted_is_asked_once_and_says_why():
    def broken() -> Any:
        raise ValueError("no data")

    one, state = made(broken)
    finished(one, state)
    assert "cannot be predicted" in one.sentence(state)
    assert "no data" in one.sentence(state)
    assert len(one.peaks) == 1


def test_what_the_work_prints_is_not_shown(capfd):
    def loud() -> Any:
        print("loud")
        return tiny()

    one, state = made(loud)
    finished(one, state)
    assert one.of(state, []).peak_bytes.low > 0
    assert "loud" not in "".join(capfd.readouterr())


def test_cards_have_bars_and_are_ranked_by_what_they_save(known):
    one, state = known
    cards = TechniqueCards({name: techniques[name] for name in FEW}, lambda name, on: None)
    figures = {name: one.of(state, (name,)) for name in FEW}
    cards.show((), {}, figures)
    cards.rank(figures)
    places = [card.children[0].description for card in cards.cells.children]
    saving = [name for name in places if figures[name].applies and not figures[name].of_pattern]
    assert saving == sorted(saving, key=lambda name: -figures[name].share)
    assert places.index(saving[-1]) < places.index("float32")
    text = cards.cards[saving[0]].children[1].value
    assert f"width:{100 * figures[saving[0]].share:.0f}%" in text
    close_all(cards.box)


@pytest.mark.parametrize(
    ("peak", "text"),
    [(40, "saves 60 B (60 %)"), (100, "saves nothing here"), (150, "needs 50 B more (50 %)")],
)
def test_texts(peak, text):
    assert Estimate(ByteRange.exact(peak), ByteRange.exact(100)).text == text
