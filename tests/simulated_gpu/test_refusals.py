"""What a simulated GPU cannot do: one line that names it, PyTorch's exception, and neither a crash nor a hang."""

from __future__ import annotations

import pytest
import torch
from processes import ran

pytestmark = pytest.mark.simulated

PROGRAM = """
import sys, torch
import torch.multiprocessing as processes

def receive(tensor):
    pass

def share(x):
    process = processes.get_context("spawn").Process(target=receive, args=(x,))
    process.start()

work = {
    "inv": torch.linalg.inv,
    "eigh": torch.linalg.eigh,
    "qr": lambda x: torch.linalg.qr(x.expand(4, 8, 8)),
    "sparse": lambda x: torch.eye(8).to_sparse_csr().cuda() @ x[0],
    "share": share,
    "file": lambda x: torch.cuda.gds.GdsFile(sys.argv[2], 66),
}
if __name__ == "__main__":
    try:
        work[sys.argv[1]](torch.randn(8, 8, device="cuda"))
    except RuntimeError as error:
        print(str(error).partition(chr(10))[0])
"""
ON_CPU = "a simulated GPU has no {}: do this step on the CPU."


@pytest.mark.parametrize(
    ("work", "line", "error"),
    [
        ("inv", "torch.linalg needs cusolverDnSgetrf_bufferSize, and " + ON_CPU.format("cuSOLVER"), "cusolver error: "),
        ("eigh", "torch.linalg needs cusolverDn", "cusolver error: "),
        ("qr", "torch.linalg needs cusolverDn", "cusolver error: "),
        ("sparse", "sparse matrices need cusparseCreateDnVec, and " + ON_CPU.format("cuSPARSE"), "CUDA error: not supported"),
        (
            "share",
            "cudaIpcGetMemHandle: memory of a simulated GPU cannot be shared between processes; copy it through the host.",
            "CUDA error: operation not supported on a simulated GPU",
        ),
        ("file", "cuFileHandleRegister: a simulated GPU cannot read and write files", "cuFileHandleRegister failed"),
    ],
    ids=["inv", "eigh", "qr", "sparse", "share", "file"],
)  # fmt: skip
def test_a_refusal_is_a_line_and_an_exception(tmp_path, work, line, error):
    (tmp_path / "program.py").write_text(PROGRAM)
    status, out, err = ran(tmp_path, "program.py", work, str(tmp_path / "file"))
    assert status == 0, err[-2000:]
    said = [text for text in err.splitlines() if text.startswith("memlab simulated GPU: ")]
    assert len(said) == 1 and said[0].startswith(f"memlab simulated GPU: {line}")
    assert out.startswith(error)


def test_what_needs_no_solver_has_its_size():
    batch = torch.randn(4, 8, 8, device="cuda")
    assert torch.linalg.solve(batch, batch[..., :3]).shape == (4, 8, 3)
    assert torch.linalg.inv(batch).shape == batch.shape
    assert torch.linalg.solve_triangular(batch, batch, upper=True).shape == batch.shape
    assert torch.linalg.matrix_norm(batch).shape == (4,)
