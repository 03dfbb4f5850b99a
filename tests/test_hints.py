"""Whatever memlab prints to be typed or pasted is what there is: magics with their options, public names with their arguments.

And where a hint is printed it works as it is, pasted into the next cell of a notebook that has done no more than %load_ext.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel import Kernel, kernel

import memlab
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
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    skipped = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented)
               if isinstance(node.body[0], ast.Expr)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, ast.walk(node)))
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


# --- pasted ---


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
