"""One captured step: propose, plan, score, verify, commit and append as a program over tensors that stay in place.

On a GPU the program is captured once per capacity as a CUDA graph and replayed; elsewhere the same callable is run,
which is how its text and its safety are tested. Nothing in it asks the device for a number, and no shape depends on
data: rows without nodes and nodes without a row take up what is not used. Tests: tests/engine/test_graph_step.py,
tests/engine/test_capture_safety.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_fast.draft import Draft
from specdec_fast.interfaces import Acceptance, CapturedProposals, CapturedRows, Rng, Rule, Target
from specdec_fast.laws import Laws
from specdec_fast.packing import pack
from specdec_fast.sampling import process
from specdec_fast.state import DecodeState
from specdec_kernels import tree_plan


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a program is made for. rows: requests; nodes: of each, root included; all_greedy: every row is at T = 0."""

    rows: int
    nodes: int
    all_greedy: bool


@dataclass(frozen=True, slots=True)
class Emission:
    """What a step gave one row: accepted and next tokens, how many were accepted and drafted, and the place of the path
    at which the target had no law (None: everywhere).
    """

    tokens: list[int]
    accepted: int
    drafted: int
    broken: int | None


class StepProgram:
    """The step of a capacity, as a callable without arguments.

    Inputs, written by the host between calls: rows int32 [B], all different; live bool [B], false for places without a
    request; most int32 [B], draft nodes that a row may have. Output: results int64 [B, N + 3], see `read`.
    """

    def __init__(
        self, capacity: Capacity, target: Target, proposals: CapturedProposals | None, rule: Rule, state: DecodeState
    ) -> None:
        self.capacity, self.target, self.proposals = capacity, target, proposals
        self.rule, self.state = rule, state
        count, device = capacity.rows, state.device
        self.rows = torch.arange(count, dtype=torch.int32, device=device)
        self.live = torch.zeros(count, dtype=torch.bool, device=device)
        self.most = torch.zeros(count, dtype=torch.int32, device=device)
        self.results = torch.zeros(count, capacity.nodes + 3, dtype=torch.int64, device=device)

    def __call__(self) -> None:
        state, nodes, index = self.state, self.capacity.nodes, self.rows.long()
        lengths, limits = state.lengths[index], state.limits[index]
        goes_on = self.live & ~state.done[index]
        drafts = torch.where(goes_on, torch.minimum(self.most, limits - lengths - 1).clamp(0, nodes - 1), 0)
        sampling = state.device_sampling(index, self.capacity.all_greedy)
        roots = (lengths - 1).clamp(min=0)
        chains = state.device_tokens[index, roots.long()][:, None]
        batch = CapturedRows(self.rows, lengths, drafts, state.device_tokens, sampling, nodes - 1)
        if self.proposals is not None and nodes > 1:
            chains = torch.cat([chains, self.proposals.propose(batch)], 1)
        draft = self._draft(chains, torch.where(goes_on, drafts + 1, 0))
        plan = tree_plan(draft.parents, draft.offsets, nodes)
        output, slots = self.target.score(draft, plan)
        assert output.logits is not None
        rng = Rng(sampling.seeds, roots)
        laws = process(draft, plan, output.logits, sampling, roots, whole=True)
        acceptance = self.rule(draft, plan, laws, rng)
        self.target.cache.commit(self.rows, slots, acceptance.path, acceptance.num_accepted)
        self._append(index, draft, laws, acceptance, goes_on, drafts)
        if self.proposals is not None and nodes > 1:
            self.proposals.observe(batch, acceptance.num_accepted)

    def _draft(self, chains: Tensor, counts: Tensor) -> Draft:
        """Chains [B, N] as a packed draft; counts int32 [B], the nodes of each that are there."""
        rows, nodes = chains.shape
        packing = pack(counts, nodes)
        tokens = chains[packing.row_of, packing.place.clamp(max=nodes - 1).long()]
        nothing = torch.full_like(packing.place, -1)
        return Draft(
            rows=self.rows,
            tokens=torch.where(packing.inside, tokens, 0),
            parents=torch.where(packing.inside, packing.place - 1, nothing),
            offsets=packing.offsets,
            drawn=torch.zeros_like(packing.place, dtype=torch.int8),
            law_row=nothing,
            row_of=packing.row_of,
            counts=(nodes,) * rows,  # capacities: the host does not know more
            max_depth=nodes - 1,
            is_chain=True,
        )

    def _append(
        self, index: Tensor, draft: Draft, laws: Laws, acceptance: Acceptance, goes_on: Tensor, drafts: Tensor
    ) -> None:
        path, accepted = acceptance.path, acceptance.num_accepted
        following = path[:, 1:].clamp(min=0).long()
        emitted = torch.cat([draft.tokens[following], acceptance.next_token[:, None]], 1)
        place = torch.arange(path.shape[1], dtype=torch.int32, device=path.device)
        emitted = torch.where(place == accepted[:, None], acceptance.next_token[:, None], emitted)
        lawless = (path >= 0) & torch.isnan(laws.lse)[path.clamp(min=0).long()]
        broken = torch.where(lawless, place, path.shape[1]).amin(1)  # the first place of the path without a law
        counts = torch.where(goes_on, torch.minimum(accepted + 1, broken), 0)
        self.state.advance(index, emitted, counts)
        told = torch.stack([torch.where(goes_on, accepted + 1, 0), drafts, broken], 1)
        self.results.copy_(torch.cat([emitted, told], 1))

    @staticmethod
    def read(results: Tensor) -> list[Emission | None]:
        """Results as the host sees them: per place what it was given, None for places where nothing happened."""
        found: list[Emission | None] = []
        for *tokens, count, drafted, broken in results.tolist():
            sound = None if broken == len(tokens) else broken
            found.append(Emission(tokens[:count], count - 1, drafted, sound) if count else None)
        return found
