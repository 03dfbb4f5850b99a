"""C functions for the symbols that PyTorch imports and nobody wrote: they create a handle, do nothing, or refuse.

A call that only changes settings, or computes values, succeeds without doing anything: values are not simulated. A call
whose answer decides how the program continues cannot be a stub that succeeds. It says once on stderr that it is not
supported and returns its library's own code for that, which PyTorch turns into an exception.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable


class Answer(enum.Enum):
    """What a stub does."""

    HANDLE = "makes an opaque object, through its first argument"
    NOTHING = "returns success"
    WORK = "counts as a launch, and returns success"
    TEXT = "returns a string"
    REFUSAL = "returns the library's code for what is not supported"


_HANDLES = (
    r"cublas(Lt\w+)?Create(_v2)?",
    r"cudnnCreate\w*",
    r"cusolverDnCreate\w*",
    r"cusparseCreate(MatDescr|Csr|DnMat)?",
    r"nvrtcCreateProgram",
)
_TEXTS = (r"(cu|nv|nccl)\w*Get(Last)?(Error|Status)(String|Name)?", r"ncclGetLastError")
_NOTHING = (
    # Settings and destructors: there is no state behind a handle.
    r"cublas(Set|Destroy)\w*",
    r"cublas(Lt)?\w*(Destroy|SetAttribute)",
    r"cudnn(Set|Destroy|Restore)\w*",
    r"cufft(Destroy|Set\w*)",
    r"cusolverDn(Destroy|Set)\w*",
    r"cusparse(Destroy|Set)\w*",
    # Profilers and compilers: nothing is traced, nothing is compiled.
    r"cupti\w*",
    r"nvrtc\w*",
    # Communication: what ends it succeeds; what would need another process refuses.
    r"nccl(Group(Start|End)|(Comm|RedOp|DevComm)(Destroy|Abort|Finalize|Deregister|WindowDeregister)|MemFree)",
)
_WORK = (
    # Calculations whose results and workspaces the caller has allocated.
    r"cublasLtMatmul",
    r"cublas\w*(gemm|Gemm|gemv|dot|Dot|trsm|getrf)\w*",
    r"cudnn(BatchNorm|Normalization|Pooling|RNN|Spatial)\w*",
    r"cufftXtExec",
    r"cusparse(Xcoo2csr|SpMM)",
)
_CODES = (
    ("cudnn", 3000),  # CUDNN_STATUS_NOT_SUPPORTED
    ("cublas", 15),  # CUBLAS_STATUS_NOT_SUPPORTED
    ("cusolver", 4),  # CUSOLVER_STATUS_ARCH_MISMATCH: PyTorch has no text for CUSOLVER_STATUS_NOT_SUPPORTED
    ("cusparse", 10),  # CUSPARSE_STATUS_NOT_SUPPORTED
    ("cuFile", 5007),  # CU_FILE_PLATFORM_NOT_SUPPORTED
    ("cufft", 16),  # CUFFT_NOT_SUPPORTED
    ("curand", 201),  # CURAND_STATUS_LAUNCH_FAILURE: the library has no code for it
    ("nvml", 3),  # NVML_ERROR_NOT_SUPPORTED
    ("nccl", 5),  # ncclInvalidUsage
    ("nv", 1),
    ("", 801),  # cudaErrorNotSupported and CUDA_ERROR_NOT_SUPPORTED
)
_REASONS = (
    ("cusolver", "torch.linalg needs {}, and a simulated GPU has no cuSOLVER: do this step on the CPU"),
    ("cusparseLt", "semi-structured sparsity needs {}, and a simulated GPU has no cuSPARSELt"),
    ("cusparse", "sparse matrices need {}, and a simulated GPU has no cuSPARSE: do this step on the CPU"),
    ("cudaIpc", "{}: memory of a simulated GPU cannot be shared between processes; copy it through the host"),
    ("cuFile", "{}: a simulated GPU cannot read and write files; copy through the host"),
    ("", "{} is not supported"),
)
_RULES = tuple(
    (answer, re.compile("|".join(patterns)))
    for answer, patterns in (
        (Answer.HANDLE, _HANDLES),
        (Answer.TEXT, _TEXTS),
        (Answer.NOTHING, _NOTHING),
        (Answer.WORK, _WORK),
    )
)
_HEAD = """// Made by memlab/simulated_gpu/stubs.py.
#include <stdio.h>
#include <stdlib.h>

void count_launch(void);
#define HANDLE(name) int name(void **made) { *made = calloc(1, 256); return *made ? 0 : 2; }
#define NOTHING(name) int name(void) { return 0; }
#define WORK(name) int name(void) { count_launch(); return 0; }
#define TEXT(name) const char *name(void) { return "not supported on a simulated GPU"; }
#define REFUSAL(name, code, text) int name(void) { \\
    static int said; \\
    if (!__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED)) \\
        fprintf(stderr, "memlab simulated GPU: " text ".\\n"); \\
    return code; }

"""


def answer_of(symbol: str) -> Answer:
    """What the stub of this symbol does."""
    return next((answer for answer, pattern in _RULES if pattern.fullmatch(symbol)), Answer.REFUSAL)


def refusal_code(symbol: str) -> int:
    """The code by which the symbol's library says that a call is not supported."""
    return next(code for prefix, code in _CODES if symbol.startswith(prefix))


def c_text(symbols: Iterable[str]) -> str:
    """A C source with one function for each symbol."""
    return _HEAD + "".join(f"{_stub(symbol)}\n" for symbol in sorted(symbols) if symbol.isidentifier())


def _stub(symbol: str) -> str:
    answer = answer_of(symbol)
    if answer is not Answer.REFUSAL:
        return f"{answer.name}({symbol})"
    reason = next(text for prefix, text in _REASONS if symbol.startswith(prefix))
    return f'REFUSAL({symbol}, {refusal_code(symbol)}, "{reason.format(symbol)}")'


def version_script(nodes: dict[str, str]) -> str:
    """The linker's list of version nodes, each with its symbols.

    The last node takes CUDA's other functions, which programs look up by name. Everything else stays local to the library,
    so that it cannot replace a function of the same name in the program that loads it.
    """
    members: dict[str, list[str]] = {}
    for symbol, node in sorted(nodes.items()):
        if node:
            members.setdefault(node, []).append(symbol)
    named = "".join(f"{node} {{ global: {'; '.join(found)}; }};\n" for node, found in sorted(members.items()))
    return f"{named}MEMLAB {{ global: cu*; _*cuda*; nccl*; nv*; memlab_*; local: *; }};\n"
