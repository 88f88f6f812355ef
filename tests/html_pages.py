"""HTML pages as tests read them: their elements and texts, and what they would load from elsewhere."""

import re
from html.parser import HTMLParser


class PageReader(HTMLParser):
    """Strict reader of a page: every element is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((name, dict(attrs)))
        if name != "meta":
            self.open.append(name)

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((name, dict(attrs)))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text.append(data)


def read_page(page: str) -> PageReader:
    """Read a page, all of whose elements must be closed."""
    reader = PageReader()
    reader.feed(page)
    assert reader.open == []
    return reader


def assert_self_contained(page: str) -> None:
    """Assert that a page loads nothing, has no scripts, and that its ids are unique."""
    assert "http:" not in page
    assert "https:" not in page
    assert "@import" not in page
    seen = read_page(page).seen
    assert {name for name, _ in seen} & {"script", "link", "img", "iframe", "object", "base"} == set()
    loaded = [
        value
        for _, attributes in seen
        for key, value in attributes.items()
        if key in ("src", "href", "xlink:href", "srcset") and not (value or "").startswith("#")
    ]
    assert loaded == []
    assert [target for target in re.findall(r"url\(([^)]*)\)", page) if not target.startswith("#")] == []
    ids = [attributes["id"] for _, attributes in seen if "id" in attributes]
    assert len(ids) == len(set(ids))
