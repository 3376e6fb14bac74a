"""Replay: accept iff the drafted token is the one that the target itself draws with the shared keyed noise.

Sample-and-match (research literature: "target-only" verification) with Gumbel noise keyed by (seed, absolute position,
token): the text is a function of the seed alone, with or without speculation, for every drafter, tree and batch.
Daliri, Musco, Suresh 2024 (coupling without communication) for the acceptance bound. T = 0 is greedy.
Tests: tests/rules/test_replay.py, tests/engine/test_replay.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec_fast.core.distributions import PendingDistributions, TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import TreePlan, exact_match_verify, replay_sample, replay_verify


def walk(draft: Draft, plan: TreePlan, choice: Tensor) -> Acceptance:
    """Follow the target's choice from the root as far as the draft has it. choice: int64 [M]."""
    path, accepted, following = exact_match_verify(
        draft.tokens,
        draft.offsets,
        plan.first_child,
        plan.next_sibling,
        choice,
        draft.score_only,
        max_depth=draft.max_depth,
    )
    return Acceptance(path, accepted, following, choice)


def walk_logits(draft: Draft, plan: TreePlan, dists: PendingDistributions, rng: Rng) -> Acceptance:
    """The same where nobody wants choices beside the path: finds distributions and tokens of the nodes it comes to."""
    path, accepted, following, *found = replay_verify(
        draft.tokens,
        draft.offsets,
        plan.first_child,
        plan.next_sibling,
        draft.score_only,
        dists.logits,
        dists.sampling_args,
        rng.seeds,
        rng.positions,
        max_depth=draft.max_depth,
    )
    dists.set_stats(found)
    return Acceptance(path, accepted, following)


@dataclass(frozen=True, slots=True)
class Replay:
    """Any tree, any proposal distribution (q is not used), any temperature."""

    name: str = "replay"
    lossless: bool = True
    replays: bool = True
    uses_q: bool = False
    prefers: str = "coupled"

    def why_not(self, needs: Needs) -> str | None:
        return None

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        return None

    def __call__(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng) -> Acceptance:
        dists = target_dists
        if isinstance(dists, PendingDistributions):
            return walk_logits(draft, plan, dists, rng)
        positions = rng.positions.index_select(0, draft.row_of) + plan.depth + 1
        seeds = rng.seeds.index_select(0, draft.row_of)
        dist = (dists.logits, dists.inv_t, dists.cut, dists.tie_id)
        choice = replay_sample(*dist, seeds, positions, overlay=dists.overlay)
        return walk(draft, plan, choice)


RULE = Replay()
