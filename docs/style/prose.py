"""Lints the prose of all Markdown documents with proselint and the project's own checks, and the words of the code.

    python docs/style/prose.py             # all documents, and docstrings and comments of all code
    python docs/style/prose.py README.md   # one document or source file

Findings are printed as `file:line: message [check]`. The exit status is 1 if there are any.
Tests: tests/docs/test_prose.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import code_prose
from markdown_prose import blocks, prose
from proselint.checks import __register__ as PROSELINT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile
from style_checks import CHECKS, PREFIX

ROOT = Path(__file__).resolve().parents[2]
EXCLUDED = (
    "CHANGELOG.md",
    "benchmarks/results/",
    "specdec_fast/assets/demo-pair.md",
    "specdec_fast/assets/demo-hybrid.md",
)
"""A record that keeps the words of its day, and documents that programs write."""
GLOSSARY = "docs/glossary.md"
"""Names other words for its terms, so the check of words leaves it out."""
OF_PROSELINT = (
    "archaism",
    "cliches",
    "hedging",
    "malapropisms",
    "mixed_metaphors",
    "mondegreens",
    "needless_variants",
    "nonwords",
    "oxymorons",
    "redundancy",
    "skunked_terms",
    "uncomparables",
    "weasel_words",
)
"""Checks of proselint that suit technical documents; its others are about typography, dates and spelling variants."""


def findings(name: str, markdown: str) -> Iterator[str]:
    """Findings of one document, in order.

    Args:
        name: What to call the document in the messages.
        markdown: Its text.
    """
    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(PROSELINT)
        registry.register_many(CHECKS)
    enabled = {f"{PREFIX}.words": name != GLOSSARY} | dict.fromkeys((*OF_PROSELINT, PREFIX), True)
    document = LintFile(name, prose(markdown))
    parts = list(blocks(document.content))
    for found in document.lint({"max_errors": sys.maxsize, "checks": enabled}):
        start, end = found.check_result.span
        start = end - len(document.content[start:end].lstrip())
        if any(first <= start and end <= last for first, last in parts):  # nothing is one phrase across paragraphs
            line = document.content.count("\n", 0, start)  # (proselint puts a line before the text)
            message = " ".join(found.check_result.message.split())
            yield f"{name}:{line}: {message} [{found.check_result.check_path}]"


def documents(root: Path = ROOT) -> list[str]:
    """Returns all Markdown files that are linted, by their paths from the root."""
    return [name for name in _files(root) if name.endswith(".md") and not name.startswith(EXCLUDED)]


def code(root: Path = ROOT) -> list[str]:
    """Returns all source files that are linted, by their paths from the root."""
    return [name for name in _files(root) if code_prose.is_code(name)]


def _files(root: Path) -> list[str]:
    """All files that git tracks or would track; all that are not hidden or built where there is no git."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    else:
        found = (path.relative_to(root) for path in root.rglob("*.*"))
        names = [path.as_posix() for path in found if not path.parts[0].startswith((".", "build", "dist"))]
    return sorted(name for name in set(names) if (root / name).is_file())


def main(arguments: Sequence[str]) -> int:
    """Prints all findings and returns the exit status."""
    names = arguments or [*documents(), *code()]
    found = []
    for name in names:
        check = findings if name.endswith(".md") else code_prose.findings
        found += check(name, (ROOT / name).read_text(encoding="utf-8"))
    for each in found:
        print(each)
    if found:
        print(f"{len(found)} findings in {len(names)} files", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
