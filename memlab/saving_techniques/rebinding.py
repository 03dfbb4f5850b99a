"""Delete names in forward after their last use, so that a tensor does not live until the function returns.

The forward is rewritten from its source: it gets a `del` after the statement that uses a name last. Arguments that are never
assigned are skipped: the caller holds them anyway. Functions with closures (also `super()`),
`locals()` or private names are not rewritten.
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
from memlab.saving_techniques.patching import on_models
from memlab.saving_techniques.technique import Demo, described
from memlab.workloads.job import Job, Parts

_LOOKS_AT_NAMES = {"locals", "vars", "dir", "eval", "exec", "breakpoint"}


def with_deletions(function: types.FunctionType) -> types.FunctionType | None:
    """The function with `del` after the last use of each name that it binds; None if there is nothing to add."""
    code = function.__code__
    if code.co_freevars or code.co_cellvars or _LOOKS_AT_NAMES & set(code.co_names):
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        return None
    named = [one for one in ast.walk(tree) if isinstance(one, ast.Attribute | ast.Name)]
    names = {one.attr if isinstance(one, ast.Attribute) else one.id for one in named}
    if any(name.startswith("__") and not name.endswith("__") for name in names):  # Python mangles it by its class
        return None
    if not _add_deletions(tree):
        return None
    ast.increment_lineno(tree, first - 1)
    return _compiled(tree, function)


def _add_deletions(function: ast.FunctionDef) -> bool:
    """Add the statements; whether there are any."""
    last: dict[str, int] = {}
    deleted = set()
    for index, part in enumerate(function.body):
        for one in ast.walk(part):
            if isinstance(one, ast.Name):
                last[one.id] = index
                if isinstance(one.ctx, ast.Del):
                    deleted.add(one.id)
    bound = [name for name in _bound(function.body) if name not in deleted]
    body: list[ast.stmt] = []
    for index, part in enumerate(function.body):
        body.append(part)
        done = [name for name in bound if last[name] == index]
        if done and not isinstance(part, ast.Return | ast.Raise):
            new = ast.Delete([ast.Name(name, ast.Del()) for name in done])
            new.lineno = new.end_lineno = part.end_lineno or part.lineno
            new.col_offset = new.end_col_offset = part.col_offset
            body.append(ast.fix_missing_locations(new))
    has_more = len(body) > len(function.body)
    function.body = body
    return has_more


def _bound(body: list[ast.stmt]) -> list[str]:
    """Names assigned at the function's top level, not only in a branch: those certainly exist."""
    targets: list[ast.expr] = []
    declared: set[str] = set()
    for part in body:
        if isinstance(part, ast.Assign):
            targets += part.targets
        elif isinstance(part, ast.AugAssign) or (isinstance(part, ast.AnnAssign) and part.value is not None):
            targets.append(part.target)
        elif isinstance(part, ast.Global | ast.Nonlocal):
            declared.update(part.names)
    flat = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return list(dict.fromkeys(one.id for one in flat if isinstance(one, ast.Name) and one.id not in declared))


def _compiled(tree: ast.FunctionDef, function: types.FunctionType) -> types.FunctionType:
    """Compile the tree as a replacement of the function; annotations and defaults are taken from the original."""
    tree.returns = None
    for one in ast.walk(tree.args):
        if isinstance(one, ast.arg):
            one.annotation = None
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [one and ast.Constant(None) for one in tree.args.kw_defaults]
    module = ast.fix_missing_locations(ast.Module([tree], []))
    made: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, made)
    code = made[tree.name].__code__.replace(co_qualname=function.__code__.co_qualname)
    new = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def _forwards(model: nn.Module) -> dict[types.FunctionType, types.FunctionType]:
    """The forwards of the model's own classes that can be rewritten, each with its replacement."""
    functions = {type(one).forward for one in model.modules() if "forward" not in vars(one)}
    own = [one for one in functions if isinstance(one, types.FunctionType) and not one.__module__.startswith("torch.")]
    rewritten = {one: new for one in own if (new := with_deletions(one)) is not None}
    if not rewritten:
        raise DoesNotApply(
            f"no forward of {type(model).__name__} holds a name past its last use, as far as its source tells."
        )
    return rewritten


def _apply(job: Job) -> None:
    rewritten = _forwards(job.model)
    for one in job.model.modules():
        plain: Any = type(one).forward
        if "forward" not in vars(one) and plain in rewritten:
            one.forward = types.MethodType(rewritten[plain], one)


@contextlib.contextmanager
def _patch() -> Iterator[None]:
    """Replace the code of the functions: a forward set on the instance would be a cycle that keeps the module alive."""
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


class NamedUNet(nn.Module):
    """A U-Net whose forward gives every tensor a name and keeps it until the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, width, 3, padding=1)
        self.down2, self.down3, self.middle, self.last = (nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.up1, self.up2 = (nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(2))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores per pixel."""
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


def named_unet() -> Parts:
    """Inference of a U-Net that keeps every name; its weights are frozen, so that autograd saves nothing."""
    return NamedUNet(8).requires_grad_(False), None, (torch.randn(4, 3, 64, 64),), None


TECHNIQUES = (described("rebinding", Demo(named_unet, share=0.5), _apply, patch=_patch, change=_forwards),)
