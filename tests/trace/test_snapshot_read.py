"""Snapshots of strangers: nothing is executed, nothing blows up, everything else is refused in one line."""

from __future__ import annotations

import gc
import io
import os
import pickle
import re
import struct
import tracemalloc

import pytest
from snapshot_samples import simulated, small

import memlab
from memlab.errors import TraceError
from memlab.trace import plain_pickle, snapshot_read
from memlab.trace.snapshot_read import looks_like_snapshot, parse, read
from memlab.trace.snapshot_write import snapshot

GOOD = {"segments": [], "device_traces": [[]]}


def text(words: str) -> bytes:
    return b"X" + struct.pack("<I", len(words)) + words.encode()


def whole(value: object, protocol: int = 4) -> bytes:
    return pickle.dumps(value, protocol=protocol)


def entry(**changes: object) -> dict:
    return {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": 1, "stream": 0, **changes}]]}


def segment(**changes: object) -> dict:
    facts = {"device": 0, "address": 0, "total_size": 512, "stream": 0, "blocks": [], **changes}
    return {"segments": [facts], "device_traces": [[]]}


class Evil:
    def __reduce__(self):
        return print, ("executed",)


CALLS = {
    "protocol 0": b"cos\nsystem\n(S'true'\ntR.",
    "global": b"\x80\x02cos\nsystem\n.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "reduce": b"\x80\x02)R.",
    "object": whole({"segments": Evil(), "device_traces": []}),
    "new object": b"\x80\x02)\x81.",
    "build": b"\x80\x02}}b.",
    "instance": b"\x80\x02(ios\nsystem\n.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02P1\n.",
    "persistent on the stack": b"\x80\x02NQ.",
    "out of band": b"\x80\x05\x97.",
    "bytes": whole({"segments": b"x", "device_traces": []}),
    "a set": whole({"segments": {1}, "device_traces": []}),
}
SHAPES = {
    "empty": b"",
    "no stop": whole(GOOD)[:-1],
    "protocol 9": b"\x80\x09N.",
    "nothing": whole(None),
    "a list": whole([1]),
    "no traces": whole({"segments": []}),
    "segments are a table": whole({"segments": {}, "device_traces": []}),
    "a segment is a number": whole({"segments": [1], "device_traces": []}),
    "traces are a number": whole({"segments": [], "device_traces": 1}),
    "an entry is a text": whole({"segments": [], "device_traces": [["x"]]}),
    "an entry without an action": whole({"segments": [], "device_traces": [[{"addr": 1, "size": 1}]]}),
    "device number of a billion": whole(segment(device=10**9)),
    "an action is a number": whole({"segments": [], "device_traces": [[{"action": 1}]]}),
    "a size is a text": whole(entry(size="1")),
    "a size is negative": whole(entry(size=-1)),
    "a size is a float": whole(entry(size=1.5)),
    "a size is true": whole(entry(size=True)),
    "a size is enormous": whole(entry(size=1 << 60)),
    "an address is enormous": whole(entry(addr=1 << 70)),
    "frames are a number": whole(entry(frames=3)),
    "a frame is a text": whole(entry(frames=["x"])),
    "a frame has no line": whole(entry(frames=[{"filename": "a", "name": "b"}])),
    "a category is a number": whole(entry(category=4)),
    "categories are a text": whole(entry(categories="x")),
    "blocks are a number": whole(segment(blocks=1)),
    "a block has no size": whole(segment(blocks=[{"state": "inactive"}])),
    "settings are a list": whole({**GOOD, "allocator_settings": []}),
    "a key is a tuple": b"\x80\x02})N" + b"s.",
    "nested key": b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"Ns.",
    "marks do not match": b"\x80\x02(0e.",
    "append to a number": b"\x80\x02K\x01K\x02a.",
    "append to the mark": b"\x80\x02](]ee.",
    "items of a list": b"\x80\x02]" + text("a") + b"Ns.",
    "odd items": b"\x80\x02}(" + text("a") + b"u.",
    "memo of nothing": b"\x80\x02h\x07.",
    "tuple of nothing": b"\x80\x02\x87.",
    "cut in a text": b"\x80\x02X\xff\xff\xff\x7fabc",
    "cut in a long text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"abc",
    "not utf-8": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
}


@pytest.mark.parametrize("name", [*CALLS, *SHAPES])
def test_what_is_no_snapshot_is_refused_in_one_line(name, capsys):
    with pytest.raises(TraceError) as caught:
        parse((CALLS | SHAPES)[name], "x.pickle")
    assert str(caught.value).startswith("'x.pickle' is not a readable PyTorch memory snapshot")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
    assert capsys.readouterr().out == "", "nothing was executed"
    if name in CALLS:  # unlike damage
        assert re.search(r"builds no plain data|is no|no segments|protocol", str(caught.value))


def test_sharing_does_not_multiply():
    """30 kB that claim to hold 40 million entries: a list of lists that are one list."""
    shared: list = [{"action": "alloc", "size": 1, "addr": 1}] * 10_000
    data = whole({"segments": [], "device_traces": [shared] * 4_000})
    with pytest.raises(TraceError, match=f"more than {len(data) // 8} entries"):
        parse(data)


def test_a_stack_that_all_entries_share_costs_no_more_than_the_file():
    """200 kB that claim a billion frames, and 100 kB that claim a gigabyte of text."""
    frame = {"filename": "x" * 4000, "line": 1, "name": ""}
    alloc = {"action": "alloc", "size": 1, "addr": 1, "frames": [frame] * 50_000}
    with pytest.raises(TraceError, match="more frames than"):
        parse(whole({"segments": [], "device_traces": [[alloc] * 15_000]}))
    stacks = [{**alloc, "frames": [frame] * depth} for depth in range(1, 257)] * 4
    entries = [{**alloc, "frames": [*entry["frames"], {**frame}]} for entry in stacks]
    with pytest.raises(TraceError, match="characters"):
        parse(whole({"segments": [], "device_traces": [entries]}))


def test_the_lines_of_a_snapshot_with_cpp_frames_are_those_of_python():
    """`stacks="all"`, PyTorch's default: unwound C++ frames come before the Python ones and between them."""
    from memlab.probes.snapshot import trace_of

    cpp, named = {"filename": "??", "line": 0, "name": "at::empty"}, {"filename": "/a/b.cpp", "line": 7, "name": "f()"}
    python = {"filename": "/home/me/train.py", "line": 12, "name": "step"}
    value = entry(frames=[cpp, named, python, cpp, {"filename": "<stdin>", "line": 1, "name": "<module>"}, cpp])
    trace = trace_of(parse(whole(value)))
    assert trace.texts["line"] == ("/home/me/train.py:12",)
    assert trace.texts["stack"] == ("/home/me/train.py:12 step\n<stdin>:1 <module>",)
    assert trace_of(parse(whole(entry(frames=[cpp])))).texts["stack"] == ("??:0 at::empty",), "nothing better is known"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for use in (memlab.load, read):
        with pytest.raises(TraceError, match="pipe"):
            use(tmp_path / "pipe")


def test_a_path_that_is_too_long_is_refused_in_one_line():
    for use in (memlab.load, read):
        with pytest.raises(TraceError, match="too long") as caught:
            use("x" * 5000)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_nesting_and_a_list_in_itself_do_not_recurse():
    deep = b"\x80\x02}(" + text("segments") + b"]" * 300_000 + b"a" * 299_999 + text("device_traces") + b"]u."
    itself: list = []
    itself.append(itself)
    for data in (deep, whole({"segments": itself, "device_traces": []})):
        with pytest.raises(TraceError, match="is no table"):
            parse(data)


@pytest.mark.parametrize(
    "claim", [b"r\xff\xff\xff\xff", b"j\xff\xff\xff\x7f", b"X\xff\xff\xff\xff", b"\x96" + b"\xff" * 8, b"\x8a\xff"]
)
def test_a_claim_makes_no_memory(claim):
    """`pickle.Unpickler` makes room for 2**32 memo entries, or for a bytearray, before it looks at the file."""
    tracemalloc.start()
    try:
        with pytest.raises(TraceError):
            parse(b"\x80\x04N" + claim + b".")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_every_prefix_is_refused():
    data = whole(snapshot(small()))
    for end in range(len(data)):
        with pytest.raises(TraceError):
            parse(data[:end])


def test_every_flipped_byte_is_read_or_refused():
    from memlab.probes.snapshot import trace_of

    data = bytearray(whole(snapshot(small())))
    for at in range(0, len(data), 3):
        flipped = bytes(data[:at]) + bytes([data[at] ^ (0x01, 0x41, 0xFF)[at // 3 % 3]]) + bytes(data[at + 1 :])
        try:
            trace_of(parse(flipped))
        except TraceError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_machine_builds_what_pickle_builds(protocol):
    value = snapshot(simulated("expandable_segments:True"))
    numbers = [-5, 70_000, 1 << 40, -(1 << 70), 1.5]
    value["more"] = [None, True, False, *numbers, "naïve \ud800", (), (1,), (1, 2), (1, 2, 3), (1,) * 9]
    assert plain_pickle.load(pickle.dumps(value, protocol=protocol)) == value


def test_the_python_pickler_without_a_memo_is_read_too():
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=4)
    pickler.fast = True
    pickler.dump(GOOD)
    assert parse(file.getvalue()).segments == []


def test_long_texts_are_cut_and_big_files_refused(tmp_path, monkeypatch):
    found = parse(whole(entry(frames=[{"filename": "x" * 100_000, "line": 1, "name": ""}])))
    assert len(found.traces[0][0]["frames"][0]["filename"]) == 4096
    path = tmp_path / "big.pickle"
    path.write_bytes(whole(GOOD))
    monkeypatch.setattr(snapshot_read, "MAX_BYTES", 10)
    with pytest.raises(TraceError, match="may have 10"):
        read(path)


@pytest.mark.parametrize("where", ["missing.pickle", ".", "\0"])
def test_what_cannot_be_opened_is_said(tmp_path, where):
    with pytest.raises(TraceError, match="cannot read") as caught:
        read(str(tmp_path / where))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_as_it_was(on):
    (gc.enable if on else gc.disable)()
    try:
        parse(whole(GOOD))
        with pytest.raises(TraceError):
            parse(b"")
        assert gc.isenabled() == on
    finally:
        gc.enable()


def test_a_snapshot_is_known_by_its_beginning(tmp_path):
    (tmp_path / "a").write_bytes(whole(GOOD))
    (tmp_path / "b").write_bytes(b"memlab\r\n")
    (tmp_path / "c").write_bytes(b"")
    assert [looks_like_snapshot(tmp_path / name) for name in "abcd"] == [True, False, False, False]
