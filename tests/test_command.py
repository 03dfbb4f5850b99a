"""`memlab COMMAND` on the command line."""

from __future__ import annotations

import pytest
from processes import python

from memlab.__main__ import main


def test_the_cards_are_listed(capsys):
    assert main(["cards"]) == 0
    assert "RTX 4060" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["no such"], ["cards", "more"]])
def test_what_is_no_command_is_refused_with_the_ones_there_are(arguments, capsys):
    assert main(arguments) == 2
    assert "memlab: there is no command" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys; from memlab.__main__ import main; main(['--help']); print('torch' in sys.modules)"
    found = python("-c", code)
    assert found.startswith("memlab calibrate")
    assert found.endswith("False\n")
