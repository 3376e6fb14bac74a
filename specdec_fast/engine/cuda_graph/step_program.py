"""The program of a CUDA-graph step: propose, plan, score, verify, commit and append over static tensors.

On a GPU the program is captured once per capacity and replayed. Elsewhere the same callable runs as it is, which is how
tests check its texts and its safety. It never reads from the device, and no shape depends on data: rows without nodes,
and nodes without a row, fill the unused places.

Tests: tests/engine/cuda_graph/test_step_program.py, tests/engine/cuda_graph/test_capture_safety.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_fast.core.cuda_graph_packing import build_packed_draft, pack_nodes
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Acceptance, CudaGraphProposals, CudaGraphRows, CudaGraphTrees, Rng, Rule, Target
from specdec_fast.sampling.target_distributions import target_distributions
from specdec_kernels import TreePlan, tree_plan


@dataclass(frozen=True, slots=True)
class Capacity:
    """The batch that a program can serve.

    Attributes:
        rows: Requests.
        nodes: Nodes of each request, root included.
        all_greedy: Whether all requests are at temperature 0.
    """

    rows: int
    nodes: int
    all_greedy: bool


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of a CUDA-graph step for one request.

    Attributes:
        tokens: Accepted tokens and the next token.
        num_accepted: Accepted draft tokens.
        num_draft_tokens: Draft tokens that were proposed.
        complete: Whether the accepted path ends at a leaf.
        first_invalid: First place of the path at which the target's distribution is NaN. None if there is none.
    """

    tokens: list[int]
    num_accepted: int
    num_draft_tokens: int
    complete: bool
    first_invalid: int | None


class StepProgram:
    """A step of one capacity, as a callable without arguments.

    Args:
        capacity: The batch that the program can serve.
        target: The model that scores drafts.
        proposals: Proposals of the drafter, or None for plain decoding.
        rule: The verification rule.
        state: The decode state whose device side the program reads and writes.

    Attributes:
        rows: Input. Row of each place in the batch, all different, int32 [B].
        live: Input. Whether a place has a request, bool [B].
        max_draft_nodes: Input. Draft nodes that each request may have, int32 [B].
        results: Output, int64 [B, N + 4]; `read` decodes it.
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
        """Runs the step. The inputs are `rows`, `live` and `max_draft_nodes`."""
        state, nodes, index = self.state, self.capacity.nodes, self.rows.long()
        lengths, limits = state.lengths[index], state.limits[index]
        active = self.live & ~state.done[index]
        drafts = torch.where(active, torch.minimum(self.max_draft_nodes, limits - lengths - 1).clamp(0, nodes - 1), 0)
        sampling = state.device_sampling(index, self.capacity.all_greedy)
        roots = (lengths - 1).clamp(min=0)
        batch = CudaGraphRows(self.rows, lengths, drafts, state.device_tokens, sampling, nodes - 1)
        proposals = self.proposals if nodes > 1 else None
        trees = None if proposals is None else proposals.propose(batch)
        drafted = torch.zeros_like(drafts) if trees is None else torch.where(active, trees.counts, 0)
        draft = self._draft(state.device_tokens[index, roots.long()], trees, torch.where(active, drafted + 1, 0))
        plan = tree_plan(draft.parents, draft.offsets, draft.counts[0])
        output, slots = self.target.score(draft, plan, () if proposals is None else proposals.aux_hidden_states)
        assert output.logits is not None
        rng = Rng(sampling.seeds, roots)
        dists = target_distributions(draft, plan, output.logits, sampling, roots, whole=True)
        acceptance = self.rule(draft, plan, dists, rng)
        self.target.cache.commit(self.rows, slots, acceptance.path, acceptance.num_accepted)
        self._append(index, draft, plan, dists, acceptance, active, drafted)
        if proposals is not None:
            proposals.observe(batch, acceptance, output)

    def _draft(self, roots: Tensor, trees: CudaGraphTrees | None, counts: Tensor) -> Draft:
        """Packs roots, int64 [B], and the trees below them into a draft. `counts` are the nodes of each, int32 [B]."""
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
        active: Tensor,
        drafted: Tensor,
    ) -> None:
        """Appends accepted and next tokens to the state, and writes the results."""
        path, accepted, nodes = acceptance.path, acceptance.num_accepted, self.capacity.nodes
        following = path[:, 1:].clamp(min=0).long()
        emitted = torch.cat([draft.tokens[following], acceptance.next_token[:, None]], 1)
        place = torch.arange(path.shape[1], dtype=torch.int32, device=path.device)
        emitted = torch.where(place == accepted[:, None], acceptance.next_token[:, None], emitted)
        invalid = (path >= 0) & torch.isnan(dists.lse)[path.clamp(min=0).long()]
        first_invalid = torch.where(invalid, place, nodes).amin(1)
        last = path.gather(1, accepted[:, None].long()).squeeze(1).clamp(min=0).long()
        counts = torch.where(active, torch.minimum(accepted + 1, first_invalid), 0)
        self.state.advance(index, emitted, counts)
        complete = (plan.first_child[last] < 0).int()
        numbers = torch.stack([torch.where(active, accepted + 1, 0), drafted, complete, first_invalid], 1)
        self.results.copy_(torch.cat([pad(emitted, (0, nodes - path.shape[1])), numbers], 1))

    @staticmethod
    def read(results: Tensor) -> list[StepOutput | None]:
        """Decodes results on the host.

        Args:
            results: A copy of `results`, int64 [B, N + 4]: tokens, then the number of emitted tokens, the number of
                draft tokens, whether the path is complete, and the first invalid place.

        Returns:
            One output for each place, None for places that were not active.
        """
        outputs: list[StepOutput | None] = []
        for *tokens, count, drafted, complete, first_invalid in results.tolist():
            place = None if first_invalid == len(tokens) else first_invalid
            outputs.append(StepOutput(tokens[:count], count - 1, drafted, bool(complete), place) if count else None)
        return outputs
