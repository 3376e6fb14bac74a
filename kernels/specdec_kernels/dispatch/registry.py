"""The table of operators by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..unknown_names import RENAMED_OPERATORS, unknown_name

if TYPE_CHECKING:
    from .operator import Op

OPS: dict[str, Op] = {}
"""Operators by name. The constructor of `Op` adds each of them."""


def unknown_operator(subject: str, got: str) -> str:
    """Returns the message of the error for an operator that does not exist."""
    return unknown_name(f"{subject} operator", got, sorted(OPS), renamed=RENAMED_OPERATORS, kind="operator")
