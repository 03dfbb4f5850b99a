"""memlab: a memory lab inside Jupyter for people who train PyTorch models.

%load_ext memlab            then put %%memtrack on a cell
with memlab.track("baseline") as run: ...
print(run.report())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

# Name -> the module it lives in; nothing is imported before it is asked for, so that `import memlab` costs nothing.
_PUBLIC = {
    "BudgetExceeded": "memlab.errors",
    "Lab": "memlab.lab",
    "MemlabError": "memlab.errors",
    "Run": "memlab.session.run",
    "Trace": "memlab.trace",
    "Card": "memlab.predictor.cards",
    "Prediction": "memlab.session.predict",
    "advise": "memlab.session.advise.ask",
    "calibrate": "memlab.predictor.calibration",
    "cards": "memlab.predictor.cards",
    "compare": "memlab.session.compare",
    "doctor": "memlab.session.doctor",
    "explain_oom": "memlab.session.oom",
    "fit": "memlab.session.fit",
    "last_run": "memlab.session.runs",
    "ledger": "memlab.session.ledger",
    "load": "memlab.session.run",
    "max_batch": "memlab.session.batch",
    "predict": "memlab.session.predict",
    "release": "memlab.session.oom",
    "runs": "memlab.session.runs",
    "size": "memlab.session.size",
    "techniques": "memlab.savings",
    "track": "memlab.session.track",
    "who": "memlab.session.who",
    "workloads": "memlab.workloads",
}

__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension", *_PUBLIC]

if TYPE_CHECKING:
    from memlab import workloads as workloads
    from memlab.errors import BudgetExceeded as BudgetExceeded
    from memlab.errors import MemlabError as MemlabError
    from memlab.lab import Lab as Lab
    from memlab.predictor.calibration import calibrate as calibrate
    from memlab.predictor.cards import Card as Card
    from memlab.predictor.cards import cards as cards
    from memlab.savings import techniques as techniques
    from memlab.session.advise.ask import advise as advise
    from memlab.session.batch import max_batch as max_batch
    from memlab.session.compare import compare as compare
    from memlab.session.doctor import doctor as doctor
    from memlab.session.fit import fit as fit
    from memlab.session.ledger import ledger as ledger
    from memlab.session.oom import explain_oom as explain_oom
    from memlab.session.oom import release as release
    from memlab.session.predict import Prediction as Prediction
    from memlab.session.predict import predict as predict
    from memlab.session.run import Run as Run
    from memlab.session.run import load as load
    from memlab.session.runs import last_run as last_run
    from memlab.session.runs import runs as runs
    from memlab.session.size import size as size
    from memlab.session.track import track as track
    from memlab.session.who import who as who
    from memlab.trace import Trace as Trace


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'memlab' has no attribute {name!r}")
    found = importlib.import_module(module)
    value = found if module == f"memlab.{name}" else getattr(found, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext memlab`: install the magics."""
    from memlab.magics.extension import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext memlab`: leave the shell as it was."""
    from memlab.magics.extension import unload

    unload(shell)
