"""Calls of matrix products, and the workspaces that PyTorch makes for them: run as a program on the simulated GPU.

`CALLS` is name -> (code, the operators in it as a dry run would note them: name, shapes, dtype, in backward).
"""

from __future__ import annotations

import json
import os
from typing import Any

KEPT = "all in a row"


def noted(text: str) -> tuple[Any, ...]:
    """An operator as a dry run would note it, of "mm 64x48 48x80", and what else is to be said of it: dtype, backward."""
    name, *words = text.split()
    overload = name if "." in name else f"{name}.default"
    shapes = tuple(tuple(map(int, one.split("x"))) for one in words if one[0].isdigit())
    dtype = next((one for one in words if one[0].isalpha() and one != "backward"), "float32")
    return (f"aten.{overload}", shapes, dtype, *[True for one in words if one == "backward"])


_LINEAR = "F.linear(E(64, 48).{0}(), E(80, 48).{0}(), E(80).{0}())"
CALLS: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    name: (code, [noted(one) for one in operators.split(", ")]) for name, code, operators in (
        ("linear", "F.linear(E(64, 48), E(80, 48), E(80))", "addmm 80 64x48 48x80"),
        ("one row", "F.linear(E(1, 48), E(80, 48), E(80))", "addmm 80 1x48 48x80"),
        ("one column", "F.linear(E(64, 48), E(1, 48), E(1))", "addmm 1 64x48 48x1"),
        ("inner 1", "F.linear(E(64, 1), E(80, 1), E(80))", "addmm 80 64x1 1x80"),
        ("inner 2", "F.linear(E(64, 2), E(2, 2), E(2))", "addmm 2 64x2 2x2"),
        ("nothing", "F.linear(E(0, 48), E(80, 48), E(80))", "addmm 80 0x48 48x80"),
        ("inner 0", "F.linear(E(64, 0), E(80, 0), E(80))", "addmm 80 64x0 0x80"),
        ("no bias", "F.linear(E(64, 48), E(80, 48))", "mm 64x48 48x80"),
        ("3-D", "F.linear(E(2, 32, 48), E(80, 48), E(80))", "addmm 80 64x48 48x80"),
        ("half", _LINEAR.format("half"), "addmm 80 64x48 48x80 float16"),
        ("double", _LINEAR.format("double"), "addmm 80 64x48 48x80 float64"),
        ("complex", _LINEAR.format("cfloat"), "addmm 80 64x48 48x80 complex64"),
        ("addmm 2-D", "torch.addmm(E(64, 80), E(64, 48), E(48, 80))", "addmm 64x80 64x48 48x80"),
        ("addmm (1, n)", "torch.addmm(E(1, 80), E(64, 48), E(48, 80))", "addmm 1x80 64x48 48x80"),
        ("addmm (n, 1)", "torch.addmm(E(64, 1), E(64, 48), E(48, 80))", "addmm 64x1 64x48 48x80"),
        ("addmm scalar", "torch.addmm(E(1), E(64, 48), E(48, 80))", "addmm 1 64x48 48x80"),
        ("activation", "torch._addmm_activation(E(80), E(64, 48), E(48, 80))", "_addmm_activation 80 64x48 48x80"),
        ("mm", "torch.mm(E(64, 48), E(48, 80))", "mm 64x48 48x80"),
        ("bmm", "torch.bmm(E(3, 64, 48), E(3, 48, 80))", "bmm 3x64x48 3x48x80"),
        ("baddbmm", "torch.baddbmm(E(80), E(3, 64, 48), E(3, 48, 80))", "baddbmm 80 3x64x48 3x48x80"),
        ("addbmm", "torch.addbmm(E(64, 80), E(3, 64, 48), E(3, 48, 80))", "addbmm 64x80 3x64x48 3x48x80"),
        ("mv", "torch.mv(E(64, 48), E(48))", "mv 64x48 48"),
        ("dot", "torch.dot(E(64), E(64))", "dot 64 64"),
        ("add", "E(64) + E(64)", "add.Tensor 64 64"),
        ("backward", f"{_LINEAR.format('requires_grad_')}.sum().backward()",
         "addmm 80 64x48 48x80, mm 64x80 80x48 backward, mm 80x64 64x48 backward"),
    )
}  # fmt: skip


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
