"""Words of other libraries' errors. Tests: tests/loading/test_models.py."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message with what a colon at its end announces, or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
