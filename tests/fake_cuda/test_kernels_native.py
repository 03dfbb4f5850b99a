"""What CUDA kernels allocate: every call on the simulated GPU, where C++ allocates, and in fake CUDA, event by event."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kernel_calls.known import KNOWN, known
from kernel_calls.run_calls import ordered, settled
from processes import python

pytestmark = pytest.mark.simulated


def side(which: str, module: str, capability: str, folder: Path) -> dict[str, list[str]]:
    output = folder / f"{which}.json"
    command = ("-m", "kernel_calls.run_calls", which, module, output, capability)
    python(*command, gpu={"capability": capability, "total_mb": 81920})
    return json.loads(output.read_text(encoding="utf-8"))


SAMPLE = ("attention", "large", "layers", "programs", "training")
MODULES = (*SAMPLE, "accumulation", "arithmetic", "indexing", "losses", "moves", "optimizers", "recurrent", "switches")
# All calls at 8.0. Where the card decides: the choice of attention and of convolutions, the launch of reductions.
CASES = [
    *((module, "8.0") for module in MODULES),
    *((module, capability) for module in ("attention", "training") for capability in ("7.5", "8.6", "9.0", "12.0")),
]
RELEASE = [pytest.param(*one, marks=pytest.mark.release) for one in CASES[len(SAMPLE) :]]


@pytest.mark.parametrize(("module", "capability"), [*CASES[: len(SAMPLE)], *RELEASE])
def test_kernels_allocate_as_predicted(module, capability, tmp_path):
    there = side("native", module, capability, tmp_path)
    here = side("fake", module, capability, tmp_path)
    assert there.keys() == here.keys()
    reasons = known(module, capability)
    assert not reasons.keys() - there.keys(), "no such call: take it out of kernel_calls/known.py"
    same_order = settled if module == "programs" else ordered
    differing = {name for name in there if same_order(there[name]) != same_order(here[name])}
    text = "\n".join(
        f"{name}\n  there {' '.join(there[name])[:600]}\n  here  {' '.join(here[name])[:600]}"
        for name in sorted(differing - reasons.keys())
    )
    assert not text, f"{len(differing - reasons.keys())} of {len(there)} differ:\n{text[:6000]}"
    assert not reasons.keys() - differing, "equal by now: take it out of kernel_calls/known.py"


def test_what_is_known_belongs_to_a_module_that_runs():
    assert KNOWN.keys() <= set(MODULES)
