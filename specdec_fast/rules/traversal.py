"""Traversal: leaf-to-root verification on trees (Weng et al. 2025, algorithm 1).

The coins of a node's descendants are looked at before its own, so that a path is kept whenever something below it can
be: at least as many accepted tokens as rule tree for the same draft. On chains it is block verification (Sun et al.
2025). Takes every proposal law, point masses and hybrid nodes included; the drawn child of a hybrid node should come
first. Tests: tests/rules/test_traversal.py, tests/kernels/test_traversal_verify.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec_fast.draft import Draft, Laws
from specdec_fast.interfaces import Acceptance, Needs, Rng
from specdec_fast.rules.tree import proposals
from specdec_fast.sampling import SamplingParams
from specdec_kernels import TreePlan, traversal_thresholds, traversal_verify


@dataclass(frozen=True, slots=True)
class Traversal:
    """Any tree, any proposal law, any temperature."""

    name: str = "traversal"
    lossless: bool = True
    replays: bool = False
    uses_q: bool = True
    prefers: str = "drawn"

    def why_not(self, needs: Needs) -> str | None:
        return None

    def why_not_sampling(self, params: SamplingParams) -> str | None:
        return None

    def __call__(
        self, draft: Draft, plan: TreePlan, target_laws: Laws, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        draft.refuse_dropped(self.name)
        path, accepted, following = traversal_verify(
            *proposals(draft, plan, target_laws),
            rng.seeds,
            rng.positions,
            uniforms=uniforms,
            max_depth=draft.max_depth,
        )
        return Acceptance(path, accepted, following)

    def thresholds(self, draft: Draft, plan: TreePlan, target_laws: Laws) -> tuple[Tensor, Tensor]:
        """Accept thresholds [M] and residual weights [M, V] (`traversal_thresholds`); nodes in post-order."""
        return traversal_thresholds(*proposals(draft, plan, target_laws))


RULE = Traversal()
