"""Embeddings and projections in the checkpoint of a head: its own where they differ from the target's, else shared.

Heads usually share both tables with their target, and files often hold copies. A copy is dropped, so that it takes no
memory. A table with other values was trained with the head, which drafts worse without it.
Tests: tests/heads/test_own_tables.py.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger("specdec_fast")

EMBEDDING, PROJECTION = "embed_tokens.weight", "lm_head.weight"
_CHUNK = 4096
"""Rows that are compared at once: whole tables in another dtype would take gigabytes."""


def split_tables(
    tensors: dict[str, Tensor], source: str, target: Any, width: int, own_tables: bool = True
) -> dict[str, Tensor]:
    """Takes a head's tables over the whole vocabulary out of its tensors.

    Args:
        tensors: Tensors by our names. `embed_tokens.weight` and `lm_head.weight` are removed.
        source: Name of the head, for messages.
        target: The target.
        width: Columns that a table must have.
        own_tables: False drops the tables even if they differ.

    Returns:
        Tables that differ from the target's, by the same names, cut to the target's vocabulary.

    Raises:
        ValueError: If a table has fewer rows than the target has token ids, or another width.
    """
    kept = {}
    for name in (EMBEDDING, PROJECTION):
        table = tensors.pop(name, None)
        if table is None:
            continue
        if table.dim() != 2 or table.shape[0] < target.vocab_size or table.shape[1] != width:
            raise ValueError(
                f"head {source}: {name} is {list(table.shape)}; expected {width} columns and a row for each of the "
                f"{target.vocab_size} token ids of the target; use a head that was trained for this target"
            )
        shared = target_table(target, name)
        if not own_tables:
            log.info("head %s: its own %s is not used", source, name)
        elif shared is None or not same_values(table, shared, target.vocab_size):
            log.info("head %s: drafts with its own %s, which differs from the target's", source, name)
            kept[name] = table[: target.vocab_size]
    return kept


def target_table(target: Any, name: str) -> Tensor | None:
    """Returns the target's embedding or projection [V, hidden], or None if it is no ordinary tensor in memory."""
    model = getattr(target, "model", None)
    found = None
    if model is not None:
        found = model.get_input_embeddings() if name == EMBEDDING else model.get_output_embeddings()
    weight: Any = getattr(found, "weight", None)
    ordinary = type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() and not weight.is_meta
    return weight.detach() if ordinary else None


def is_tied(target: Any) -> bool:
    """Returns whether a target's projection is its embedding."""
    embedding, projection = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    return getattr(embedding, "weight", None) is getattr(projection, "weight", embedding)


def same_values(table: Tensor, shared: Tensor, rows: int) -> bool:
    """Returns whether two tables have the same first rows, up to the rounding of either one's dtype."""
    if table.shape[1:] != shared.shape[1:] or min(table.shape[0], shared.shape[0]) < rows:
        return False
    for start in range(0, rows, _CHUNK):
        one = table[start : min(start + _CHUNK, rows)]
        other = shared[start : start + one.shape[0]].to(one.device)
        if not (torch.equal(one, other.to(one.dtype)) or torch.equal(one.to(other.dtype), other)):
            return False
    return True


def embedding_of(table: Tensor | None) -> nn.Embedding | None:
    """Returns a module of the shape of an embedding table, for `load_tensors` to fill, or None without one."""
    return None if table is None else nn.Embedding(*table.shape)


def projection_of(table: Tensor | None) -> nn.Linear | None:
    """Returns a module of the shape of a projection [V, hidden], for `load_tensors` to fill, or None without one."""
    return None if table is None else nn.Linear(table.shape[1], table.shape[0], bias=False)
