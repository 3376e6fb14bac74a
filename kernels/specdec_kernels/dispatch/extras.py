"""Installation hints for missing packages of an extra. Tests: tests/architecture/test_build.py."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """Returns the command that installs an extra, as in the README."""
    return f"run `pip install -e '.[{extra}]'` in the checkout"
