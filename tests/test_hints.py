"""Whatever memlab prints to be typed or pasted is what there is: magics with their options, public names with their arguments."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import memlab
from memlab.magics.extension import MAGICS
from memlab.magics.track import _parser

PACKAGE = Path(memlab.__file__).parent
CALL = re.compile(r"(?<![\w.'])memlab\.([a-z]\w*)(\((?:[^()]|\([^()]*\))*\))?")
MAGIC = re.compile(r"(%%?)(mem\w+)((?: --?\w[\w-]*| (?:on|off|clear|release)\b)*)")
WORDS = {"memledger": {"on", "off", "clear"}, "memoom": {"release", "--keep-outputs"}, "memwho": {"-d"}}


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


TEXTS = [(str(path.relative_to(PACKAGE)), text) for path in sorted(PACKAGE.rglob("*.py")) for text in printed(path)]


def hints(pattern: re.Pattern[str]) -> list[tuple[str, ...]]:
    return sorted({match.groups("") for _, text in TEXTS for match in pattern.finditer(text)})


@pytest.mark.parametrize(("signs", "name", "rest"), hints(MAGIC))
def test_a_magic_that_is_named_is_installed_and_takes_these_options(signs, name, rest):
    kind = "cell" if signs == "%%" else "line"
    assert any(name in magics.magics[kind] for magics in MAGICS)
    options = {option for action in _parser()._actions for option in action.option_strings}
    words = {word for word in rest.split() if name != "memtrack" or word.startswith("-")}  # "put %%memtrack on a cell"
    assert words <= (options if name == "memtrack" else WORDS.get(name, set()))


@pytest.mark.parametrize(("name", "arguments"), [one for one in hints(CALL) if one[0] in memlab.__all__ or one[1]])
def test_a_call_that_is_named_is_public_and_takes_these_arguments(name, arguments):
    public = getattr(memlab, name)
    if arguments:
        call = ast.parse(f"f{arguments}", mode="eval").body
        assert isinstance(call, ast.Call)
        named = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        inspect.signature(public).bind(*call.args, **named)
        if name == "track":  # which passes on what it is given
            public(**named)


def test_the_texts_are_found():
    assert {("%%", "memtrack", " --lines"), ("%", "memoom", " release"), ("%", "memledger", " on")} <= set(hints(MAGIC))
    assert {("track", "(lines=True)"), ("advise", '(..., card="RTX 4060")')} <= set(hints(CALL))
