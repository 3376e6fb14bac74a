"""A trained head for automata: it maps the one-hot state before a token to the state after it.

Wrong features, a wrong shift between tokens and features or a wrong parent give wrong states, so wrong drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from oracles.automaton import AutomatonTarget
from specdec_fast.core.draft import Draft
from specdec_fast.heads.blockwise import BlockwiseHeads
from specdec_kernels import tree_plan


class AutomatonHead:
    """A head with the interface of `PagedHead`. model: its automaton, exact if it is the target's; kept: the ids of its
    vocabulary (None: all).
    """

    aux_hidden_states = ("final_norm",)

    def __init__(self, model: AutomatonTarget, kept: Sequence[int] | None = None) -> None:
        self.model, self.cache, self.device = model, model.cache, model.device
        self.vocab_size = model.vocab_size
        self.token_ids = None if kept is None else torch.tensor(kept, dtype=torch.int64)

    def features(self, aux_hidden_states: Mapping[str, Tensor]) -> Tensor:
        return aux_hidden_states["final_norm"]

    def zero_features(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, len(self.model.table))

    def extend(self, rows: Tensor, tokens: Tensor, features: Tensor, offsets: Tensor) -> Tensor:
        self.cache.stage(rows, offsets, tokens.shape[0], advance=True)
        return self._after(tokens, features)

    def score(self, draft: Draft, features: Tensor) -> Tensor:
        self.cache.stage(draft.rows, draft.offsets, draft.num_nodes, tree_plan(draft.parents, draft.offsets))
        return self._after(draft.tokens, features)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.model.table
        return logits if self.token_ids is None else logits[:, self.token_ids]

    def _after(self, tokens: Tensor, features: Tensor) -> Tensor:
        return torch.eye(len(self.model.table))[self.model.transitions[features.argmax(1), tokens]]


def blockwise_over(target: AutomatonTarget) -> BlockwiseHeads:
    """Returns blockwise heads that predict three tokens ahead of a target whose state grows by one with any token."""
    states = len(target.table)
    made = BlockwiseHeads(states, target.vocab_size, 3, inner_size=states)
    with torch.no_grad():
        made.inner.weight.copy_(torch.eye(states).repeat(3, 1))
        made.inner.bias.zero_()
        for head in range(3):
            own = slice(head * states, (head + 1) * states)
            ahead = (torch.arange(states) + 1 + head).clamp(max=states - 1)
            made.outer.weight[own, own] = torch.eye(states)[ahead].T - torch.eye(states)
    return made
