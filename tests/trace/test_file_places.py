"""Where traces may lie: links are followed, what is no ordinary file is left alone, errors are one line of ours."""

from __future__ import annotations

import os

import pytest
from trace_samples import small_trace

from memlab.errors import TraceError
from memlab.trace.file import load, save


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


def test_a_folder_is_no_trace(tmp_path):
    with pytest.raises(TraceError, match="is a folder"):
        load(tmp_path)


def test_a_system_that_refuses_is_quoted_in_one_line(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied", "x.tmp")

    monkeypatch.setattr("memlab.trace.whole.tempfile.mkstemp", refuse)
    with pytest.raises(TraceError, match="Permission denied"):
        save(small_trace(), tmp_path / "a")


def test_a_file_that_was_cut_off_is_nowhere_exact(tmp_path):
    from memlab.session.run import load as load_run

    whole = save(small_trace(), tmp_path / "a").read_bytes()
    for end in range(len(whole) // 3, len(whole), 7):
        (tmp_path / "cut").write_bytes(whole[:end])
        assert not load_run(tmp_path / "cut").is_exact
