"""The ledger in words: what is shown, what is left out, and that nothing in it can do harm."""

from __future__ import annotations

import re

from memlab.analysis.growth import Accounts, Entry, Growth, Left, LevelAfterRun
from memlab.analysis.peak import Peak
from memlab.units import UNBOUNDED, ByteRange
from memlab.views.ledger import ROWS_SHOWN, ledger_page

MiB = 1 << 20


def entry(index: int, *left: Left, level: LevelAfterRun | None = None, **known) -> Entry:
    levels = (level or LevelAfterRun("cpu", 0, sum(one.nbytes for one in left)),)
    known = {"text": "code", "again": 0, "status": "ok", "number": index + 1, **known}
    facts = {"index": index, "cell": "a", "duration_s": 0.1, "is_tracked": False, "levels": levels, "left": left}
    return Entry(**{**facts, **known})


def text(*entries: Entry, growths: tuple[Growth, ...] = (), notes: tuple[str, ...] = ()) -> str:
    return ledger_page(Accounts(entries, growths, True, notes)).text()


def row(*entries: Entry) -> str:
    return text(*entries).splitlines()[3]


def test_a_row_has_everything():
    level = LevelAfterRun("cuda:0", MiB, 4 * MiB, Peak(ByteRange(9 * MiB, 9 * MiB), -1, -1, ""))
    mine = [Left(f"losses[{i}]", "cuda:0", MiB) for i in range(3)]
    line = row(entry(4, *mine, level=level, text="train()", again=2, status="ValueError"))
    wanted = r"\s+\[5\]\s+train\(\) \(run 3\) \(ValueError\)\s+cuda:0\s+1.00 MiB\s+9.00 MiB\s+4.00 MiB\s+\+3.00 MiB\s+3.00 MiB\s+"
    assert re.match(wanted + r"losses \(3 tensors\) 3.00 MiB$", line), line


def test_peaks_that_are_not_exact_say_so_and_the_cpu_has_none():
    def shown(low, high):
        return row(entry(0, level=LevelAfterRun("cuda:0", 0, 1, Peak(ByteRange(low, high), -1, -1, ""))))

    assert "5.00 to 9.00 MiB" in shown(5 * MiB, 9 * MiB)
    assert "≥ 5.00 MiB" in shown(5 * MiB, UNBOUNDED)
    words = " ".join(row(entry(0, level=LevelAfterRun("cpu", 0, 2 * MiB))).split())
    assert words == "[1] code cpu 0 B 2.00 MiB +2.00 MiB rounding and what Python does not see 2.00 MiB"


def test_what_went_and_what_was_given_back():
    freed = [Left("x", "cpu", MiB, died=1), Left("y[0]", "cpu", MiB, died=1), Left("y[1]", "cpu", MiB, died=2)]
    later = [entry(1, number=7), entry(2, number=9)]
    shown = text(entry(0, *freed), *later)
    assert "0 B  y (2 tensors) 2.00 MiB (freed since, in [9]), x 1.00 MiB (freed since, in [7])" in shown
    assert shown.count("Freed since: alive when its cell had ended, freed by a later one") == 1
    assert row(entry(0, freed[0])).endswith("0 B  x 1.00 MiB (freed since)")  # nobody noted that cell
    half = text(entry(0, freed[0], Left("x.b", "cpu", MiB)), *later)  # a part of it is there
    assert "freed since" not in half.lower()
    assert "−1.00 MiB" in row(entry(0, level=LevelAfterRun("cpu", MiB, 0)))


def test_one_tensor_has_its_whole_path_and_many_names_are_counted():
    assert "model.fc.weight 1.00 MiB" in row(entry(0, Left("model.fc.weight", "cpu", MiB)))
    many = row(entry(0, *(Left(name, "cpu", size * MiB) for size, name in enumerate("abcdef", 1))))
    assert "f 6.00 MiB, e 5.00 MiB, d 4.00 MiB, 3 more names" in many


def test_what_was_not_looked_at_says_so():
    level = LevelAfterRun("cuda:0", 0, 2 * MiB)
    assert "not inspected 2.00 MiB" in row(entry(0, level=level, is_whole=False))
    assert "Cell [1]: too long." in text(entry(0, level=level, notes=("too long",)))


def test_quiet_cells_are_counted_and_old_rows_left_out():
    quiet = [entry(i) for i in range(5)]
    busy = [entry(10 + i, Left("x", "cpu", MiB), text=f"code {i}") for i in range(ROWS_SHOWN + 7)]
    shown = text(*quiet, *busy)
    assert "5 cells freed everything and had no peak." in shown and "7 earlier rows not shown" in shown
    assert len(shown) < 12_000


def test_runs_of_a_cell_that_leave_the_same_are_one_row():
    def run(index: int, size: int = MiB) -> Entry:
        level = LevelAfterRun("cpu", index * MiB, index * MiB + size)
        return entry(index, Left(f"losses[{index}]", "cpu", size), level=level, text="train()", again=index)

    lines = text(*map(run, range(4)), run(4, 2 * MiB)).splitlines()
    wanted = r"\s+\[1\] … \[4\]\s+train\(\) \(4 runs\)\s+cpu\s+0 B\s+4.00 MiB\s+\+4.00 MiB\s+4.00 MiB\s+"
    assert re.match(wanted + r"each: losses\[3\] 1.00 MiB$", lines[3]), lines[3]
    assert "[5]" in lines[4] and "train() (run 5)" in lines[4]
    assert text(run(0), run(1)).count("train()") == 2


def test_an_empty_ledger_and_one_that_is_off():
    table = ledger_page(Accounts((), (), False))
    assert table.text().splitlines()[0] == "memlab ledger · 0 cells · off (%memledger on)"
    assert "%load_ext memlab" in table.text()
    assert "<table" not in table.html()


def test_growth_in_a_sentence():
    growth = Growth("a", 7, "losses.append(loss)", "losses", "cuda:0", 3 * MiB, 4, 12 * MiB)
    grows = "losses by 3.00 MiB in each of the last 4 runs (cuda:0; losses.append(loss))"
    wanted = f"Cell [7] grows when run again: {grows}; 12.00 MiB of it is still alive."
    assert wanted in text(growths=(growth,))


def test_an_interrupted_cell_whose_number_nobody_tells():
    words = row(entry(0, Left("x", "cpu", MiB), number=0, status="interrupted")).split()
    assert words[:3] == ["[?]", "code", "(interrupted)"]


HOSTILE = "<script>alert(1)</script>\x1b[2J\n\u202e" + "x" * 5000


def test_hostile_texts_are_escaped_and_keep_their_line_and_html_shows_the_same():
    one = entry(0, Left(HOSTILE, "cpu", MiB), text=HOSTILE, status=HOSTILE, notes=(HOSTILE,))
    growth = Growth("a", 1, HOSTILE, HOSTILE, "cpu", MiB, 2, MiB)
    table = ledger_page(Accounts((one,), (growth,), True, (HOSTILE,)))
    assert all(line.isprintable() for line in table.text().splitlines())
    html = table.html()
    assert "<script" not in html and html.replace("\n", "").isprintable()
    assert len(html) < 8000 and len(table.text().splitlines()) < 15
    page = ledger_page(Accounts((entry(0, Left("x < y", "cpu", MiB)),), (), True))
    for cell in re.split(r"  +", page.text().splitlines()[3].strip()):
        assert cell.replace("<", "&lt;") in page.html()
