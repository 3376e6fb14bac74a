"""Hooks of the site: pages for files outside of docs/, their links, and nothing that a page loads from elsewhere."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs")


@pytest.fixture
def pages(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module docs/hooks/repository_pages.py."""
    monkeypatch.syspath_prepend(str(root / "docs" / "hooks"))
    yield import_module("repository_pages")
    sys.modules.pop("repository_pages")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("trees.md", "trees.md"),
        ("../figures/x.svg", "../figures/x.svg"),
        ("https://example.org/README.md", "https://example.org/README.md"),
        ("#here", "#here"),
        ("../../setup.py", "../files/setup.py.md"),
        ("../../setup.py#L3", "../files/setup.py.md"),
        ("../../LICENSE", "../files/LICENSE"),
        ("../../README.md", "../index.md"),
        ("../../CHANGELOG.md", "../changelog.md"),
        ("../../CONTRIBUTING.md#benchmarks", "../contributing/index.md#benchmarks"),
        ("../../ARCHITECTURE.md", "../architecture.md"),
        ("../../gone.py", "../../gone.py"),  # for the strict build to find
    ],
)
def test_links_of_a_page(root: Path, pages: Any, target: str, expected: str) -> None:
    page = root / "docs" / "concepts" / "page.md"
    text = f'See [a `b`]({target} "title").'
    assert pages.with_site_links(text, page, "concepts/page.md") == f'See [a `b`]({expected} "title").'


def test_links_of_the_documents_of_the_root(root: Path, pages: Any) -> None:
    text = "[a](docs/glossary.md#root), [folder](tests), `[b](setup.py)`\n\n```text\n[c](setup.py)\n```\n"
    found = pages.with_site_links(text, root / "CONTRIBUTING.md", "contributing/index.md")
    assert found == "[a](../glossary.md#root), folder, `[b](setup.py)`\n\n```text\n[c](setup.py)\n```\n"


def test_patterns_of_the_navigation_are_expanded(pages: Any) -> None:
    (expanded,) = pages._expanded([{"Decisions": ["decisions/index.md", "decisions/2*.md"]}])
    first, *records = expanded["Decisions"]
    assert first == "decisions/index.md" and len(records) > 5
    assert records == sorted(records, reverse=True) and all(each.startswith("decisions/2") for each in records)


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ('<script src="https://a.b/c.js">', ["https://a.b/c.js"]),
        ("<img alt='x' src='//a.b/c.png'>", ["//a.b/c.png"]),
        ('<link rel="stylesheet" href="https://a.b/c.css">', ["https://a.b/c.css"]),
        ('<pre class="mermaid"><code>', ["the renderer of a Mermaid diagram"]),
        ('<a href="https://a.b/">x</a><link rel="canonical" href="https://a.b/"><script src="../a.js">', []),
    ],
)
def test_resources_of_other_machines_are_found(
    root: Path, monkeypatch: pytest.MonkeyPatch, html: str, expected: list[str]
) -> None:
    monkeypatch.syspath_prepend(str(root / "docs" / "hooks"))
    found = list(import_module("local_resources").remote_resources(html))
    sys.modules.pop("local_resources")
    assert found == expected
