"""Links of documents lead to files and headings that exist, and the navigation of the site is complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from documents import listing
from documents.links import anchors, dead_links, github_slug, links, site_slug
from documents.navigation import wrong_navigation

Write = Callable[[dict[str, str]], list[Path]]


def test_links_resolve(root: Path, documents: list[Path]) -> None:
    found = dead_links(root, documents)
    assert not found, listing(found)
    targets = [target for document in documents for target, _ in links(document.read_text(encoding="utf-8"))]
    assert len(targets) > 100, "they are not found"


def test_all_pages_are_in_the_navigation(root: Path) -> None:
    found = wrong_navigation(root)
    assert not found, listing(found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[a](gone.md)", "no such file"),
        ("![a](gone.svg 'title')", None),  # not Markdown: a title has double quotes here
        ('![a](gone.svg "title")', "no such file"),
        ("[![a](here.md)](gone.md)", "no such file"),
        ("[a]: gone.md", "no such file"),
        ('<img src="gone.png">', "no such file"),
        ("[a](here.md#nowhere)", "no such heading"),
        ("[a](#nowhere)", "no such heading"),
        ("[a](/docs/here.md)", "absolute path"),
        ("[a](here.md#the-head-of-x) [b](#here) [c](../README.md) [d](https://example.org/x) [e](..)", None),
        ("`[a](gone.md)`\n```text\n[a](gone.md)\n```", None),
        ("[a](here.md#q--a)", "no such heading"),  # GitHub's anchor, which the site has not
    ],
)
def test_a_planted_dead_link_is_caught(tmp_path: Path, write: Write, text: str, reason: str | None) -> None:
    here = "# Title\n\n## The *head* of `x`\n\n## Q & A\n"
    document, *_ = write({"docs/a.md": f"# Here\n\n{text}\n", "docs/here.md": here, "README.md": ""})
    found = dead_links(tmp_path, [document])
    assert len(found) == (reason is not None) and all(reason in each for each in found if reason)
    assert all(each.startswith("docs/a.md:3: ") for each in found)


def test_anchors_are_those_of_the_renderers() -> None:
    text = (
        '# A `b_c` [d](e.md)\n```\n# no\n```\n## Twice\n## Twice\n## Own { #mine }\n<a id="set"></a>\n## Größe: x/y\n'
    )
    assert anchors(text, site_slug) == {"a-b_c-d", "twice", "twice_1", "mine", "set", "groe-xy"}
    assert anchors(text, github_slug) == {"a-b_c-d", "twice", "twice-1", "mine", "set", "größe-xy"}


def test_planted_faults_of_the_navigation_are_caught(tmp_path: Path, write: Write) -> None:
    nav = "nav:\n  - Home: index.md\n  - More:\n      - gone.md\n      - notes/2*.md\n"
    write(
        {"mkdocs.yml": nav + "x: !!python/name:a.b\n", "docs/index.md": "", "docs/notes/21.md": "", "docs/lost.md": ""}
    )
    assert wrong_navigation(tmp_path) == [
        "docs/lost.md: not in the nav of mkdocs.yml",
        "mkdocs.yml: gone.md: no such page in docs/",
    ]
