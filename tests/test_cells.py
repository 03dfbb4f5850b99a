"""The text of a tracked cell: one line for one line, whatever the body is."""

from __future__ import annotations

import ast

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from memlab.cells import armed, body_of, is_tracked

CALL = "get_ipython()._memlab_arm('--name x')"


def of(body: str, first: str = "%%memtrack --name x\n") -> str:
    """The armed cell; what IPython would rewrite is only noted."""
    return "".join(armed([first, *body.splitlines(keepends=True)], lambda rest: f"rewritten({rest!r})\n"))


@pytest.mark.parametrize(
    "first", ["%%memtrack\n", "%%memtrack", "%%memtrack --name a\n", "%%memtrack\t-x\r\n", "%%memtrack \n"]
)
def test_a_cell_is_tracked_when_it_begins_with_the_magic(first):
    assert is_tracked([first, "x = 1\n"])


@pytest.mark.parametrize(
    "first",
    ["%%memtrackx\n", "%%memtrack?\n", "%memtrack x\n", " %%memtrack\n", "%%time\n", "# %%memtrack\n", "\n", "%%memtrack_2"],
)  # fmt: skip
def test_any_other_cell_is_not(first):
    assert not is_tracked([first, "%%memtrack\n"])
    assert not is_tracked([])


@pytest.mark.parametrize(
    "body",
    ["", "x = 1", "x = 1\ny = 2\n", "# only\n# comments\n", "\n\nx\n", 's = """a\n  b\n"""\n', "x = 1\r\ny = 2\r\n",
     "def f():\n\treturn 1\n", "await f()", "%time x\n!ls\n", "naïve = 'ö'\n", "x ==\n", "from math import pi\n", "   \n\t\n"],
)  # fmt: skip
def test_the_body_stays_as_it_is_below_one_line(body):
    assert of(body) == CALL + "\n" + body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("from __future__ import annotations\nx\n", "\nfrom __future__ import annotations; CALL\nx\n"),
        ("from __future__ import annotations", "\nfrom __future__ import annotations; CALL"),
        ("from __future__ import annotations  # why\nx", "\nfrom __future__ import annotations; CALL  # why\nx"),
        ("from __future__ import (a,\n  b)  # why\nx", "\nfrom __future__ import (a,\n  b); CALL  # why\nx"),
        ("from __future__ import \\\n  a\nx", "\nfrom __future__ import \\\n  a; CALL\nx"),
        ("from \\\n __future__ import a\nx", "\nfrom \\\n __future__ import a; CALL\nx"),
        ("from __future__ import a; x = '#'\n", "\nfrom __future__ import a; CALL; x = '#'\n"),
        ("from __future__ import a;\n", "\nfrom __future__ import a; CALL;\n"),
        ("from __future__ import a; \\\nx\n", "\nfrom __future__ import a; CALL; \\\nx\n"),
        (
            "from __future__ import a\nfrom __future__ import b\nx",
            "\nfrom __future__ import a\nfrom __future__ import b; CALL\nx",
        ),
        ('"""doc"""\nfrom __future__ import a\nx', '\n"""doc"""\nfrom __future__ import a; CALL\nx'),
        ('"""d # d"""; from __future__ import a\nx', '\n"""d # d"""; from __future__ import a; CALL\nx'),
        ("\"d\" 'e'\nfrom __future__ import a\nx", "\n\"d\" 'e'\nfrom __future__ import a; CALL\nx"),
        ('"""a\nb"""\n# c\n\nfrom __future__ import a\n', '\n"""a\nb"""\n# c\n\nfrom __future__ import a; CALL\n'),
        ("# first\n\nfrom __future__ import a\n", "\n# first\n\nfrom __future__ import a; CALL\n"),
        ("\nfrom __future__ import a\r\nx\r\n", "\n\nfrom __future__ import a; CALL\r\nx\r\n"),
        ("from __future__ import a\n!ls 'x\n?y\n", "\nfrom __future__ import a; CALL\n!ls 'x\n?y\n"),
        ("from __future__ import a\nif 1:\n  x\n y\n", "\nfrom __future__ import a; CALL\nif 1:\n  x\n y\n"),
        ("from  __future__  import a\nü = 1", "\nfrom  __future__  import a; CALL\nü = 1"),
    ],
)
def test_future_imports_stay_first_and_keep_their_line(body, expected):
    assert of(body) == expected.replace("CALL", CALL)


@pytest.mark.parametrize(
    "body",
    ["x = 1\nfrom __future__ import a\n", "from math import pi\nfrom __future__ import a\n", "import a; from __future__ import a\n",
     '"d".strip()\nfrom __future__ import a\n', "!ls\nfrom __future__ import a\n", "def f():\n    from __future__ import a\n",
     '"""from __future__ import a"""\n', "# from __future__ import a\n"],
)  # fmt: skip
def test_what_is_no_future_import_of_the_cell_moves_nothing(body):
    assert of(body) == CALL + "\n" + body


def test_a_cell_magic_below_is_left_to_ipython():
    assert of("%%time\nx\n") == f"{CALL}\nrewritten('%%time\\nx\\n')\n"
    assert of("\n  \n%%time\nx") == f"{CALL}\n\n  \nrewritten('%%time\\nx')\n"


def test_an_indented_body_loses_its_indent_as_any_cell_does():
    body = "  x = 1\n  if x:\n    y\n"
    assert of(body) == f"{CALL}\n{TransformerManager().transform_cell(body)}"
    assert of(body).endswith("\nx = 1\nif x:\n  y\n")


@pytest.mark.parametrize("line", ["--name 'a b'", '--name "it\'s"', "--name \\", "--name ünï", "--name '\U0001f680'"])
def test_the_options_reach_the_call_as_they_were_written(line):
    call = ast.parse(of("", f"%%memtrack {line}\n")).body[0].value
    assert [argument.value for argument in call.args] == [line]
    assert of("", f"%%memtrack   {line}  \r\n") == of("", f"%%memtrack {line}\n")


def test_the_same_text_gives_the_same_text():
    lines = ["%%memtrack\n", "from __future__ import a\n", "x\n"]
    first, second = armed(lines, str), armed(lines, str)
    assert first == second
    assert lines == ["%%memtrack\n", "from __future__ import a\n", "x\n"]


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        ("%%memtrack\nx\n", "x\n"),
        ("\n\n%%memtrack --name a\n\nx\n", "\nx\n"),
        ("  %%memtrack\n  x", "  x"),
        ("%%memtracks\nx", ""),
        ("x = 1\n%%memtrack\n", ""),
        ("", ""),
    ],
)
def test_the_text_below_the_magic(raw, body):
    assert body_of(raw) == body
