from __future__ import annotations

import pytest
from analysis.random_traces import random_trace, recategorised
from scripted_traces import HOST, Script, busy

from memlab.analysis.breakdown import BY, breakdown
from memlab.analysis.peak import device_peak, peak
from memlab.errors import MemlabError
from memlab.trace import Bounded, Category, Phase


def step() -> Script:
    script = Script()
    script.segment(4096)
    script.here_it_starts()
    script.preexisting(512, requested=500)
    known = {"phase": Phase.FORWARD, "category": Category.ACTIVATION, "module": "net.a", "line": "a.py:3"}
    script.alloc(1024, at=1, requested=1000, **known)
    script.alloc(512, at=2, requested=512, phase=Phase.FORWARD, module="net.b")
    gone = script.alloc(256, at=3, requested=100, phase=Phase.BACKWARD, category=Category.GRADIENT)
    script.free(gone, at=4)
    return script


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("phase", {"forward": 1512, "before the run": 500, "rounding": 192, "backward": 100}),
        ("category", {"other": 1012, "activation": 1000, "rounding": 192, "gradient": 100}),
        ("tensor", {"activation of net.a": 1000, "other of net.b": 512, "other, before the run": 500, "rounding": 192,
                    "gradient of elsewhere": 100}),
        ("module", {"net.a": 1000, "net.b": 512, "before the run": 500, "rounding": 192, "elsewhere": 100}),
        ("line", {"a.py:3": 1000, "elsewhere": 612, "before the run": 500, "rounding": 192}),
    ],
)  # fmt: skip
def test_the_shares_by_hand_largest_first(by, expected):
    found = breakdown(step().trace(), 0, by)
    assert list(found.items()) == list(expected.items())
    assert found.total_bytes == 2304


def test_of_reserved_there_is_what_is_cached():
    found = breakdown(step().trace(), 0, "phase", "reserved")
    assert found["cached"] == 4096 - 512  # reserved peaks at the start, when one block is there
    assert found.total_bytes == 4096


def test_an_empty_trace_has_no_shares():
    found = breakdown(Script().trace(), 0)
    assert (dict(found), found.total_bytes) == ({}, 0)
    assert "0 B" in str(found)


def test_it_is_a_mapping_that_prints_and_exports():
    found = breakdown(step().trace(), 0, "module")
    assert len(found) == len(list(found)) == 5
    assert found.percent("net.a") == "43 %"
    assert str(found).splitlines()[0].split() == ["net.a", "1000", "B", "43", "%"]
    assert found.to_pandas().sum() == found.total_bytes
    assert found.to_pandas().name == "allocated_bytes"


def test_a_name_from_a_file_cannot_steer_the_terminal():
    script = Script()
    script.alloc(10, at=1, module="\x1b[2Jevil\nname")
    assert "\x1b" not in str(breakdown(script.trace(), 0, "module"))
    assert len(str(breakdown(script.trace(), 0, "module")).splitlines()) == 2


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"by": "colour"}, r"'colour'.*category, module, line, tensor, phase"),
        ({"of": "device"}, "never queried"),
        ({"of": "used"}, "no peak of 'used'"),
    ],
)
def test_what_is_unknown_is_refused(asked, says):
    with pytest.raises(MemlabError, match=says):
        breakdown(step().trace(), 0, **asked)
    with pytest.raises(MemlabError, match="the CPU reserves nothing"):
        breakdown(Script(HOST).trace(), -1, of="reserved")


@pytest.mark.parametrize(
    "stretch",
    [
        *(Bounded(0, begin, 9, 5, peak_allocated_bytes=1 << 20, peak_reserved_bytes=1 << 21) for begin in (0, 7)),
        Bounded(0, 1, 4, 5),
    ],
)
def test_a_peak_whose_rows_were_dropped_or_lost_has_no_shares(stretch):
    script = step()
    script.sample(3, 1 << 20)
    with pytest.raises(MemlabError, match="what held"):
        breakdown(script.trace(bounded=(stretch,)), 0)


@pytest.mark.parametrize("by", BY)
def test_the_shares_sum_to_the_peak_exactly(by):
    for trace in (*map(random_trace, range(30)), busy(4000)):
        found = breakdown(trace, 0, by)
        assert found.total_bytes == peak(trace, 0).low_bytes
        assert list(found.values()) == sorted(found.values(), reverse=True)
        assert 0 not in found.values()
    assert breakdown(trace, 0, by, "reserved").total_bytes == peak(trace, 0, "reserved").low_bytes


def on_a_shared_card(own: int = 3500, used: int = 6000) -> Script:
    """3,000 bytes reserved, 1,012 allocated of them; the driver reads `used`, and `own` for this process."""
    script = Script()
    script.segment(2000)
    script.here_it_starts()
    script.alloc(512, at=5, requested=500, category=Category.PARAMETER)
    script.segment(1000, at=6)
    script.alloc(500, at=7, category=Category.ACTIVATION)
    script.sample(8, 1012, 3000, used, own, 0)
    return script


def test_of_device_everything_on_the_card_has_its_share():
    found = breakdown(on_a_shared_card().trace(), 0, of="device")
    assert dict(found) == {
        "other processes": 2500, "cached": 1988, "parameter": 500, "activation": 500, "context": 500, "rounding": 12,
    }  # fmt: skip
    assert found.total_bytes == 6000


def test_where_the_driver_tells_no_processes_apart_the_rest_is_unknown():
    found = breakdown(on_a_shared_card(own=-1).trace(), 0, of="device")
    assert found["unknown"] == 3000
    assert found.total_bytes == 6000


@pytest.mark.parametrize("used", [2500, 3000, 3100])
def test_a_reading_that_came_too_early_makes_no_negative_share(used):
    trace = on_a_shared_card(used=used).trace()
    found = breakdown(trace, 0, of="device")
    assert min(found.values()) > 0
    assert found.total_bytes == device_peak(trace, 0).low_bytes


def test_a_category_counts_as_it_was_at_the_peak_also_of_a_block_from_before():
    script = step()
    script.blocks[0] |= {"category": Category.PARAMETER, "module": "net.a"}
    trace = recategorised(script.trace(), (1, 3, Category.BUFFER), (1, 99, Category.OPTIMIZER))
    expected = {"buffer": 1000, "other": 512, "parameter": 500, "rounding": 192, "gradient": 100}
    assert dict(breakdown(trace, 0)) == expected
    assert breakdown(trace, 0, "module")["net.a"] == 1500
