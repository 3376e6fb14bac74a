"""A finite automaton as a language model: a `Target` whose logits depend on the whole prefix, at the cost of a look-up.

The state after a token is a function of that token and of the state before it, which is read from the paged cache.
So any error in staging, commits, rollbacks or page tables changes the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from specdec_fast.cache import PagedCache
from specdec_fast.cache.shapes import LayerShape
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Slots, TargetOutput
from specdec_kernels import TreePlan, kv_stage


def random_logits(states: int, vocab: int, seed: int = 0, std: float = 1.5) -> Tensor:
    """Logits float32 [states, vocab]."""
    return torch.randn(states, vocab, generator=torch.Generator().manual_seed(seed)) * std


def mixing(states: int, vocab: int) -> Tensor:
    """Returns transitions int64 [states, vocab] that depend on every earlier token."""
    return (torch.arange(states)[:, None] * 5 + torch.arange(vocab)[None, :] * 3 + 1) % states


class AutomatonTarget:
    """A target over an automaton. logits [S, V]: row s follows state s; transitions int64 [S, V]: the state after a
    token, from the state before it.

    The text starts in state 0. `before_pass`, when set, is called before every forward pass (to raise, to
    count).
    """

    def __init__(
        self,
        logits: Tensor,
        transitions: Tensor | None = None,
        *,
        max_rows: int = 8,
        max_length: int = 64,
        page_size: int = 4,
        num_pages: int | None = None,
    ) -> None:
        self.table = logits
        self.vocab_size = logits.shape[1]
        self.transitions = mixing(*logits.shape) if transitions is None else transitions
        self.device = torch.device("cpu")
        self.max_length = max_length
        if num_pages is None:
            num_pages = max_rows * -(-max_length // page_size) + 1
        self.cache = PagedCache(
            [LayerShape(1, 1, 1)],
            num_pages=num_pages,
            page_size=page_size,
            max_rows=max_rows,
            max_length=max_length,
            dtype=torch.float32,
        )
        self.before_pass: Callable[[], None] | None = None
        self.num_layers = 4  # only for `skip_layers`
        self.passes = 0

    def state_after(self, tokens: Sequence[int]) -> int:
        """Returns the state after a text, without a cache."""
        state = 0
        for token in tokens:
            state = int(self.transitions[state, token])
        return state

    def logits_after(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns logits [V] after a text, without a cache."""
        return self.table[self.state_after(tokens)].double().numpy()

    def extend(
        self,
        rows: Tensor,
        tokens: Tensor,
        offsets: Tensor,
        *,
        logits: bool | Tensor,
        aux_hidden_states: Sequence[str] = (),
    ) -> TargetOutput:
        bounds = offsets.tolist()
        parents = [node - start - 1 for start, stop in pairwise(bounds) for node in range(start, stop)]
        slots = self.cache.stage(rows, offsets, tokens.shape[0], advance=True)
        states = self._run(tokens, parents, bounds, slots)
        caught = self._aux_hidden_states(aux_hidden_states, states)
        if logits is False:
            return TargetOutput(None, caught)
        wanted = logits if isinstance(logits, Tensor) else (offsets[1:] - 1).long()
        return TargetOutput(self.table[states[wanted]].clone(), caught)

    def score(self, draft: Draft, plan: TreePlan, aux_hidden_states: Sequence[str] = ()) -> tuple[TargetOutput, Slots]:
        slots = self.cache.stage(draft.rows, draft.offsets, draft.num_nodes, None if draft.is_chain else plan)
        states = self._run(draft.tokens, draft.parents.tolist(), draft.offsets.tolist(), slots)
        return TargetOutput(self.table[states].clone(), self._aux_hidden_states(aux_hidden_states, states)), slots

    def _aux_hidden_states(self, names: Sequence[str], states: Tensor) -> dict[str, Tensor]:
        """Hidden states [M, S]: the state, one-hot."""
        return {name: torch.eye(len(self.table))[states] for name in names}

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        return hidden @ self.table

    @contextmanager
    def skip_layers(self, skip: Sized) -> Iterator[None]:
        """Inside the block, logits are wrong by an amount that grows with `skip`, and stored states are wrong."""
        table, transitions = self.table, self.transitions
        if len(skip):
            self.table = table + 0.2 * len(skip) ** 0.5 * random_logits(*table.shape, seed=71)
            self.transitions, self._host = (transitions + (len(skip) > 6)) % len(table), None
        try:
            yield
        finally:
            self.table, self.transitions, self._host = table, transitions, None

    def _run(self, tokens: Tensor, parents: list[int], bounds: list[int], slots: Slots) -> Tensor:
        self.passes += 1
        if self.before_pass is not None:
            self.before_pass()
        transitions = self._host_transitions()
        states = [0] * tokens.shape[0]
        ids = tokens.tolist()
        for row, before in enumerate(self._committed_states(slots).tolist()):
            start = bounds[row]
            for node in range(start, bounds[row + 1]):
                parent = parents[node]
                state = int(before) if parent < 0 else states[start + parent]
                states[node] = transitions[state][ids[node]]
        found = torch.tensor(states, dtype=torch.int64)
        kv_stage(
            found.to(torch.float32).reshape(-1, 1, 1),
            tokens.to(torch.float32).reshape(-1, 1, 1),
            self.cache.keys[0],
            self.cache.values[0],
            slots.slots,
        )
        return found

    def _committed_states(self, slots: Slots) -> Tensor:
        newest = (slots.lengths.long() - 1).clamp(min=0)
        pages = slots.page_table.gather(1, (newest // self.cache.page_size)[:, None]).squeeze(1).long()
        stored = self.cache.keys[0][pages, newest % self.cache.page_size].reshape(-1)
        return torch.where(slots.lengths > 0, stored, 0.0)

    def _host_transitions(self) -> list[list[int]]:
        if getattr(self, "_host", None) is None:
            self._host = self.transitions.tolist()
        return self._host


def scripted(script: Sequence[int], vocab: int, **shape: int) -> AutomatonTarget:
    """Returns a target whose greedy token at absolute position i is script[i], after any text."""
    states = len(script) + 1
    logits = torch.zeros(states, vocab)
    logits[0, 0] = 1.0
    for position, token in enumerate(script):
        logits[position, token] = 8.0
    counting = torch.arange(1, states + 1).clamp(max=states - 1)[:, None].expand(states, vocab).contiguous()
    return AutomatonTarget(logits, counting, **shape)
