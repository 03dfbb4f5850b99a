"""What is read of ELF files: imports with their version nodes, needed libraries, defined symbols; damage gives one line."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from memlab.errors import SimulatedGpuError
from memlab.simulated_gpu import elf

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("gcc"), reason="needs Linux and gcc, which makes the files"
)


def made(folder: Path, name: str, text: str, *options: str) -> Path:
    (folder / f"{name}.c").write_text(text)
    subprocess.run(["gcc", "-fPIC", *options, "-o", name, f"{name}.c"], cwd=folder, check=True)
    return folder / name


@pytest.fixture(scope="module")
def user(tmp_path_factory) -> Path:
    """A library that imports one symbol with a version node, one without, and one weakly."""
    folder = tmp_path_factory.mktemp("elf")
    (folder / "nodes.map").write_text("NODE_1.0 { global: with_node; };\n")
    made(
        folder,
        "libfirst.so",
        "int with_node(void) { return 1; }",
        "-shared",
        "-Wl,-soname,libfirst.so.3",
        "-Wl,--version-script=nodes.map",
    )
    made(folder, "libsecond.so", "int without(void) { return 1; }", "-shared")
    text = """
        int with_node(void), without(void);
        extern int maybe(void) __attribute__((weak));
        static int own(void) { return 3; }
        __attribute__((visibility("hidden"))) int hidden(void) { return 4; }
        int offered(void) { return with_node() + without() + (maybe ? maybe() : 0) + own() + hidden(); }
    """
    rpath = "-Wl,-rpath,$ORIGIN/../beside:/elsewhere"
    return made(
        folder, "libuser.so", text, "-shared", "-L.", "-Wl,--no-as-needed", "-l:libfirst.so", "-l:libsecond.so", rpath
    )


def test_imports_have_their_version_nodes(user):
    found = elf.linkage(user)
    assert {name: found.imports[name] for name in ("with_node", "without", "maybe")} == {
        "with_node": "NODE_1.0", "without": "", "maybe": "",
    }  # fmt: skip
    assert "offered" not in found.imports
    assert found.needed[:2] == ("libfirst.so.3", "libsecond.so")
    assert found.search_path == ("$ORIGIN/../beside", "/elsewhere")


def test_hidden_and_static_functions_are_not_offered(user):
    assert "offered" in elf.defined(user)
    assert not {"own", "hidden", "with_node"} & elf.defined(user)


def test_symbols_of_an_object_file(tmp_path):
    text = "int elsewhere(void); int here(void) { return elsewhere(); } static int own(void) { return 1; } int (*p)(void) = own;"
    assert elf.defined(made(tmp_path, "one.o", text, "-c")) == {"here", "p"}


def test_a_file_that_is_cut_off_anywhere_gives_one_line(user, tmp_path):
    whole, cut = user.read_bytes(), tmp_path / "cut.so"
    for size in range(0, len(whole) - 1, 97):
        cut.write_bytes(whole[:size])
        with pytest.raises(SimulatedGpuError, match=r"^'.*cut\.so' is not a complete ELF file for x86-64: .*\.$"):
            elf.linkage(cut)


def test_a_file_with_any_damaged_byte_is_read_or_refused(user, tmp_path):
    whole, bad = bytearray(user.read_bytes()), tmp_path / "bad.so"
    table = struct.unpack_from("<Q", whole, 40)[0]
    for place in [*range(64), *range(table, len(whole), 3)]:
        changed = whole.copy()
        changed[place] ^= 0xFF
        bad.write_bytes(changed)
        try:
            elf.linkage(bad)
            elf.defined(bad)
        except SimulatedGpuError as error:
            assert "\n" not in str(error)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SimulatedGpuError, match=r"cannot read .*absent.so.: No such file"):
        elf.linkage(tmp_path / "absent.so")


def test_this_interpreters_torch_is_read_in_no_time():
    import torch

    path = Path(torch.__file__).parent / "lib" / "libtorch_python.so"
    if not path.exists():
        pytest.skip("this build of torch has no libtorch_python.so")
    found = elf.linkage(path)
    assert "libc.so.6" in found.needed
    assert found.imports["malloc"].startswith("GLIBC_")
