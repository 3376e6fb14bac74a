"""Replay: a draft token is accepted if the target itself samples it with the shared keyed noise.

This is sample-and-match ("target-only") verification with Gumbel noise keyed by seed, absolute position and token. The
text depends only on the seed: speculation, drafter, tree and batch do not change it. At temperature 0 this is greedy
verification. Tests: tests/rules/test_replay.py, tests/engine/test_replay.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec_fast.core.distributions import PendingDistributions, TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Rng, Rule
from specdec_kernels import TreePlan, exact_match_verify, replay_sample, replay_verify


def match_choices(draft: Draft, plan: TreePlan, choice: Tensor) -> Acceptance:
    """Accepts the path from the root on which every token is the target's choice.

    Args:
        draft: Packed trees of M nodes.
        plan: Depths, ancestors and links of the nodes.
        choice: The target's choice after each node, int64 [M].

    Returns:
        The accepted path and the next token of each request, with `choice`.
    """
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


def sample_and_match(draft: Draft, plan: TreePlan, dists: PendingDistributions, rng: Rng) -> Acceptance:
    """Samples the target's choices along the accepted path only, and accepts as `match_choices` does.

    Args:
        draft: Packed trees of M nodes.
        plan: Depths, ancestors and links of the nodes.
        dists: The target's pending distributions, M rows. They receive the statistics of the visited nodes.
        rng: Keys of the random numbers, [B].

    Returns:
        The accepted path and the next token of each request, without `node_choice`.
    """
    path, accepted, following, *stats = replay_verify(
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
    dists.set_stats(stats)
    return Acceptance(path, accepted, following)


@dataclass(frozen=True, slots=True)
class Replay(Rule):
    """Accepts the tokens that plain decoding with the same seed would emit: any tree, any temperature.

    Draft distributions are not used, so drafters may drop nodes and select tokens by any criterion.

    Source:
        Daliri, Musco, Suresh 2024 (coupling without communication), for the acceptance bound.
    """

    name: str = "replay"
    lossless: bool = True
    replays: bool = True
    uses_q: bool = False
    prefers: str = "coupled"

    def __call__(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng) -> Acceptance:
        """Accepts the longest path of tokens that the target samples itself."""
        dists = target_dists
        if isinstance(dists, PendingDistributions):
            return sample_and_match(draft, plan, dists, rng)
        positions = rng.positions.index_select(0, draft.row_of) + plan.depth + 1
        seeds = rng.seeds.index_select(0, draft.row_of)
        dist = (dists.logits, dists.inv_t, dists.cut, dists.tie_id)
        choice = replay_sample(*dist, seeds, positions, overlay=dists.overlay)
        return match_choices(draft, plan, choice)


RULE = Replay()
