"""Chains of a draft model in captured steps: K passes over its cache, whose lengths on the device say what is held.

The first pass feeds one or two committed tokens a row: the root, and before it the last drafted one where all were
accepted. Tests: tests/engine/cuda_graph/test_step_program.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.device_packing import pack_nodes
from specdec_fast.interfaces import Acceptance, CudaGraphRows, CudaGraphTrees, StateView, TargetOutput


@dataclass(eq=False)
class CudaGraphChains:
    """Chains of `model`, a target over a cache of its own.

    greedy: likeliest tokens, else those of the noise of replay; masked: its logits as tokens are picked from;
    catch_up: feeds rows what is new of their tokens; room: whether a row may hold so many; left: is told how much of
    its text a row holds that leaves.
    """

    model: Any
    greedy: bool
    masked: Callable[[Tensor | None], Tensor]
    catch_up: Callable[[list[int], list[Sequence[int]]], Tensor]
    room: Callable[[int, int], bool]
    left: Callable[[int, int], None]
    aux_hidden_states: tuple[str, ...] = ()

    def enter(self, view: StateView, rows: Sequence[int]) -> None:
        tokens = [view.tokens(row) for row in rows]
        if rows:
            self.catch_up(list(rows), tokens)

    def reserve(self, row: int, length: int) -> bool:
        return self.room(row, length)

    def propose(self, batch: CudaGraphRows) -> CudaGraphTrees:
        cache, index = self.model.cache, batch.rows.long()
        held = torch.minimum(cache.lengths[index], batch.lengths - 1).clamp(min=0)
        cache.rollback(batch.rows, held)
        drafting = batch.drafts > 0
        packing = pack_nodes(torch.where(drafting, (batch.lengths - held).clamp(max=2), 0), 2)
        at = (held[packing.row_of] + packing.place).clamp(0, batch.tokens.shape[1] - 1)
        fed = batch.tokens[index[packing.row_of], at.long()]
        chosen: list[Tensor] = []
        for level in range(batch.num_draft_tokens):
            if level:
                packing = pack_nodes((batch.drafts > level).to(torch.int32), 1)
                fed = chosen[-1][packing.row_of]
            known = packing.inside & (fed < self.model.vocab_size)
            scored = self.model.extend(batch.rows, torch.where(known, fed, 0), packing.offsets, logits=packing.last)
            logits = self.masked(scored.logits)
            positions = batch.lengths + level
            chosen.append(logits.argmax(1) if self.greedy else batch.sampling.sample_replay(logits, positions))
        return CudaGraphTrees(torch.stack(chosen, 1), None, batch.drafts, len(chosen))

    def observe(self, batch: CudaGraphRows, acceptance: Acceptance, output: TargetOutput) -> None:
        cache, known = self.model.cache, batch.lengths + acceptance.num_accepted
        cache.rollback(batch.rows, torch.minimum(cache.lengths[batch.rows.long()], known))

    def leave(self, view: StateView, rows: Sequence[int]) -> None:
        for row in rows:  # beyond the text is what a step that failed has drafted
            self.left(row, min(int(self.model.cache.lengths[row]), view.length(row)))
