"""Shapes of what a cache keeps for a layer, and the error of a cache that is too large.

Tests: tests/cache/test_paged.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key/value shape of one attention layer.

    Attributes:
        num_kv_heads: Heads of keys and values.
        key_dim: Size of a key.
        value_dim: Size of a value.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class WindowShape:
    """Window of a causal convolution.

    Attributes:
        length: Inputs that it remembers: one less than its width.
        channels: Its channels.
    """

    length: int
    channels: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """State of a recurrence.

    Attributes:
        heads: Its heads.
        key_dim: Size of a key.
        value_dim: Size of a value.
        groups: Groups of heads that share a key.
        gates: Log gates of one node.
    """

    heads: int
    key_dim: int
    value_dim: int
    groups: int
    gates: int


@contextmanager
def fitting_into_memory(what: str, size: int, device: torch.device | str, remedy: str) -> Iterator[None]:
    """Explains a lack of memory inside of the context.

    Args:
        what: What is allocated, in words.
        size: Its bytes.
        device: The device that has the memory.
        remedy: What to do about it.

    Raises:
        ValueError: If an allocation inside fails.
        RuntimeError: If anything else does.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "alloc" not in str(error):
            raise
        raise ValueError(
            f"cache: got {what}, which take {size / 2**30:,.1f} GiB and do not fit into the memory of {device}; "
            f"expected less; {remedy}"
        ) from error
