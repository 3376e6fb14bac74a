"""Prints warnings of the library on standard error, below the text of an answer.

Tests: tests/commands/test_warning_lines.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from specdec_fast.commands.error_wording import replace_code_words
from specdec_fast.commands.word_wrap import wrap_words

_held: list[str] | None = None  # lines that wait for the end of a text; None while lines are printed at once


@contextmanager
def warnings_after_text() -> Iterator[None]:
    """Holds warnings of the library back until a block ends, so that they stand below the text that it prints."""
    global _held
    if _held is not None:  # in a block of its own, which ends later
        yield
        return
    _held = []
    try:
        yield
    finally:
        lines, _held = _held, None
        for line in lines:
            print(line, file=sys.stderr)


class WarningLines(logging.Handler):
    """Writes every warning of the library to standard error as one line."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a warning in the words of the program, or holds it back."""
        words = f"specdec: {record.levelname.lower()}: {replace_code_words(record.getMessage())}"
        line = wrap_words(words, sys.stderr)
        if _held is None:
            print(line, file=sys.stderr)
        else:
            _held.append(line)
