"""Words of other libraries' errors. Tests: tests/loading/test_models.py."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or the name of its class."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
