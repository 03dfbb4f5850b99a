"""The cell of a run that raised, predicted to its end: what it would have needed had it gone on."""

from __future__ import annotations

from memlab.api.advise.subject import OfStep, card_of, gpus_of
from memlab.api.display import Progress
from memlab.api.prediction import Prediction
from memlab.api.run import Run
from memlab.api.ways_out import as_after_release
from memlab.errors import MemlabError
from memlab.prediction.torch_versions import other_version
from memlab.torch_internals.traceback import running_shell

LIMIT_S = 60.0
"""How long the prediction may take."""


def whole_cell_of(run: Run) -> Prediction | None:
    """The prediction of the run's cell, as it would run now; None if it cannot be predicted, or fails there too.

    A child process runs it on a fake GPU like that of the run, and releases first what the failed cell still holds. One that
    needs less than the run had reached is not of the same work, as names of the notebook have changed since: also None.
    """
    card = card_of(run)
    if card is None or not run.cell_text or running_shell() is None:
        return None
    name = f"{run.name} (it raised; its cell predicted to the end)"
    version, devices = other_version(run.trace), gpus_of(run)
    subject = OfStep(name, card, text=run.cell_text, before=as_after_release, torch_version=version, devices=devices)
    with Progress(card.name) as progress:
        tell = lambda text: progress.write(f"predicting {run.name} to its end: {text}")  # noqa: E731
        try:
            found = subject.attempt((), tell, LIMIT_S)
        except MemlabError:
            return None
    assert isinstance(found, Prediction)
    return found if found.allocated_bytes.high >= run.peak_allocated_bytes else None
