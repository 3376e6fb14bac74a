"""The hint that a message gives if a package of an extra is missing. Tests: tests/architecture/test_build.py."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """Returns the command that installs an extra, as the README gives it."""
    return f"run `pip install -e '.[{extra}]'` in the checkout"
