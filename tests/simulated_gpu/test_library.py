"""The compiled library: one folder per state of the sources, whole or not at all; compilers and prebuilt libraries."""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memlab.errors import SimulatedGpuError
from memlab.simulated_gpu import library
from memlab.simulated_gpu.cuda_symbols import CudaSymbols

KNOWN = CudaSymbols({"cudaMalloc": "libcudart.so.13"}, frozenset({"libcudart.so.13"}))
MORE = CudaSymbols({"cudaMalloc": "libcudart.so.13", "cudaNewCall": "libcudart.so.13"}, frozenset({"libcudart.so.13"}))

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="needs Linux and gcc")


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch) -> Path:
    """Small sources, an empty cache, and no prebuilt library."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.c").write_text("int cudaMalloc(void) { return 0; }\n")
    (folder / "symbols.txt").write_text("soname libcudart.so.13\ncudaMalloc libcudart.so.13\n")
    monkeypatch.setattr(library, "SOURCES", folder)
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "lib")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return folder


def test_every_name_is_the_same_file():
    folder = library.folder_for(KNOWN)
    names = {"libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1", library.NAME}
    assert {path.name for path in folder.iterdir()} == names
    assert len({path.stat().st_ino for path in folder.iterdir()}) == 1


def test_it_is_compiled_once(monkeypatch):
    folder = library.folder_for(KNOWN)
    monkeypatch.setattr(library, "compile_into", None)
    assert library.folder_for(KNOWN) == folder


@pytest.mark.parametrize("lost", [library.NAME, "libcuda.so.1"])
def test_a_folder_that_lost_a_part_is_made_again(lost):
    folder = library.folder_for(KNOWN)
    (folder / lost).unlink()
    assert library.folder_for(KNOWN) == folder
    assert (folder / lost).exists()


@pytest.mark.parametrize("rest", [b"", b"\x7fELF", b"no library at all"])
def test_a_library_that_was_cut_short_is_made_again(rest):
    folder = library.folder_for(KNOWN)
    (folder / library.NAME).unlink()  # not overwritten: this process has it mapped
    (folder / library.NAME).write_bytes(rest)
    assert library.folder_for(KNOWN) == folder
    assert (folder / "libcuda.so.1").stat().st_size > 10_000


def test_a_compiler_that_is_no_command_gets_one_line(monkeypatch):
    monkeypatch.setenv("CC", "gcc '")
    with pytest.raises(SimulatedGpuError, match="which is no command"):
        library.folder_for(KNOWN)


def test_a_changed_source_and_an_unknown_symbol_need_another_one(sources):
    first = library.folder_for(KNOWN)
    more = library.folder_for(MORE)
    (sources / "one.c").write_text("int cudaMalloc(void) { return 1; }\n")
    assert len({first, more, library.folder_for(KNOWN)}) == 3


def test_several_at_a_time_do_no_harm():
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(library.folder_for, [KNOWN] * 4))
    assert len(set(found)) == 1
    assert [path.name for path in library.cache().iterdir()] == [found[0].name]


def test_what_a_killed_process_left_is_removed():
    left, recent = library.cache() / "unfinished-old", library.cache() / "unfinished-new"
    left.mkdir(parents=True)
    recent.mkdir()
    os.utime(left, (0, 0))
    library.folder_for(KNOWN)
    assert not left.exists()
    assert recent.exists()


def test_a_failing_compiler_leaves_a_log_and_nothing_else(sources):
    (sources / "one.c").write_text("this is no C\n")
    with pytest.raises(
        SimulatedGpuError, match=r"could not be compiled: .*one\.c:1.*error.* All messages are in '.*\.log'\.$"
    ) as error:
        library.folder_for(KNOWN)
    assert "\n" not in str(error.value)
    log = Path(str(error.value).split("'")[-2])
    assert "this is no C" in log.read_text()
    log.unlink()
    assert list(library.cache().iterdir()) == []


def test_no_compiler_says_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SimulatedGpuError, match=r"no C compiler was found \(cc, gcc, clang\): install one"):
        library.folder_for(KNOWN)
    monkeypatch.setenv("CC", "no-such-compiler -O3")
    with pytest.raises(SimulatedGpuError, match="no compiler 'no-such-compiler', which CC names"):
        library.folder_for(KNOWN)


def test_a_compiler_with_options(monkeypatch):
    monkeypatch.setenv("CC", "gcc -O0")
    assert (library.folder_for(KNOWN) / library.NAME).exists()


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SimulatedGpuError, match=r"cannot write '.*': Not a directory\. Set XDG_CACHE_HOME"):
        library.folder_for(KNOWN)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a:b"))
    with pytest.raises(SimulatedGpuError, match="cannot search a folder"):
        library.folder_for(KNOWN)


def test_a_prebuilt_library_is_used_if_it_fits(monkeypatch, sources):
    library.prebuild(library.PREBUILT)
    monkeypatch.setenv("CC", "no-such-compiler")
    folder = library.folder_for(KNOWN)
    assert (folder / library.NAME).read_bytes() == (library.PREBUILT / library.NAME).read_bytes()
    with pytest.raises(SimulatedGpuError, match="no compiler"):
        library.folder_for(MORE)
    (sources / "one.c").write_text("int cudaMalloc(void) { return 1; }\n")
    with pytest.raises(SimulatedGpuError, match="no compiler"):
        library.folder_for(KNOWN)


def test_a_prebuilt_library_that_does_not_load_is_compiled_again():
    library.prebuild(library.PREBUILT)
    (library.PREBUILT / library.NAME).write_bytes(b"damaged")
    (library.PREBUILT / library.NAME).chmod(0o644)
    assert (library.folder_for(KNOWN) / library.NAME).stat().st_size > 1000
