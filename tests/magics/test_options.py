"""What the magics refuse, before anything runs, and how `%memtrack` reads a line."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

from memlab.magics.track import TrackMagics, parse, split_line

MiB = 1 << 20


def test_without_options_there_are_the_defaults():
    found = parse("")
    assert (found.name, found.budget_bytes, found.save, found.rate_hz) == ("", None, None, 10.0)
    assert (found.live, found.show, found.lines) == (True, True, False)


def test_every_option_arrives(tmp_path):
    files = f"--save '{tmp_path}/x y' --rate 5 --ring 5000 --no-live --quiet"
    found = parse(f"--name 'a b' --device cpu --budget 2MiB {files} --lines -f a.b --function c --shapes")
    assert (found.name, found.target.type, found.budget_bytes) == ("a b", "cpu", 2 * MiB)
    assert (found.save, found.rate_hz, found.entries) == (tmp_path / "x y", 5.0, 5000)
    assert (found.live, found.show) == (False, False)
    assert (found.lines, found.functions, found.shapes) == (True, ("a.b", "c"), True)
    assert parse('--name=x"y z"').name == "xy z"
    assert parse("-f a").lines is True


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--bogus", "unknown '--bogus'"),
        ("--devices 0", "--devices goes with --predict CARD"),
        ("--nam x", "unknown '--nam x'"),
        ("extra words", "unknown 'extra words'"),
        ("--name", "expected one argument"),
        ("-f", "expected one argument"),
        ("--name ''", "1 to 200 characters"),
        (f"--name {'n' * 10_000}", "1 to 200 characters"),
        ("--name 'open", "No closing quotation"),
        ('--name "open', "No closing quotation"),
        ("--device gpu7", "not a device: 'gpu7'"),
        ("--device cuda:99", "cannot measure cuda:99"),
        ("--device ''", "not a device"),
        ("--budget much", "not a size: 'much'"),
        ("--budget 0", "above 0"),
        ("--budget -1", "not a size: '-1'"),
        ("--budget nan", "not a size"),
        ("--rate 0", "above 0 and at most 20 Hz, got 0.0"),
        ("--rate 21", "at most 20 Hz, got 21.0"),
        ("--rate -1", "at most 20 Hz, got -1.0"),
        ("--rate nan", "at most 20 Hz, got nan"),
        ("--rate inf", "at most 20 Hz, got inf"),
        ("--rate fast", "invalid float value: 'fast'"),
        ("--ring 10", "1,000 to 10,000,000, got 10"),
        ("--ring 1.5", "invalid int value: '1.5'"),
        ("--save no/such/folder/x.memlab", "name a file in a folder that exists"),
        ("--save ''", "name a file in a folder that exists"),
        ("--save .", "name a file in a folder that exists"),
        ("--predict 'RTX 4060'", "--predict has to stand in the cell's first line"),
        ("--predict T4 --lines", "--lines does not go with --predict"),
        ("--predict T4 --device cuda", "--device does not go with --predict"),
        ("--torch 2.14", "--torch goes with --predict CARD"),
        ("--raises-oom", "--raises-oom goes with --predict CARD"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error_of_one_line(line, why):
    with pytest.raises(UsageError) as caught:
        parse(line)
    message = str(caught.value)
    assert message.startswith("%memtrack: ") and why in message
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    ("line", "options", "statement"),
    [
        ("x = f(a, b)", "", "x = f(a, b)"),
        ("--name q x = 1", "--name q", "x = 1"),
        ("--name 'a b' x = 1", "--name 'a b'", "x = 1"),
        ('--name "a b" --quiet "text" + y', '--name "a b" --quiet', '"text" + y'),
        ("--name='a b' x", "--name='a b'", "x"),
        ("--quiet -- -x", "--quiet", "-x"),
        ("-- -x", "", "-x"),
        ("--budget 2GiB model(x) if a else -b", "--budget 2GiB", "model(x) if a else -b"),
        ("f('--name', x)", "", "f('--name', x)"),
        ("  --quiet   x", "--quiet", "x"),
        ("--quiet", "--quiet", ""),
        ("--name", "--name", ""),
        ("--name 'open x", "--name", "'open x"),
        ("--predict T4 --devices 2 --torch 2.14 f()", "--predict T4 --devices 2 --torch 2.14", "f()"),
    ],
)
def test_a_line_is_options_and_then_a_statement(line, options, statement):
    assert split_line(line) == (options, statement)


def test_help_tells_every_option_as_does_a_refusal():
    with pytest.raises(UsageError) as error:
        parse("--zork")
    options = ("--name N", "--device D", "-f FUNCTION", "--budget SIZE", "--save FILE", "--predict CARD", "--quiet")
    for option in options:
        assert option in str(error.value)
        assert option.split()[0] in TrackMagics.memtrack.__doc__
    assert "\n" not in str(error.value)
