"""The sizes of a model as a table: as plain text that stands alone, and as HTML for a notebook. Both say the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from memlab.units import format_bytes, one_line
from memlab.views import theme

if TYPE_CHECKING:
    from memlab.sizes.value import Layer, Sizes

Rows = tuple[tuple[str, ...], ...]

_LAYERS_SHOWN = 60
_INPUTS_SHOWN = 4
_HEAD = ("layer", "type", "output", "parameters", "gradient", "optimizer", "activations", "classic")
_NOT_COUNTED = (
    "Not counted: a loss outside of the model, temporaries of operators and of backward, the allocator's rounding."
)
_CATEGORIES = {
    "parameters": "parameter",
    "buffers": "buffer",
    "gradients": "gradient",
    "optimizer state": "optimizer",
    "activations": "activation",
    "outputs": "temporary",
    "inputs": "input",
    "held otherwise": "other",
}
"""The colour that each part has elsewhere in memlab."""


@dataclasses.dataclass(frozen=True, slots=True)
class SizeTable:
    """The words of a table of sizes, cut into parts; `text` and `html` put them together."""

    title: str
    shares: tuple[tuple[str, int], ...]
    parts: Rows
    layers: Rows
    classic: tuple[str, ...]
    terms: Rows
    notes: tuple[str, ...]

    def text(self) -> str:
        """Plain text, for terminals, screen readers and converted notebooks."""
        blocks = [[self.title], _aligned(self.parts, 0, 2), _aligned(self.layers, 0, 1, 2)]
        blocks += [[*self.classic, *_aligned(self.terms, 1)], list(self.notes)]
        return "\n\n".join("\n".join(block) for block in blocks if block)

    def html(self) -> str:
        """A bar and small tables that take their text's colour from the page; everything in them is escaped."""
        inside = [f"<div><b>{escape(self.title)}</b></div>", _bar(self.shares), _parts_table(self.parts)]
        if self.layers:
            inside.append(
                f"<details><summary>By layer</summary>{_html_table(self.layers, (0, 1, 2), head=1)}</details>"
            )
        if self.classic:
            lines = "".join(f"<div>{escape(line)}</div>" for line in self.classic[1:])
            summary = f"<summary>{escape(self.classic[0])}</summary>"
            inside.append(f"<details>{summary}{lines}{_html_table(self.terms, (1,))}</details>")
        inside += [f"<div style='color:{theme.WARNING}'>{escape(note)}</div>" for note in self.notes[:-1]]
        inside += [f"<div>{escape(note)}</div>" for note in self.notes[-1:]]
        return f"<div style='{_BOX}'>{''.join(inside)}</div>"


# --- sizes to words -------------------------------------------------------------------------------------------------


def table(sizes: Sizes) -> SizeTable:
    """Put sizes into words."""
    mode = "training" if sizes.is_training else "eval"
    more = len(sizes.inputs) - _INPUTS_SHOWN
    given = ", ".join(sizes.inputs[:_INPUTS_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return SizeTable(
        title=one_line(f"memlab · size of {sizes.model} · input {given or 'none'} · {mode} mode · {sizes.device}"),
        shares=tuple((name, nbytes) for name, nbytes in sizes.parts.items() if nbytes),
        parts=tuple(_parts(sizes)),
        layers=_layers(sizes),
        classic=tuple(_classic(sizes)),
        terms=tuple((_signed(term.nbytes), one_line(term.text)) for term in sizes.classic.terms),
        notes=(*map(one_line, sizes.notes), _NOT_COUNTED),
    )


def _parts(sizes: Sizes) -> Iterator[tuple[str, ...]]:
    about = _about(sizes)
    least = "≥ " if sizes.is_lower_bound else ""
    for name, nbytes in sizes.parts.items():
        if nbytes or name in ("parameters", "activations"):
            yield name, (least if name == "activations" else "") + format_bytes(nbytes), about.get(name, "")
    yield "all together", least + format_bytes(sizes.total_bytes), ""
    level = "all but the gradients"
    yield "between forward and backward", least + format_bytes(sizes.before_backward_bytes), level
    level = "all but activations and outputs"
    yield "when the optimizer steps", format_bytes(sizes.at_optimizer_bytes), level


def _about(sizes: Sizes) -> dict[str, str]:
    frozen = sizes.parameter_count - sizes.trainable_count
    saved = sum(one.why == "saved" for one in sizes.kept)
    return {
        "parameters": f"{sizes.parameter_count:,}" + (f", {frozen:,} of them frozen" if frozen else ""),
        "activations": f"{saved:,} storage{'s' if saved != 1 else ''} that autograd keeps for backward",
        "outputs": "as far as autograd does not keep them",
        "optimizer state": one_line(sizes.optimizer, 60),
        "held otherwise": "by attributes, caches or custom functions",
    }


def _layers(sizes: Sizes) -> Rows:
    """Head and rows, without the columns in which nothing stands."""
    rows = [_layer_row(layer) for layer in folded(sizes.layers, _LAYERS_SHOWN)]
    used = [column for column in range(len(_HEAD)) if any(row[column] for row in rows)]
    return tuple(tuple(row[column] for column in used) for row in (_HEAD, *rows)) if rows else ()


def _layer_row(layer: Layer) -> tuple[str, ...]:
    shape = "×".join(map(str, layer.shape)) if layer.shape is not None else ""
    own = layer.parameter_bytes + layer.buffer_bytes
    sizes = (own, layer.gradient_bytes, layer.optimizer_bytes, layer.activation_bytes, layer.classic_bytes)
    cells = [format_bytes(size) if size else "" for size in sizes]
    return one_line(layer.path, 48) or "(itself)", one_line(layer.type, 24), shape, *cells


def _classic(sizes: Sizes) -> Iterator[str]:
    one = sizes.classic
    if not one.without_backward_bytes:
        return
    once, twice = _decimal(one.without_backward_bytes), _decimal(one.with_backward_bytes)
    off = _off(one.with_backward_bytes, one.kept_bytes)
    yield f"The classic estimate says {twice} with backward; this forward leaves {_decimal(one.kept_bytes)}{off}."
    parameters = _decimal(one.parameter_bytes, 6)
    yield f"Classic: parameters {parameters}, intermediates {once}, with backward {twice}."
    if one.terms:
        yield "From that to what is left, activations and outputs:"


def _off(estimate: int, truth: int) -> str:
    if not truth or estimate == truth:
        return ""
    return f", so it is {abs(estimate - truth) / truth:.0%} too {'high' if estimate > truth else 'low'}"


def _decimal(count: int, digits: int = 4) -> str:
    """Millions of bytes, as the classic has them."""
    return f"{count / 1e6:,.{digits}f} MB"


def _signed(count: int) -> str:
    return ("+" if count > 0 else "−") + _decimal(abs(count))


# --- many layers to few ---------------------------------------------------------------------------------------------


def folded(layers: tuple[Layer, ...], limit: int) -> list[Layer]:
    """At most `limit` layers: where there are more, those below a depth are added to the one above them."""
    depth = max((layer.path.count(".") + 1 for layer in layers), default=0)
    shown = list(layers)
    while len(shown) > limit and depth > 1:
        depth -= 1
        shown = _fold(layers, depth)
    if len(shown) > limit:
        rest = shown[limit - 1 :]
        shown = [*shown[: limit - 1], _sum("…", f"{len(rest)} more", rest)]
    return shown


def _fold(layers: tuple[Layer, ...], depth: int) -> list[Layer]:
    groups: dict[str, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(".".join(layer.path.split(".")[:depth]), []).append(layer)
    return [one[0] if len(one) == 1 else _sum(path, f"{len(one)} layers", one) for path, one in groups.items()]


def _sum(path: str, kind: str, group: list[Layer]) -> Layer:
    own = next((layer for layer in group if layer.path == path), None)
    sums = {name: sum(getattr(layer, name) for layer in group) for name in _summed(group[0])}
    shape = own.shape if own else None
    return dataclasses.replace(group[0], path=path, type=own.type if own else kind, shape=shape, **sums)


def _summed(layer: Layer) -> list[str]:
    names = [field.name for field in dataclasses.fields(layer)]
    return [name for name in names if name.endswith(("_bytes", "_count"))]


# --- words to text and HTML -----------------------------------------------------------------------------------------

_BOX = "font-size:13px;line-height:1.5;font-variant-numeric:tabular-nums"
_CELL = "text-align:right;padding:1px 10px 1px 0;white-space:nowrap"


def _aligned(rows: Rows, *left: int) -> list[str]:
    """The columns of these numbers stand left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _html_table(rows: Rows, left: tuple[int, ...], head: int = 0) -> str:
    """A table of which the first `head` rows are its head."""
    if not rows:
        return ""
    lines = [
        "".join(_html_cell(cell, i in left, tag) for i, cell in enumerate(row)) for tag, row in _tagged(rows, head)
    ]
    top, body = ("".join(f"<tr>{line}</tr>" for line in part) for part in (lines[:head], lines[head:]))
    return f"<table style='margin:2px 0;border-collapse:collapse'><thead>{top}</thead><tbody>{body}</tbody></table>"


def _tagged(rows: Rows, head: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    return (("th" if number < head else "td", row) for number, row in enumerate(rows))


def _html_cell(cell: str, is_left: bool, tag: str = "td", style: str = "") -> str:
    return f"<{tag} style='{_CELL}{';text-align:left' if is_left else ''}{style}'>{escape(cell)}</{tag}>"


def _parts_table(rows: Rows) -> str:
    """The parts, each with the colour that it has in the bar."""
    body = ""
    for name, *others in rows:
        colour = _colour(name) if name in _CATEGORIES else "transparent"
        cells = _html_cell(name, True, style=f";border-left:6px solid {colour};padding-left:6px")
        body += f"<tr>{cells}{''.join(_html_cell(cell, i == 1) for i, cell in enumerate(others))}</tr>"
    return f"<table style='margin:2px 0;border-collapse:collapse'><tbody>{body}</tbody></table>"


def _bar(shares: tuple[tuple[str, int], ...]) -> str:
    """The parts as one bar."""
    total = sum(nbytes for _, nbytes in shares)
    pieces = "".join(
        f"<div title='{escape(name)}' style='width:{100 * nbytes / total:.2f}%;background:{_colour(name)}'></div>"
        for name, nbytes in shares
    )
    return f"<div style='display:flex;height:10px;max-width:480px;margin:4px 0' aria-hidden='true'>{pieces}</div>"


def _colour(part: str) -> str:
    return theme.CATEGORIES[_CATEGORIES[part]]
