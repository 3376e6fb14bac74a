"""Checks of documents: what a page links to, names, runs and measures. Tests: tests/docs/."""

from __future__ import annotations

from collections.abc import Iterable


def listing(found: Iterable[str]) -> str:
    """All findings, one per line, for the message of an assertion."""
    return "\n".join(["", *found])
