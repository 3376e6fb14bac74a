"""Fenced blocks of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import dedent
from typing import NamedTuple

SHELL = "bash", "sh", "console"
"""Languages of blocks with commands."""
NO_RUN = "no-run"
IN_VLLM = "in-vllm"
"""Of blocks that run in vLLM's environment, as a part of an example."""
"""Word after the language of a Python block that no test runs: it needs a download or a GPU."""


INCLUDE = '--8<-- "'
"""Begins a block that the site fills with a section of a file, which has tests of its own."""


class Block(NamedTuple):
    """A fenced block: its language, the rest of its first line, its text and its line in the document."""

    language: str
    info: str
    source: str
    line: int


def fences(text: str) -> Iterator[Block]:
    """All fenced blocks of a document, those in lists too."""
    pattern = r"^ *(`{3,})(\w*)([^\n`]*)\n(.*?)^ *\1"
    for match in re.finditer(pattern, text, flags=re.DOTALL | re.MULTILINE):
        yield Block(match[2], match[3].strip(), dedent(match[4]), text.count("\n", 0, match.start()) + 1)


def without_fences(text: str) -> str:
    """A document without its fenced blocks; its lines keep their numbers."""
    pattern = r"^ *(`{3,})[^\n`]*\n.*?^ *\1[^\n]*"
    return re.sub(pattern, lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
