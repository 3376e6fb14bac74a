"""Packed lists of token trees that a caller wrote as Python lists or tensors, one tree per request.

Tests: tests/core/test_draft.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdec_fast.core.proposal_kind import ProposalKind

Tree = tuple[Sequence[int] | Tensor, Sequence[int] | Tensor]
"""Tokens and parents of a tree, root first with parent -1."""


def host_list(values: Sequence[Any] | Tensor) -> list[Any]:
    """Returns a sequence, or a vector on any device, as a list of Python values."""
    return list(values.tolist()) if isinstance(values, Tensor) else list(values)


def is_chain(tokens: Sequence[int], parents: Sequence[int]) -> bool:
    """Returns whether every node of a tree follows the one before it."""
    return len(tokens) == len(parents) and all(parent == node - 1 for node, parent in enumerate(parents))


def pack_trees(
    rows: Sequence[int], trees: Sequence[tuple[list[int], list[int]]]
) -> tuple[list[int], list[int], tuple[int, ...], int]:
    """Joins trees on one axis.

    Args:
        rows: Row of each request, for messages.
        trees: Tokens and parents of each request, root first with parent -1.

    Returns:
        Tokens and parents of all nodes, the nodes of each request, and the largest depth.

    Raises:
        ValueError: If a parent does not precede its child, or if a tree has other numbers of tokens and parents.
    """
    tokens: list[int] = []
    parents: list[int] = []
    counts, deepest = [], 0
    for index, (row_tokens, row_parents) in enumerate(trees):
        if len(row_tokens) != len(row_parents):
            raise ValueError(
                f"tree of row {rows[index]}: got {len(row_tokens)} tokens and {len(row_parents)} parents; "
                "expected one parent per token"
            )
        depths: list[int] = []
        for node, parent in enumerate(row_parents):
            if 0 <= parent < node:
                depths.append(depths[parent] + 1)
            elif node == 0 and parent == -1:
                depths.append(0)
            else:
                raise ValueError(
                    f"tree of row {rows[index]}, node {node}: got parent {parent}; expected -1 for node 0 and an "
                    "earlier node otherwise; order the nodes so that parents precede their children "
                    "(specdec_fast.embedding.parent_first does)"
                )
        deepest = max(deepest, max(depths, default=0))
        tokens.extend(row_tokens)
        parents.extend(row_parents)
        counts.append(len(row_tokens))
    return tokens, parents, tuple(counts), deepest


def pack_sources(
    rows: Sequence[int],
    counts: Sequence[int],
    kinds: Sequence[Sequence[int] | Tensor] | None,
    dist_rows: Sequence[Sequence[int] | Tensor] | None,
) -> tuple[list[int], list[int]]:
    """Joins what is known about how tokens were picked. Roots are added.

    Args:
        rows: Row of each request, for messages.
        counts: Nodes of each request, root included.
        kinds: `ProposalKind` of each node but the root. None: `SAMPLED` for nodes with a distribution.
        dist_rows: Row of the distributions of each node but the root, -1 for deterministic nodes. None: all are
            deterministic.

    Returns:
        `Draft.proposal_kinds` and `Draft.dist_index` as lists.

    Raises:
        ValueError: If numbers of nodes differ, or a sampled node has no distribution.
    """
    every_kind: list[int] = []
    every_row: list[int] = []
    for place, count in enumerate(counts):
        if not count:
            continue
        sources = [-1] * (count - 1) if dist_rows is None else host_list(dist_rows[place])
        default = [int(ProposalKind.SAMPLED if source >= 0 else ProposalKind.DETERMINISTIC) for source in sources]
        own = default if kinds is None else [int(kind) for kind in host_list(kinds[place])]
        for name, got in (("kinds", own), ("dist_rows", sources)):
            if len(got) != count - 1:
                raise ValueError(
                    f"{name} of row {rows[place]}: got {len(got)} of them; expected {count - 1}, one for each node but "
                    "the root"
                )
        for node, (kind, source) in enumerate(zip(own, sources), 1):
            if kind != ProposalKind.DETERMINISTIC and source < 0:
                raise ValueError(
                    f"tree of row {rows[place]}, node {node}: got proposal kind {kind} and no distribution; expected "
                    "the row of dists that its token was sampled from; pass dist_rows and dists"
                )
        every_kind += [0, *own]
        every_row += [-1, *(source if kind else -1 for kind, source in zip(own, sources))]
    return every_kind, every_row
