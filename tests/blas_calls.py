"""Calls of matrix products, and the workspaces that PyTorch makes for them: run as a program on the pretend device.

`CALLS` is name -> (code, the operators in it as a pretend run would note them: name, shapes, dtype, in backward).
"""

from __future__ import annotations

import json
import os
from typing import Any

F = "float32"
KEPT = "all in a row"
CALLS: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "linear": ("F.linear(E(64, 48), E(80, 48), E(80))", [("aten.addmm.default", ((80,), (64, 48), (48, 80)), F)]),
    "one row": ("F.linear(E(1, 48), E(80, 48), E(80))", [("aten.addmm.default", ((80,), (1, 48), (48, 80)), F)]),
    "one column": ("F.linear(E(64, 48), E(1, 48), E(1))", [("aten.addmm.default", ((1,), (64, 48), (48, 1)), F)]),
    "inner 1": ("F.linear(E(64, 1), E(80, 1), E(80))", [("aten.addmm.default", ((80,), (64, 1), (1, 80)), F)]),
    "inner 2": ("F.linear(E(64, 2), E(2, 2), E(2))", [("aten.addmm.default", ((2,), (64, 2), (2, 2)), F)]),
    "nothing": ("F.linear(E(0, 48), E(80, 48), E(80))", [("aten.addmm.default", ((80,), (0, 48), (48, 80)), F)]),
    "inner 0": ("F.linear(E(64, 0), E(80, 0), E(80))", [("aten.addmm.default", ((80,), (64, 0), (0, 80)), F)]),
    "no bias": ("F.linear(E(64, 48), E(80, 48))", [("aten.mm.default", ((64, 48), (48, 80)), F)]),
    "3-D": ("F.linear(E(2, 32, 48), E(80, 48), E(80))", [("aten.addmm.default", ((80,), (64, 48), (48, 80)), F)]),
    "half": (
        "F.linear(E(64, 48).half(), E(80, 48).half(), E(80).half())",
        [("aten.addmm.default", ((80,), (64, 48), (48, 80)), "float16")],
    ),
    "double": (
        "F.linear(E(64, 48).double(), E(80, 48).double(), E(80).double())",
        [("aten.addmm.default", ((80,), (64, 48), (48, 80)), "float64")],
    ),
    "complex": (
        "F.linear(E(64, 48).cfloat(), E(80, 48).cfloat(), E(80).cfloat())",
        [("aten.addmm.default", ((80,), (64, 48), (48, 80)), "complex64")],
    ),
    "addmm 2-D": (
        "torch.addmm(E(64, 80), E(64, 48), E(48, 80))",
        [("aten.addmm.default", ((64, 80), (64, 48), (48, 80)), F)],
    ),
    "addmm (1, n)": (
        "torch.addmm(E(1, 80), E(64, 48), E(48, 80))",
        [("aten.addmm.default", ((1, 80), (64, 48), (48, 80)), F)],
    ),
    "addmm (n, 1)": (
        "torch.addmm(E(64, 1), E(64, 48), E(48, 80))",
        [("aten.addmm.default", ((64, 1), (64, 48), (48, 80)), F)],
    ),
    "addmm scalar": (
        "torch.addmm(E(1), E(64, 48), E(48, 80))",
        [("aten.addmm.default", ((1,), (64, 48), (48, 80)), F)],
    ),
    "activation": (
        "torch._addmm_activation(E(80), E(64, 48), E(48, 80))",
        [("aten._addmm_activation.default", ((80,), (64, 48), (48, 80)), F)],
    ),
    "mm": ("torch.mm(E(64, 48), E(48, 80))", [("aten.mm.default", ((64, 48), (48, 80)), F)]),
    "bmm": ("torch.bmm(E(3, 64, 48), E(3, 48, 80))", [("aten.bmm.default", ((3, 64, 48), (3, 48, 80)), F)]),
    "baddbmm": (
        "torch.baddbmm(E(80), E(3, 64, 48), E(3, 48, 80))",
        [("aten.baddbmm.default", ((80,), (3, 64, 48), (3, 48, 80)), F)],
    ),
    "addbmm": (
        "torch.addbmm(E(64, 80), E(3, 64, 48), E(3, 48, 80))",
        [("aten.addbmm.default", ((64, 80), (3, 64, 48), (3, 48, 80)), F)],
    ),
    "mv": ("torch.mv(E(64, 48), E(48))", [("aten.mv.default", ((64, 48), (48,)), F)]),
    "dot": ("torch.dot(E(64), E(64))", [("aten.dot.default", ((64,), (64,)), F)]),
    "add": ("E(64) + E(64)", [("aten.add.Tensor", ((64,), (64,)), F)]),
    "backward": (
        "F.linear(E(64, 48).requires_grad_(), E(80, 48).requires_grad_(), E(80).requires_grad_()).sum().backward()",
        [
            ("aten.addmm.default", ((80,), (64, 48), (48, 80)), F),
            ("aten.mm.default", ((64, 80), (80, 48)), F, True),
            ("aten.mm.default", ((80, 64), (64, 48)), F, True),
        ],
    ),
}


def main() -> None:
    """Print name -> [place, bytes, whether it stays] of every workspace, for each call alone and for all in a row."""
    import torch
    from torch.nn import functional

    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=100_000)
    names = {"torch": torch, "F": functional, "E": lambda *shape: torch.empty(*shape, device="cuda")}

    def entries() -> list[dict[str, Any]]:
        return torch.cuda.memory._snapshot()["device_traces"][0]

    def workspaces(calls: list[str]) -> list[list[Any]]:
        torch._C._cuda_clearCublasWorkspaces()
        found = []
        for place, code in enumerate(calls):
            first = len(entries())
            with torch.inference_mode("backward" not in code):
                eval(code, dict(names))
            new = entries()[first:]
            taken = [entry for entry in new if entry["action"] == "alloc" and entry["size"] >= 100_000]
            gone = {entry["addr"] for entry in new if entry["action"] == "free_completed" and entry["size"] >= 100_000}
            found += [[place, entry["size"], entry["addr"] not in gone] for entry in taken]
        return found

    codes = {name: code for name, (code, _) in CALLS.items()}
    result = {name: workspaces([code]) for name, code in codes.items()}
    result[KEPT] = workspaces(list(codes.values()))
    print(json.dumps(result), flush=True)
    os._exit(0)  # 2.15 may abort when the engine's thread is still there at exit


if __name__ == "__main__":
    main()
