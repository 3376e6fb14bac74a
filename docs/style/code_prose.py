"""Lints docstrings and comments of the code: words outside of the glossary, each with the term to use.

Identifiers, code spans and string literals are left alone. `ALLOWED` lists phrases that are right.
Tests: tests/docs/test_prose.py.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

PLACES = "specdec_fast/", "kernels/", "csrc/", "benchmarks/", "tests/", "examples/", "docs/", "setup.py"
SUFFIXES = ".py", ".pyi", ".c", ".cpp", ".cu", ".cuh", ".h", ".sh"

WORDS = {
    r"coins?|coin[- ](?:flips?|toss(?:es)?)": "a uniform draw",
    r"law(?:s|ful|fully)?": "a distribution",
    r"rac(?:e|es|ed|ing)": "Gumbel-max",
    r"riddles?": "plain words",
    r"scouts?": "a score-only node",
    r"seams?": "an interface",
    r"stand-?ins?": "a simulated GPU, a fake",
    r"tap(?:s|ped)?": "an auxiliary hidden state",
    r"told": "is notified, is passed, receives",
    r"who(?:so)?m?ever": "any caller, every user",
    r"row equality": "batch invariance",
    r"whole[- ]pass(?:es)?": "fused forward",
    r"captured steps?": "a CUDA-graph step",
}
"""Private words, each with the term of the field; docs/glossary.md defines the terms."""

ALLOWED = {
    r"data[- ]rac(?:es?|ing)": "the term of concurrent programming",
    r"race conditions?": "the term of concurrent programming",
    r"told apart": "means distinguished",
}
"""Phrases in which such a word is right, each with the reason."""

_BETTER = list(WORDS.values())
_WORD = re.compile(
    "|".join(rf"(?P<w{at}>(?<![\w-])(?:{pattern})(?![\w-]))" for at, pattern in enumerate(WORDS)), re.IGNORECASE
)
_ALLOWED = re.compile("|".join(rf"\b(?:{phrase})\b".replace(" ", r"\s+") for phrase in ALLOWED), re.IGNORECASE)
_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_C_TOKEN = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.|[^'\\\n])*'", re.DOTALL)
_SHELL_COMMENT = re.compile(r"(?:^|(?<=\s))#(?!!).*", re.MULTILINE)


def findings(name: str, source: str) -> Iterator[str]:
    """Yields the findings of one file, in order.

    Args:
        name: The path of the file from the root; its suffix selects the language.
        source: The text of the file.
    """
    for first, text in sorted(comments(name, source)):
        plain = _ALLOWED.sub(_blank, _SPAN.sub(_blank, text))
        for found in _WORD.finditer(plain):
            line = first + plain.count("\n", 0, found.start())
            better = _BETTER[int(str(found.lastgroup)[1:])]
            yield f"{name}:{line}: '{found[0]}': write {better} [specdec.code_words]"


def comments(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Yields the first line and the text of every docstring and comment of a file."""
    if name.endswith((".py", ".pyi")):
        yield from _python_comments(source)
    elif name.endswith(".sh"):
        for found in _SHELL_COMMENT.finditer(source):
            yield 1 + source.count("\n", 0, found.start()), found[0]
    else:
        for found in _C_TOKEN.finditer(source):
            if found[0].startswith("/"):
                yield 1 + source.count("\n", 0, found.start()), found[0]


def is_code(name: str) -> bool:
    """Returns whether a file, by its path from the root, is code of the project."""
    return name.startswith(PLACES) and name.endswith(SUFFIXES)


def _python_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields comments, and strings that are statements: docstrings of modules, classes, functions and attributes."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, "\n".join(lines[node.lineno - 1 : node.end_lineno])


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])
