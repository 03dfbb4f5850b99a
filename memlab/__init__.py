"""memlab: a memory lab inside Jupyter for people who train PyTorch models.

%load_ext memlab            then put %%memtrack on a cell
with memlab.track("baseline") as run: ...
print(run.report())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

# Name -> the module it lives in; modules are imported on first use, which keeps `import memlab` cheap.
_PUBLIC = {
    "BudgetExceeded": "memlab.errors",
    "Lab": "memlab.lab",
    "MemlabError": "memlab.errors",
    "Run": "memlab.api.run",
    "Trace": "memlab.trace",
    "Card": "memlab.prediction.cards",
    "Prediction": "memlab.api.prediction",
    "advise": "memlab.api.advise",
    "calibrate": "memlab.prediction.calibration",
    "cards": "memlab.prediction.cards",
    "compare": "memlab.api.compare",
    "doctor": "memlab.api.doctor",
    "explain_oom": "memlab.api.oom",
    "fit": "memlab.api.fit",
    "last_run": "memlab.api.runs",
    "ledger": "memlab.api.ledger",
    "load": "memlab.api.runs",
    "max_batch": "memlab.api.largest_batch",
    "predict": "memlab.api.predict",
    "ranks": "memlab.api.ranks",
    "release": "memlab.api.oom",
    "runs": "memlab.api.runs",
    "scaling": "memlab.api.scaling",
    "size": "memlab.api.size",
    "techniques": "memlab.saving_techniques",
    "track": "memlab.api.track",
    "who": "memlab.api.who",
    "workloads": "memlab.workloads",
}

__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension", *_PUBLIC]

if TYPE_CHECKING:
    from memlab import workloads as workloads
    from memlab.api.advise import advise as advise
    from memlab.api.compare import compare as compare
    from memlab.api.doctor import doctor as doctor
    from memlab.api.fit import fit as fit
    from memlab.api.largest_batch import max_batch as max_batch
    from memlab.api.ledger import ledger as ledger
    from memlab.api.oom import explain_oom as explain_oom
    from memlab.api.oom import release as release
    from memlab.api.predict import predict as predict
    from memlab.api.prediction import Prediction as Prediction
    from memlab.api.ranks import ranks as ranks
    from memlab.api.run import Run as Run
    from memlab.api.runs import last_run as last_run
    from memlab.api.runs import load as load
    from memlab.api.runs import runs as runs
    from memlab.api.scaling import scaling as scaling
    from memlab.api.size import size as size
    from memlab.api.track import track as track
    from memlab.api.who import who as who
    from memlab.errors import BudgetExceeded as BudgetExceeded
    from memlab.errors import MemlabError as MemlabError
    from memlab.lab import Lab as Lab
    from memlab.prediction.calibration import calibrate as calibrate
    from memlab.prediction.cards import Card as Card
    from memlab.prediction.cards import cards as cards
    from memlab.saving_techniques import techniques as techniques
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
