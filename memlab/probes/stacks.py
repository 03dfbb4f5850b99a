"""Python stacks of allocator history as texts, each kept once; frames of the notebook machinery are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MACHINERY = ("/IPython/core/interactiveshell.py", "/ipykernel/", "/ipykernel_launcher.py", "/asyncio/", "/tornado/")
_LIBRARIES = ("/torch/", "/memlab/", "/site-packages/", "/dist-packages/", "<frozen ", "<string>", "/lib/python3")

Frame = Mapping[str, Any]


class Stacks:
    """Interns stacks: `index(frames)` gives a number, `texts` and `line_of` what it stands for.

    Within one snapshot PyTorch gives equal frames as the same object, so a stack is known by the identities of its
    frames; `forget_objects` must be called when the snapshot goes, since identities are then used again.
    """

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.lines: dict[str, int] = {}
        self.line_of: list[int] = []
        self._seen: dict[tuple[int, ...], int] = {}

    def index(self, frames: Sequence[Frame]) -> int:
        """The number of this stack (innermost frame first), -1 for none."""
        if not frames:
            return -1
        key = tuple(map(id, frames))
        index = self._seen.get(key)
        if index is None:
            index = self._seen[key] = self._add(frames)
        return index

    def forget_objects(self) -> None:
        """Forget the identities of frames, keep the texts."""
        self._seen.clear()

    def _add(self, frames: Sequence[Frame]) -> int:
        own = list(_until_machinery(frames))
        text = "\n".join(f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in own)
        index = self.texts.setdefault(text, len(self.texts))
        if index == len(self.line_of):
            self.line_of.append(self._line(own))
        return index

    def _line(self, frames: Sequence[Frame]) -> int:
        """The innermost line that is the user's own: not PyTorch's, not a library's."""
        for frame in frames:
            if not any(part in frame["filename"] for part in _LIBRARIES):
                text = f"{frame['filename']}:{frame['line']}"
                return self.lines.setdefault(text, len(self.lines))
        return -1


def _until_machinery(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The frames inside of the notebook's own call of the cell."""
    for depth, frame in enumerate(frames):
        if any(part in frame["filename"] for part in _MACHINERY):
            return frames[:depth]
    return frames
