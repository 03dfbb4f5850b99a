"""The explorer without a browser: its columns give the levels and figures of the run, and its page escapes what it shows."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import re
from typing import Any

import numpy as np
import pytest
from scripted_traces import GPU, Script, busy

from memlab.analysis.breakdown import breakdown
from memlab.analysis.curves import areas
from memlab.analysis.iterations import distinct
from memlab.analysis.peak import peak
from memlab.analysis.timeline import timeline
from memlab.errors import MemlabError, TraceError
from memlab.trace import Category, Kind, Phase, Recategorised, Trace
from memlab.views.explorer import Explorer, ExplorerRun

HOSTILE = "</script><img src=x onerror='window.hacked = 1'>"


def unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the columns, read as the page reads them."""
    raw = gzip.decompress(data)
    length = int.from_bytes(raw[:4], "little")
    header, offset, columns = json.loads(raw[4 : 4 + length]), 4 + length, {}
    for name, kind, count in header["columns"]:
        width = int(kind[1])
        planes = np.frombuffer(raw, "u1", width * count, offset).reshape(width, count)
        columns[name] = np.ascontiguousarray(planes.T).view(f"<{kind}").ravel()
        offset += width * count
    assert offset == len(raw)
    return header, columns


def levels(columns: dict[str, np.ndarray], of: np.ndarray | None = None) -> np.ndarray:
    """The bytes after each event, of all pieces or of some."""
    begin = np.cumsum(columns["begin"].astype("i8"))
    end, size = begin + columns["age"], columns["sizes"][columns["size"]].astype("i8")
    change = np.zeros(len(columns["time"]) + 1, "i8")
    chosen = np.ones(len(begin), bool) if of is None else of
    np.add.at(change, begin[chosen], size[chosen])
    np.add.at(change, np.minimum(end, len(change) - 1)[chosen], -size[chosen])
    return np.cumsum(change)[:-1]


def run_of(trace: Trace, **more: Any) -> ExplorerRun:
    return ExplorerRun("a run", trace, trace.device_indices[0], **more)


@pytest.mark.parametrize("seed", range(3))
def test_the_columns_give_every_level_of_the_run_and_the_event_of_its_peak(seed: int) -> None:
    trace = busy(4000, seed)
    header, columns = unpacked(run_of(trace).packed())
    line = timeline(trace, 0)
    assert levels(columns).tolist() == line.bytes.tolist()
    assert header["peak"]["bytes"] == peak(trace, 0).low_bytes == levels(columns)[header["peak"]["event"]]
    times_ns = np.cumsum(columns["time"].astype("i8")) * round(header["tick_s"] * 1e9)
    assert np.abs(times_ns - line.time_ns).max() <= header["tick_s"] * 1e9


def test_the_names_of_the_pieces_give_the_breakdown_of_the_peak() -> None:
    trace = busy(3000)
    header, columns = unpacked(run_of(trace).packed())
    module = columns["of module"][columns["origin"]]
    at, found = header["peak"]["event"], {}
    for number, name in enumerate(header["texts"]["module"]):
        if name and (held := int(levels(columns, module == number)[at])):
            found[name] = held
    rounding = columns["roundings"][columns["rounding"]]
    assert rounding.max() > 0
    shares = breakdown(trace, 0, "module").shares
    named = {name: count for name, count in shares.items() if name in found}
    # Blocks are shown with what the allocator added, which the breakdown has in a row of its own.
    assert sum(found.values()) - sum(named.values()) <= shares["rounding"]
    assert named.keys() == found.keys()


def test_a_block_that_changes_its_category_is_a_piece_for_each() -> None:
    script = Script()
    script.here_it_starts()
    first = script.alloc(1024, category=Category.ACTIVATION)
    other = script.alloc(512, category=Category.TEMPORARY)
    script.free(other)
    third = script.alloc(256)
    script.free(first)
    script.free(third)
    # The last one comes after the end of its block and says nothing.
    changes = Recategorised([0, 0, 1], [2, 3, 5], [Category.GRADIENT, Category.OTHER, Category.INPUT])
    trace = dataclasses.replace(script.trace(), recategorised=changes)
    header, columns = unpacked(run_of(trace).packed())
    category = columns["of category"][columns["origin"]]
    assert columns["block"].tolist() == [0, 1, 0, 0, 2]
    assert category.tolist() == [Category.ACTIVATION, Category.TEMPORARY, Category.GRADIENT, Category.OTHER, 0]
    line = timeline(trace, 0)
    assert levels(columns).tolist() == line.bytes.tolist()
    layers = areas(trace, 0).layers
    for code, name in ((Category.ACTIVATION, "activation"), (Category.GRADIENT, "gradient"), (Category.OTHER, "other")):
        assert levels(columns, category == code).tolist() == layers[name].tolist()
    assert header["unseen"] == 0


def test_a_free_without_its_allocation_is_counted_and_not_drawn() -> None:
    script = Script()
    block = script.preexisting(512)
    script.alloc(1024)
    script.free(block)
    trace = script.trace()
    kinds = trace.events.kind.copy()
    kinds[0] = Kind.SEGMENT_ALLOC
    header, columns = unpacked(run_of(dataclasses.replace(trace, events=trace.events.replace(kind=kinds))).packed())
    assert (header["unseen"], len(columns["begin"])) == (1, 1)


def test_out_of_memory_phases_capacity_and_holders_are_in_the_header() -> None:
    script = Script()
    script.here_it_starts()
    script.alloc(512, phase=Phase.FORWARD)
    script.oom(1 << 30, 100)
    header, _ = unpacked(run_of(script.trace(), holders={0: ("kept[3]",)}).packed())
    assert header["ooms"] == [[1, 1 << 30]]
    assert (header["capacity"], header["holders"]) == (GPU.capacity_bytes, {"0": ["kept[3]"]})
    _, columns = unpacked(run_of(busy(2000)).packed())
    assert set(columns["phase code"].tolist()) >= {Phase.BACKWARD, Phase.OPTIMIZER}


def test_large_sizes_and_long_runs_keep_every_byte() -> None:
    script = Script()
    script.here_it_starts()
    script.alloc((5 << 30) + 512, at=3_600_000_000_000)
    header, columns = unpacked(run_of(script.trace(duration=86_400 * 10**9)).packed())
    assert levels(columns).tolist() == [0, (5 << 30) + 512]
    assert header["end_s"] == 86_400
    assert np.cumsum(columns["time"])[-1] * header["tick_s"] == pytest.approx(3600)


def test_lines_have_the_names_that_the_reader_knows() -> None:
    script = Script()
    script.alloc(512, line="<ipython-input-1-abc>:3")
    trace = script.trace()
    header, _ = unpacked(
        run_of(trace, line_name=lambda line: line.replace("<ipython-input-1-abc>", "cell [1]")).packed()
    )
    assert header["texts"]["line"] == ["", "cell [1]:3"]


def test_distinct_rows_are_numbered() -> None:
    a, b = np.array([3, 3, 7, 3]), np.array([0, 1, 0, 0])
    number, first = distinct(a, b)
    assert number[0] == number[3] and len(set(number.tolist())) == 3
    assert sorted(zip(a[first].tolist(), b[first].tolist(), strict=True)) == [(3, 0), (3, 1), (7, 0)]

    # Their combinations are more than an integer can number.
    many = [np.array([0, 1 << 30, 1 << 30]), np.array([1 << 30, 5, 5]), np.array([7, 1 << 30, 1 << 30])]
    number, first = distinct(*many)
    assert number[1] == number[2] != number[0] and len(first) == 2


def test_the_page_stands_alone_and_escapes_every_name(tmp_path: Any) -> None:
    script = Script()
    script.alloc(512, module=HOSTILE, line=f"{HOSTILE}:1")
    explorer = Explorer(dataclasses.replace(run_of(script.trace()), title=HOSTILE))
    path = explorer.save(tmp_path / "explorer.html")
    page = path.read_text()
    assert "<img" not in page and page.count("</script>") == 1
    assert not re.search(r"https?://", page)
    header, _ = unpacked(base64.b64decode(re.search(r'startExplorer\([^[]*\["([^"]+)"\]', page)[1]))
    assert header["texts"]["module"] == ["", HOSTILE]
    with pytest.raises(TraceError, match="cannot save"):
        explorer.save(tmp_path / "missing" / "explorer.html")


def test_text_and_page_have_the_largest_blocks() -> None:
    script = Script()
    script.alloc(512, module="small")
    script.alloc(1 << 20, module="large")
    explorer = Explorer(run_of(script.trace()))
    rows = [line for line in explorer.text.splitlines() if "KiB" in line or "MiB" in line or "512 B" in line]
    assert "large" in rows[1] and "small" in rows[2]
    assert "1.00 MiB" in explorer.bundle()["text/plain"]
    assert "run.explore().save(" in explorer.text


def test_a_run_without_blocks_is_refused() -> None:
    with pytest.raises(MemlabError, match="nothing to explore"):
        Explorer(run_of(Script().trace()))
