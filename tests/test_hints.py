"""Whatever memlab prints to be typed or pasted is there: magics and commands with their options, names with their arguments.

And where a hint is printed it works as it is, pasted into the next cell of a notebook that has done no more than %load_ext. All
of them are found in the texts of the package, so that a new one fails here until a test that pastes it is named in `PASTED`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from kernel import Kernel, kernel

import memlab
from memlab.__main__ import main
from memlab.allocator.conf import parse_conf
from memlab.integrations import pytest_plugin
from memlab.magics.extension import MAGICS
from memlab.magics.track import make_parser

PACKAGE = Path(memlab.__file__).parent
CALL = re.compile(r"(?<![\w.'])memlab\.([a-z]\w*)(\((?:[^()]|\([^()]*\))*\))?")
MAGIC = re.compile(r"(%%?)(mem\w+)((?: --?\w[\w-]*| (?:on|off|clear|release)\b)*)")
WORDS = {
    "memledger": {"on", "off", "clear"},
    "memoom": {"release", "--keep-outputs"},
    "memwho": {"-d"},
    "memadvise": {"--target"},
}


def printed(path: Path) -> Iterator[str]:
    """The texts in a file that are no docstrings; what is filled in becomes a name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings, also of constants
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "x" for one in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


@functools.cache
def texts() -> list[str]:
    return [text for path in PACKAGE.rglob("*.py") for text in printed(path)]


def hints(pattern: re.Pattern[str]) -> list[tuple[str, ...]]:
    return sorted({match.groups("") for text in texts() for match in pattern.finditer(text)})


def test_a_magic_that_is_named_is_installed_and_takes_these_options():
    options = {option for action in make_parser()._actions for option in action.option_strings}
    for signs, name, rest in hints(MAGIC):
        kind = "cell" if signs == "%%" else "line"
        assert any(name in magics.magics[kind] for magics in MAGICS), f"{signs}{name}"
        words = {
            word for word in rest.split() if name != "memtrack" or word.startswith("-")
        }  # "put %%memtrack on a cell"
        assert words <= (options if name == "memtrack" else WORDS.get(name, set())), f"{signs}{name}{rest}"


def test_a_call_that_is_named_is_public_and_takes_these_arguments():
    for name, arguments in hints(CALL):
        if not arguments:
            assert name not in memlab.__all__ or hasattr(memlab, name)
            continue
        call = ast.parse(f"f{arguments}", mode="eval").body
        assert isinstance(call, ast.Call)
        named = {str(one.arg): one.value for one in call.keywords}
        inspect.signature(getattr(memlab, name)).bind(*call.args, **named)
        if name == "track":  # which passes on what it is given
            memlab.track(**{key: ast.literal_eval(value) for key, value in named.items()})


def test_the_texts_are_found():
    assert {("%%", "memtrack", " --lines"), ("%", "memoom", " release"), ("%", "memledger", " on")} <= set(hints(MAGIC))
    assert {("track", "(lines=True)"), ("advise", '(..., card="RTX 4060")')} <= set(hints(CALL))
    assert {("run", " --out"), ("predict", ' --card "x" SCRIPT')} <= set(hints(COMMAND))


# --- commands, options, names and settings ---

COMMAND = re.compile(r"(?<![\w.`'/-])`?memlab (" + "|".join((
    "run", "predict", "show", "compare", "fit", "check", "simulate", "cards", "calibrate", "progress", "doctor"
)) + r")\b((?: (?:--?[a-z][\w-]*|\"[^\"]*\"|[A-Z]{2,}))*)")  # fmt: skip
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
TORCH = re.compile(r"(?<![\w.`'/-])torch(?:\.[A-Za-z]\w*)+")
SETTING = re.compile(r"\bPYTORCH_(?:CUDA_|x_)?ALLOC_CONF=(\S*[^\s;.`:])")
FOREIGN = {"--shm-size", "--no-python"}  # of docker, of torchrun
OF_SCRIPTS = {"--epochs", "--config"}  # in examples
STYLES = {"--memlab-less", "--memlab-more", "--memlab-grid"}


class Read(Exception):
    """Raised in place of a command's work, with its parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.options = set(parser._option_string_actions)


def reading(words: list[str]) -> set[str]:
    """The options of a command, whose words are parsed and which does nothing; a wrong one ends as it does in a shell."""
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parse(self, *args, **kwargs)
        raise Read(self)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_alone):
        try:
            main(words)
        except Read as found:
            return found.options
        except SystemExit as ended:
            pytest.fail(f"{shlex.join(words)} ends with {ended.code}")
    pytest.fail(f"{shlex.join(words)} parses nothing")


def examples() -> list[str]:
    """The lines of help that begin with a command."""
    lines = [line for text in texts() for line in text.splitlines() if line.startswith("  memlab ")]
    return sorted({re.sub(r"  +\(.*\)$", "", line.strip()).split(" (then")[0] for line in lines})


@functools.cache
def options_of(command: str) -> set[str]:
    words = {"predict": ["x.py"], "run": ["x.py"], "check": ["a", "--baseline", "b"], "compare": ["a", "b"],
             "simulate": ["--card", "T4", "--", "x"], "cards": [], "doctor": [], "calibrate": []}  # fmt: skip
    return reading([command, *words.get(command, ["a"])])


@pytest.fixture
def with_a_model(tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)


def test_the_examples_of_help_are_parsed_by_their_commands(with_a_model):
    assert len(examples()) > 20
    for line in (one for one in examples() if "--help" not in one):
        reading(shlex.split(line)[1:])


def test_a_command_that_is_named_has_these_options():
    for command, rest in hints(COMMAND):
        assert set(OPTION.findall(rest)) <= options_of(command) | {"--help"}, f"memlab {command}{rest}"


def test_an_option_that_is_named_anywhere_is_one(with_a_model):
    commands = {command for command, _ in hints(COMMAND)}
    known = {option for command in commands for option in options_of(command)} | FOREIGN | STYLES | OF_SCRIPTS
    known |= reading(["predict", "my-model"])
    known |= {option for action in make_parser()._actions for option in action.option_strings}
    known |= {word for words in WORDS.values() for word in words} | {"--version", "--help"}
    known |= set(OPTION.findall(inspect.getsource(pytest_plugin.pytest_addoption)))
    named = {option for text in texts() if " " in text for option in OPTION.findall(text)}
    assert named <= known, named - known


def test_a_name_of_pytorch_that_is_printed_exists():
    """In sentences; names that are looked up are checked by the self-test."""
    for name in sorted({name for text in texts() if " " in text for name in TORCH.findall(text)}):
        found: Any = import_module("torch")
        for index, part in enumerate(parts := name.split(".")[1:], 2):
            if not hasattr(found, part):
                import_module(".".join(["torch", *parts][:index]))
            found = getattr(found, part)


def test_a_setting_that_is_advised_is_one():
    found = {setting for text in texts() for setting in SETTING.findall(text)} - {"x"}
    assert "expandable_segments:True" in found
    for setting in found:
        parse_conf(setting)


# --- what was pasted ---

PASTED = {
    "scripts/test_ways_out_cuda.py::test_what_is_advised_avoids_the_error": (
        "del x", ".detach()", ".item()", ".cpu()", "gc.collect()", "optimizer.zero_grad()", "fused=True",
        "with torch.inference_mode():", "torch.cuda.set_per_process_memory_fraction(1.0)",
    ),
    "scripts/test_ways_out_cuda.py::test_the_command_that_is_named_counts_the_whole_step": (
        "memlab predict --card x SCRIPT ARGS",
    ),
    "scripts/test_ways_out_cuda.py::test_expandable_segments_are_advised_where_they_would_have_helped": (
        "PYTORCH_x_ALLOC_CONF=expandable_segments:True",
    ),
    "magics/test_ways_out_cuda.py::test_what_the_frames_of_a_failed_cell_hold": ("%memoom release",),
    "magics/test_ways_out_cuda.py::test_a_batch_that_an_earlier_cell_made": ("x = {n}",),
    "magics/test_ways_out_cuda.py::test_a_cell_without_backward_may_need_no_graph": ("torch.inference_mode()",),
    "api/test_cell_batch.py::test_a_loader_gives_batches_of_the_size": ("batch_size={n}",),
    "saving_techniques/test_claims.py::test_it_does_what_it_says_on_cuda": ("foreach=False",),
    "magics/test_who.py::test_all_that_is_alive_by_name": ("%memwho",),
    "magics/test_advise.py::test_what_an_advice_says_to_do_next_is_done": (
        "_.measure()", "import memlab; memlab.advise(x, allow_changes=True)",
    ),
    "magics/test_assume.py::test_what_the_report_says_how_to_set_is_set_as_it_says": ("--assume x",),
    "api/test_assume.py::test_the_report_says_how_to_set_one_in_a_shell_and_in_python": ("assume={x: x}",),
    "api/test_results.py::test_a_result_comes_back_as_it_is_and_keeps_no_tensor_alive": ("with memlab.track() as run:",),
    "test_command.py::test_the_cards_are_listed": ("memlab cards",),
    "scripts/test_ranks_command.py::test_what_the_report_of_a_parent_advises_measures_its_children": (
        "memlab run --nproc-per-node 2 --out DIR train.py",
    ),
    "scripts/test_ranks_command.py::test_torchrun_over_memlab_run_does_as_well_and_workers_of_loaders_are_no_ranks": (
        "torchrun --no-python memlab run --out DIR train.py",
    ),
    "scripts/test_run_command.py::test_some_steps_are_measured_and_the_run_and_its_page_are_kept": ("memlab run --out",),
    "scripts/test_run_command.py::test_a_script_runs_as_python_runs_it": ("memlab run SCRIPT",),
    "scripts/test_run_command.py::test_a_module_runs_as_python_runs_it": ("python -m",),
}  # fmt: skip
"""The test that pastes, or does, what is printed in backticks to be typed -> what that is."""
TYPED = re.compile(r"`([%.\-]?[^`\n]*(?:[(=]|^%|memlab |del |-)[^`\n]*|[%.]\w[^`\n]*|python -m|pip install \w+)`")
NOT_TYPED = {".data =", "with FakeCuda(card):", "pip install torch"}
"""Of the list of PyTorch's private names, for memlab's own code, and what every machine of the tests has done."""


def test_what_is_printed_to_be_typed_was_pasted_by_a_test():
    found = {typed for text in texts() if " " in text for typed in TYPED.findall(text)} - NOT_TYPED
    pasted = {typed for hints in PASTED.values() for typed in hints}
    assert found == pasted, f"no test in PASTED for {found - pasted}, and nothing prints {pasted - found}"
    for test in PASTED:
        file, name = test.split("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8"), test


# --- pasted into a notebook ---


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("pasted"), "%load_ext memlab", "from memlab.lesson import Lesson") as found:
        found.ok("import torch")
        found.ok("%%memtrack --quiet --name first\ny = torch.ones(1 << 20)\n")
        found.ok("%%memtrack --quiet --name second\nz = torch.ones(1 << 20)\n")
        found.ok('%%memtrack --quiet --name third --predict T4\nx = torch.ones(1 << 20, device="cuda")\n')
        yield found


@pytest.mark.parametrize(
    ("cell", "hint", "gives"),
    [
        ("%memfit nosuch", "import memlab; memlab.cards", "RTX 4060"),
        ("%%memtrack --predict nosuch\n1", "import memlab; memlab.cards", "RTX 4060"),
        ("%memlab gpt nosuch", "import memlab; memlab.techniques", "checkpoint"),
        ("%memoom", "import memlab; memlab.explain_oom('CUDA out of memory. ...')", "ran out of memory"),
        ("%memledger off\n%memledger", "%memledger on", ""),
        ("%memfit first", '%%memtrack --predict "RTX 4060"', ""),
        ("import memlab\nmemlab.fit(memlab.runs['third'], ['T4'])['L4']", "%memfit third L4", "fits"),
        (
            "lesson = Lesson('x')\nlesson.guess('How much?', between=('1 MiB', '1 GiB'))",
            'lesson.guesses[0].commit("300 MiB")',
            "locked",
        ),
        ("lesson = Lesson('x')\nlesson.guess('What?', choices=['a', 'b'])", 'lesson.guesses[0].commit("a")', "locked"),
    ],
)
def test_a_hint_works_pasted_into_the_next_cell(notebook, cell, hint, gives):
    reply = notebook.run(cell)
    texts = [str(data.get("text/plain", "")) for data in reply.shown]
    assert hint in f"{reply.said}{reply.out}{reply.stdout}{''.join(texts)}"
    if hint.startswith("%%"):
        hint += '\nw = torch.ones(4, device="cuda")'
    pasted = notebook.run(hint)
    assert pasted.status == "ok" and gives in f"{pasted.out}"


def test_a_cell_that_asks_for_two_gpus_gets_them_as_it_says(notebook):
    cell = "%%memtrack --predict T4{}\nw = torch.ones(4, device='cuda:1')"
    (hint,) = re.findall(r"or (--devices \d)", notebook.run(cell.format("")).said)
    assert "Fits 2 x T4" in notebook.ok(cell.format(f" {hint}")).report


def test_a_run_that_a_comparison_lacks_a_result_of_gets_one_as_it_says(notebook):
    assert "end its cell with an expression" in notebook.ok("%memcompare first second").report
    notebook.ok("%%memtrack --quiet --name first\ny = torch.ones(1 << 20)\ny.sum()\n")
    notebook.ok(
        "import memlab\nwith memlab.track('second', show=False) as run:\n    run.result(torch.ones(1 << 20).sum())"
    )
    assert "results equal bit for bit" in notebook.ok("%memcompare first second").report


def test_a_cell_whose_end_is_not_seen_is_tracked_as_it_says(notebook):
    reply = notebook.run("%%memtrack --name silent\n1", silent=True)
    assert "import memlab and use memlab.track() in it" in reply.said
    notebook.run("import memlab\nwith memlab.track('silent'):\n    torch.ones(9)", silent=True)
    assert notebook.value("'silent' in memlab.runs") is True
