"""Values that a prediction assumes: their keys, what they decide, and setting them."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from types import SimpleNamespace

import pytest
import torch
from processes import python

import memlab
from memlab.errors import PredictionError
from memlab.fake_cuda.assumed import AssumedValue
from memlab.prediction.assumptions import how_to_set, parsed
from memlab.prediction.probe import NOTES

CARD = memlab.Card("a card", 1 << 33, (8, 0), (100 << 20, 200 << 20), 1 << 33, 1 << 33, 108)
WIDTH = 1 << 16


def selects() -> None:
    rows = torch.randn(1000, WIDTH, device="cuda")
    kept = rows[torch.randn(1000, device="cuda") > 0]
    kept.mean().item()


def waits() -> None:
    loss = 9.0
    while loss > 2:
        loss = torch.randn(64, device="cuda").mean().item()


FILE = "test_assume.py"
MASK = f"{FILE}:{selects.__code__.co_firstlineno + 2} mask"
ITEM = f"{FILE}:{selects.__code__.co_firstlineno + 3} item"
ROW = WIDTH * 4


@pytest.fixture(scope="module")
def found() -> memlab.Prediction:
    return memlab.predict(selects, CARD)


def test_an_assumption_has_a_key_a_value_and_a_bound(found, tmp_path):
    assert f"{MASK}: assumed 1,000, at most 1,000" in str(found) and f"{ITEM}: assumed 1" in str(found)
    again = memlab.load(found.save(tmp_path / "p.memlab"))
    for one in (found, again):
        mask, item = one.assumptions.values
        assert (mask.key, mask.low, mask.least, mask.most, mask.decides) == (MASK, 1000, 0, 1000, "size")
        assert (item.key, item.high, item.most, item.count) == (ITEM, 1.0, None, 1)
    table = found.assumptions.to_pandas()
    assert list(table["key"]) == [MASK, ITEM] and table["most"][0] == 1000
    assert found.verdict.endswith("to spare")


def test_a_value_is_set_by_its_key(found):
    few = memlab.predict(selects, CARD, assume={MASK: 250})
    assert f"{MASK}: set to 250, at most 1,000" in str(few)
    # the indices of the mask are 8 bytes each
    assert 750 * ROW <= found.peak_allocated_bytes - few.peak_allocated_bytes <= 750 * (ROW + 64)


def test_the_report_says_how_to_set_one_in_a_shell_and_in_python(found):
    option, python = re.findall("`(.*?)`", next(line for line in str(found).splitlines() if "to set an" in line))
    flag, words = shlex.split(option)
    assert flag == "--assume" and parsed([words]) == {MASK: 1000}
    assert eval(f"dict({python})") == {"assume": {MASK: 1000}}
    assert "to set an" not in str(memlab.predict(selects, CARD, assume={MASK: 1, ITEM: 2}))


@pytest.mark.parametrize("text", ['a "quoted" file.py:3 mask', "it's $HOME.py:3 mask", "C:\\x.py:3 item"])
def test_names_that_a_shell_would_change_are_quoted(text):
    values = [dataclasses.asdict(AssumedValue(text, 3, 3, decides="size"))]
    option = how_to_set(SimpleNamespace(notes={NOTES: {"assumed": values}})).split("`")[1]  # type: ignore[arg-type]
    assert parsed(shlex.split(option)[1:]) == {text: 3}


@pytest.mark.parametrize(
    ("assume", "text"),
    [
        ({MASK: 2000}, f"'{MASK}' is 0 to 1,000, got 2,000"),
        ({MASK: -1}, f"'{MASK}' is 0 to 1,000, got -1"),
        ({MASK: 0.5}, f"'{MASK}' is 0 to 1,000, got 0.5"),
        ({"train.py:1 item": 2}, f"the program never read 'train.py:1 item'; the keys are {MASK}, {ITEM}."),
        ({MASK: "many"}, f"'{MASK}' is given 'many'"),
        ({"": 1}, "got the key ''"),
        ([MASK], "got list"),
        ({MASK: float("nan")}, "is given nan"),
    ],
)
def test_what_cannot_be_set_is_refused_in_one_line(assume, text):
    with pytest.raises(PredictionError) as caught:
        memlab.predict(selects, CARD, assume=assume)
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_words_become_values():
    words = ["train.py:41 nonzero=2,500", "cell:3 item=True", "a=b.py:1 item=0.5", "x.py:1 item=-1"]
    expected = {"train.py:41 nonzero": 2500, "cell:3 item": True, "a=b.py:1 item": 0.5, "x.py:1 item": -1}
    assert parsed(words) == expected
    for word in ("nothing", "x.py:1 item=", "=3", "x.py:1 item=much"):
        with pytest.raises(PredictionError):
            parsed([word])


def test_the_first_line_names_what_the_length_depends_on():
    found = memlab.predict(waits, CARD)
    line = waits.__code__.co_firstlineno + 3
    condition = f"if it runs as long as was assumed ({FILE}:{line} item=1.0)"
    assert condition in str(found).splitlines()[0] and condition in repr(found) and condition in found.report().title
    assert condition in str(memlab.fit(found, ["T4"])).splitlines()[0]
    largest = memlab.max_batch(lambda batch: waits, CARD, at_most=1)
    assert condition in largest.title and condition in largest.scene().title
    assert condition in str(memlab.scaling(waits, CARD, world_sizes=[2])).splitlines()[0]
    assert [one.decides for one in found.assumptions.values] == ["length"]
    longer = memlab.predict(
        lambda: [torch.zeros(1, device="cuda") for _ in range(torch.randn(9, device="cuda").argmax())], CARD
    )
    assert "at most 8" in str(longer) and "if it runs as long" in longer.verdict


def test_what_may_not_fit_is_predicted_with_the_fewest_too():
    small = memlab.Card("small", 360 << 20, (8, 0), 0, 360 << 20, 360 << 20, 108)
    found = memlab.predict(selects, small)
    assert found.fits == "close" and f"with the most of {MASK} (fits with the fewest)" in str(found).splitlines()[0]
    assert f"({MASK}): between 250.0 MiB (fewest) and 500.0 MiB (most) allocated." in str(found)
    tiny = memlab.predict(selects, memlab.Card("tiny", 100 << 20, (8, 0), 0, 100 << 20, 100 << 20, 108))
    assert tiny.fits == "no" and "with the fewest" not in tiny.verdict and "(fewest)" in str(tiny)


def test_the_command_takes_values_and_gives_them_as_data(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\nx = torch.randn(64, device='cuda')\nloss = x[x > 0].sum()\nwhile loss > 2: pass\n")
    asked = ("-m", "memlab", "predict", "--card", "8GiB", "--json", "--assume", "train.py:3 mask=5", script)
    facts = json.loads(python(*asked).splitlines()[-1])
    mask, item = facts["assumed"]
    assert (mask["key"], mask["high"], mask["is_given"]) == ("train.py:3 mask", 5, True)
    assert (item["key"], item["high"], item["decides"]) == ("train.py:4 item", False, "length")


def test_a_peak_that_depends_on_an_assumed_value_says_so():
    def step() -> None:
        found = torch.nonzero(torch.rand(1000, device="cuda") > 0.5)
        kept.append(found.float())

    kept: list[torch.Tensor] = []
    found = memlab.predict(step, CARD)
    (key,) = (one.key for one in found.assumptions.values)
    condition = "bytes exactly, from the simulated allocator of a GPU, for the values that were assumed."
    assert condition in str(found.report())
    given = str(memlab.predict(step, CARD, assume={key: 500}).report())
    assert "bytes exactly, from the simulated allocator of a GPU." in given


def test_a_mask_that_is_read_again_as_in_backward_selects_as_many():
    def step() -> None:
        rows, mask = torch.randn(100, 8, device="cuda", requires_grad=True), torch.randn(100, device="cuda") > 0
        found, base = rows[mask], torch.zeros(100, 8, device="cuda")
        base[mask] = found * 2
        base.sum().backward()
        mask |= torch.randn(100, device="cuda") > 0
        rows[mask]

    line = step.__code__.co_firstlineno + 2
    found = memlab.predict(step, CARD, assume={f"{FILE}:{line} mask": 30})
    high = {one.key: one.high for one in found.assumptions.values}
    assert high == {f"{FILE}:{line + at} mask": count for at, count in {0: 30, 1: 30, 2: 30, 4: 100}.items()}


def test_what_equals_one_number_is_not_there_for_another():
    def step() -> None:
        chosen = torch.randn(1000, 4, device="cuda").argmax(1)
        for number in range(4):
            (chosen == number).nonzero()

    def high(assume: dict[str, float] | None = None) -> tuple[int, int, int]:
        (one,) = memlab.predict(step, CARD, assume=assume).assumptions.values
        return one.low, one.high, one.most

    key = f"{FILE}:{step.__code__.co_firstlineno + 3} nonzero"
    assert high() == (1000, 1000, 1000)
    assert high({key: 300}) == (100, 300, 1000)
    assert high({key: 600}) == (0, 600, 1000)


LIBRARY = {
    "choosing.py": "def chosen(mask):\n    return mask.nonzero()\n\n\ndef both(mask):\n    return mask.nonzero()\n",
    "layers.py": (
        "from choosing import both, chosen\n\n\ndef first(rows, mask):\n    return rows[chosen(mask)[:, 0]]\n\n\n"
        "def second(rows, mask, other):\n    return rows[chosen(mask)[:, 0]], rows[both(other)[:, 0]]\n"
    ),
}


@pytest.fixture
def library(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name, text in LIBRARY.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    import layers

    yield layers
    for name in LIBRARY:
        sys.modules.pop(name.removesuffix(".py"))


def test_what_a_library_reads_has_its_lines_in_the_key_and_is_set_by_any_of_them(library):
    def step() -> None:
        rows = torch.randn(1000, WIDTH, device="cuda")
        masks = [torch.randn(1000, device="cuda") > 0 for _ in range(3)]
        kept.extend((library.first(rows, masks[0]), library.second(rows, *masks[1:])))

    def most(assume: dict[str, float] | None = None) -> dict[str, int]:
        return {one.key: one.high for one in memlab.predict(step, CARD, assume=assume).assumptions.values}

    kept: list[object] = []
    user = f"{FILE}:{step.__code__.co_firstlineno + 3}"
    first, second, both = (f"{user} layers.py:{at} choosing.py:{read} nonzero" for at, read in ((5, 2), (9, 2), (9, 6)))
    assert most() == {first: 1000, second: 1000, both: 1000}
    assert most({f"{user} nonzero": 10}) == {first: 10, second: 10, both: 10}
    assert most({"layers.py:9 nonzero": 20}) == {first: 1000, second: 20, both: 20}
    narrower = {f"{user} nonzero": 10, "choosing.py:2 nonzero": 30, f"{user} layers.py:9 nonzero": 40, both: 40}
    assert most(narrower) == {first: 30, second: 40, both: 40}
    with pytest.raises(PredictionError, match=r"'choosing.py:2 nonzero' is 0 to 1,000, got 2,000"):
        most({"choosing.py:2 nonzero": 2000})
    with pytest.raises(PredictionError, match=r"never read 'choosing.py:3 nonzero'; the keys are .* choosing.py:2"):
        most({"choosing.py:3 nonzero": 2})
