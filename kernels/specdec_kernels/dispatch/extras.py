"""What a message says where a package of an extra is missing. Tests: tests/architecture/test_build.py."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """The remedy, in the words of the README."""
    return f"run `pip install -e '.[{extra}]'` in the checkout"
