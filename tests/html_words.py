"""What a page says, read as a browser would."""

from __future__ import annotations

from html.parser import HTMLParser


class Words(HTMLParser):
    """What is left of HTML without tags; the names of the tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
