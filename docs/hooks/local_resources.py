"""Warns where a built page loads something from another machine. Tests: tests/docs/test_hooks.py."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

log = logging.getLogger("mkdocs.hooks.local_resources")

_ADDRESS = r"(?:https?:)?//[^\"' >]+"
_LOADED = re.compile(
    rf"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc(?:set)?=[\"']?(?P<src>{_ADDRESS})"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|icon))"
    rf"[^>]*?\bhref=[\"']?(?P<href>{_ADDRESS})"
    r"|<(?P<mermaid>pre|div) class=[\"']?mermaid",
    flags=re.IGNORECASE,
)


def on_post_build(config: MkDocsConfig) -> None:
    """Checks all pages; warnings fail a strict build."""
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        for resource in remote_resources(page.read_text(encoding="utf-8")):
            log.warning("%s loads %s; pages must work without a network", page.relative_to(config.site_dir), resource)


def remote_resources(html: str) -> Iterator[str]:
    """Addresses that a page loads by itself; links to follow do not count. Mermaid diagrams load their renderer."""
    for match in _LOADED.finditer(html):
        yield match["src"] or match["href"] or "the renderer of a Mermaid diagram"
