"""Every technique against its own claim: what it saves of a peak, and whether results are what it says."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from job_runs import one_inference, one_layer, prepared

from memlab.analysis.breakdown import BEFORE, ELSEWHERE
from memlab.api.compare import compare
from memlab.api.regression import Regression, regression_of
from memlab.api.run import Run
from memlab.api.runs import runs
from memlab.api.workload_run import baseline_patterns_of, run_workload, work_of
from memlab.errors import DoesNotApply, MemlabError
from memlab.prediction.cards import find
from memlab.saving_techniques import Technique, techniques
from memlab.trace.columns import Category

ATTACKED = {category.name.lower() for category in Category} | {"reserved", "host memory", "none"}
ON = {device: [one for one in techniques.values() if one.demo.device == device] for device in ("cpu", "cuda")}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "techniques.json"
RECORDED = json.loads(RESULTS.read_text())["techniques"]
"""What docs/techniques.md shows."""


@functools.cache
def run_of(demo_work: Any, size: str, steps: int, on: Any, names: tuple[str, ...], habits: tuple[str, ...]) -> Run:
    """A run that several techniques are compared with is made once."""
    return run_workload(work_of(demo_work, size), names, habits, on=on, steps=steps, timed=False, keep=False)


def both(technique: Technique, device: str) -> tuple[Run, Run]:
    """The run as it is often written, and with the technique."""
    demo, name = technique.demo, technique.name
    on = find("RTX 4060") if technique.only_predicted else device
    of = demo.workload, demo.size, demo.steps, on
    return run_of(*of, (), tuple(baseline_patterns_of([name]))), run_of(*of, (name,), ())


def saved_share(technique: Technique, plain: Run, changed: Run) -> float:
    before, after = (rise(run, technique.demo.of) for run in (plain, changed))
    return (before - after) / before


def rise(run: Run, of: str) -> int:
    """The peak above what others had alive before the run."""
    level = run.devices[0].level(of)
    assert level is not None
    return int(getattr(run, f"peak_{of}_bytes")) - (level.start_bytes if of == "allocated" else 0)


def check_share(technique: Technique, share: float) -> None:
    if technique.kind == "saving":
        assert share >= technique.demo.share
    else:
        assert abs(share) <= technique.demo.share, "a myth moves no peak"


@pytest.mark.parametrize("technique", ON["cpu"], ids=lambda one: one.name)
def test_it_does_what_it_says(technique: Technique) -> None:
    plain, changed = both(technique, "cpu")
    share = saved_share(technique, plain, changed)
    check_share(technique, share)
    recorded = RECORDED[technique.name]["cpu"]
    assert share == pytest.approx(1 - recorded["after"] / recorded["before"], abs=0.02)

    results, claimed = compare(plain, changed).results, technique.equality
    if claimed.kind == "exact":
        assert results.verdict == "equal", results.why
    elif claimed.kind == "close":
        assert results.verdict == "equal" or 0 < results.relative <= claimed.relative, results.why
    else:
        assert results.verdict == "different" and claimed.why, "results that are said to change do change"


# --- taken out of a model that used it, as `memlab check` and the pytest plugin compare peaks ------------------------------

OUTSIDE_MODULES = {
    "meta_init": "the weights that are made twice are made before any module is called",
    "mmap_loading": "the file is read before any module is called",
    "foreach_off": "the step of the optimizer, which makes the temporaries, is in no module",
    "fused": "the step of the optimizer, which makes the temporaries, is in no module",
}
"""Where the culprit is no module, and why: there the category, and with --lines the line, name it."""
UNCATEGORISED = {name: OUTSIDE_MODULES[name] for name in ("meta_init", "mmap_loading")}
AT_CONVERSION = {"int8_weights": "temporary"}
"""What grows where a run with the technique is highest while it converts the weights: the full ones are still there then."""


@pytest.mark.parametrize("technique", [one for one in ON["cpu"] if one.kind == "saving"], ids=lambda one: one.name)
def test_taken_out_it_is_a_regression_with_its_culprit(technique: Technique) -> None:
    without, used = both(technique, "cpu")
    check_culprits(technique, regression_of(compare(used, without), tolerance=0.02))
    assert not regression_of(compare(used, used), tolerance=0.02).is_regression


def check_culprits(technique: Technique, found: Regression) -> None:
    assert found.is_regression, found.text
    category, module = (found.culprits[by][0] for by in ("category", "module"))
    expected = (*technique.attacks, AT_CONVERSION.get(technique.name))
    assert category in expected or technique.name in UNCATEGORISED
    assert (module in (ELSEWHERE, BEFORE)) == (technique.name in OUTSIDE_MODULES)
    assert "line" in found.unknown  # these are measured without


NOT_ON_A_CARD = {
    "expandable_segments": "it lowers reserved, not allocated",
    "meta_init": "it lowers host memory",
    "mmap_loading": "it lowers host memory",
}
"""What `memlab check` cannot find on a predicted card, and why."""


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "technique", [one for one in techniques.values() if one.kind == "saving"], ids=lambda one: one.name
)
def test_on_a_predicted_card_too(technique: Technique) -> None:
    on, demo, name = find("RTX 4060"), technique.demo, technique.name
    of = demo.workload, demo.size, demo.steps, on
    used, without = run_of(*of, (name,), ()), run_of(*of, (), tuple(baseline_patterns_of([name])))
    found = regression_of(compare(used, without), tolerance=0.02)
    if name in NOT_ON_A_CARD:
        assert not found.is_regression
        return
    check_culprits(technique, found)
    assert found.unknown["line"] == "predicted without lines"


@pytest.mark.simulated
@pytest.mark.parametrize("technique", ON["cuda"], ids=lambda one: one.name)
def test_it_does_what_it_says_on_cuda(technique: Technique) -> None:
    check_share(technique, saved_share(technique, *both(technique, "cuda")))


@pytest.mark.simulated
@pytest.mark.parametrize("technique", [one for one in ON["cpu"] if one.kind == "saving"], ids=lambda one: one.name)
def test_what_the_cpu_shows_cuda_shows_too(technique: Technique) -> None:
    assert saved_share(technique, *both(technique, "cuda")) > 0


@pytest.mark.parametrize("technique", techniques.values(), ids=lambda one: one.name)
def test_it_says_all_that_a_reader_needs(technique: Technique) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]{1,40}", technique.name)
    assert technique.idea and len(technique.idea) <= 140 and "\n" not in technique.idea
    assert set(technique.attacks) <= ATTACKED and technique.attacks
    assert technique.price and technique.not_when and technique.references
    assert all("http" in one or "PyTorch" in one for one in technique.references)
    assert all(re.fullmatch(r"[A-G]\d{1,2}", tip) for tip in technique.tips)
    assert technique.kind != "saving" or technique.demo.share >= 0.25
    compile(technique.code, technique.name, "exec")
    assert all(name in techniques and why for name, why in technique.excludes.items())
    assert technique.idea in str(technique) and technique.name in repr(technique)


def test_names_of_earlier_versions_work() -> None:
    for one in techniques.values():
        assert one.habit is one.baseline_pattern and one.outside is one.patch
        assert one.shown is one.demo and one.before is None


TRAINING_ONLY = [
    "checkpoint", "checkpoint_sequential", "sqrt_segments", "selective_checkpoint", "offload", "chunked_loss",
    "clip_under_no_grad", "accumulation", "retain_graph", "set_to_none", "freezing", "feature_extraction", "low_rank",
    "sgd", "momentum", "adafactor", "foreach_off", "fused", "step_in_backward", "no_grad_backward",
]  # fmt: skip
INFERENCE_ONLY = [
    "no_grad", "inference_mode", "half_inference", "int8_weights", "eval_mode", "feature_lists", "conv_bn_fusion",
    "repvgg_merge", "acnet_merge", "micro_batching",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "trains", "why"),
    [(name, False, "inference") for name in TRAINING_ONLY]
    + [(name, True, "goes backward|in training|trains") for name in INFERENCE_ONLY],
)
def test_the_wrong_kind_of_job_is_refused_in_one_line(name: str, trains: bool, why: str) -> None:
    with pytest.raises(DoesNotApply, match=why) as caught:
        prepared(one_layer if trains else one_inference, name)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"{name}: ")


def test_what_it_excludes_is_refused() -> None:
    pairs = [(one.name, other) for one in techniques.values() for other in one.excludes]
    assert pairs
    for name, other in pairs:
        with pytest.raises(MemlabError, match="exclude each other"):
            techniques.ordered([name, other])
        assert techniques.conflict([other, name])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nonsense", r"no technique 'nonsense'\. import memlab; memlab\.techniques shows all 55\."),
        ("chekpoint", "Did you mean checkpoint"),
        (["a list"], "no technique"),
        ("x" * 1000, "no technique 'x{70}"),
    ],
)
def test_a_name_that_does_not_exist(name, hint) -> None:
    with pytest.raises(MemlabError, match=hint) as caught:
        techniques[name]
    assert len(str(caught.value)) < 200
    assert name not in techniques and techniques.get(name) is None


def test_names_are_a_list() -> None:
    with pytest.raises(MemlabError, match="a list of names, got 'checkpoint'"):
        techniques.ordered("checkpoint")


def test_the_table() -> None:
    table = techniques.to_pandas()
    assert list(table.index) == list(techniques) and len(table) == len(techniques) == 55
    assert (table.kind == "saving").sum() == 50 and (table.kind == "myth").sum() == 5
    assert all(name in repr(techniques) for name in techniques)


def test_a_technique_that_finds_nothing_leaves_no_run() -> None:
    before = list(runs)
    with pytest.raises(DoesNotApply) as caught:
        run_workload(work_of(one_layer), ["in_place"])
    assert list(runs) == before and str(caught.value).count("in_place") == 1
