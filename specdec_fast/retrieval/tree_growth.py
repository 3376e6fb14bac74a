"""Best-first growth of trees from weighted continuations, in Python. The compiled version is in csrc/suffix.

Tests: tests/retrieval/test_suffix_index.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specdec_kernels.random import REPLAY, gumbel, words

Grown = tuple[list[int], list[int], float, int]
Continuation = tuple[int, float, Any]
Noise = tuple[int, int]


def unseen_weight(kinds: int, match: int) -> float:
    """Returns the weight of unseen tokens behind a match: one per distinct seen token, divided by the squared length.

    Source: Witten and Bell 1991, method C, over the square of the length.
    """
    return kinds / match**2


def gumbel_max_probabilities(
    noise: Noise, depth: int, rest: float, found: Sequence[Continuation]
) -> list[Continuation]:
    """Replaces the weight of each continuation by its probability of being the Gumbel-max.

    With z = log(weight) + noise, it is the share of exp(z) among siblings, times the probability exp(-rest / exp(z))
    that no unlisted token, of total weight `rest`, exceeds it. The share expresses the trust in the weights.

    Args:
        noise: Key of the replay noise: seed and position.
        depth: Depth of the continuations below the root.
        rest: Total weight of unlisted tokens.
        found: Continuations with their weights.

    Returns:
        The continuations with these probabilities.
    """
    ids = torch.tensor([token for token, _, _ in found], dtype=torch.int64)
    gumbels = gumbel(words(noise[0], noise[1] + depth, 0, REPLAY, ids)).tolist()
    raised = [weight * math.exp(own) for (_, weight, _), own in zip(found, gumbels)]
    total = sum(raised)
    probabilities = [own / total * math.exp(-rest / own) if own > 0 else 0.0 for own in raised]
    return [(token, own, place) for own, (token, _, place) in zip(probabilities, found)]


def grow(
    start: Any,
    depth: int,
    nodes: int,
    min_probability: float,
    children: Callable[[Any], tuple[Sequence[Continuation], float]],
    match: int,
    noise: Noise | None = None,
    base: int = 0,
) -> Grown:
    """Grows a tree best-first. Ties go to the older parent, then to the lower token.

    A path's probability is the product of its tokens' shares among siblings. With `base`, and without noise, it is the
    path's own weight as a share of `base`.

    Args:
        start: The place of the root.
        depth: Depth limit.
        nodes: Most nodes.
        min_probability: Paths with a smaller probability are dropped.
        children: Maps a place to the (token, weight, place) of its continuations, and the total weight of unlisted
            ones, which counts with noise only.
        match: Length of the match, passed through.
        noise: Seed and position of the root.
        base: Total weight of all paths.

    Returns:
        Tokens, parents, sum of probabilities, and `match`.
    """
    tokens: list[int] = []
    parents: list[int] = []
    expected = 0.0
    heap: list[tuple[float, int, int, int, Any]] = []

    def push(place: Any, probability: float, node: int, below: int) -> None:
        if below >= depth:
            return
        found, rest = children(place)
        total: float = base or sum(weight for _, weight, _ in found)
        above = 1.0 if base else probability
        if noise is not None and found:
            found, total, above = gumbel_max_probabilities(noise, below + 1, rest, found), 1.0, probability
        for token, weight, child in found:
            own = above * weight / total
            if own >= min_probability:
                heapq.heappush(heap, (-own, node, token, below + 1, child))

    push(start, 1.0, 0, 0)
    while heap and len(tokens) < nodes:
        negative, parent, token, below, place = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        expected -= negative
        push(place, -negative, len(tokens), below)
    return tokens, parents, expected, match


def depth_limit(nodes: int, factor: float, match: int) -> int:
    """Depth limit of a tree: `factor` times the match, at least 1 and at most the nodes."""
    return min(nodes, max(1, int(min(nodes, factor * match))))


def check_tokens(tokens: Sequence[int]) -> Sequence[int]:
    """Returns the tokens. Raises ValueError if one is out of range."""
    for token in tokens:
        if not 0 <= token < 2**31:
            raise ValueError(f"suffix: got token {token}; expected 0 to 2**31 - 1")
    return tokens
