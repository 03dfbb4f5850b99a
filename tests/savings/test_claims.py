"""Every technique against its own claim: what it saves of a peak, and whether results are what it says."""

from __future__ import annotations

import re

import pytest
import torch

from memlab.errors import DoesNotApply, MemlabError
from memlab.predictor.cards import find
from memlab.savings import Technique, techniques
from memlab.session.compare import compare
from memlab.session.run import Run
from memlab.session.runs import runs
from memlab.session.trial import habits_of, trial, work_of
from memlab.trace.columns import Category

ATTACKED = {category.name.lower() for category in Category} | {"reserved", "host memory", "none"}
ON = {
    device: [one for one in techniques.values() if one.shown and one.shown.device == device]
    for device in ("cpu", "cuda")
}


@pytest.fixture(autouse=True)
def one_thread():
    """Sums of floats depend on how many threads share them; two pytest workers share two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def both(technique: Technique, device: str) -> tuple[Run, Run]:
    """The run as it is often written, and with the technique."""
    shown = technique.shown
    assert shown is not None
    work = work_of(shown.workload, shown.size) if isinstance(shown.workload, str) else work_of(shown.workload)
    on = find("RTX 4060") if technique.conf else device  # what is said to the allocator before it starts
    try:
        plain = trial(work, habits=habits_of([technique.name]), on=on, steps=shown.steps, timed=False)
        changed = trial(work, [technique.name], on=on, steps=shown.steps, timed=False)
    finally:
        for run in list(runs.values()):
            runs.discard(run)
    return plain, changed


def saved_share(technique: Technique, plain: Run, changed: Run) -> float:
    assert technique.shown is not None
    before, after = (rise(run, technique.shown.of) for run in (plain, changed))
    return (before - after) / before


def rise(run: Run, of: str) -> int:
    """The peak above what others had alive before the run."""
    level = run.devices[0].level(of)
    assert level is not None
    return int(getattr(run, f"peak_{of}_bytes")) - (level.start_bytes if of == "allocated" else 0)


def check_share(technique: Technique, plain: Run, changed: Run) -> None:
    assert technique.shown is not None
    share, claimed = saved_share(technique, plain, changed), technique.shown.share
    if technique.kind == "saving":
        assert share >= claimed, f"{technique.name} saves {share:.1%} of the peak, not {claimed:.0%}"
    elif technique.kind == "myth":
        assert abs(share) <= claimed, f"{technique.name} is called a myth and moves the peak by {share:.1%}"
    else:
        assert share >= -abs(claimed), f"{technique.name} costs {-share:.1%} of the peak, more than {claimed:.0%}"


def check_results(technique: Technique, plain: Run, changed: Run) -> None:
    found, claimed = compare(plain, changed).results, technique.equality
    if claimed.kind == "exact":
        assert found.verdict == "equal", found.why
    elif claimed.kind == "close":
        off = 0.0 if found.verdict == "equal" else found.relative
        assert off is not None and off <= claimed.relative, f"{found.why} Claimed: {claimed.relative:g}"
    else:
        assert claimed.why


@pytest.mark.parametrize("technique", ON["cpu"], ids=lambda one: one.name)
def test_it_does_what_it_says(technique: Technique) -> None:
    plain, changed = both(technique, "cpu")
    check_share(technique, plain, changed)
    check_results(technique, plain, changed)


@pytest.mark.fakegpu
@pytest.mark.parametrize("technique", ON["cuda"], ids=lambda one: one.name)
def test_it_does_what_it_says_on_a_card(technique: Technique) -> None:
    check_share(technique, *both(technique, "cuda"))


@pytest.mark.fakegpu
@pytest.mark.parametrize("technique", ON["cpu"], ids=lambda one: one.name)
def test_what_the_cpu_shows_cuda_shows_too(technique: Technique) -> None:
    plain, changed = both(technique, "cuda")
    if technique.kind == "saving":
        assert saved_share(technique, plain, changed) > 0


@pytest.mark.parametrize("technique", techniques.values(), ids=lambda one: one.name)
def test_it_says_all_that_a_reader_needs(technique: Technique) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]{1,40}", technique.name)
    assert technique.idea and len(technique.idea) <= 140 and "\n" not in technique.idea
    assert set(technique.attacks) <= ATTACKED and technique.attacks
    assert technique.price and technique.not_when and technique.references
    assert all("http" in one or "PyTorch" in one for one in technique.references)
    assert all(re.fullmatch(r"[A-G]\d{1,2}", tip) for tip in technique.tips)
    assert technique.shown is None or technique.kind != "saving" or technique.shown.share >= 0.25
    assert technique.kind != "saving" or technique.shown is not None, "a saving is shown, or it is none"
    compile(technique.code, technique.name, "exec")
    for other, why in technique.excludes.items():
        assert other in techniques and why


def test_what_it_excludes_is_refused() -> None:
    pairs = [(one.name, other) for one in techniques.values() for other in one.excludes]
    assert pairs
    for name, other in pairs:
        with pytest.raises(MemlabError, match="exclude each other"):
            techniques.ordered([name, other])
        assert techniques.conflict([other, name])


def test_names_that_are_none() -> None:
    with pytest.raises(MemlabError, match=r"no technique 'nonsense'\. memlab\.techniques shows all"):
        techniques["nonsense"]
    with pytest.raises(MemlabError, match="no technique"):
        techniques[["a list"]]  # type: ignore[index]
    assert "nonsense" not in techniques and techniques.get("nonsense") is None


def test_the_table() -> None:
    table = techniques.to_pandas()
    assert list(table.index) == list(techniques) and len(table) == len(techniques) > 25
    assert all(name in repr(techniques) for name in techniques)


def test_a_technique_that_finds_nothing_leaves_no_run() -> None:
    def nothing() -> tuple:
        model = torch.nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters(), 0.1), (torch.ones(1, 2), torch.ones(1, 2)), torch.nn.MSELoss()

    before = list(runs)
    with pytest.raises(DoesNotApply):
        trial(work_of(nothing), ["in_place"])
    assert list(runs) == before
