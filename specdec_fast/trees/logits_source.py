"""What trees are grown by: a source of draft logits whose rows follow those of the engine.

Two of them are in specdec_fast/targets/: `DraftModelRunner` over a draft model and `HeadRunner` over a trained head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, StateView, TargetOutput


@dataclass(frozen=True, slots=True)
class Staged:
    """The tree whose nodes' keys lie behind a row's committed tokens."""

    tokens: list[int]
    parents: list[int]

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    def walk(self, text: Sequence[int]) -> list[int]:
        """The nodes that hold this text, from the root on: as far as the tree has it."""
        path: list[int] = []
        for token in text:
            parent = path[-1] if path else -1
            following = (
                node for node, above in enumerate(self.parents) if above == parent and self.tokens[node] == token
            )
            node = next(following, None)
            if node is None:
                break
            path.append(node)
        return path


class Source(Protocol):
    """Whose logits trees grow by: rows that follow those of the engine, over a cache of their own.

    vocab_size: the target's; token_ids: int64 [Vd], ascending, what the Vd columns of the logits stand for, or None for
    the first Vd ids; keeps: what it stored for a node that is accepted stays, so it has to be told what was staged.
    """

    device: torch.device
    vocab_size: int
    token_ids: Tensor | None
    keeps: bool

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None: ...
    def room(self, row: int, tokens: int, length: int) -> bool:
        """Whether a row of `tokens` tokens can be drafted for now, and hold `length` of them."""
        ...

    def catch_up(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None: ...
    def score(self, rows: Sequence[int], draft: Draft) -> Tensor:
        """One pass over whole trees, one of each of `rows`: what `logits` makes logits of, [M, any]. The draft's
        `counts` may be bounds.
        """
        ...

    def logits(self, scored: Tensor) -> Tensor: ...
    def told(self, trees: Sequence[tuple[int, tuple[list[int], list[int]]]]) -> None:
        """(row, (tokens, parents)) of trees that were staged as they grew, all their nodes; -1 for no token."""
        ...

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None: ...
    def release(self, rows: Sequence[int]) -> None: ...
