"""What trees are grown by: a source of draft logits whose rows follow those of the engine.

Two of them are in specdec_fast/targets/: `Mirror` over a draft model and `HeadRows` over a trained head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from specdec_fast.draft import Draft
from specdec_fast.interfaces import Acceptance, StateView, TargetOutput


class StagedTrees:
    """The trees of a draft, whose nodes' keys lie behind rows' committed tokens; read once for all rows."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    @cached_property
    def trees(self) -> list[tuple[list[int], list[int]]]:
        """(tokens, parents) of every tree."""
        tokens, parents = self._draft.tokens.tolist(), self._draft.parents.tolist()
        ends = list(accumulate(self._draft.counts))
        return [(tokens[a:b], parents[a:b]) for a, b in zip([0, *ends], ends)]

    def size(self, place: int) -> int:
        return self._draft.counts[place]


@dataclass(frozen=True, slots=True)
class Staged:
    """The tree number `place` of those that were staged. known: (tokens, parents) of the tree that it is the first part
    of, where the host has them already.
    """

    staged: StagedTrees
    place: int
    known: tuple[list[int], list[int]] | None = None

    @property
    def num_nodes(self) -> int:
        return self.staged.size(self.place)

    def walk(self, text: Sequence[int]) -> list[int]:
        """The nodes that hold this text, from the root on: as far as the tree has it."""
        if not text:
            return []
        tokens, parents = self.known or self.staged.trees[self.place]
        parents = parents[: self.num_nodes]
        path: list[int] = []
        for token in text:
            parent = path[-1] if path else -1
            following = (node for node, above in enumerate(parents) if above == parent and tokens[node] == token)
            node = next(following, None)
            if node is None:
                break
            path.append(node)
        return path


class Source(Protocol):
    """Whose logits trees grow by: rows that follow those of the engine, over a cache of their own.

    vocab_size: the target's; token_ids: int64 [Vd], ascending, what the Vd columns of the logits stand for, or None for
    the first Vd ids.
    """

    device: torch.device
    vocab_size: int
    token_ids: Tensor | None

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None: ...
    def room(self, row: int, tokens: int, length: int) -> bool:
        """Whether a row of `tokens` tokens can be drafted for now, and hold `length` of them."""
        ...

    def catch_up(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None: ...
    def score(self, rows: Sequence[int], draft: Draft) -> Tensor:
        """One pass over whole trees, one of each of `rows`: what `logits` makes logits of, [M, any]."""
        ...

    def logits(self, scored: Tensor) -> Tensor: ...
    def told(self, trees: Sequence[tuple[int, tuple[list[int], list[int]]]]) -> None:
        """(row, (tokens, parents)) of trees that were staged as they grew, all their nodes; -1 for no token."""
        ...

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None: ...
    def release(self, rows: Sequence[int]) -> None: ...
