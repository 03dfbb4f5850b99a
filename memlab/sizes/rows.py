"""Figures per layer: each storage charged to one module, by its path."""

from __future__ import annotations

from collections import Counter, defaultdict

from memlab.sizes.belongings import PARAMETER
from memlab.sizes.found import Found
from memlab.sizes.value import SAVED, Layer


def rows(found: Found) -> tuple[Layer, ...]:
    """One row for every path of a module to which anything is charged, in the order of the model."""
    sums = _sums(found)
    made: list[Layer] = []
    for path, module in found.layers.every:
        if path in sums:
            calls, shape = found.rehearsed.calls.get(path, 0), found.rehearsed.shapes.get(path)
            layer = Layer(path, type(module).__name__, calls, shape, **sums[path])
            made += [] if layer.is_empty else [layer]
    return tuple(made)


def _sums(found: Found) -> dict[str, Counter[str]]:
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    layer_of: dict[int, str] = {}
    for one, grad in zip(found.mine, found.gradients, strict=True):
        layer_of[id(found.standins.of(one.tensor))] = one.layer
        kind = "parameter" if one.kind == PARAMETER else "buffer"
        sums[one.layer][f"{kind}_bytes"] += one.nbytes
        sums[one.layer]["gradient_bytes"] += grad.nbytes if grad else 0
        sums[one.layer]["parameter_count"] += one.tensor.numel() if one.kind == PARAMETER else 0
    for owner, nbytes in found.states.here(found.standins.device_types).items() if found.states else ():
        if owner in layer_of:
            sums[layer_of[owner]]["optimizer_bytes"] += nbytes
    for kept in found.rehearsed.kept.values():
        sums[kept.layer]["activation_bytes"] += kept.nbytes if kept.why == SAVED else 0
    for output in found.rehearsed.counted:
        sums[output.path]["classic_bytes"] += output.nbytes
    return sums
