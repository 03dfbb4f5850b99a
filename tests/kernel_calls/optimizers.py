"""Two steps of every optimizer that PyTorch has, in each of its ways: the first makes the state, the second uses it."""

from __future__ import annotations

from typing import Any

import torch

from kernel_calls import Setup, T, bf16, f32

CASES: dict[str, Setup] = {}
SHAPES = ((64, 64), (64,), (300, 64), ())
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "foreach capturable": {"foreach": True, "capturable": True},
    "for-loop capturable": {"foreach": False, "capturable": True},
    "fused": {"fused": True},
}


def steps(name: str, make: Any, dtype: torch.dtype = f32, shapes: Any = SHAPES) -> None:
    def setup() -> Any:
        params = [torch.empty(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]
        for one in params:
            one.grad = torch.zeros_like(one)

        def body() -> None:
            optimizer = make(params)
            for _ in range(2):
                optimizer.step()

        return body

    CASES[f"{name} {'bf16' if dtype == bf16 else 'f32'}"] = setup


def ways(name: str, maker: Any, *names: str, shapes: Any = SHAPES, **options: Any) -> None:
    for way in names:
        steps(f"{name} {way}", lambda p, way=way: maker(p, **options, **WAYS[way]), shapes=shapes)
    steps(f"{name} {names[0]}", lambda p: maker(p, **options, **WAYS[names[0]]), bf16, shapes)


LOOPS = ("default", "for-loop", "foreach")
CAPTURED = (*LOOPS, "foreach capturable", "for-loop capturable")
ways("Adam", torch.optim.Adam, *CAPTURED, "fused")
ways("Adam decay", torch.optim.Adam, *CAPTURED, "fused", weight_decay=0.1)
ways("Adam amsgrad", torch.optim.Adam, *CAPTURED, "fused", amsgrad=True)
ways("Adam maximize", torch.optim.Adam, *CAPTURED, "fused", maximize=True)
ways("AdamW", torch.optim.AdamW, *CAPTURED, "fused")
ways("NAdam", torch.optim.NAdam, *CAPTURED)
ways("NAdam decoupled", torch.optim.NAdam, *CAPTURED, weight_decay=0.1, decoupled_weight_decay=True)
ways("RAdam", torch.optim.RAdam, *CAPTURED)
ways("RAdam decay", torch.optim.RAdam, *CAPTURED, weight_decay=0.1)
ways("Adamax", torch.optim.Adamax, *CAPTURED)
ways("Adadelta", torch.optim.Adadelta, *CAPTURED)
ways("Adagrad", torch.optim.Adagrad, *LOOPS)
ways("Adagrad decay", torch.optim.Adagrad, *LOOPS, weight_decay=0.1, lr_decay=0.1)
ways("RMSprop", torch.optim.RMSprop, *CAPTURED)
ways("RMSprop centered", torch.optim.RMSprop, *CAPTURED, centered=True, momentum=0.9, weight_decay=0.1)
ways("ASGD", torch.optim.ASGD, *CAPTURED)
ways("Rprop", torch.optim.Rprop, *CAPTURED, shapes=SHAPES[:3])  # a mask of no dimension is a matter of values
ways("SGD", torch.optim.SGD, *LOOPS, "fused", lr=0.1)
ways("SGD momentum", torch.optim.SGD, *LOOPS, "fused", lr=0.1, momentum=0.9, weight_decay=0.1)
ways("SGD nesterov", torch.optim.SGD, *LOOPS, "fused", lr=0.1, momentum=0.9, nesterov=True, maximize=True)
ways("Adafactor", torch.optim.Adafactor, *LOOPS)
ways("Adafactor decay", torch.optim.Adafactor, *LOOPS, weight_decay=0.1, maximize=True)
MATRICES = ((64, 64), (300, 64), (64, 200))
if hasattr(torch.optim, "Muon"):
    for dtype in (f32, bf16):
        steps("Muon", lambda p: torch.optim.Muon(p), dtype, MATRICES)
        steps("Muon plain", lambda p: torch.optim.Muon(p, momentum=0.0, nesterov=False), dtype, MATRICES)
        steps("Muon rms", lambda p: torch.optim.Muon(p, adjust_lr_fn="match_rms_adamw"), dtype, MATRICES)


def lbfgs(name: str, **options: Any) -> None:
    def setup() -> Any:
        params = [T(64, 64), T(64)]
        for one in params:
            one.grad = torch.zeros_like(one)

        def body() -> None:
            optimizer = torch.optim.LBFGS(params, max_iter=3, **options)

            def closure() -> Any:
                return (params[0].detach() * 2).sum()

            optimizer.step(closure)
            optimizer.step(closure)

        return body

    CASES[name] = setup


lbfgs("LBFGS")
lbfgs("LBFGS wolfe", line_search_fn="strong_wolfe")
