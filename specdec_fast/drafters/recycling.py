"""Token recycling: trees from the likeliest successors that the target last showed (Luo et al. 2024, section 3).

Needs no model. A matrix holds, for every token, the k likeliest next tokens of the newest node that held it, on refused
branches too; a fixed tree of ranks is filled from it with one gather per level.
Tests: tests/drafters/test_recycling.py and the contract suite.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specdec_fast.draft import Draft
from specdec_fast.interfaces import Acceptance, Budget, Needs, Parts, Rng, StateView, TargetOutput

# How likely the successor of a rank is to be accepted: it settles which nodes the tree has, not what they hold.
_RANKS = (0.5, 0.14, 0.08, 0.05, 0.04, 0.03, 0.025, 0.02)


@lru_cache(maxsize=512)
def tree_of_ranks(nodes: int, top: int, depth: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The `nodes` likeliest nodes of a tree of ranks, level by level: (parent, rank) of each; the root is node 0.

    Nodes are numbered in the order of the levels, and inside a level by parent and rank. Smaller trees are parts of
    larger ones.
    """
    chosen: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-_RANKS[0], (0,))] if nodes else []
    while heap and len(chosen) < nodes:
        value, path = heapq.heappop(heap)
        chosen.append(path)
        if len(path) < depth:
            heapq.heappush(heap, (value * _RANKS[0], (*path, 0)))
        if path[-1] + 1 < top:
            sibling = path[-1] + 1
            heapq.heappush(heap, (value / _RANKS[path[-1]] * _RANKS[sibling], (*path[:-1], sibling)))
    chosen.sort(key=lambda path: (len(path), path))
    number = {(): 0} | {path: at for at, path in enumerate(chosen, 1)}
    levels: list[list[tuple[int, int]]] = []
    for path in chosen:
        if len(path) > len(levels):
            levels.append([])
        levels[-1].append((number[path[:-1]], path[-1]))
    return tuple(tuple(level) for level in levels)


class RecyclingDrafter:
    """Up to `num_draft_tokens` nodes, at most `depth` deep, from the last seen `top_k` successors of each token.

    shared: one matrix for all requests, kept when they end; otherwise each request learns for itself.

    With `shared`, what one request was given is drafted for another. A rule that replays is exact whatever is drafted.
    The others toss coins that are keyed by a request's seed, so requests that share need seeds of their own; that is
    why `from_parts` shares by default only under rules that replay and greedy ones.
    """

    name = "recycling"
    needs = Needs(topology="tree", host_tokens=True, logits=True)

    def __init__(self, num_draft_tokens: int = 12, top_k: int = 8, depth: int = 6, shared: bool = False) -> None:
        if num_draft_tokens < 1 or depth < 1:
            raise ValueError(f"recycling num_draft_tokens, depth: got {num_draft_tokens}, {depth}; expected at least 1")
        if not 1 <= top_k <= len(_RANKS):
            raise ValueError(f"recycling top_k: got {top_k}; expected 1 to {len(_RANKS)}")
        self.num_draft_tokens = num_draft_tokens
        self._top, self._depth, self.shared = top_k, depth, shared
        self._common: Tensor | None = None
        self._own: dict[int, Tensor] = {}

    @classmethod
    def from_parts(cls, parts: Parts, **options: Any) -> RecyclingDrafter:
        """One that shares by default where that is exact."""
        options.setdefault("shared", parts.prefers in ("coupled", "greedy"))
        return cls(**options)

    def successors(self, row: int) -> Tensor | None:
        """What a row reads: int32 [V, top_k], the likeliest first, -1 where nothing was seen; None before any step."""
        return self._common if self.shared else self._own.get(row)

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        pass

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        trees = []
        for row, limit in zip(rows, budget.nodes):
            root, seen = view.tokens(row)[-1], self.successors(row)
            levels = tree_of_ranks(min(limit, self.num_draft_tokens), self._top, self._depth)
            trees.append(([root], [-1]) if seen is None else self._fill(root, levels, seen))
        return Draft.trees(rows, trees, device=view.device)

    def _fill(
        self, root: int, levels: Sequence[Sequence[tuple[int, int]]], seen: Tensor
    ) -> tuple[list[int], list[int]]:
        """The tree of ranks with tokens in it, without the branches of which nothing was seen."""
        tokens, parents, place = [root], [-1], {0: 0}  # place: number in the tree of ranks -> in the draft
        number, known = 1, {0: root}
        for level in levels:
            inner = sorted({parent for parent, _ in level if parent in known})
            if not inner:
                break
            following = seen[torch.tensor([known[node] for node in inner], device=seen.device)].tolist()
            ranks = dict(zip(inner, following))
            for parent, rank in level:
                token = ranks[parent][rank] if parent in ranks else -1
                if token >= 0:
                    known[number], place[number] = token, len(tokens)
                    tokens.append(token)
                    parents.append(place[parent])
                number += 1
        return tokens, parents

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        assert output.logits is not None
        vocab = output.logits.shape[1]
        top = output.logits.topk(min(self._top, vocab), dim=1).indices.to(torch.int32)
        if self.shared:
            if self._common is None:
                self._common = self._empty(vocab, top.device)
            _learn(self._common, draft.tokens, top)
            return
        start = 0
        for row, count in zip(draft.rows.tolist(), draft.counts):
            if row not in self._own:
                self._own[row] = self._empty(vocab, top.device)
            _learn(self._own[row], draft.tokens[start : start + count], top[start : start + count])
            start += count

    def _empty(self, vocab: int, device: torch.device) -> Tensor:
        return torch.full((vocab, self._top), -1, dtype=torch.int32, device=device)

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._own.pop(row, None)


def _learn(seen: Tensor, tokens: Tensor, top: Tensor) -> None:
    """Replace the successors of tokens (int64 [M]) by top (int32 [M, k]); of equal tokens the last node counts."""
    last = torch.full((seen.shape[0],), -1, dtype=torch.int64, device=seen.device)
    order = torch.arange(tokens.shape[0], device=seen.device)
    last.scatter_reduce_(0, tokens, order, "amax")
    newest = last[tokens] == order
    seen[tokens[newest], : top.shape[1]] = top[newest]


DRAFTER = RecyclingDrafter
