"""Rules with a planted mistake, which tests must detect, and text positions with random distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Rng, Rule
from specdec_fast.lab.backend_agreement import dists_of_logits
from specdec_fast.lab.rational_oracle import dist_of_logits
from specdec_fast.lab.text_positions import Place
from specdec_kernels import TreePlan


class AlteredRule:
    """A rule whose thresholds, residuals, uniforms, keys or results pass through functions that may alter them."""

    def __init__(
        self,
        rule: Rule,
        *,
        threshold: Callable[[Tensor], Tensor] = lambda found: found,
        residual: Callable[[Tensor, TokenDistributions], Tensor] = lambda found, dists: found,
        uniforms: Callable[[Tensor], Tensor] = lambda found: found,
        rng: Callable[[Rng], Rng] = lambda found: found,
        acceptance: Callable[
            [Acceptance, Draft, TokenDistributions, Rng], Acceptance
        ] = lambda found, draft, dists, rng: found,
    ) -> None:
        self.rule, self.alter_threshold, self.alter_residual = rule, threshold, residual
        self.alter_uniforms, self.alter_rng, self.alter_acceptance = uniforms, rng, acceptance

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        more = {} if uniforms is None else {"uniforms": self.alter_uniforms(uniforms)}
        found = self.rule(draft, plan, target_dists, self.alter_rng(rng), **more)
        return self.alter_acceptance(found, draft, target_dists, rng)

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        threshold, residual = self.rule.thresholds(draft, plan, target_dists)
        return self.alter_threshold(threshold), self.alter_residual(residual, target_dists)


def random_place(vocab: int = 60, seed: int = 0, noise: float = 1.0, masked: int = 0) -> Place:
    """A text position with random distributions; the first `masked` tokens have probability 0 under the target."""
    source = torch.Generator().manual_seed(seed)
    p = torch.randn(1, vocab, generator=source) * 1.5
    q = p + noise * torch.randn(1, vocab, generator=source)
    p[:, :masked] = float("-inf")
    base, draft = (dist_of_logits(logits[0].double().numpy(), 1.0) for logits in (p, q))
    dists = dists_of_logits(p), dists_of_logits(q)
    return Place(f"random {seed}", "first speculated", (1, 2, 3), *dists, base, draft, 0.0)
