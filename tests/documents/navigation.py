"""The navigation of the site, as mkdocs.yml declares it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MADE_BY_HOOKS = {"architecture.md", "changelog.md", "contributing/index.md"}
"""Pages of the navigation that docs/hooks/repository_pages.py makes from documents of the root."""


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without importing what its tags name."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def settings(root: Path) -> dict[str, Any]:
    """The contents of mkdocs.yml."""
    found: dict[str, Any] = yaml.load((root / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
    return found


def entries(nav: Any) -> Iterator[str]:
    """All pages and patterns of a navigation."""
    if isinstance(nav, dict):
        nav = list(nav.values())
    if isinstance(nav, list):
        for each in nav:
            yield from entries(each)
    else:
        yield str(nav)


def wrong_navigation(root: Path) -> list[str]:
    """Pages that the navigation lacks, and entries without a page."""
    docs = root / "docs"
    listed = list(entries(settings(root)["nav"]))
    shown = {path.relative_to(docs).as_posix() for each in listed for path in docs.glob(each)} | MADE_BY_HOOKS
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md") if docs / "style" not in path.parents}
    found = [f"docs/{page}: not in the nav of mkdocs.yml" for page in sorted(pages - shown)]
    empty = [each for each in listed if each not in MADE_BY_HOOKS and not list(docs.glob(each))]
    return found + [f"mkdocs.yml: {each}: no such page in docs/" for each in empty]
