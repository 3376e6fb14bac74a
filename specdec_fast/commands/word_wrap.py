"""Line breaks between words, for terminals of any width. Tests: tests/commands/test_narrow_terminals.py.

A terminal breaks a line that is too long inside a word. Pipes and files get the line as it is, so that programs can
read it.
"""

from __future__ import annotations

import os
import re
import textwrap
from typing import Any

_SPAN = re.compile(r"`[^`\n]+`")
_HELD = "\x00"
_NARROWEST = 20


def width_of(stream: Any, *, table: bool = False) -> int | None:
    """Returns the columns of a terminal, which the variable COLUMNS overrides; None for a pipe or a file.

    Args:
        stream: Where is written.
        table: COLUMNS applies to pipes and files too, as it does for tables.
    """
    try:
        columns = os.environ.get("COLUMNS", "")
        if (table or stream.isatty()) and columns.isdigit() and int(columns):
            return int(columns)
        return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None
    except (AttributeError, OSError, ValueError):  # no terminal, a closed stream, or one without a number
        return None


def wrap_words(text: str, stream: Any, indent: int = 0, *, table: bool = False) -> str:
    """Breaks lines between words where they are wider than a terminal.

    Args:
        text: One or more lines. A command in backquotes stays on one line if it fits, because a part of it may be
            copied and run.
        stream: Where it is written.
        indent: Blanks before the second and further lines.
        table: COLUMNS applies to pipes and files too.

    Returns:
        The text with more line breaks; the same text if the stream is no terminal.
    """
    width = width_of(stream, table=table)
    if width is None:
        return text
    width = max(width, _NARROWEST)

    def hold(match: re.Match[str]) -> str:
        return match[0].replace(" ", _HELD) if len(match[0]) <= width - indent else match[0]

    lines = [
        textwrap.wrap(
            _SPAN.sub(hold, line),
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
            replace_whitespace=False,
        )
        or [""]
        for line in text.split("\n")
    ]
    return "\n".join(part for parts in lines for part in parts).replace(_HELD, " ")
