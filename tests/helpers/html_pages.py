"""Checks of generated HTML pages.

A page loads nothing external, its tables scroll in their own boxes, and its tags are paired.
"""

from __future__ import annotations

from html.parser import HTMLParser

_ALONE = {"meta", "line", "path"}


class Document(HTMLParser):
    """``facts`` and ``command``: of its head; ``rows``: of all its tables; ``scripts``: how many it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.facts: dict[str, str] = {}
        self.command, self.name = "", ""
        self.rows = self.scripts = 0
        self.open: list[tuple[str, str]] = []
        assert text.startswith("<!doctype html>")
        assert "<meta name=viewport" in text
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert not given.keys() & {"src", "href"}
        assert not [name for name in given if name.startswith("on")]
        if tag == "table":
            assert ("div", "scroll") in self.open
        self.rows += tag == "tr"
        self.scripts += tag == "script"
        if tag not in _ALONE:
            self.open.append((tag, given.get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        if tag not in _ALONE:
            assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        inside = [tag for tag, _ in self.open]
        if inside[-1:] == ["pre"]:
            self.command += data
        elif ("dl", "facts") in self.open:
            if inside[-1] == "dt":
                self.name = data
            else:
                self.facts[self.name] = self.facts.get(self.name, "") + data
