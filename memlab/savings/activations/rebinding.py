"""Names let go of in forward: `del` after the last use, so that a tensor does not live until the function returns.

The forward is written anew from its source: `del` after the statement that uses a name last, nothing else. Arguments that are
not assigned to are left: the caller holds them whatever the function does. Functions with closures (also `super()`),
`locals()` or private names are left as they are.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.errors import DoesNotApply
from memlab.savings.outside import on_models
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job, Parts

_LOOKS_AT_NAMES = {"locals", "vars", "dir", "eval", "exec", "breakpoint"}


def tidied(function: types.FunctionType) -> types.FunctionType | None:
    """The function with `del` after the last use of each name that it binds; None where there is none to add."""
    code = function.__code__
    if code.co_freevars or code.co_cellvars or _LOOKS_AT_NAMES & set(code.co_names):
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        found = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(found, ast.FunctionDef) or found.decorator_list or _has_private(found):
        return None
    if not _let_go(found):
        return None
    ast.increment_lineno(found, first - 1)
    return _compiled(found, function)


def _let_go(function: ast.FunctionDef) -> bool:
    """Add the statements; whether there are any."""
    body = function.body
    last = {one.id: index for index, part in enumerate(body) for one in ast.walk(part) if isinstance(one, ast.Name)}
    removed = {one.id for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Del)}
    after: dict[int, list[str]] = {}
    for name in _bound(body):
        if name not in removed and not isinstance(body[last[name]], ast.Return | ast.Raise):
            after.setdefault(last[name], []).append(name)
    function.body = [
        new
        for index, part in enumerate(body)
        for new in (part, *([_del(after[index], part)] if index in after else []))
    ]
    return bool(after)


def _bound(body: list[ast.stmt]) -> list[str]:
    """Names that are assigned to in the function's own statements, not only in a branch: those there are for sure."""
    targets: list[ast.expr] = []
    for part in body:
        if isinstance(part, ast.Assign):
            targets += part.targets
        elif isinstance(part, ast.AugAssign) or (isinstance(part, ast.AnnAssign) and part.value is not None):
            targets.append(part.target)
    flat = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    declared = {name for part in body if isinstance(part, ast.Global | ast.Nonlocal) for name in part.names}
    return list(dict.fromkeys(one.id for one in flat if isinstance(one, ast.Name) and one.id not in declared))


def _del(names: list[str], after: ast.stmt) -> ast.stmt:
    made = ast.Delete([ast.Name(name, ast.Del()) for name in names])
    made.lineno = made.end_lineno = after.end_lineno or after.lineno
    made.col_offset = made.end_col_offset = after.col_offset
    return ast.fix_missing_locations(made)


def _has_private(function: ast.FunctionDef) -> bool:
    """Names that Python mangles by the class they stand in."""
    names = {one.attr if isinstance(one, ast.Attribute) else one.id for one in ast.walk(function)
             if isinstance(one, ast.Attribute | ast.Name)}  # fmt: skip
    return any(name.startswith("__") and not name.endswith("__") for name in names)


def _compiled(found: ast.FunctionDef, function: types.FunctionType) -> types.FunctionType:
    found.returns = None
    for one in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs, found.args.vararg, found.args.kwarg):
        if one is not None:
            one.annotation = None
    found.args.defaults = [ast.Constant(None) for _ in found.args.defaults]
    found.args.kw_defaults = [one and ast.Constant(None) for one in found.args.kw_defaults]
    module = ast.fix_missing_locations(ast.Module([found], []))
    made: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, made)
    code = made[found.name].__code__.replace(co_qualname=function.__code__.co_qualname)
    new = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def _forwards(model: nn.Module) -> dict[types.FunctionType, types.FunctionType]:
    """The forwards of the model's own classes that can be written anew."""
    functions = {type(one).forward for one in model.modules() if "forward" not in vars(one)}
    own = [one for one in functions if isinstance(one, types.FunctionType) and not one.__module__.startswith("torch.")]
    found = {one: new for one in own if (new := tidied(one)) is not None}
    if not found:
        raise DoesNotApply(
            f"no forward of {type(model).__name__} holds a name of its own past the last use, as far as its source tells."
        )
    return found


def _apply(job: Job) -> None:
    found = _forwards(job.model)
    for one in job.model.modules():
        plain: Any = type(one).forward
        new = found.get(plain) if "forward" not in vars(one) else None
        if new is not None:
            one.forward = types.MethodType(new, one)


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """A module that is being called has looked up its forward already, so that the function's code is exchanged."""
    before: dict[types.FunctionType, types.CodeType] = {}

    def change(model: nn.Module) -> None:
        for function, new in _forwards(model).items():
            before.setdefault(function, function.__code__)
            function.__code__ = new.__code__

    try:
        with on_models(change):
            yield
    finally:
        for function, code in before.items():
            function.__code__ = code


class _UNet(nn.Module):
    """A U-Net whose forward gives every tensor a name and keeps it until the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.down3, self.middle = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.up1, self.up2 = nn.Conv2d(2 * width, width, 3, padding=1), nn.Conv2d(2 * width, width, 3, padding=1)
        self.last, self.head = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        conv1 = functional.relu(self.down1(x))
        conv2 = functional.relu(self.down2(conv1))
        pooled = functional.max_pool2d(conv2, 2)
        conv3 = functional.relu(self.down3(pooled))
        deep = functional.relu(self.middle(functional.max_pool2d(conv3, 2)))
        up1 = functional.interpolate(deep, scale_factor=2.0)
        merged1 = torch.cat([up1, conv3], 1)
        conv4 = functional.relu(self.up1(merged1))
        up2 = functional.interpolate(conv4, scale_factor=2.0)
        merged2 = torch.cat([up2, conv2], 1)
        conv5 = functional.relu(self.up2(merged2))
        conv6 = functional.relu(self.last(conv5))
        return self.head(conv6)


def named_unet(width: int = 8, side: int = 64) -> Parts:
    """A prediction of a U-Net that keeps every name; its weights are frozen, so that autograd keeps nothing."""
    torch.manual_seed(0)
    return _UNet(width).requires_grad_(False), None, (torch.randn(4, 3, side, side),), None


TECHNIQUES = (
    Technique(
        name="rebinding",
        idea="In forward, bind the result to the old name, or `del` what is not needed again, instead of keeping each name.",
        attacks=("activation", "temporary"),
        kind="saving",
        stage="model",
        equality=EXACT,
        price="none.",
        not_when="Gradients are on: what backward needs autograd keeps, whatever the names; then only the few tensors that no"
        " backward needs go earlier. `del` of an argument frees nothing: the caller holds it.",
        code="""\
def forward(self, x):
    skip = self.down(x)
    x = self.middle(self.pool(skip))
    x = torch.cat([self.up(x), skip], 1)
    del skip
    return self.head(x)
""",
        references=(
            "FAQ: My model reports cuda runtime error(2): out of memory, PyTorch documentation,"
            " https://docs.pytorch.org/docs/stable/notes/faq.html",
            "U-Net: Convolutional Networks for Biomedical Image Segmentation, Ronneberger et al. 2015,"
            " https://arxiv.org/abs/1505.04597",
        ),
        shown=Shown(named_unet, share=0.5),
        tips=("C2",),
        apply=_apply,
        outside=_outside,
    ),
)
