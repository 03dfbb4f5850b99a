"""Copies between the host and the GPU: dense and strided ones, with another dtype, in place."""

from __future__ import annotations

import torch

from kernel_calls import Calls, N, f32

case = Calls()
CASES = case.cases


def H(*shape, dtype=None):
    """A tensor of the host."""
    return lambda of_call: torch.zeros(*shape, dtype=dtype or of_call)


def move(name, inputs, call):
    case(name, inputs, call, grad=False)


VIEWS = {
    "dense": lambda x: x, "part": lambda x: x[:16], "strided": lambda x: x[:, ::2], "columns": lambda x: x[:, :32],
    "transposed": lambda x: x.t(), "permuted": lambda x: x.view(8, 8, 64).permute(2, 0, 1),
    "last": lambda x: x.view(4, 4, 16, 16).to(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1].expand(64, 64), "row of columns": lambda x: x[:, 3],
}  # fmt: skip
for name, view in VIEWS.items():
    move(f"cpu {name}", (N(64, 64),), lambda x, view=view: view(x).cpu())
    move(f"cpu {name} float64", (N(64, 64),), lambda x, view=view: view(x).to("cpu", torch.float64))
    move(f"cpu {name} async half", (N(64, 64),), lambda x, view=view: view(x).to("cpu", torch.half, non_blocking=True))
    move(f"cuda {name}", (H(64, 64),), lambda x, view=view: view(x).cuda())
    move(f"cuda {name} float64", (H(64, 64),), lambda x, view=view: view(x).to("cuda", torch.float64))
    move(
        f"cuda {name} async half", (H(64, 64),), lambda x, view=view: view(x).to("cuda", torch.half, non_blocking=True)
    )
    if name == "expanded":
        continue
    move(f"into {name}", (N(64, 64), H(64, 64)), lambda x, y, view=view: view(x).copy_(view(y).contiguous()))
    move(f"into {name} of another", (N(64, 64), H(64, 64)), lambda x, y, view=view: view(x).copy_(view(y)))
    move(
        f"into {name} float64", (N(64, 64), H(64, 64, dtype=torch.float64)),
        lambda x, y, view=view: view(x).copy_(view(y)),
    )  # fmt: skip
    move(
        f"into {name} async float64", (N(64, 64), H(64, 64, dtype=torch.float64)),
        lambda x, y, view=view: view(x).copy_(view(y), non_blocking=True),
    )  # fmt: skip
    move(f"host into {name}", (N(64, 64), H(64, 64)), lambda x, y, view=view: view(y).copy_(view(x)))
    move(
        f"host into {name} float64", (N(64, 64), H(64, 64, dtype=torch.float64)),
        lambda x, y, view=view: view(y).copy_(view(x)),
    )  # fmt: skip
    move(f"on the GPU {name}", (N(64, 64), N(64, 64, dtype=f32)), lambda x, y, view=view: view(x).copy_(view(y)))
move("one row into all", (N(64, 64), H(64)), lambda x, y: x.copy_(y))
move("one number into all", (N(64, 64), H()), lambda x, y: x.copy_(y))
move("row into columns", (N(64, 64), H(32)), lambda x, y: x[:, ::2].copy_(y))
move(
    "part of the host, set", (N(64, 64), H(64, 32)), lambda x, y: x.__setitem__((slice(None), slice(None, None, 2)), y)
)
move("cpu contiguous", (N(64, 64),), lambda x: x.t().cpu().contiguous())
move("tolist", (N(64, 64),), lambda x: x[:, ::2].tolist())
move("numpy", (N(64, 64),), lambda x: x[:, ::2].float().cpu().numpy())
move("cpu preserve", (N(64, 64),), lambda x: x.t().to("cpu", memory_format=torch.contiguous_format))
move("cuda preserve", (H(64, 64),), lambda x: x.t().to("cuda", memory_format=torch.contiguous_format))
