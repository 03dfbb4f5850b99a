"""The pytest plugin, in sessions of its own (`pytester`): budgets, baselines, predicted cards, wrong usage."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.context
import re
import time
from pathlib import Path

import pytest
from processes import pytest_session

pytest_plugins = ["pytester"]
REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = ("-p", "memlab.integrations.pytest_plugin", "-p", "no:cacheprovider")
MODEL = """
import pytest, torch

def net(width):
    return torch.nn.Sequential(torch.nn.Linear(100, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))

def step(device, width=300, rows=500):
    model = net(width).to(device)
    model(torch.randn(rows, 100, device=device)).square().mean().backward()
"""


@pytest.fixture(scope="module")
def server() -> multiprocessing.context.ForkServerContext:
    """A process that has imported what sessions need, and used none of it: a fork of one that has computed may hang."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["memlab.api.predict", "memlab.api.track", "memlab.integrations.pytest_plugin"])
    return context


@pytest.fixture
def session(server: multiprocessing.context.ForkServerContext, pytester: pytest.Pytester):
    """Write a test file and run pytest on it: the result of the session."""

    def run(text: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=MODEL + text)
        output, began = pytester.path / "output", time.monotonic()
        environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(REPOSITORY)}
        process = server.Process(target=pytest_session, args=(pytester.path, output, [*PLUGIN, *options], environment))
        process.start()
        process.join()
        return pytest.RunResult(process.exitcode or 0, output.read_text().splitlines(), [], time.monotonic() - began)

    return run


def test_what_fails_a_marked_test_is_its_budget_its_card_or_an_error_of_its_own(session):
    result = session("""
@pytest.mark.memory_budget("1GiB")
def test_small():
    step("cpu")

@pytest.mark.memory_budget("500KiB")
def test_large():
    step("cpu")

@pytest.mark.memory_budget("99GiB", device="T4")
def test_larger_than_the_card():
    torch.ones(30_000_000_000, device="cuda")

@pytest.mark.memory_budget("1GiB")
def test_measured():
    assert 1 == 2

@pytest.mark.memory_budget("1GiB", device="T4")
def test_predicted():
    raise ValueError("mine")
""")
    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines(["*above the budget of 500.0 KiB*", "*module: *", "*category: *"])
    result.stdout.fnmatch_lines(["*does not fit on T4*", "*assert 1 == 2*", "*ValueError: mine*"])


def test_a_predicted_card_needs_no_gpu_and_says_the_same_each_time(session, pytester):
    text = """
@pytest.mark.parametrize("again", range(5))
@pytest.mark.memory_budget("1GiB", device="RTX 4060")
def test_small(again):
    step("cuda")

@pytest.mark.memory_budget("1MiB", device="RTX 4060")
def test_large():
    step("cuda")
"""
    result = session(text, "--memlab-baseline", "peaks.json", "--memlab-update")
    result.assert_outcomes(passed=5, failed=1)
    peaks = json.loads((pytester.path / "peaks.json").read_text())["peaks"]
    assert len({one["peak_bytes"] for name, one in peaks.items() if "small" in name}) == 1
    assert all(type(one["peak_bytes"]) is int and one["peak_bytes"] > 0 for one in peaks.values())


def test_growth_over_the_baseline_names_what_grew(session):
    text = """
@pytest.mark.memory_budget(device="RTX 4060")
def test_step():
    step("cuda", width=WIDTH)

def test_part(memory):
    with memory("two"):
        step("cpu", width=WIDTH)
"""
    first = session(text.replace("WIDTH", "300"), "--memlab-baseline", "peaks.json", "--memlab-update")
    first.assert_outcomes(passed=2)
    session(text.replace("WIDTH", "300"), "--memlab-baseline", "peaks.json").assert_outcomes(passed=2)
    grown = session(text.replace("WIDTH", "3000"), "--memlab-baseline", "peaks.json")
    grown.assert_outcomes(failed=2)
    grew = "*grew by more than 2.0% over its baseline*"
    grown.stdout.fnmatch_lines([grew, "*module: Sequential.*", "*line: test_it.py:*", "*category: *"])
    # The summary has the whole messages again where CI is set.
    failures = grown.stdout.str().partition("short test summary")[0]
    assert failures.count("line: not known, measured without lines") == 1  # of the part


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(1500)
def test_of_a_hundred_predictions_none_differs(session, pytester):
    text = """
@pytest.mark.parametrize("again", range(100))
@pytest.mark.memory_budget("1GiB", device="RTX 4060")
def test_step(again):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(10)).cuda()
    images = torch.randn(32, 3, 32, 32, device="cuda")
    optimizer = torch.optim.AdamW(model(images).sum() and model.parameters())
    for _ in range(2):
        model(images).square().mean().backward()
        optimizer.step()
"""
    session(text, "--memlab-baseline", "peaks.json", "--memlab-update").assert_outcomes(passed=100)
    first, *others = json.loads((pytester.path / "peaks.json").read_text())["peaks"].values()
    assert first["by"]["line"]
    assert [one for one in others if one != first] == []


@pytest.mark.parametrize(
    "options, content, said",
    [
        (["--memlab-update"], None, "needs the file"),
        (["--memlab-baseline", "peaks.json"], None, "there is no baseline"),
        (["--memlab-baseline", "peaks.json"], "[]", "is no baseline of memlab"),
        (["--memlab-baseline", "peaks.json", "--memlab-update"], "def test_mine(): pass", "or remove it"),
        (["--memlab-baseline", "."], None, "a file in a folder that exists, got '.'"),
        (["--memlab-baseline", "no/peaks.json", "--memlab-update"], None, "got 'no/peaks.json'"),
        (["--memlab-baseline", "peaks.json"], '{"version": 1, "peaks": {"a": {"peak_bytes": "x"}}}', "no peak"),
        (["--memlab-baseline", "peaks.json"], '{"version": 1, "peaks": {"a": {"peak_bytes": 1}}}', "memlab ('by')"),
        (["--memlab-baseline", "peaks.json"], '{"version": 9, "peaks": {}}', "its version is 9, this memlab reads 1"),
    ],
)
def test_wrong_usage_is_one_line(session, pytester, options, content, said):
    if content is not None:
        (pytester.path / "peaks.json").write_text(content)
    result = session("def test_nothing(): pass", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in "\n".join([*result.errlines, *result.outlines])


WRONG = {
    "'much'": "much",
    "'1GiB', device=3": "device is cpu",
    "'1GiB', on=2": "takes a size",
    "'1GiB', device='cuda:77'": "Name a card, and the test is predicted",
    "'1GiB', device=''": "no card is known as ''",
    "'1GiB', device='T4'": "allocated nothing on T4",
    "'1GiB', device='T4', torch_version='1.13'": "memlab knows the memory of PyTorch 2.10 to 2.15",
    "'1GiB', torch_version='2.14'": "torch_version is for predictions on a card",
}


def test_a_wrong_marker_fails_its_test_in_one_line(session):
    tests = (f"@pytest.mark.memory_budget({one})\ndef test_{number}(): pass\n" for number, one in enumerate(WRONG))
    result = session("\n".join(tests))
    result.assert_outcomes(failed=len(WRONG))
    for number, said in enumerate(WRONG.values()):
        assert re.search(rf"_ test_{number} _+\n.*{re.escape(said)}", result.stdout.str()), said


def test_a_predicted_test_can_be_for_another_pytorch(session, pytester):
    text = """
import torch.nn.functional as F

@pytest.mark.memory_budget(device="RTX 4060", torch_version="2.13")
def test_before():
    attend()

@pytest.mark.memory_budget(device="RTX 4060", torch_version="2.14")
def test_since():
    attend()

def attend():
    make = lambda heads: torch.randn(1, heads, 1024, 64, device="cuda", requires_grad=True)
    F.scaled_dot_product_attention(make(8), make(2), make(2), enable_gqa=True).sum().backward()
"""
    session(text, "--memlab-baseline", "peaks.json", "--memlab-update").assert_outcomes(passed=2)
    before, since = json.loads((pytester.path / "peaks.json").read_text())["peaks"].values()
    assert since["peak_bytes"] < before["peak_bytes"]  # single precision takes the memory-efficient kernel since 2.14


MANY = """
@pytest.mark.parametrize("rows", [100, 200, 300, 400])
@pytest.mark.memory_budget(device="cpu")
def test_step(rows):
    step("cpu", rows=rows)
"""


def test_workers_of_xdist_write_one_baseline(session, pytester):
    session(MANY, "--memlab-baseline", "peaks.json", "--memlab-update", "-p", "xdist", "-n", "2").assert_outcomes(
        passed=4
    )
    assert len(json.loads((pytester.path / "peaks.json").read_text())["peaks"]) == 4


def test_what_the_baseline_does_not_know_is_named(session):
    session(MANY, "-k", "100 or 200", "--memlab-baseline", "peaks.json", "--memlab-update")
    result = session(MANY, "--memlab-baseline", "peaks.json")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(
        ["memlab: not in the baseline: test_it.py::test_step*300* and 1 more; --memlab-update adds them."]
    )


def test_a_baseline_of_another_device_or_torch_is_named(session, pytester):
    text = """
@pytest.mark.memory_budget(device=DEVICE)
def test_step():
    step("cuda" if DEVICE != "cpu" else "cpu")
"""
    file, options = pytester.path / "peaks.json", ("--memlab-baseline", "peaks.json")
    t4 = text.replace("DEVICE", "'T4'")
    session(t4, *options, "--memlab-update").assert_outcomes(passed=1)
    for other, said in (
        ("L4", "another device, T4, predicted; this is L4, predicted"),
        ("cpu", "T4, predicted; this is cpu"),
    ):
        result = session(text.replace("DEVICE", f"'{other}'"), *options)
        result.assert_outcomes(failed=1)
        assert f"{said}: renew it with --memlab-update" in result.stdout.str()
    content = json.loads(file.read_text())
    content["peaks"]["test_it.py::test_step"]["torch"] = "1.13.1"
    file.write_text(json.dumps(content))
    result = session(t4, *options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["memlab: the baseline is of PyTorch 1.13.1, the run of 2.*; --memlab-update renews it."]
    )


def test_methods_of_a_test_case_are_measured_and_not_predicted(session):
    result = session("""
import unittest

class TestIt(unittest.TestCase):
    @pytest.mark.memory_budget("500KiB")
    def test_large(self):
        step("cpu")

    @pytest.mark.memory_budget("1GiB")
    def test_small(self):
        step("cpu")

    @pytest.mark.memory_budget("1GiB", device="RTX 4060")
    def test_card(self):
        step("cuda")
""")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*above the budget of 500.0 KiB*"])
    result.stdout.fnmatch_lines(["*can be measured, not predicted*"])


@pytest.mark.simulated
def test_a_failure_on_a_simulated_gpu_says_where_its_figures_come_from(session):
    text = """
@pytest.mark.memory_budget(BUDGET, device="cuda")
def test_marked():
    step("cuda", width=WIDTH)

def test_part(memory):
    with memory("two", budget=BUDGET, device="cuda"):
        step("cuda", width=WIDTH)

@pytest.mark.memory_budget("1KiB")
def test_on_the_host():
    step("cpu")
"""
    small = text.replace("BUDGET", "'500KiB'").replace("WIDTH", "300")
    failed = session(small, "-rN")
    failed.assert_outcomes(failed=3)
    assert failed.stdout.str().count("simulated GPU: bytes are real, values and times are not") == 2
    session(small.replace("'500KiB'", "'1GiB'"), "--memlab-baseline", "peaks.json", "--memlab-update")
    grown = session(
        text.replace("BUDGET", "'1GiB'").replace("WIDTH", "3000"), "--memlab-baseline", "peaks.json", "-k", "not host"
    )
    grown.assert_outcomes(failed=2, deselected=1)
    grown.stdout.fnmatch_lines(["*grew by more than*", "simulated GPU: bytes are real, values and times are not"])
