"""Arguments of `process_logits`: the node that each row of logits follows, and four kinds of logits processors.

Shapes: R rows of logits, V token ids, N packed nodes, B requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ALWAYS = 2**31 - 1
"""`Additions.until` of an addition that never ends."""


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Packed trees of N nodes and B requests, and the node that each row of logits follows.

    The path of a node is the node and its ancestors without the root, which is committed already. A row of logits
    decides the token at position root + depth + 1.

    Attributes:
        tokens: int64 [N].
        parents: Index within the request, int32 [N]; -1 for its root. Parents come first.
        offsets: First node of each request, int32 [B + 1].
        roots: Absolute positions of the roots, int32 [B].
        nodes: Packed index of the node that each row follows, int32 [R]; None: row i follows node i.
    """

    tokens: Tensor
    parents: Tensor
    offsets: Tensor
    roots: Tensor
    nodes: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition, presence and frequency penalties, and the committed tokens that they count.

    Attributes:
        factors: (repetition > 0, presence, frequency) of each request, float32 [B, 3]; (1, 0, 0) is off.
        rows: Row of the tables below of each request, int32 [B].
        ids: Distinct committed tokens of each table row, int32 [T, C].
        counts: How often each was generated, int32 [T, C]; 0: it is in the prompt only.
        sizes: Entries of each table row that are in use, int32 [T].
    """

    factors: Tensor
    rows: Tensor
    ids: Tensor
    counts: Tensor
    sizes: Tensor


@dataclass(frozen=True, slots=True)
class Additions:
    """Numbers added to logits: bias, and -inf for tokens that are banned, always or up to a position.

    Attributes:
        offsets: First entry of each request, int32 [B + 1].
        ids: int32 [E], distinct within a request unless the value is -inf.
        values: float32 [E], finite or -inf.
        until: An entry applies at positions below this one, int32 [E]; `ALWAYS`: everywhere.
    """

    offsets: Tensor
    ids: Tensor
    values: Tensor
    until: Tensor


@dataclass(frozen=True, slots=True)
class Forced:
    """Tokens without an alternative.

    Attributes:
        offsets: First entry of each request, int32 [B + 1].
        positions: int32 [F].
        ids: The only token at the position, int32 [F].
    """

    offsets: Tensor
    positions: Tensor
    ids: Tensor


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Bit masks of allowed tokens.

    Attributes:
        words: int32 [K, W] with 32 * W >= V. Bit v % 32 of word v // 32 is set iff token v is allowed.
        index: Mask of each row of logits, int32 [R]; -1 for none.
    """

    words: Tensor
    index: Tensor
