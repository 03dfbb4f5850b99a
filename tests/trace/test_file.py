"""Saving and loading: everything comes back, nothing is half written, hostile files are refused in one line.

Links are followed, what is no ordinary file is left alone.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from trace_samples import small_trace

from memlab.errors import TraceError
from memlab.trace import Marks, Trace
from memlab.trace.file import MAGIC, VERSION, PartialFile, TraceWriter, dumps, load, loads, save


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
    monkeypatch.setattr(TraceWriter, "done", lambda self: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(TraceError, match="disk full"):
        save(small_trace(), path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.memlab"]


def test_every_prefix_is_read_or_refused_in_one_line(tmp_path):
    whole = dumps(small_trace())
    assert save(small_trace(), tmp_path / "a.memlab").read_bytes() == whole
    read = 0
    for end in range(len(whole)):
        try:
            trace = loads(whole[:end])
        except TraceError as error:
            assert "\n" not in str(error)
        else:
            read += 1
            assert "cut off" in [gap.name for gap in trace.gaps]
    assert read > 100


def test_every_flipped_byte_is_read_or_refused():
    whole = dumps(small_trace())
    for at in range(len(whole)):
        try:
            loads(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        except TraceError as error:
            assert len(str(error)) < 600


def chunk(tag: bytes, payload: bytes) -> bytes:
    return struct.pack("<4sQI", tag, len(payload), zlib.crc32(payload)) + payload


def head(**changes) -> bytes:
    made_by = {"engine": "x", "devices": [], "versions": {}, "gaps": [], "bounded": []} | changes
    return chunk(b"HEAD", json.dumps({"made_by": made_by, "first_row": 0, "notes": {}}).encode())


START = MAGIC + struct.pack("<I", VERSION)
MANY_ROWS = json.dumps({"table": "marks", "rows": 1 << 50, "columns": list(Marks.DTYPES.items())}).encode()
HOSTILE = {
    "empty": (b"", "does not begin like one"),
    "pickle": (b"\x80\x04cos\nsystem\n(S'true'\ntR.", "does not begin like one"),
    "no head": (START, "before its header"),
    "future": (MAGIC + struct.pack("<I", 99), "upgrade memlab"),
    "unknown field": (START + head(evil=1), "not a readable"),
    "deep json": (START + chunk(b"HEAD", b"[" * 200_000), "not a readable"),
    "head is a list": (START + chunk(b"HEAD", b"[1]"), "not a readable"),
    "texts are numbers": (START + head() + chunk(b"TEXT", b'{"op": [1]}'), "something else than text"),
    "unknown texts": (START + head() + chunk(b"TEXT", b'{"no": ["a"]}'), "not a readable"),
    "rows": (START + head() + chunk(b"COLS", struct.pack("<I", 2) + b"{}"), "not a readable"),
    "more rows than bytes": (START + head() + chunk(b"COLS", struct.pack("<I", len(MANY_ROWS)) + MANY_ROWS), "rows"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(tmp_path, name):
    content, says = HOSTILE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=says) as caught:
        load(tmp_path / name)
    assert "\n" not in str(caught.value)


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


# --- places ---


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save(small_trace(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert load(tmp_path / "real").notes == {"name": "n"}


def test_a_pipe_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="no ordinary file"):
        save(small_trace(), tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("place", ["a\0b", None, 7])
def test_what_is_no_name_is_refused(place):
    for use in (load, lambda name: save(small_trace(), name)):
        with pytest.raises(TraceError) as caught:
            use(place)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["missing/a.memlab", ""])
def test_a_folder_is_no_file(tmp_path, where):
    with pytest.raises(TraceError, match="cannot save"):
        save(small_trace(), tmp_path / where)
    with pytest.raises(TraceError, match="is a folder"):
        load(tmp_path)


def test_a_system_that_refuses_is_quoted_in_one_line(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied", "x.tmp")

    monkeypatch.setattr("memlab.trace.file.tempfile.mkstemp", refuse)
    with pytest.raises(TraceError, match="Permission denied"):
        save(small_trace(), tmp_path / "a")


def test_a_file_that_was_cut_off_is_nowhere_exact(tmp_path):
    from memlab.api.runs import load as load_run

    whole = save(small_trace(), tmp_path / "a").read_bytes()
    for end in range(len(whole) // 3, len(whole), 7):
        (tmp_path / "cut").write_bytes(whole[:end])
        assert not load_run(tmp_path / "cut").is_exact
