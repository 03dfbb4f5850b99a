"""Snapshots of strangers: nothing is executed, nothing blows up, everything else is refused in one line."""

from __future__ import annotations

import gc
import io
import pickle
import struct
import tracemalloc

import pytest
from snapshot_samples import settled, small

from memlab.errors import TraceError
from memlab.trace import plain_pickle, snapshot_read
from memlab.trace.snapshot import looks_like_snapshot, parse, read, snapshot

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
    "no action": whole({"segments": [], "device_traces": [[{"action": 1}]]}),
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


@pytest.mark.parametrize("name", CALLS)
def test_what_asks_for_a_class_is_told_apart_from_damage(name):
    with pytest.raises(TraceError, match=r"builds no plain data|is no|no segments|protocol"):
        parse(CALLS[name])


def test_sharing_does_not_multiply():
    """30 kB that pretend to 40 million entries: a list of lists that are one list."""
    shared: list = [{"action": "alloc", "size": 1, "addr": 1}] * 10_000
    data = whole({"segments": [], "device_traces": [shared] * 4_000})
    with pytest.raises(TraceError, match=f"more than {len(data)} entries"):
        parse(data)


def test_nesting_does_not_recurse():
    deep = b"\x80\x02}(" + text("segments") + b"]" * 300_000 + b"a" * 299_999 + text("device_traces") + b"]u."
    with pytest.raises(TraceError, match="is no table"):
        parse(deep)


def test_a_list_in_itself_is_refused():
    itself: list = []
    itself.append(itself)
    with pytest.raises(TraceError, match="is no table"):
        parse(whole({"segments": itself, "device_traces": []}))


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
        for flip in (0x01, 0x41, 0xFF):
            flipped = bytes(data[:at]) + bytes([data[at] ^ flip]) + bytes(data[at + 1 :])
            try:
                trace_of(parse(flipped))
            except TraceError as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_machine_builds_what_pickle_builds(protocol):
    value = snapshot(settled("expandable_segments:True"))
    value |= {
        "more": [
            None,
            True,
            False,
            -5,
            70_000,
            1 << 40,
            -(1 << 70),
            1.5,
            "naïve \ud800",
            (),
            (1,),
            (1, 2),
            (1, 2, 3),
            (1,) * 9,
        ]
    }
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
