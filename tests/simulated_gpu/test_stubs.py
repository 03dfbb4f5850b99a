"""Stubs: what each does, and that a compiler accepts them with their version nodes."""

from __future__ import annotations

import ctypes
import re
import shutil
import sys

import pytest

from memlab.errors import SimulatedGpuError
from memlab.simulated_gpu import cuda_symbols, elf, library, stubs
from memlab.simulated_gpu.cuda_symbols import CudaSymbols
from memlab.simulated_gpu.elf import Linkage
from memlab.simulated_gpu.stubs import Answer

compiles = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="needs Linux and gcc")


@pytest.mark.parametrize(
    ("symbol", "answer"),
    [
        ("cublasCreate_v2", Answer.HANDLE),
        ("cublasLtMatmulDescCreate", Answer.HANDLE),
        ("cusparseCreateMatDescr", Answer.HANDLE),
        ("cusparseCreateCsr", Answer.HANDLE),
        ("cusparseSpMM", Answer.WORK),
        ("cusparseCreateCoo", Answer.REFUSAL),
        ("cublasSetStream_v2", Answer.NOTHING),
        ("cublasSgemmStridedBatched", Answer.WORK),
        ("cudnnDestroy", Answer.NOTHING),
        ("ncclGroupEnd", Answer.NOTHING),
        ("ncclSend", Answer.REFUSAL),
        ("ncclGetErrorString", Answer.TEXT),
        ("cublasGetStatusString", Answer.TEXT),
        ("cudaGetErrorName", Answer.TEXT),
        ("cudaMalloc", Answer.REFUSAL),
        ("cusolverDnXgeev", Answer.REFUSAL),
    ],
)
def test_what_a_stub_does(symbol, answer):
    assert stubs.answer_of(symbol) is answer


@pytest.mark.parametrize(
    ("symbol", "code"),
    [
        ("cudnnFind", 3000),
        ("cublasXt", 15),
        ("cusolverDnX", 4),
        ("cusparseX", 10),
        ("cufftX", 16),
        ("cudaX", 801),
        ("cuX", 801),
    ],
)
def test_a_refusal_has_its_librarys_code(symbol, code):
    assert stubs.refusal_code(symbol) == code


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """A library of stubs alone."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "empty.c").write_text("int memlab_here(void) { return 7; }\nint helper(void) { return 8; }\n")
    monkeypatch.setattr(library, "SOURCES", tmp_path / "csrc")
    nodes = {
        "cudaNew": "libcudart.so.13",
        "cublasCreate_v2": "libcublas.so.13",
        "ncclSend": "",
        "cublasSetStream_v2": "libcublas.so.13",
    }
    library.compile_into(tmp_path, CudaSymbols(nodes, frozenset()))
    return tmp_path / library.NAME


@compiles
def test_stubs_compile_and_answer(compiled, capfd):
    loaded = ctypes.CDLL(str(compiled))
    assert [loaded.cudaNew(), loaded.cudaNew(), loaded.ncclSend(), loaded.cublasSetStream_v2()] == [801, 801, 5, 0]
    handle = ctypes.c_void_p()
    assert loaded.cublasCreate_v2(ctypes.byref(handle)) == 0
    assert handle.value
    assert capfd.readouterr().err.splitlines() == [
        "memlab simulated GPU: cudaNew is not supported.",
        "memlab simulated GPU: ncclSend is not supported.",
    ]


@compiles
def test_helper_functions_of_the_sources_stay_inside(compiled):
    assert "memlab_here" in elf.defined(compiled)
    assert "helper" not in elf.defined(compiled)


def test_a_node_that_any_library_names_counts():
    one = Linkage({"cudaMalloc": "", "malloc": "GLIBC_2.2.5"}, ("libcudart.so.13", "libc.so.6"), ())
    two = Linkage({"cudaMalloc": "libcudart.so.13"}, (), ())
    expected = CudaSymbols({"cudaMalloc": "libcudart.so.13"}, frozenset({"libcudart.so.13"}))
    assert cuda_symbols.imported([one, two]) == cuda_symbols.imported([two, one]) == expected


def test_only_what_is_not_known_is_beyond():
    known = CudaSymbols({"cuA": "n", "cuB": ""}, frozenset({"x"}))
    assert not CudaSymbols({"cuA": "", "cuB": ""}, frozenset()).beyond(known)
    assert CudaSymbols({"cuA": "m", "cuC": ""}, frozenset("y")).beyond(known) == CudaSymbols(
        {"cuA": "m", "cuC": ""}, frozenset("y")
    )


def test_the_list_of_symbols_is_read_and_a_wrong_line_named(tmp_path):
    path = tmp_path / "symbols.txt"
    path.write_text("soname libcudart.so.13\ncudaMalloc libcudart.so.13\ncuInit -\n")
    assert cuda_symbols.listed(path).nodes == {"cudaMalloc": "libcudart.so.13", "cuInit": ""}
    path.write_text("cudaMalloc\n")
    with pytest.raises(SimulatedGpuError, match=re.escape("no symbol: 'cudaMalloc'")):
        cuda_symbols.listed(path)


def test_the_list_of_this_package_is_whole():
    listed = cuda_symbols.listed(library.SOURCES / "symbols.txt")
    assert len(listed.nodes) > 700
    assert {"libcudart.so.13", "libcublas.so.13", "libcudnn.so.9"} <= listed.libraries
