"""Saving and loading: everything comes back, nothing is half written, hostile files are refused in one line."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from trace_samples import small_trace

from memlab.errors import TraceError
from memlab.trace import Marks, Trace
from memlab.trace.file import MAGIC, VERSION, PartialFile, Writer, load, save


def same(a: Trace, b: Trace) -> bool:
    """Whether two traces hold the same."""
    tables = ("events", "blocks", "marks", "samples", "recategorised")
    arrays = all(
        np.array_equal(getattr(getattr(a, table), name), getattr(getattr(b, table), name))
        for table in tables
        for name in getattr(a, table).DTYPES
    )
    return arrays and (a.made_by, a.first_row, a.texts, a.notes) == (b.made_by, b.first_row, b.texts, b.notes)


def test_everything_comes_back(tmp_path):
    trace = small_trace()
    assert same(load(save(trace, tmp_path / "a.memlab")), trace)


def test_a_failed_save_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = save(small_trace(), tmp_path / "a.memlab")
    before = path.read_bytes()
    monkeypatch.setattr(Writer, "done", lambda self: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(TraceError, match="disk full"):
        save(small_trace(), path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.memlab"]


@pytest.mark.parametrize("where", ["missing/a.memlab", ""])
def test_where_it_cannot_be_saved_is_said(tmp_path, where):
    with pytest.raises(TraceError, match="cannot save"):
        save(small_trace(), tmp_path / where)


def test_every_prefix_is_read_or_refused_in_one_line(tmp_path):
    whole = save(small_trace(), tmp_path / "a.memlab").read_bytes()
    read = 0
    for end in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:end])
        try:
            trace = load(tmp_path / "cut")
        except TraceError as error:
            assert "\n" not in str(error)
        else:
            read += 1
            assert "cut off" in [gap.name for gap in trace.gaps]
    assert read > 100


def test_every_flipped_byte_is_read_or_refused(tmp_path):
    whole = bytearray(save(small_trace(), tmp_path / "a.memlab").read_bytes())
    for at in range(len(whole)):
        flipped = bytes(whole[:at]) + bytes([whole[at] ^ 0x41]) + bytes(whole[at + 1 :])
        (tmp_path / "bad").write_bytes(flipped)
        try:
            load(tmp_path / "bad")
        except TraceError as error:
            assert len(str(error)) < 600


def chunk(tag: bytes, payload: bytes) -> bytes:
    return struct.pack("<4sQI", tag, len(payload), zlib.crc32(payload)) + payload


def head(**changes) -> bytes:
    made_by = {"engine": "x", "devices": [], "versions": {}, "gaps": [], "bounded": []} | changes
    return chunk(b"HEAD", json.dumps({"made_by": made_by, "first_row": 0, "notes": {}}).encode())


HOSTILE = {
    "empty": b"",
    "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "no head": MAGIC + struct.pack("<I", VERSION),
    "future": MAGIC + struct.pack("<I", 99),
    "unknown field": MAGIC + struct.pack("<I", VERSION) + head(evil=1),
    "deep json": MAGIC + struct.pack("<I", VERSION) + chunk(b"HEAD", b"[" * 200_000),
    "head is a list": MAGIC + struct.pack("<I", VERSION) + chunk(b"HEAD", b"[1]"),
    "texts are numbers": MAGIC + struct.pack("<I", VERSION) + head() + chunk(b"TEXT", b'{"op": [1]}'),
    "unknown texts": MAGIC + struct.pack("<I", VERSION) + head() + chunk(b"TEXT", b'{"no": ["a"]}'),
    "rows": MAGIC + struct.pack("<I", VERSION) + head() + chunk(b"COLS", struct.pack("<I", 2) + b"{}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(HOSTILE[name])
    with pytest.raises(TraceError) as caught:
        load(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_claim_of_more_rows_than_bytes_is_refused(tmp_path):
    described = json.dumps({"table": "marks", "rows": 1 << 50, "columns": list(Marks.DTYPES.items())}).encode()
    payload = struct.pack("<I", len(described)) + described
    (tmp_path / "big").write_bytes(MAGIC + struct.pack("<I", VERSION) + head() + chunk(b"COLS", payload))
    with pytest.raises(TraceError, match="rows"):
        load(tmp_path / "big")


KILLED = """
import os, sys
from memlab.trace import MadeBy, Samples
from memlab.trace.file import PartialFile
part = PartialFile(sys.argv[1])
part.writer.head(MadeBy("test"))
for tick in range(50):
    part.writer.table("samples", Samples([tick * 10**8], [0], [tick], [0], [0], [0], [0]))
    part.flush()
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_kernel_wrote_is_read(tmp_path):
    path = tmp_path / "run.memlab"
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == -9
    with pytest.raises(TraceError, match=r"run\.memlab\.partial"):
        load(path)
    trace = load(f"{path}.partial")
    assert len(trace.samples) == 50
    assert trace.gaps[-1].text.endswith("known up to 4.90 s after its start")


def test_a_finished_run_removes_its_partial_file(tmp_path):
    with PartialFile(tmp_path / "a.memlab") as part:
        assert part.path.exists()
    assert not list(tmp_path.iterdir())
