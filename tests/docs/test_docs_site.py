"""The docs site: built without warnings, with its pages in order, and without loading anything from the network."""

import re
from pathlib import Path
from typing import Any

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).parents[2]
LOADED = re.compile(
    r"""<(?:script|img|iframe|link)[^>]*\s(?:src|href)=["']?(?:https?:)?//[^"'> ]+|url\(["']?(?:https?:)?//"""
)
"""An element or a CSS rule that a browser loads from another host."""


def build_site(docs: Path, site: Path, **others: Any) -> None:
    """Build a folder of pages with the project's settings; any warning is an error."""
    build(load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(docs), site_dir=str(site), strict=True, **others))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built site."""
    folder = tmp_path_factory.mktemp("site")
    build_site(ROOT / "docs", folder)
    return folder


def test_every_page_is_in_the_site_and_in_its_menu(site: Path) -> None:
    menu = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert menu == {*(page.name for page in (ROOT / "docs").glob("*.md")), "decisions/README.md"}
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    built = [page.parent / page.name.replace("README", "index").replace(".md", ".html") for page in pages]
    assert [page for page in built if not (site / page).exists()] == []


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    texts = {path: path.read_text() for path in site.rglob("*") if path.suffix in (".html", ".css")}
    assert len(texts) > 20
    assert {path.name: found[0] for path, text in texts.items() if (found := LOADED.search(text))} == {}


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example/a.js"></script>',
        "<link rel=stylesheet href=//cdn.example/a.css>",
        "@font-face { src: url(https://fonts.example/a.woff) }",
    ],
)
def test_what_would_be_loaded_is_seen(text: str) -> None:
    """Negative control."""
    assert LOADED.search(text)


def test_only_pages_are_published(site: Path) -> None:
    assert [path.name for path in site.rglob("*") if path.suffix in (".py", ".md", ".pyc")] == []


def test_a_dead_link_ends_the_build(tmp_path: Path) -> None:
    """Negative control: it is the link, as the same page without it is built."""
    docs = tmp_path / "docs"
    docs.mkdir()
    page, only = docs / "index.md", {"nav": [{"Home": "index.md"}]}
    page.write_text("# Home\n")
    build_site(docs, tmp_path / "site", **only)
    page.write_text("# Home\n\n[gone](no_such_page.md)\n")
    with pytest.raises(Abort, match="strict mode"):
        build_site(docs, tmp_path / "site", **only)
