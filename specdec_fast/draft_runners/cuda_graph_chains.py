"""Chains of a draft model in CUDA-graph steps: K passes over its cache, whose lengths are on the device.

The first pass feeds one or two committed tokens per row: the root, and before it the last drafted token if all were
accepted. Tests: tests/engine/cuda_graph/test_step_program.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_fast.core.cuda_graph_packing import pack_nodes
from specdec_fast.draft_runners.draft_chain_runner import DraftChainRunner
from specdec_fast.interfaces import Acceptance, CudaGraphRows, CudaGraphTrees, StateView, TargetOutput


class CudaGraphChains:
    """Proposes chains of a draft model in CUDA-graph steps (`specdec_fast.interfaces.CudaGraphProposals`).

    Args:
        runner: Rows of the draft model.
        greedy: Pick the likeliest tokens; otherwise pick with the noise of rule `replay`.
    """

    aux_hidden_states: tuple[str, ...] = ()

    def __init__(self, runner: DraftChainRunner, greedy: bool) -> None:
        self.runner, self.model, self.greedy = runner, runner.model, greedy

    def enter(self, view: StateView, rows: Sequence[int]) -> None:
        """Feeds the committed tokens that the draft model has not stored yet."""
        tokens = [view.tokens(row) for row in rows]
        if rows:
            self.runner.catch_up(list(rows), tokens)

    def reserve(self, row: int, length: int) -> bool:
        """Reserves pages of the draft model."""
        return self.runner.reserve(row, length)

    def propose(self, batch: CudaGraphRows) -> CudaGraphTrees:
        """Runs one pass per level; the first one also feeds tokens that are not stored yet."""
        cache, index = self.model.cache, batch.rows.long()
        stored = torch.minimum(cache.lengths[index], batch.lengths - 1).clamp(min=0)
        cache.rollback(batch.rows, stored)
        drafting = batch.drafts > 0
        packing = pack_nodes(torch.where(drafting, (batch.lengths - stored).clamp(max=2), 0), 2)
        at = (stored[packing.row_of] + packing.place).clamp(0, batch.tokens.shape[1] - 1)
        fed = batch.tokens[index[packing.row_of], at.long()]
        picked: list[Tensor] = []
        largest: list[Tensor] = []  # largest logits: not finite for NaN, +inf and all -inf
        for level in range(batch.num_draft_tokens):
            if level:
                packing = pack_nodes((batch.drafts > level).to(torch.int32), 1)
                fed = picked[-1][packing.row_of]
            known = packing.inside & (fed < self.model.vocab_size)
            scored = self.model.extend(batch.rows, torch.where(known, fed, 0), packing.offsets, logits=packing.last)
            logits = self.runner.mask_logits(scored.logits)
            largest.append(logits.amax(1))
            positions = batch.lengths + level
            picked.append(logits.argmax(1) if self.greedy else batch.sampling.sample_replay(logits, positions))
        # a chain ends before a token without a distribution; a row without any draft is counted as a fault
        sound = torch.isfinite(torch.stack(largest, 1)).to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)
        return CudaGraphTrees(torch.stack(picked, 1), None, torch.minimum(batch.drafts, sound), len(picked))

    def observe(self, batch: CudaGraphRows, acceptance: Acceptance, output: TargetOutput) -> None:
        """Drops rejected tokens from the draft model's cache."""
        cache, known = self.model.cache, batch.lengths + acceptance.num_accepted
        cache.rollback(batch.rows, torch.minimum(cache.lengths[batch.rows.long()], known))

    def leave(self, view: StateView, rows: Sequence[int]) -> None:
        """Notes on the host how many tokens the draft model has stored."""
        for row in rows:  # a failed step may have drafted tokens beyond the text
            self.runner.leave_cuda_graph(row, min(int(self.model.cache.lengths[row]), view.length(row)))
