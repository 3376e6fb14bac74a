"""What `process_logits` takes: where each row of logits stands, and the four kinds of sparse edits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ALWAYS = 2**31 - 1
"""`Additions.until` of an addition that never ends."""


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Packed trees of N nodes and B requests, and the node each of the R rows of logits follows.

    tokens: int64 [N]; parents: int32 [N], index within the request, -1 for its root, parents first; offsets:
        int32 [B + 1]; roots: int32 [B], absolute positions of the roots.
    nodes: int32 [R], packed index of the node that a row of logits follows; None: row i follows node i.

    The tokens on a node's path are those of the node and its ancestors without the root, which is committed already.
    A row of logits decides the token at position root + depth + 1.
    """

    tokens: Tensor
    parents: Tensor
    offsets: Tensor
    roots: Tensor
    nodes: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition, presence and frequency penalties and the committed tokens that they count.

    factors: float32 [B, 3], (repetition > 0, presence, frequency); (1, 0, 0) is off.
    rows: int32 [B], each request's row in the tables below.
    ids, counts: int32 [T, C], the distinct committed tokens of a table row and how often each was generated (0: it is
        in the prompt only); sizes: int32 [T], how many entries of a table row are in use.
    """

    factors: Tensor
    rows: Tensor
    ids: Tensor
    counts: Tensor
    sizes: Tensor


@dataclass(frozen=True, slots=True)
class Additions:
    """Numbers added to logits: bias, and -inf for what is banned, for good or up to a position.

    offsets: int32 [B + 1]; ids: int32 [E], distinct within a request unless the value is -inf; values: float32 [E],
    finite or -inf; until: int32 [E], added where the position being decided is lower (`ALWAYS`: everywhere).
    """

    offsets: Tensor
    ids: Tensor
    values: Tensor
    until: Tensor


@dataclass(frozen=True, slots=True)
class Forced:
    """Tokens without an alternative. offsets: int32 [B + 1]; positions, ids: int32 [F], the only token there."""

    offsets: Tensor
    positions: Tensor
    ids: Tensor


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Bit masks of allowed tokens.

    words: int32 [K, W] with 32 * W >= V; bit v % 32 of word v // 32 is set iff token v is allowed.
    index: int32 [R], the mask of each row of logits, -1 for none.
    """

    words: Tensor
    index: Tensor
