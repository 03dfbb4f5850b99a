"""No author of a lesson writes where a figure comes from: its maker says so; and guesses meet computed values, no literals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import nbformat
import pytest

from notebooks.build.execute import outputs
from notebooks.build.source import Lesson, lessons

LESSONS = pytest.mark.parametrize("lesson", lessons(), ids=lambda one: one.name)
MAKERS = {"runs", "track", "predict", "max_batch", "advise", "who", "explain_oom", "run", "Lab", "CachingAllocator"}
"""The names of memlab that give a result which knows where its figures come from."""
SOURCE = r"(measured|simulated|predicted|computed|read from the message)"


def tree(lesson: Lesson) -> ast.Module:
    """The code of a lesson without its magics; what a cell magic names is in `memlab.runs`."""
    cells = [cell.source for cell in lesson.fresh().cells if cell.cell_type == "code"]
    return ast.parse("\n".join(line for cell in cells for line in cell.splitlines() if not line.startswith("%")))


def names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def targets_of(node: ast.AST) -> set[str]:
    """The names that an assignment to it binds: of `runs[n]` it is `runs`."""
    inner = {one.slice for one in ast.walk(node) if isinstance(one, ast.Subscript)}
    return names(node) - set().union(*map(names, inner))


def bindings(code: ast.AST) -> Iterator[tuple[set[str], ast.AST]]:
    """Names that are bound, and what they are bound to."""
    for node in ast.walk(code):
        match node:
            case ast.Assign(targets=targets, value=value):
                yield set().union(*map(targets_of, targets)), value
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                yield targets_of(target), value
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                yield targets_of(target), value
            case ast.withitem(optional_vars=ast.AST() as target, context_expr=value):
                yield targets_of(target), value
            case ast.FunctionDef(name=name):
                yield {name}, node


def from_makers(code: ast.AST) -> set[str]:
    """The names whose values come from a run, a prediction or the like, through any number of assignments."""

    def is_made(value: ast.AST) -> bool:
        asks = {
            one.attr
            for one in ast.walk(value)
            if isinstance(one, ast.Attribute) and names(one) & {"memlab", "lesson", "lab"}
        }
        return bool(asks & MAKERS or names(value) & (found | {"CachingAllocator"}))

    found: set[str] = set()
    while new := set().union(*(bound for bound, value in bindings(code) if is_made(value))) - found:
        found |= new
    return found


def literals(code: ast.AST) -> set[str]:
    """The names that stand for nothing but what the author typed."""
    typed, computed = set(), set()
    for bound, value in bindings(code):
        is_filled_later = isinstance(value, ast.List | ast.Dict) and not ast.unparse(value)[1:-1]
        if not isinstance(value, ast.FunctionDef) and not names(value) and not is_filled_later:
            typed |= bound
        elif not is_filled_later:
            computed |= bound
    return typed - computed


def calls(code: ast.AST, method: str) -> Iterator[ast.Call]:
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
            yield node


@LESSONS
def test_a_guess_is_compared_with_a_value_that_the_notebook_computed(lesson: Lesson) -> None:
    code = tree(lesson)
    typed = literals(code)
    for call in calls(code, "compare"):
        if isinstance(call.func, ast.Attribute) and names(call.func) != {"memlab"}:
            assert names(call.args[0]) - typed - names(call.func), f"a literal is no answer: {ast.unparse(call)}"


@LESSONS
def test_whatever_comes_from_a_run_is_given_with_the_run(lesson: Lesson) -> None:
    code = tree(lesson)
    made = from_makers(code)
    for method, value in {"compare": 0, "holds": 1}.items():
        for call in calls(code, method):
            is_guess_or_claim = isinstance(call.func, ast.Attribute) and names(call.func) != {"memlab"}
            if is_guess_or_claim and names(call.args[value]) & made:
                assert len(call.args) > value + 1, f"which run is it from? {ast.unparse(call)}"


@LESSONS
def test_nobody_types_a_source(lesson: Lesson) -> None:
    typed = {word.arg for word in ast.walk(tree(lesson)) if isinstance(word, ast.keyword)}
    assert not typed & {"source", "found"}


@LESSONS
def test_every_claim_and_answer_of_the_kept_notebook_says_its_source(lesson: Lesson) -> None:
    shown = text_of(nbformat.read(lesson.notebook, as_version=4))
    for claim in re.findall(r"^Claim holds.*", shown, re.MULTILINE):
        assert re.match(rf"Claim holds \({SOURCE}", claim), claim
    for source in re.findall(r"You said .*(?:right|it was [^,\n]*), (.*)\.$", shown, re.MULTILINE):
        assert re.match(SOURCE, source), source


@LESSONS
def test_the_kept_notebook_is_that_of_a_student_who_guessed(lesson: Lesson) -> None:
    shown = text_of(nbformat.read(lesson.notebook, as_version=4))
    asked = sum(map(len, lesson.answers.values()))
    assert "You skipped the guess" not in shown, f"python -m notebooks.build make {lesson.name[:2]}"
    assert f"You committed {asked} of {asked} guesses." in shown
    locked = re.findall(r"You said (.*); locked\.$", shown, re.MULTILINE)
    said = [answer for answers in lesson.answers.values() for answer in answers]
    assert [*map(plain, locked)] == [*map(plain, said)], "python -m notebooks.build make, as an answer has changed"
    assert not re.search(r"You said .*\bnan\b", shown)


def text_of(notebook: nbformat.NotebookNode) -> str:
    """The text of all its outputs."""
    return "\n".join(one.get("text") or one.get("data", {}).get("text/plain", "") for one in outputs(notebook))


def plain(answer: object) -> str:
    """An answer as its source and its notebook have it: `160 MiB` for 160.0 MiB, `25` for 25 %, `forward` for "forward"."""
    return re.sub(r"\.0+(?= )| %$|\"", "", str(answer))


def test_the_rule_finds_a_literal_and_a_run_that_is_not_given() -> None:
    code = ast.parse(
        "options = ['a', 'b']\nrun = memlab.runs['x']\nheld = run.breakdown()\nkept[n] = held['y']\nm = n + 1"
    )
    assert literals(code) == {"options"} and from_makers(code) == {"run", "held", "kept"}
