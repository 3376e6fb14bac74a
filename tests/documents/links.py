"""Links of documents: files that do not exist, and anchors without a heading."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from documents.blocks import without_fences

LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(\s*<?([^()\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
DEFINITION = re.compile(r"^ {0,3}\[[^\]^]+\]:\s+<?(\S+?)>?(?:\s|$)", flags=re.MULTILINE)
HTML_LINK = re.compile(r"<(?:a|img|source|link|script)\b[^>]*?\b(?:href|src|srcset)=[\"']([^\"']+)[\"']")
GENERATED = re.compile(r"^(?:::: |<!-- generate: )", flags=re.MULTILINE)
"""A page with headings that are made when the site is built; the build checks links to these."""


def links(text: str) -> Iterator[tuple[str, int]]:
    """(target, line) of all links and pictures of a document, code left out."""
    prose = re.sub(r"`+[^`\n]+`+", lambda match: " " * len(match[0]), without_fences(text))
    for pattern in (LINK, DEFINITION, HTML_LINK):
        for match in pattern.finditer(prose):
            yield match[1], prose.count("\n", 0, match.start()) + 1


def site_slug(heading: str) -> str:
    """The anchor that Python-Markdown gives to a heading."""
    text = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def github_slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(text: str, slug: Callable[[str], str]) -> set[str]:
    """Anchors of a document: its headings by a slug function, and the ids that it sets itself."""
    prose = without_fences(text)
    found: set[str] = set(re.findall(r"\bid=[\"']([^\"']+)[\"']", prose))
    for heading in re.findall(r"^#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$", prose, flags=re.MULTILINE):
        explicit = re.search(r"\{[^}]*#([\w-]+)[^}]*\}\s*$", heading)
        plain = re.sub(r"\{[^}]*\}\s*$", "", heading)
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        base = explicit[1] if explicit else slug(re.sub(r"[`*]|(?<!\w)_|_(?!\w)", "", plain))
        place, number = base, 0
        while place in found:
            number += 1
            place = f"{base}_{number}" if slug is site_slug else f"{base}-{number}"
        found.add(place)
    return found


def dead_links(root: Path, documents: Iterable[Path]) -> list[str]:
    """Relative links of documents to files, folders and anchors that do not exist."""
    found = []
    for document in documents:
        for target, line in links(document.read_text(encoding="utf-8")):
            reason = _dead(root, document, target)
            if reason is not None:
                found.append(f"{document.relative_to(root)}:{line}: {target}: {reason}")
    return found


def _dead(root: Path, document: Path, target: str) -> str | None:
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    if target.startswith("/"):
        return "got an absolute path; expected one relative to the document"
    name, _, anchor = target.partition("#")
    path = Path(os.path.normpath(document.parent / name)) if name else document
    if not path.exists():
        return "no such file"
    if not anchor or path.suffix != ".md":
        return None
    text = path.read_text(encoding="utf-8")
    if GENERATED.search(text):
        return None
    slugs = [github_slug] + ([site_slug] if root / "docs" in path.parents else [])
    if all(anchor in anchors(text, slug) for slug in slugs):
        return None
    return f"no such heading in {path.relative_to(root)}"
