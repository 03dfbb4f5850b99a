"""The ledger in words: what is shown, what is left out, and that nothing in it can do harm."""

from __future__ import annotations

import re

from memlab.analysis.growth import Accounts, Entry, Growth, Left, Level
from memlab.analysis.peak import UNKNOWN_BYTES, Peak
from memlab.views.ledger import ROWS_SHOWN, ledger_table

MiB = 1 << 20


def entry(index: int, *left: Left, level: Level | None = None, **known) -> Entry:
    levels = (level or Level("cpu", 0, sum(one.nbytes for one in left)),)
    known = {"text": "code", "again": 0, "status": "ok", "number": index + 1, **known}
    facts = {"index": index, "cell": "a", "duration_s": 0.1, "is_tracked": False, "levels": levels, "left": left}
    return Entry(**{**facts, **known})


def text(*entries: Entry, growths: tuple[Growth, ...] = (), notes: tuple[str, ...] = ()) -> str:
    return ledger_table(Accounts(entries, growths, True, notes)).text()


def row(*entries: Entry) -> str:
    return text(*entries).splitlines()[3]


def test_a_row_has_everything():
    level = Level("cuda:0", MiB, 4 * MiB, Peak(9 * MiB, 9 * MiB, -1, -1, ""))
    mine = [Left(f"losses[{i}]", "cuda:0", MiB) for i in range(3)]
    line = row(entry(4, *mine, level=level, text="train()", again=2, status="ValueError"))
    wanted = r"\[5\]\s+train\(\) \(run 3\) \(ValueError\)\s+cuda:0\s+1.00 MiB\s+9.00 MiB\s+4.00 MiB\s+\+3.00 MiB\s+3.00 MiB\s+"
    assert re.match(wanted + r"losses \(3 tensors\) 3.00 MiB$", line), line


def test_peaks_that_are_not_exact_say_so_and_the_cpu_has_none():
    def shown(low, high):
        return row(entry(0, level=Level("cuda:0", 0, 1, Peak(low, high, -1, -1, ""))))

    assert "5.00 MiB to 9.00 MiB" in shown(5 * MiB, 9 * MiB)
    assert "≥ 5.00 MiB" in shown(5 * MiB, UNKNOWN_BYTES)
    assert row(entry(0, level=Level("cpu", 0, 2 * MiB))).split() == [
        "[1]", "code", "cpu", "0", "B", "2.00", "MiB", "+2.00", "MiB", "rounding", "and", "what", "Python", "does",
        "not", "see", "2.00", "MiB",
    ]  # fmt: skip


def test_what_went_and_what_was_given_back():
    freed = [Left("x", "cpu", MiB, died=1), Left("y[0]", "cpu", MiB, died=1), Left("y[1]", "cpu", MiB, died=2)]
    later = [entry(1, number=7), entry(2, number=9)]
    shown = text(entry(0, *freed), *later)
    assert "0 B  y (2 tensors) 2.00 MiB (freed since, in [9]), x 1.00 MiB (freed since, in [7])" in shown
    assert shown.count("Freed since: there when its cell had ended, let go of by a later one") == 1
    assert row(entry(0, freed[0])).endswith("0 B  x 1.00 MiB (freed since)")  # nobody noted that cell
    half = text(entry(0, freed[0], Left("x.b", "cpu", MiB)), *later)  # a part of it is there
    assert "freed since" not in half.lower()
    assert "−1.00 MiB" in row(entry(0, level=Level("cpu", MiB, 0)))


def test_one_tensor_has_its_whole_path_and_many_names_are_counted():
    assert "model.fc.weight 1.00 MiB" in row(entry(0, Left("model.fc.weight", "cpu", MiB)))
    many = row(entry(0, *(Left(name, "cpu", size * MiB) for size, name in enumerate("abcdef", 1))))
    assert "f 6.00 MiB, e 5.00 MiB, d 4.00 MiB, 3 more names" in many


def test_what_was_not_looked_at_says_so():
    level = Level("cuda:0", 0, 2 * MiB)
    assert "not looked at 2.00 MiB" in row(entry(0, level=level, is_whole=False))
    assert "Cell [1]: too long." in text(entry(0, level=level, notes=("too long",)))


def test_quiet_cells_are_counted_and_old_rows_left_out():
    quiet = [entry(i) for i in range(5)]
    busy = [entry(10 + i, Left("x", "cpu", MiB)) for i in range(ROWS_SHOWN + 7)]
    shown = text(*quiet, *busy)
    assert "5 cell(s) left nothing and took nothing that was seen." in shown
    assert "7 earlier rows are not shown" in shown
    assert len(shown) < 12_000


def test_an_empty_ledger_and_one_that_is_off():
    table = ledger_table(Accounts((), (), False))
    assert table.text().splitlines()[0] == "memlab ledger · 0 cells · off (%memledger on)"
    assert "%load_ext memlab" in table.text()
    assert "<table" not in table.html()


def test_growth_in_a_sentence():
    growth = Growth("a", 7, "losses.append(loss)", "losses", "cuda:0", 3 * MiB, 4, 12 * MiB)
    wanted = (
        "Cell [7] grows when run again: losses by 3.00 MiB in each of the last 4 runs (cuda:0; losses.append(loss)); "
    )
    assert wanted + "12.00 MiB of it is still there." in text(growths=(growth,))


def test_an_interrupted_cell_whose_number_nobody_tells():
    words = row(entry(0, Left("x", "cpu", MiB), number=0, status="interrupted")).split()
    assert words[:3] == ["[?]", "code", "(interrupted)"]


HOSTILE = "<script>alert(1)</script>\x1b[2J\n\u202e" + "x" * 5000


def test_hostile_texts_are_escaped_and_keep_their_line():
    one = entry(0, Left(HOSTILE, "cpu", MiB), text=HOSTILE, status=HOSTILE, notes=(HOSTILE,))
    growth = Growth("a", 1, HOSTILE, HOSTILE, "cpu", MiB, 2, MiB)
    table = ledger_table(Accounts((one,), (growth,), True, (HOSTILE,)))
    assert all(line.isprintable() for line in table.text().splitlines())
    html = table.html()
    assert "<script" not in html
    assert html.replace("\n", "").isprintable()
    assert len(html) < 8000
    assert len(table.text().splitlines()) < 15


def test_text_and_html_show_the_same():
    table = ledger_table(Accounts((entry(0, Left("x < y", "cpu", MiB)),), (), True))
    for cell in table.rows[0]:
        assert cell.replace("<", "&lt;") in table.html()
        assert cell in table.text()
