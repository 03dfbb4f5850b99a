"""What a page says, read as a browser would."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Words(HTMLParser):
    """What is left of HTML without tags; the names of the tags, each of which is closed where it has to be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def __contains__(self, text: str) -> bool:
        return text in "".join(self.words).replace("\N{NO-BREAK SPACE}", " ")

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def weight(bundle: dict[str, Any]) -> int:
    """The approximate size of a bundle in a saved notebook."""
    return sum(len(json.dumps(content)) for content in bundle.values())
