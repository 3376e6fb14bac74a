"""Tree: ordered proposals on trees, tested one after another at every node (research literature: recursive rejection).

A node's children are tested in index order, each against the conditional law it was drawn from: SpecInfer's independent
siblings (Miao et al. 2024, algorithm 2), siblings without replacement (Jeon et al. 2024; Chen et al. 2024, Sequoia,
algorithm 2), point masses, and hybrid nodes (Hu et al. 2025); any mixture in one node. On chains this is rule token.
Tests: tests/rules/test_tree.py, tests/kernels/test_ordered_verify.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec_fast.draft import Draft
from specdec_fast.interfaces import Acceptance, Needs, Rng
from specdec_fast.laws import Laws
from specdec_fast.sampling import SamplingParams
from specdec_kernels import TreePlan, ordered_thresholds, ordered_verify


def proposals(draft: Draft, plan: TreePlan, target_laws: Laws) -> tuple[Any, ...]:
    """A draft and its laws as the operators on ordered proposals take them."""
    laws = draft.laws
    return (
        draft.tokens,
        draft.offsets,
        plan.first_child,
        plan.next_sibling,
        draft.drawn,
        draft.law_row,
        (target_laws.logits, *target_laws.stats),
        None if laws is None else (laws.logits, *laws.stats),
        None if laws is None else laws.token_ids,
        draft.scouts,
    )


@dataclass(frozen=True, slots=True)
class OrderedProposals:
    """A rule over one of the operators on ordered proposals: any tree, any proposal law, any temperature."""

    name: str
    verify: Callable[..., Any]
    weigh: Callable[..., Any]
    lossless: bool = True
    replays: bool = False
    uses_q: bool = True
    prefers: str = "drawn"
    from_leaves: bool = False

    def why_not(self, needs: Needs) -> str | None:
        return None

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        return None

    def __call__(
        self, draft: Draft, plan: TreePlan, target_laws: Laws, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        draft.refuse_dropped(self.name)
        path, accepted, following = self.verify(
            *proposals(draft, plan, target_laws),
            rng.seeds,
            rng.positions,
            uniforms=uniforms,
            max_depth=draft.max_depth,
            overlay=target_laws.overlay,
        )
        return Acceptance(path, accepted, following)

    def thresholds(self, draft: Draft, plan: TreePlan, target_laws: Laws) -> tuple[Tensor, Tensor]:
        """Accept thresholds [M] and residual weights [M, V], as the operator's *_thresholds defines them."""
        return self.weigh(*proposals(draft, plan, target_laws), overlay=target_laws.overlay)


RULE = OrderedProposals("tree", ordered_verify, ordered_thresholds)
