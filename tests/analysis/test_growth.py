"""Which cells grow when they are run again, told from entries written by hand."""

from __future__ import annotations

import pytest

from memlab.analysis.growth import MIN_GROWTH_BYTES, Accounts, Entry, Left, LevelAfterRun, growing
from memlab.analysis.peak import Peak
from memlab.units import UNBOUNDED, ByteRange

KiB, MiB = 1 << 10, 1 << 20


def entry(index: int, *left: Left, cell: str = "a", **known) -> Entry:
    levels = known.pop("levels", (LevelAfterRun("cpu", 0, sum(one.nbytes for one in left)),))
    return Entry(index, index + 1, "code", cell, 0, 0.1, "ok", False, levels, left, **known)


def left(path: str, nbytes: int = MiB, died: int | None = None, device: str = "cpu") -> Left:
    return Left(path, device, nbytes, died=died)


def flags(*entries: Entry) -> list[tuple[str, int, int]]:
    return [(growth.name, growth.bytes_per_run, growth.runs) for growth in growing(entries)]


# --- names ---


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("x", "x"), ("losses[17]", "losses"), ("model.layer3.0.conv1.weight", "model"), ("cfg['x']", "cfg"),
        ("größe.grad", "größe"), ("losses[3].grad_fn -> MulBackward0 -> saved self", "losses"),
        *((output, "Out") for output in ("Out[7]", "_", "__", "___", "_7", "_12", "_oh[3]", "Out[7][0].grad")),
        ("_private", "_private"), ("__version__", "__version__"), ("_7a", "_7a"),
        ("traceback of cell 5 -> f() -> big", "traceback of cell 5"), ("", ""),
    ],
)  # fmt: skip
def test_the_variable_behind_a_path(path, root):
    assert left(path).root == root


# --- growth ---


def test_what_a_run_adds_to_what_the_run_before_left():
    runs = [entry(i, left(f"losses[{i}]")) for i in range(3)]
    assert flags(*runs[:1]) == []
    assert flags(*runs[:2]) == [("losses", MiB, 2)]
    assert flags(*runs) == [("losses", MiB, 3)]


@pytest.mark.parametrize(
    "runs",
    [
        [entry(0, left("x", died=1)), entry(1, left("x", died=2)), entry(2, left("x"))],
        [entry(0, left("x[0]", died=1)), entry(1, cell="b"), entry(2, left("x[0]", died=3)), entry(3, cell="b"),
         entry(4, left("x[0]"))],
        [entry(0, left("opt.state[0]")), entry(1), entry(2)],
        [entry(0, left("x[0]")), entry(1, left("x[1]")), entry(2)],
        # As `old, new = new, make()`, of which the names were asked afterwards.
        [entry(0, left("old")), entry(1, left("new"))],
        [entry(0, left("")), entry(1, left(""))],
    ],
    ids=["replaced", "emptied by another cell in between", "left by the first run alone", "not left by the last run",
         "another name each time", "without a name"],
)  # fmt: skip
def test_what_does_not_grow(runs):
    assert flags(*runs) == []


def test_other_cells_in_between_do_not_matter_and_outputs_are_one_name():
    assert flags(entry(0, left("Out[1]")), entry(1, left("_"))) == [("Out", MiB, 2)]
    assert flags(entry(0, left("x[0]")), entry(1, left("y"), cell="b"), entry(2, left("x[1]"))) == [("x", MiB, 2)]


def test_as_far_back_as_it_grew_each_time():
    runs = [entry(0, left("x[0]")), entry(1), entry(2, left("x[1]")), entry(3, left("x[2]"))]
    assert flags(*runs) == [("x", MiB, 2)]


def test_scalars_are_no_concern():
    small = MIN_GROWTH_BYTES - 1
    assert flags(*(entry(i, left(f"Out[{i}]", small)) for i in range(5))) == []
    assert flags(*(entry(i, left(f"Out[{i}]", small + 1)) for i in range(5))) == [("Out", small + 1, 5)]


def test_copies_that_get_larger_steadily_grow():
    runs = [entry(i, left("k", (i + 1) * MiB, died=i + 1)) for i in range(4)]
    assert flags(*runs[:3]) == []
    assert flags(*runs) == [("k", MiB, 3)]


@pytest.mark.parametrize("sizes", [(1, 2, 3, 3), (1, 2, 4, 8), (4, 3, 5, 6), (9, 2, 3, 4, 1)])
def test_copies_of_other_sizes_do_not(sizes):
    assert flags(*(entry(i, left("k", size * MiB, died=i + 1)) for i, size in enumerate(sizes))) == []


def test_devices_are_apart_and_the_largest_comes_first():
    runs = [entry(i, left(f"x[{i}]"), left(f"y[{i}]", 2 * MiB, device="cuda:0")) for i in range(2)]
    assert [(growth.name, growth.device) for growth in growing(runs)] == [("y", "cuda:0"), ("x", "cpu")]


def test_what_is_still_there_of_it():
    runs = [entry(0, left("x[0]", died=3)), entry(1, left("x[1]", died=3)), entry(2, left("x[2]"))]
    assert growing(runs)[0].still_bytes == MiB


# --- the values ---


def test_what_no_storage_accounts_for():
    levels = (LevelAfterRun("cpu", 0, 3 * MiB), LevelAfterRun("cuda:0", 5, 1))
    one = entry(0, left("x"), left("gone", died=0), levels=levels)
    assert (one.unnamed_bytes("cpu"), one.unnamed_bytes("cuda:0"), one.unnamed_bytes("cuda:1")) == (2 * MiB, 0, 0)


def test_pandas_has_a_row_for_each_cell_and_device():
    exact, open_end = Peak(ByteRange(5, 5), -1, -1, ""), Peak(ByteRange(7, UNBOUNDED), -1, -1, "")
    cards = LevelAfterRun("cuda:0", 1, 4, exact), LevelAfterRun("cuda:1", 2, 2, open_end)
    levels = (*cards, LevelAfterRun("cpu", 0, MiB))
    runs = (entry(0, left("x[0]", died=1), levels=levels), entry(1, left("x[1]", 20 * KiB)))
    frame = Accounts(runs, growing(runs), True).to_pandas()
    assert frame["device"].tolist() == ["cuda:0", "cuda:1", "cpu", "cpu"]
    assert frame["peak_low_bytes"].tolist()[:2] == [5, 7]
    assert frame["peak_high_bytes"].isna().tolist() == [False, True, True, True]
    assert frame["left_bytes"].tolist()[:3] == [3, 0, MiB]
    assert frame["still_bytes"].tolist() == [0, 0, 0, 20 * KiB]
    assert frame["names"].tolist() == ["", "", "x", "x"]
    assert len(Accounts((), (), True).to_pandas()) == 0
    storages = Accounts(runs, (), True).left_to_pandas()
    assert storages[["cell", "path", "nbytes"]].values.tolist() == [[1, "x[0]", MiB], [2, "x[1]", 20 * KiB]]
