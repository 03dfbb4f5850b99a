"""Techniques as edits of a cell's text: the changed cell is what the search runs, and what the advice prints as a diff.

An edit is made only where the first run has shown that it is the same computation; otherwise there is none, and the technique
is switched on from outside as for a function. Running a changed cell twice changes nothing further.
"""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from memlab.saving_techniques.checkpoint import EXPENSIVE, four, square_root

CHUNKED = '''
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

def hidden_of(model, head, *args, **kwargs):
    """What model(*args, **kwargs) passes to its last layer; called in any other way, the model makes logits as before."""
    head.forward = passed_on
    try:
        return model(*args, **kwargs)
    finally:
        del head.forward

def passed_on(hidden):
    return hidden

def chunked_cross_entropy(hidden, targets, head, chunks=8):
    """cross_entropy(head(hidden), targets) in chunks of positions: the logits never exist all at once."""
    def loss_of(hidden, targets):
        return F.cross_entropy(F.linear(hidden, head.weight, head.bias), targets, reduction="sum")

    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    parts = zip(hidden.chunk(chunks), targets.chunk(chunks))
    return sum(checkpoint(loss_of, *part, use_reentrant=False) for part in parts) / (targets != -100).sum()
'''


OFFLOADED = '''
from functools import partial
from torch.autograd.graph import save_on_cpu

def offloaded(forward, *args, **kwargs):
    """What forward saves for backward waits in the host's memory."""
    with save_on_cpu(pin_memory=True):
        return forward(*args, **kwargs)
'''
IN_BFLOAT16 = '''
from functools import partial
import torch

def in_bfloat16(forward, *args, **kwargs):
    """Matrix products and convolutions in bfloat16; weights and the result stay in float32."""
    with torch.autocast("DEVICE", dtype=torch.bfloat16):
        output = forward(*args, **kwargs)
    return output.float() if isinstance(output, torch.Tensor) else output
'''
IN_HALF = '''
from functools import partial
import torch

def in_half(forward, *args, **kwargs):
    """Inputs in HALF, as the weights are."""
    is_float = [isinstance(one, torch.Tensor) and one.is_floating_point() for one in args]
    args = [one.to(HALF) if cast else one for one, cast in zip(args, is_float)]
    return forward(*args, **kwargs)
'''
STEP_IN_BACKWARD = '''
from copy import copy
from weakref import ref

def step_in_backward(optimizer):
    """Update each parameter as soon as its gradient is there, and free that: optimizer.step() then finds nothing to do."""
    kept = ref(optimizer)  # a hook that held the optimizer would keep its parameters forever
    def step(parameter):
        one = copy(kept())  # with the same state and, as of now, the same learning rate
        groups = [group for group in one.param_groups if any(each is parameter for each in group["params"])]
        one.param_groups = [{**group, "params": [parameter]} for group in groups]
        one.step()
        parameter.grad = None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(step)
'''
KEEP_PRODUCTS = f'''
from functools import partial
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

def keep_products(context, operator, *args, **kwargs):
    """Products, convolutions and attention are kept; what is cheap is run again."""
    name = getattr(getattr(operator, "overloadpacket", None), "__name__", "")
    return CheckpointPolicy.MUST_SAVE if name in products else CheckpointPolicy.PREFER_RECOMPUTE

products = {sorted(EXPENSIVE)!r}
'''


class _Cell:
    """A cell's text that is being edited; `facts` are those of `observed.Observer`, `names` the techniques asked for."""

    def __init__(self, text: str, facts: Mapping[str, Any], names: Sequence[str]) -> None:
        self.source, self.lines, self.names, self.facts = text, text.splitlines(), names, facts
        self.models: Mapping[str, Mapping[str, Any]] = facts.get("models", {})
        self.tree = ast.parse(text)
        self.inserted: dict[int, list[str]] = {}
        self.replaced: list[tuple[ast.expr | ast.stmt, str]] = []

    def model(self) -> str:
        """The name of the only model of the cell, "" if there are several or none."""
        return next(iter(self.models)) if len(self.models) == 1 else ""

    def uses(self, name: str) -> list[ast.stmt]:
        """The statements in which the model of this name runs, or the optimizer takes a step, as the first run has shown."""
        behind = [number for number in self.facts.get("used_in", {}).get(name, ()) if number < len(self.tree.body)]
        return [self.tree.body[-1 - number] for number in behind]

    def place(self, name: str) -> int | None:
        """The line behind which this model or optimizer is ready: that of its last assignment, else the beginning of the cell.

        None if it is assigned anywhere else than at the top level, or used before: there a change would come too late.
        """
        names = [one for one in ast.walk(self.tree) if isinstance(one, ast.Name) and one.id == name]
        stored = {id(one) for one in names if isinstance(one.ctx, ast.Store)}
        row = 0
        for one in self.tree.body:
            if isinstance(one, ast.Assign | ast.AnnAssign) and (made := stored & set(map(id, ast.walk(one)))):
                stored -= made
                row = one.end_lineno or 0
            elif one.lineno <= row:  # a line that several statements share is not cut
                row = max(row, one.end_lineno or 0)
        return None if stored or any(one.lineno <= row for one in self.uses(name)) else row

    def is_edited(self, edit: Callable[[_Cell], bool]) -> bool:
        """Make an edit; one that cannot be made leaves nothing behind."""
        before = {row: list(lines) for row, lines in self.inserted.items()}, list(self.replaced)
        if not (done := edit(self)):
            self.inserted, self.replaced = before
        return done

    def calls(self, name: str) -> list[ast.Call]:
        """The calls of functions and methods of this name."""
        called = [one for one in ast.walk(self.tree) if isinstance(one, ast.Call)]
        return [one for one in called if ast.unparse(one.func).rpartition(".")[2] == name]

    def replace(self, node: ast.expr | ast.stmt, text: str) -> bool:
        """Put this in the place of a node; False if some of it has been replaced."""
        ends = node.end_lineno or node.lineno
        if any(one.lineno <= ends and node.lineno <= (one.end_lineno or 0) for one, _ in self.replaced):
            return False
        self.replaced.append((node, text))
        return True

    def insert(self, behind: int, text: str) -> None:
        """Insert lines behind a line; 0 is the beginning of the cell, where a definition is followed by an empty line."""
        self.inserted.setdefault(behind, []).extend(text.strip("\n").split("\n") + [""] * text.startswith("\n"))

    def text(self) -> str:
        """The changed text."""
        lines = list(self.lines)
        for node, new in sorted(self.replaced, key=lambda one: (-one[0].lineno, -one[0].col_offset)):
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            # The columns of a syntax tree count bytes.
            head = lines[first].encode()[: node.col_offset].decode()
            tail = lines[last].encode()[node.end_col_offset :].decode()
            lines[first : last + 1] = [head + new + tail]
            self.inserted = {row - (last - first if row > last else 0): more for row, more in self.inserted.items()}
        for row in sorted(self.inserted, reverse=True):
            lines[row:row] = self.inserted[row]
        return "\n".join(lines) + "\n"


def _over_blocks(cell: _Cell, imports: str, more: str = "") -> bool:
    name = cell.model()
    facts, behind = cell.models.get(name, {}), cell.place(name)
    if behind is None or not facts.get("blocks") or facts["has_statistics"]:  # a checkpoint would update them twice
        return False
    paths = facts["blocks"]
    parents = {path.rpartition(".")[0] for path in paths}
    over = f"[{name}.get_submodule(path) for path in {paths!r}]"
    counted = [path.rpartition(".")[2] for path in paths] == [str(index) for index in range(len(paths))]
    if len(parents) == 1 and (parent := parents.pop()) and counted:
        over = _attribute(name, parent)
    lines = [
        f"for block in {over}:  # keep only each block's input, and recompute the rest in backward",
        f"    block.forward = partial(checkpoint, type(block).forward, block, use_reentrant=False{more})",
    ]
    cell.insert(behind, "\n".join([imports, *lines]))
    return True


def _checkpoint(cell: _Cell) -> bool:
    name = cell.model()
    behind = cell.place(name)
    if behind is not None and cell.models.get(name, {}).get("blocks") and cell.models[name]["is_transformers"]:
        cell.insert(behind, f"{name}.gradient_checkpointing_enable()  # recomputes each block in backward")
        return True
    return _over_blocks(cell, "from functools import partial\nfrom torch.utils.checkpoint import checkpoint")


def _selective_checkpoint(cell: _Cell) -> bool:
    contexts = "partial(create_selective_checkpoint_contexts, keep_products)"
    return _over_blocks(cell, KEEP_PRODUCTS, f", context_fn={contexts}")


def _segments(count: Callable[[int], int], cell: _Cell) -> bool:
    """PyTorch's own segments may begin with a layer that works in place, and would change what they are run again from."""
    name = cell.model()
    facts, behind = cell.models.get(name, {}), cell.place(name)
    if behind is None or not facts.get("chain") or "in_place" in cell.names:
        return False
    path, layers = facts["chain"]
    chain, cut = _attribute(name, path) if path else name, count(layers)
    lines = [
        "from functools import partial",
        "from torch.utils.checkpoint import checkpoint_sequential",
        f"# {cut} segments: only their inputs are kept, the rest is run again in backward",
        f"{chain}.forward = partial(checkpoint_sequential, list({chain}), {cut}, use_reentrant=False)",
    ]
    cell.insert(behind, "\n".join(lines))
    return True


def _in_place(cell: _Cell) -> bool:
    name = cell.model()
    paths, behind = cell.models.get(name, {}).get("in_place"), cell.place(name)
    if behind is None or not paths:
        return False
    cell.insert(behind, f"for path in {paths!r}:\n    {name}.get_submodule(path).inplace = True")
    return True


def _around_forward(call: str, text: str, cell: _Cell) -> bool:
    """The forward of the only model is what a call with MODEL gives, of a function that is defined first.

    It is a partial of the model's method, not a closure: in a deep copy of the model, as for a moving average of its weights,
    that is the copy's method.
    """
    name = cell.model()
    behind = cell.place(name)
    if behind is None or not name:
        return False
    device = cell.models[name]["device"]
    half = "torch.bfloat16" if device == "cpu" else "torch.float16"
    cell.insert(0, text.replace("DEVICE", device).replace("HALF", half))
    cell.insert(behind, f"{name}.forward = {call.replace('MODEL', name).replace('HALF', half)}")
    return True


def _without_graph(mode: str, cell: _Cell) -> bool:
    """The statements in which a model runs, each in the mode; a text over several lines would be indented, too."""
    ran = {id(one) for name in cell.models for one in cell.uses(name)}
    body, within = cell.tree.body, []
    for number, one in enumerate(body):
        if id(one) not in ran:
            continue
        inside = list(ast.walk(one))
        constants = (node for node in inside if isinstance(node, ast.Constant | ast.JoinedStr))
        stored = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        if any(node.lineno != node.end_lineno for node in constants):
            return False
        if any(other is not one and _share_a_line(one, other) for other in body[max(number - 1, 0) : number + 2]):
            return False
        if (
            isinstance(one, ast.Assign) and stored & cell.models.keys()
        ):  # what inference mode makes can never be trained
            return False
        text, after = ast.get_source_segment(cell.source, one) or "", ""
        if isinstance(one, ast.Expr) and one is body[-1] and "shown" not in cell.source:
            text, after = f"shown = {text}", "\nshown"
        within.append((one, f"with {mode}():\n{textwrap.indent(text, '    ')}{after}"))
    if not any(isinstance(one, ast.Name) and one.id == "torch" for one in ast.walk(cell.tree)):
        cell.insert(0, "import torch")
    return bool(within) and all(cell.replace(one, text) for one, text in within)


def _share_a_line(one: ast.stmt, other: ast.stmt) -> bool:
    return one.lineno <= (other.end_lineno or 0) and other.lineno <= (one.end_lineno or 0)


def _set_to_none(cell: _Cell) -> bool:
    calls = [one for one in cell.calls("zero_grad") if one.args or one.keywords]
    return bool(calls) and all(cell.replace(one, f"{ast.unparse(one.func)}()") for one in calls)


def _retain_graph(cell: _Cell) -> bool:
    calls = [one for one in cell.calls("backward") if any(word.arg == "retain_graph" for word in one.keywords)]
    for one in calls:
        one.keywords = [word for word in one.keywords if word.arg != "retain_graph"]
    return bool(calls) and all(cell.replace(one, ast.unparse(one)) for one in calls)


def _mmap_loading(cell: _Cell) -> bool:
    loads = [one for one in cell.calls("load") if ast.unparse(one.func) == "torch.load"]
    calls = [one for one in loads if all(word.arg not in (None, "mmap") for word in one.keywords)]
    return bool(calls) and all(cell.replace(one, _with_keyword(cell, one, "mmap=True")) for one in calls)


def _optimizer_setting(settings: str, cell: _Cell) -> bool:
    """In the call that makes the only optimizer, or else in its groups."""
    known = cell.facts.get("optimizers", {})
    if len(known) != 1:
        return False
    ((name, kind),) = known.items()
    calls, behind = cell.calls(kind), cell.place(name)
    if len(calls) == 1 and not any(word.arg in (None, "foreach", "fused") for word in calls[0].keywords):
        return cell.replace(calls[0], _with_keyword(cell, calls[0], settings))
    if behind is None:
        return False
    settings = settings if "foreach" in settings else f"foreach=False, {settings}"
    cell.insert(behind, f"for group in {name}.param_groups:\n    group.update({settings})")
    return True


def _step_in_backward(cell: _Cell) -> bool:
    """Only an optimizer that the cell makes: each run of the cell would add hooks to another one."""
    known = cell.facts.get("optimizers", {})
    behind = cell.place(next(iter(known))) if len(known) == 1 else None
    words, text = ("clip", "scaler", "closure"), cell.source.lower()
    if not behind or not cell.facts.get("steps_after_each_backward") or any(one in text for one in words):
        return False
    cell.insert(0, STEP_IN_BACKWARD)
    cell.insert(behind, f"step_in_backward({next(iter(known))})")
    return True


def _with_keyword(cell: _Cell, call: ast.Call, word: str) -> str:
    """The text of a call with one more argument."""
    text = ast.get_source_segment(cell.source, call) or ""
    if "#" in text:
        text = ast.unparse(call)
    inside = text[:-1].rstrip().removesuffix(",")
    return f"{inside}{'' if inside.endswith('(') else ', '}{word})"


def _chunked_loss(cell: _Cell) -> bool:
    name = cell.model()
    facts = cell.models.get(name, {})
    if not facts.get("head"):
        return False
    named = [one for name in cell.facts.get("losses", ()) for one in cell.calls(name) if isinstance(one.func, ast.Name)]
    calls = cell.calls("cross_entropy") + named
    if len(calls) != 1 or calls[0].keywords or len(calls[0].args) != 2:
        return False
    logits, targets = calls[0].args
    inner: ast.expr = logits
    while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in _RESHAPES:
        inner = inner.func.value
    made = _value_of(cell, inner, logits) if isinstance(inner, ast.Name) else inner
    if not (isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id == name):
        return False
    head = _attribute(name, facts["head"])
    arguments = ast.unparse(made)[len(name) + 1 : -1]
    hidden = f"hidden_of({name}, {head}{', ' * bool(arguments)}{arguments})"
    if made is not inner:  # the logits have a name
        if not cell.replace(made, hidden):
            return False
        hidden = ast.unparse(inner)
    cell.insert(0, CHUNKED)
    return cell.replace(calls[0], f"chunked_cross_entropy({hidden}, {ast.unparse(targets)}, {head})")


def _value_of(cell: _Cell, name: ast.Name, where: ast.expr) -> ast.expr | None:
    """The only value of a name that is used nowhere else: used for anything else, it would hold something else than it did."""
    uses = [one for one in ast.walk(cell.tree) if isinstance(one, ast.Name) and one.id == name.id]
    inside = set(map(id, ast.walk(where)))
    assigned = [one for one in ast.walk(cell.tree) if isinstance(one, ast.Assign) and one.targets[0] in uses]
    is_alone = all(isinstance(one.ctx, ast.Store) or id(one) in inside for one in uses)
    stores = [one for one in uses if isinstance(one.ctx, ast.Store)]
    return assigned[0].value if is_alone and len(stores) == len(assigned) == len(assigned[0].targets) == 1 else None


_RESHAPES = {"view", "reshape", "flatten", "contiguous"}


def _attribute(name: str, path: str) -> str:
    """The expression of a submodule."""
    return "".join([name, *(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))])


EDITS: dict[str, Callable[[_Cell], bool]] = {
    "chunked_loss": _chunked_loss,
    "checkpoint": _checkpoint,
    "selective_checkpoint": _selective_checkpoint,
    "checkpoint_sequential": partial(_segments, four),
    "sqrt_segments": partial(_segments, square_root),
    "in_place": _in_place,
    "autocast_bf16": partial(_around_forward, "partial(in_bfloat16, MODEL.forward)", IN_BFLOAT16),
    "offload": partial(_around_forward, "partial(offloaded, MODEL.forward)", OFFLOADED),
    "retain_graph": _retain_graph,
    "set_to_none": _set_to_none,
    "mmap_loading": _mmap_loading,
    "foreach_off": partial(_optimizer_setting, "foreach=False"),
    "fused": partial(_optimizer_setting, "fused=True"),
    "step_in_backward": _step_in_backward,
    "half_inference": partial(_around_forward, "partial(in_half, MODEL.to(HALF).forward)", IN_HALF),
    "no_grad": partial(_without_graph, "torch.no_grad"),
    "inference_mode": partial(_without_graph, "torch.inference_mode"),
}
"""Technique -> edits the cell; False if it cannot be written into this one."""
FIRST = ("no_grad", "inference_mode", "chunked_loss", "checkpoint")
"""What most often reaches a target, at a small price."""


def edited(text: str, facts: Mapping[str, Any], names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The cell's text with these techniques, as far as they can be written into it, and the names of those."""
    try:
        cell = _Cell(textwrap.dedent(text), facts, names)
    except (SyntaxError, ValueError):  # magics: such a cell is left as it is
        return text, ()
    done = [name for name in EDITS if name in names and cell.is_edited(EDITS[name])]
    return (cell.text(), tuple(done)) if done else (text, ())


def diff(before: str, after: str) -> str:
    """The change as a unified diff of the cell."""
    both, names = (textwrap.dedent(before).splitlines(), after.splitlines()), ("cell", "cell, changed")
    return "\n".join(difflib.unified_diff(*both, *names, n=2, lineterm=""))
