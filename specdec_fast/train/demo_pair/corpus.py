"""The training text of the demo pair: finds, reads and splits it.

It has three domains, all under licences that allow this use. `code` is the standard library of the running Python (PSF
licence), `docs` the reStructuredText sources of the Python documentation (PSF licence), and `kjv` the King James Bible
(public domain). A document is a file or a chapter. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

DOMAINS = ("code", "docs", "kjv")
HOLD_OUT_EVERY = 33
MAX_DOCUMENT_BYTES = 400_000
# folders of tables and tests, which are poor training text
SKIPPED_PARTS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "encodings",
        "__pycache__",
        "pydoc_data",
        "lib-dynload",
        "unicodedata_db",
        "pgen2",
    }
)

BOOK_NAMES = (
    "Genesis|Exodus|Leviticus|Numbers|Deuteronomy|Joshua|Judges|Ruth|1 Samuel|2 Samuel|"
    "1 Kings|2 Kings|1 Chronicles|2 Chronicles|Ezra|Nehemiah|Esther|Job|Psalms|Proverbs|"
    "Ecclesiastes|Song of Solomon|Isaiah|Jeremiah|Lamentations|Ezekiel|Daniel|Hosea|Joel|Amos|"
    "Obadiah|Jonah|Micah|Nahum|Habakkuk|Zephaniah|Haggai|Zechariah|Malachi|Matthew|Mark|"
    "Luke|John|Acts|Romans|1 Corinthians|2 Corinthians|Galatians|Ephesians|Philippians|"
    "Colossians|1 Thessalonians|2 Thessalonians|1 Timothy|2 Timothy|Titus|Philemon|Hebrews|"
    "James|1 Peter|2 Peter|1 John|2 John|3 John|Jude|Revelation"
)
BOOKS = BOOK_NAMES.split("|")
VERSE = re.compile(r"^(?P<book>[0-9]?[A-Za-z]+?)(?P<chapter>\d+):(?P<verse>\d+) (?P<text>.*)$")


class CorpusNotFound(ValueError):
    """Raised if a part of the training text is not on this machine."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file or chapter, with its domain and a stable name."""

    domain: str
    name: str
    text: str


def read_code() -> Iterator[Document]:
    """Yields the sources of the running Python's standard library, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not SKIPPED_PARTS.isdisjoint(relative.parts[:-1]):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if 200 <= len(text) <= MAX_DOCUMENT_BYTES:
            yield Document("code", relative.as_posix(), text)


def find_documentation() -> Path | None:
    """Returns the folder with the sources of the newest installed Python documentation, or None."""
    found = {}
    for path in Path("/usr/share/doc").glob("python3.*/html/_sources"):
        version = re.fullmatch(r"python3\.(\d+)", path.parent.parent.name)
        if version:
            found[int(version[1])] = path
    return found[max(found)] if found else None


def read_docs() -> Iterator[Document]:
    """Yields the Python documentation as reStructuredText; raises CorpusNotFound if it is not installed."""
    root = find_documentation()
    if root is None:
        raise CorpusNotFound(
            "no Python documentation under /usr/share/doc/python3.*/html/_sources: "
            "install the Debian package python3-doc (or python3.11-doc)"
        )
    for path in sorted(root.rglob("*.rst.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if 200 <= len(text) <= MAX_DOCUMENT_BYTES:
            yield Document("docs", path.relative_to(root).as_posix(), text)


def read_kjv() -> Iterator[Document]:
    """Yields the chapters of the King James Bible; raises CorpusNotFound if it is not installed."""
    program = shutil.which("bible") or shutil.which("bible", path="/usr/bin:/usr/games:/usr/local/bin")
    if program is None:
        raise CorpusNotFound("no program called bible: install the Debian packages bible-kjv and bible-kjv-text")
    done = subprocess.run([program, "-f", "-l20000", "gen1:1-rev22:21"], capture_output=True, text=True, timeout=120)
    if done.returncode or "God created the heaven" not in done.stdout:
        raise CorpusNotFound(
            "the program bible printed no text: install the Debian package bible-kjv-text "
            f"(it said: {(done.stderr or done.stdout)[:200]!r})"
        )
    yield from split_chapters(done.stdout.splitlines())


def split_chapters(lines: Iterable[str]) -> Iterator[Document]:
    """Yields chapters from lines such as `Ge1:1 In the beginning ...`, which are in canonical order."""
    book, index = "", -1
    key: tuple[int, str] = (-1, "")
    verses: list[str] = []
    for line in lines:
        match = VERSE.match(line)
        if match is None:
            continue
        if match["book"] != book:
            book, index = match["book"], index + 1
        if (index, match["chapter"]) != key:
            if verses:
                yield _chapter(key, verses)
            key, verses = (index, match["chapter"]), []
        verses.append(f"{match['chapter']}:{match['verse']} {match['text']}")
    if verses:
        yield _chapter(key, verses)


def _chapter(key: tuple[int, str], verses: list[str]) -> Document:
    name = f"{BOOKS[key[0]]} {key[1]}"
    return Document("kjv", name, name + "\n\n" + "\n".join(verses) + "\n")


def held_out(document: Document) -> bool:
    """Returns whether a document is held out from training: one in 33, by a hash of its name."""
    digest = hashlib.sha256(f"{document.domain}/{document.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % HOLD_OUT_EVERY == 0


def read_corpus() -> list[Document]:
    """Returns the documents of all domains; raises CorpusNotFound with the names of all missing packages."""
    documents: list[Document] = []
    missing: list[str] = []
    for reader in (read_code, read_docs, read_kjv):
        try:
            documents += reader()
        except CorpusNotFound as error:
            missing.append(str(error))
    if missing:
        raise CorpusNotFound(
            f"the training text is not all here: {'; '.join(missing)}. In one line: apt-get install python3-doc "
            "bible-kjv bible-kjv-text"
        )
    return documents
