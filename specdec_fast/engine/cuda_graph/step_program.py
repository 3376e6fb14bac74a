"""One captured step: propose, plan, score, verify, commit and append as a program over tensors that stay in place.

On a GPU the program is captured once per capacity as a CUDA graph and replayed; elsewhere the same callable is run,
which is how its text and its safety are tested. Nothing in it asks the device for a number, and no shape depends on
data: rows without nodes and nodes without a row take up what is not used. Tests:
tests/engine/cuda_graph/test_step_program.py, tests/engine/cuda_graph/test_capture_safety.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_fast.core.device_packing import build_packed_draft, pack_nodes
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Acceptance, CudaGraphProposals, CudaGraphRows, CudaGraphTrees, Rng, Rule, Target
from specdec_fast.sampling.target_distributions import target_distributions
from specdec_kernels import TreePlan, tree_plan


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a program is made for. rows: requests; nodes: of each, root included; all_greedy: every row is at T = 0."""

    rows: int
    nodes: int
    all_greedy: bool


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave one row: accepted and next tokens, how many were accepted and drafted, whether nothing drafted
    was left behind what was accepted, and the place of the path at which the target had no distribution (None:
    everywhere).
    """

    tokens: list[int]
    accepted: int
    drafted: int
    complete: bool
    broken: int | None


class StepProgram:
    """The step of a capacity, as a callable without arguments.

    Inputs, written by the host between calls: rows int32 [B], all different; live bool [B], false for places without a
    request; most int32 [B], draft nodes that a row may have. Output: results int64 [B, N + 4], see `read`.
    """

    def __init__(
        self, capacity: Capacity, target: Target, proposals: CudaGraphProposals | None, rule: Rule, state: DecodeState
    ) -> None:
        self.capacity, self.target, self.proposals = capacity, target, proposals
        self.rule, self.state = rule, state
        count, device = capacity.rows, state.device
        self.rows = torch.arange(count, dtype=torch.int32, device=device)
        self.live = torch.zeros(count, dtype=torch.bool, device=device)
        self.max_draft_nodes = torch.zeros(count, dtype=torch.int32, device=device)
        self.results = torch.zeros(count, capacity.nodes + 4, dtype=torch.int64, device=device)

    def __call__(self) -> None:
        state, nodes, index = self.state, self.capacity.nodes, self.rows.long()
        lengths, limits = state.lengths[index], state.limits[index]
        goes_on = self.live & ~state.done[index]
        drafts = torch.where(goes_on, torch.minimum(self.max_draft_nodes, limits - lengths - 1).clamp(0, nodes - 1), 0)
        sampling = state.device_sampling(index, self.capacity.all_greedy)
        roots = (lengths - 1).clamp(min=0)
        batch = CudaGraphRows(self.rows, lengths, drafts, state.device_tokens, sampling, nodes - 1)
        proposals = self.proposals if nodes > 1 else None
        trees = None if proposals is None else proposals.propose(batch)
        drafted = torch.zeros_like(drafts) if trees is None else torch.where(goes_on, trees.counts, 0)
        draft = self._draft(state.device_tokens[index, roots.long()], trees, torch.where(goes_on, drafted + 1, 0))
        plan = tree_plan(draft.parents, draft.offsets, draft.counts[0])
        output, slots = self.target.score(draft, plan, () if proposals is None else proposals.aux_hidden_states)
        assert output.logits is not None
        rng = Rng(sampling.seeds, roots)
        dists = target_distributions(draft, plan, output.logits, sampling, roots, whole=True)
        acceptance = self.rule(draft, plan, dists, rng)
        self.target.cache.commit(self.rows, slots, acceptance.path, acceptance.num_accepted)
        self._append(index, draft, plan, dists, acceptance, goes_on, drafted)
        if proposals is not None:
            proposals.observe(batch, acceptance, output)

    def _draft(self, roots: Tensor, trees: CudaGraphTrees | None, counts: Tensor) -> Draft:
        """Roots int64 [B] and what is behind them as a packed draft; counts int32 [B], the nodes that are there."""
        tokens = roots[:, None] if trees is None else torch.cat([roots[:, None], trees.tokens], 1)
        nodes = tokens.shape[1]
        packing = pack_nodes(counts, nodes)
        at = packing.row_of, packing.place.clamp(max=nodes - 1).long()
        parents = packing.place - 1
        if trees is not None and trees.parents is not None:
            parents = pad(trees.parents, (1, 0), value=-1)[at]
        is_chain = trees is None or trees.parents is None
        depth = 0 if trees is None else trees.depth
        return build_packed_draft(self.rows, packing, tokens[at], parents, depth=depth, is_chain=is_chain)

    def _append(
        self,
        index: Tensor,
        draft: Draft,
        plan: TreePlan,
        dists: TokenDistributions,
        acceptance: Acceptance,
        goes_on: Tensor,
        drafted: Tensor,
    ) -> None:
        path, accepted, nodes = acceptance.path, acceptance.num_accepted, self.capacity.nodes
        following = path[:, 1:].clamp(min=0).long()
        emitted = torch.cat([draft.tokens[following], acceptance.next_token[:, None]], 1)
        place = torch.arange(path.shape[1], dtype=torch.int32, device=path.device)
        emitted = torch.where(place == accepted[:, None], acceptance.next_token[:, None], emitted)
        lawless = (path >= 0) & torch.isnan(dists.lse)[path.clamp(min=0).long()]
        broken = torch.where(lawless, place, nodes).amin(1)  # the first place of the path without a distribution
        last = path.gather(1, accepted[:, None].long()).squeeze(1).clamp(min=0).long()
        counts = torch.where(goes_on, torch.minimum(accepted + 1, broken), 0)
        self.state.advance(index, emitted, counts)
        complete = (plan.first_child[last] < 0).int()
        told = torch.stack([torch.where(goes_on, accepted + 1, 0), drafted, complete, broken], 1)
        self.results.copy_(torch.cat([pad(emitted, (0, nodes - path.shape[1])), told], 1))

    @staticmethod
    def read(results: Tensor) -> list[StepOutput | None]:
        """Results as the host sees them: per place what it was given, None for places where nothing happened."""
        found: list[StepOutput | None] = []
        for *tokens, count, drafted, complete, broken in results.tolist():
            sound = None if broken == len(tokens) else broken
            found.append(StepOutput(tokens[:count], count - 1, drafted, bool(complete), sound) if count else None)
        return found
