"""Files, folders and words that documents name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from documents.blocks import SHELL, fences, without_fences

WORDS = re.compile(r"\bissue\s+#?\d|\bsession\b", re.IGNORECASE)
MACHINE_PATHS = re.compile(r"(?<![\w.})])/(?:work|root|home)/")
# A path from the root: folders, or a file with a suffix that we use. Globs and <placeholders> are not claims.
PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|toml|json|h|cpp|cu|txt|yml)")
OUR_PLACES = "specdec_fast", "kernels", "csrc", "tests", "benchmarks", "examples", "requirements", "docs", ".ci"
TEXTS = {".py", ".md", ".toml", ".txt", ".cpp", ".h"}


def named_paths(text: str) -> Iterator[str]:
    """Paths of ours that a document names in code spans, links and shell blocks."""
    prose = without_fences(text)
    spans = re.findall(r"`([^`\n]+)`", prose)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", prose) if "://" not in link]
    shell = [block.source for block in fences(text) if block.language in (*SHELL, "text")]
    shell = [re.sub(r"^(cp .*) \S+$", r"\1", source, flags=re.MULTILINE) for source in shell]  # a copy is new
    for piece in [*spans, *links, *shell]:
        for word in re.split(r"[\s,;:()'\"=|]+|::", piece):
            if re.search(r"[<>*{}$]", word) or not PATH.fullmatch(word):
                continue
            if word.partition("/")[0] in OUR_PLACES or (word in links and "/" not in word):
                yield word


def missing_paths(root: Path, documents: Iterable[Path]) -> list[str]:
    """Files and folders that a document names and that are not there."""
    return [
        f"{document.relative_to(root)}: {name} does not exist"
        for document in documents
        for name in sorted(set(named_paths(document.read_text(encoding="utf-8"))))
        if not (root / name).exists() and not (document.parent / name).exists()
    ]


def missing_tests(root: Path, files: Iterable[Path]) -> list[str]:
    """Files of tests that a module names and that are not there."""
    found = []
    for path in files:
        place = path.relative_to(root)
        if place.parts[0] in ("specdec_fast", "kernels", "csrc") and path.suffix in (".py", ".cpp", ".h"):
            names = sorted(set(re.findall(r"tests/[\w/]+\.py", path.read_text(encoding="utf-8"))))
            found += [f"{place}: {name} does not exist" for name in names if not (root / name).exists()]
    return found


def forbidden_words(root: Path, files: Iterable[Path]) -> list[str]:
    """Paths of one machine anywhere, and in documents words that mean nothing to a reader of the project."""
    found = []
    for path in files:
        place = str(path.relative_to(root))
        if place == "tests/docs/test_names.py" or path.suffix not in TEXTS:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATHS.search(line) or (path.suffix == ".md" and WORDS.search(line)):
                found.append(f"{place}:{number}: {line.strip()}")
    return found
