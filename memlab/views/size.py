"""The sizes of a model as a page: parts, layers, and the classic estimate."""

from __future__ import annotations

from memlab.analysis.step_size import Sizes, folded
from memlab.units import format_bytes, number_of, one_line
from memlab.views import theme
from memlab.views.page import Folded, Markup, Page, PageLines, Part
from memlab.views.table import Cell, Column, Table

_LAYERS_SHOWN = 60
_INPUTS_SHOWN = 4
_PARTS = (Column(""), Column("", "bytes"), Column(""))
_SIZES = ("parameters", "gradient", "optimizer", "activations", "classic")
_LAYERS = (
    Column("layer", limit=48), Column("type", limit=24), Column("output"), *(Column(name, "bytes") for name in _SIZES)
)  # fmt: skip
_TERMS = (Column("", "count"), Column("", limit=500, wraps=True))
_COLOURS = {
    name: theme.CATEGORIES[category]
    for name, category in (
        ("parameters", "parameter"), ("buffers", "buffer"), ("gradients", "gradient"), ("optimizer state", "optimizer"),
        ("activations", "activation"), ("outputs", "temporary"), ("inputs", "input"), ("held otherwise", "other"),
    )
}  # fmt: skip
"""The colour of each part, as everywhere in memlab."""
_NOT_COUNTED = (
    "Not counted: a loss outside of the model, temporaries of operators and of backward, the allocator's rounding."
)


def size_page(sizes: Sizes) -> Page:
    """The sizes as a page."""
    mode = "training" if sizes.is_training else "eval"
    more = len(sizes.inputs) - _INPUTS_SHOWN
    given = ", ".join(sizes.inputs[:_INPUTS_SHOWN]) + (f" and {more} more" if more > 0 else "")
    bar = ""
    for name, nbytes in sizes.parts.items():
        if nbytes:
            width = f"{100 * nbytes / (sizes.total_bytes or 1):.2f}%"
            bar += f"<div title='{name}' style='width:{width};background:{_COLOURS[name]}'></div>"
    bar = f"<div style='display:flex;height:10px;max-width:480px' aria-hidden='true'>{bar}</div>"
    rows = _parts(sizes)
    layers: list[tuple[Cell, ...]] = []
    for one in folded(sizes.layers, _LAYERS_SHOWN):
        shape = "×".join(map(str, one.shape)) if one.shape is not None else ""
        own = one.parameter_bytes + one.buffer_bytes
        counts = (own, one.gradient_bytes, one.optimizer_bytes, one.activation_bytes, one.classic_bytes)
        layers.append((one.path or "(itself)", one.type, shape, *(count or None for count in counts)))
    colours = tuple(_COLOURS.get(name, "") for name, _, _ in rows)
    parts: list[Part] = [Markup(bar), Table("", _PARTS, tuple(rows), colours=colours)]
    parts += [Folded("By layer", Table("", _LAYERS, tuple(layers)))] if layers else []
    parts += [_classic(sizes)] if sizes.classic.without_backward_bytes else []
    parts += [PageLines(sizes.notes, colour=theme.WARNING), PageLines((_NOT_COUNTED,))]
    title = f"memlab · size of {sizes.model} · input {given or 'none'} · {mode} mode · {sizes.device}"
    return Page(title, tuple(parts))


def _parts(sizes: Sizes) -> list[tuple[str, Cell, str]]:
    frozen = sizes.parameter_count - sizes.trainable_count
    saved = number_of(sum(one.why == "saved" for one in sizes.kept), "storage")
    about = {
        "parameters": f"{sizes.parameter_count:,}" + (f", {frozen:,} of them frozen" if frozen else ""),
        "activations": f"{saved} that autograd keeps for backward",
        "outputs": "as far as autograd does not keep them",
        "optimizer state": one_line(sizes.optimizer, 60),
        "held otherwise": "by attributes, caches or custom functions",
    }

    def at_least(nbytes: int) -> Cell:
        return f"≥ {format_bytes(nbytes)}" if sizes.is_lower_bound else nbytes

    rows: list[tuple[str, Cell, str]] = []
    for name, nbytes in sizes.parts.items():
        if nbytes or name in ("parameters", "activations"):
            rows.append((name, at_least(nbytes) if name == "activations" else nbytes, about.get(name, "")))
    return [
        *rows,
        ("all together", at_least(sizes.total_bytes), ""),
        ("between forward and backward", at_least(sizes.before_backward_bytes), "all but the gradients"),
        ("when the optimizer steps", sizes.at_optimizer_bytes, "all but activations and outputs"),
    ]


def _classic(sizes: Sizes) -> Folded:
    estimate = sizes.classic
    once, twice = _decimal(estimate.without_backward_bytes), _decimal(estimate.with_backward_bytes)
    off, truth = "", estimate.kept_bytes
    if truth and estimate.with_backward_bytes != truth:
        difference = estimate.with_backward_bytes - truth
        off = f", so it is {abs(difference) / truth:.0%} too {'high' if difference > 0 else 'low'}"
    says = f"The classic estimate is {twice} with backward; this forward leaves {_decimal(truth)}{off}"
    terms = []
    for term in estimate.terms:
        terms.append((f"{'+' if term.nbytes > 0 else '−'}{_decimal(abs(term.nbytes))}", term.text))
    parameters = _decimal(estimate.parameter_bytes, 6)
    why = " What separates the two:" if terms else ""
    title = f"Classic: parameters {parameters}, intermediates {once}, with backward {twice}.{why}"
    return Folded(says, Table(title, _TERMS, tuple(terms)))


def _decimal(count: int, digits: int = 4) -> str:
    """Millions of bytes, as in the classic estimate."""
    return f"{count / 1e6:,.{digits}f} MB"
