"""Small plain models with a training step, in several sizes, for lessons, tests, benchmarks and the Lab.

`memlab.workloads["gpt"]` is a Workload, `.sized("laptop", batch=4)` a function that returns model, optimizer, batch and loss, which
a `Job` runs. The package is a mapping, name -> Workload. Its functions are plainer: each builds everything and
returns `step`, a callable without arguments; `vgg16` and `vgg19` return the model alone. Nothing here measures anything.

Techniques rely on: equal layers in `blocks` (`nn.Sequential`); ReLU and GELU as modules, not in place; `conv1`, `bn1`,
`relu1`, or conv, norm, ReLU in a row of an `nn.Sequential`; `attend(q, k, v, is_causal)` on every module that mixes positions;
`head`, a linear layer, with `features(...)`, which returns its input (in language models without bias, and tied to the
embedding `token` by the setting `tied`). A model with `job_step(job)` has steps of its own: `gan`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, cast

from memlab.by_name import ByName
from memlab.errors import MemlabError
from memlab.workloads import images, language, others
from memlab.workloads.images import vgg16, vgg19
from memlab.workloads.language import gpt2, transformer
from memlab.workloads.vision import resnet, unet, vgg
from memlab.workloads.workload import SIZES, Workload

__all__ = [
    "SIZES",
    "Workload",
    "Workloads",
    "gpt2",
    "resnet",
    "transformer",
    "unet",
    "vgg",
    "vgg16",
    "vgg19",
    "workloads",
]

KNOWN = {one.name: one for one in (others.MLP, *images.WORKLOADS, *language.WORKLOADS, others.GAN)}


class Workloads(ModuleType, ByName[Workload]):
    """A module that is a mapping, name -> Workload: Python lets a module change its class (data model, 3.3.2.1)."""

    _known = KNOWN

    def _unknown(self, name: str) -> MemlabError:
        return MemlabError(f"there is no workload {name!r:.80}. Known: {', '.join(KNOWN)}.")

    # A module is equal only to itself, whatever it contains: sets and dicts of modules rely on it.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        width = max(map(len, KNOWN))
        return "\n".join(f"{one.name:<{width}}  {one.idea}" for one in KNOWN.values())

    def to_pandas(self) -> Any:
        """One row per workload and size, with its settings."""
        import pandas

        rows = [
            (one.name, size, one.idea, ", ".join(f"{key}={value}" for key, value in settings.items()))
            for one in KNOWN.values()
            for size, settings in one.sizes.items()
        ]
        return pandas.DataFrame(rows, columns=["name", "size", "idea", "settings"]).set_index(["name", "size"])


sys.modules[__name__].__class__ = Workloads
workloads = cast(Workloads, sys.modules[__name__])
"""The package itself, for type checkers, which do not know that it is a mapping."""
