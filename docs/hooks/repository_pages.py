"""Pages and links for files outside of docs/: the changelog, the architecture, and sources that a page links to.

Documents link to files by relative paths, which work in a checkout. On the site such a link leads to a page with the
highlighted source, or to a copy of the file when it is a picture or a result. Tests: tests/docs/test_hooks.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
COPIED = {
    "CHANGELOG.md": "changelog.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing/index.md",
}
"""Documents of the repository that are pages of the site."""
ELSEWHERE = {"README.md": "index.md", "kernels/README.md": "kernels/index.md"}
"""Documents whose text has another place on the site."""
SOURCES = "files"
"""Folder of the site with the linked files of the repository."""
LARGEST = 60_000
"""Bytes of a source that is shown as a page; larger files are copied as they are."""
LANGUAGES = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".cu": "cpp", ".sh": "bash", ".toml": "toml", ".yml": "yaml"}

_FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2`*[ \t]*$", flags=re.DOTALL | re.MULTILINE)
_NO_RUN = re.compile(r"^( *`{3,}\w+)(?: +(?:no-run|in-vllm)\b)", flags=re.MULTILINE)
"""A word for the tests of documents, which fenced blocks of the site do not know."""
_LINK = re.compile(
    r"(?P<code>`+)(?!`).*?(?<!`)(?P=code)(?!`)|(?P<text>!?\[(?:[^\[\]]|\[[^\[\]]*\])*\])\((?P<target>[^()\s]+)(?P<title>\s+\"[^\"]*\")?\)"
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expands patterns of the navigation: `decisions/2*.md` lists the records, the newest first."""
    config.nav = _expanded(config.nav or [])
    return config


def _expanded(entries: list) -> list:
    found: list = []
    for entry in entries:
        if isinstance(entry, dict):
            found.append(
                {name: _expanded(value) if isinstance(value, list) else value for name, value in entry.items()}
            )
        elif "*" in entry:
            found += sorted((path.relative_to(DOCS).as_posix() for path in DOCS.glob(entry)), reverse=True)
        else:
            found.append(entry)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents of the root and the files that any page links to."""
    documents = [Path(str(file.abs_src_path)) for file in files.documentation_pages() if file.abs_src_path]
    for name, place in COPIED.items():
        if (ROOT / name).exists():
            files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
            documents.append(ROOT / name)
    linked = {path for document in documents for path in _linked_files(document)}
    for path in sorted(linked):
        name = path.relative_to(ROOT).as_posix()
        if _shown(path):
            files.append(File.generated(config, f"{SOURCES}/{name}.md", content=_source_page(name, path)))
        else:
            files.append(File.generated(config, f"{SOURCES}/{name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files outside of docs/ into links to their pages."""
    place = page.file.src_uri
    markdown = _NO_RUN.sub(r"\1", markdown)
    if place.startswith(f"{SOURCES}/"):
        return markdown
    origins = {copy: ROOT / name for name, copy in COPIED.items()}
    return with_site_links(markdown, origins.get(place, DOCS / place), place)


def with_site_links(markdown: str, document: Path, place: str) -> str:
    """A document's text with the links of the site.

    Args:
        markdown: The text, with links relative to `document`.
        document: File of the repository that the text comes from.
        place: Path of the page below docs/.
    """

    def replaced(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        target, _, anchor = match["target"].partition("#")
        path = _inside(document, target)
        if path is None:
            return match[0]
        if path.is_dir() or not path.exists():
            return match[0] if not path.exists() or DOCS in path.parents else match["text"][1:-1]
        uri = _site_uri(path)
        relative = os.path.relpath(uri, os.path.dirname(place) or ".").replace(os.sep, "/")
        mark = f"#{anchor}" if anchor and not uri.startswith(f"{SOURCES}/") else ""
        return f"{match['text']}({relative}{mark}{match['title'] or ''})"

    return _outside_code(markdown, lambda text: _LINK.sub(replaced, text))


def _site_uri(path: Path) -> str:
    """Where a file of the repository is on the site, as a path below docs/."""
    name = path.relative_to(ROOT).as_posix()
    if DOCS in path.parents:
        return path.relative_to(DOCS).as_posix()
    known = COPIED.get(name) or ELSEWHERE.get(name)
    return known or f"{SOURCES}/{name}" + (".md" if _shown(path) else "")


def _inside(document: Path, target: str) -> Path | None:
    """The path in the repository that a link leads to; None for addresses and for anchors of the same page."""
    if not target or re.match(r"[a-z][a-z+.-]*:|//", target):
        return None
    path = Path(os.path.normpath(document.parent / target))
    return path if ROOT in path.parents else None


def _linked_files(document: Path) -> Iterator[Path]:
    """Files outside of docs/ that a document links to."""
    found: list[str] = []

    def collect(text: str) -> str:
        found.extend(match["target"] for match in _LINK.finditer(text) if match["target"])
        return text

    _outside_code(document.read_text(encoding="utf-8"), collect)
    for target in found:
        path = _inside(document, target.partition("#")[0])
        if path is None or not path.is_file() or DOCS in path.parents:
            continue
        if path.relative_to(ROOT).as_posix() not in COPIED | ELSEWHERE:
            yield path


def _shown(path: Path) -> bool:
    return (path.suffix in LANGUAGES or path.name in ("Makefile", "run")) and path.stat().st_size <= LARGEST


def _source_page(name: str, path: Path) -> str:
    text = path.read_text(encoding="utf-8").rstrip("\n")
    language = LANGUAGES.get(path.suffix, "makefile" if path.name == "Makefile" else "bash")
    head = f"---\ntitle: {path.name}\nsearch:\n  exclude: true\nhide:\n  - navigation\n  - toc\n---\n"
    return f'{head}\n# `{name}`\n\n``````{language} linenums="1"\n{text}\n``````\n'


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Changes a text outside of its fenced blocks."""
    parts, start = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[start : fence.start()]), fence[0]]
        start = fence.end()
    return "".join([*parts, change(markdown[start:])])
