from __future__ import annotations

import pytest
import torch

from memlab.errors import ClaimRefuted, MemlabError
from memlab.lesson.account import account
from memlab.lesson.claim import saves, saves_nothing
from memlab.session.runs import runs
from memlab.session.track import track
from memlab.units import MiB


def test_a_saving_that_is_one():
    claim = saves("half", 200 * MiB, 100 * MiB)
    assert claim.saved_share == 0.5
    assert (
        str(claim)
        == "Claim holds (measured): with half the peak of allocated is 100.0 MiB instead of 200.0 MiB (-50%)."
    )


@pytest.mark.parametrize("after", [151 * MiB, 200 * MiB, 300 * MiB])
def test_a_saving_that_is_none(after):
    with pytest.raises(ClaimRefuted, match="At least 25% was claimed"):
        saves("it", 200 * MiB, after)
    with pytest.raises(AssertionError):  # as any assertion in a notebook
        saves("it", 200 * MiB, after)


def test_a_myth():
    assert saves_nothing("emptying", 1000, 995).saved_share == 0.005
    for after in (900, 1100):
        with pytest.raises(ClaimRefuted, match="At most 1% was claimed"):
            saves_nothing("emptying", 1000, after)


def test_two_runs_of_this_machine():
    with track("large", show=False) as large:
        torch.empty(1 << 20)
    with track("small", show=False) as small:
        torch.empty(1 << 10)
    try:
        assert "measured on cpu" in str(saves("less", large, small))
        with pytest.raises(MemlabError, match="a claim compares runs, or numbers of bytes, got str"):
            saves("less", large, "3")  # type: ignore[arg-type]
    finally:
        runs.discard(large)
        runs.discard(small)


@pytest.mark.parametrize(("before", "share"), [(0, 0.25), (100, 0), (100, 1.5)])
def test_what_cannot_be_claimed(before, share):
    with pytest.raises(MemlabError):
        saves("it", before, 0, at_least=share)


def test_an_account_shows_what_it_cannot_explain():
    found = account("Peak", 110, [("weights", "4 P", 40, 40), ("activations", "4 BH", 50, 66)])
    assert found.unexplained_bytes == 20 and found.terms[1].residual_bytes == 16
    assert "The formulas leave 20 B of 110 B unexplained (18.2%)." in str(found)
    assert list(found.to_pandas()["residual_bytes"]) == [0, 16]
    assert "&lt;b&gt;" in account("<b>", 1, [("<b>", "", 1, 1)])._repr_mimebundle_()["text/html"]
