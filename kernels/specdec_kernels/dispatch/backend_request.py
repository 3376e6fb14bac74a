"""Requests for backends: the context manager `use_backend` and the environment variable SPECDEC_BACKEND.

Tests: tests/kernels/test_dispatch.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from .registry import OPS, unknown_operator


@dataclass(frozen=True)
class BackendRequest:
    """Requested backend names: one for all operators, and exceptions by operator name."""

    everywhere: str | None
    by_op: tuple[tuple[str, str], ...] = ()

    def name_for(self, op: str) -> str | None:
        """Returns the backend that is requested for an operator, or None."""
        for name, _ in self.by_op:  # the environment is read before operators exist; `use_backend` checks at once
            if name not in OPS:
                raise ValueError(unknown_operator("SPECDEC_BACKEND", name))
        return dict(self.by_op).get(op, self.everywhere)


def parse_request(text: str) -> BackendRequest | None:
    """Parses text such as "cpu" or "cpu,tree_attention=sdpa"; "" and "auto" give None."""
    everywhere, by_op = None, []
    for part in filter(None, (p.strip() for p in text.split(","))):
        op, equals, name = part.rpartition("=")
        if equals:
            by_op.append((op.strip(), name.strip()))
        elif name != "auto":
            everywhere = name
    return BackendRequest(everywhere, tuple(by_op)) if everywhere or by_op else None


FROM_ENVIRONMENT = parse_request(os.environ.get("SPECDEC_BACKEND", ""))
REQUEST: ContextVar[BackendRequest | None] = ContextVar("specdec_backend", default=FROM_ENVIRONMENT)
"""The request of the current thread and context."""


@contextmanager
def use_backend(name: str | None = None, **by_op: str) -> Iterator[None]:
    """Runs operators on the named backend inside the block.

    `use_backend("reference")` applies to all operators, `use_backend(tree_attention="sdpa")` to one, and
    `use_backend()` restores automatic selection. The request holds for the current thread and context. A compiled
    program keeps the backends that were selected when it was compiled. The environment variable SPECDEC_BACKEND ("cpu",
    or "cpu,tree_attention=sdpa") is read at import and sets the request outside of any block.

    Args:
        name: Backend for all operators, or None.
        **by_op: Backend by operator name.

    Raises:
        ValueError: If an operator does not exist.
        UnsupportedError: From a call inside the block that the backend cannot serve.
    """
    for op in by_op:
        if op not in OPS:
            raise ValueError(unknown_operator("use_backend", op))
    token = REQUEST.set(BackendRequest(name, tuple(sorted(by_op.items()))) if name or by_op else None)
    try:
        yield
    finally:
        REQUEST.reset(token)
