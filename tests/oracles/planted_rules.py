"""Rules with a planted mistake, for tests that must see them, and places with invented distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Rng, Rule
from specdec_fast.lab.backend_agreement import dist_index
from specdec_fast.lab.rational_oracle import dist_of_logits
from specdec_fast.lab.text_positions import Place
from specdec_kernels import TreePlan


class Planted:
    """A rule whose thresholds, residuals, coins or answers pass through functions that may spoil them."""

    def __init__(
        self,
        rule: Rule,
        *,
        threshold: Callable[[Tensor], Tensor] = lambda found: found,
        residual: Callable[[Tensor, TokenDistributions], Tensor] = lambda found, dists: found,
        coins: Callable[[Tensor], Tensor] = lambda found: found,
        rng: Callable[[Rng], Rng] = lambda found: found,
        answer: Callable[[Acceptance, Draft, TokenDistributions, Rng], Acceptance] = lambda found, draft, dists, rng: (
            found
        ),
    ) -> None:
        self.rule, self.spoil_threshold, self.spoil_residual = rule, threshold, residual
        self.spoil_coins, self.spoil_rng, self.spoil_answer = coins, rng, answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def __call__(
        self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        more = {} if uniforms is None else {"uniforms": self.spoil_coins(uniforms)}
        found = self.rule(draft, plan, target_dists, self.spoil_rng(rng), **more)
        return self.spoil_answer(found, draft, target_dists, rng)

    def thresholds(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions) -> tuple[Tensor, Tensor]:
        threshold, residual = self.rule.thresholds(draft, plan, target_dists)
        return self.spoil_threshold(threshold), self.spoil_residual(residual, target_dists)


def place(vocab: int = 60, seed: int = 0, noise: float = 1.0, masked: int = 0) -> Place:
    """A place whose distributions are random; `masked` tokens have no probability in the target's."""
    source = torch.Generator().manual_seed(seed)
    p = torch.randn(1, vocab, generator=source) * 1.5
    q = p + noise * torch.randn(1, vocab, generator=source)
    p[:, :masked] = float("-inf")
    base, draft = (dist_of_logits(logits[0].double().numpy(), 1.0) for logits in (p, q))
    return Place(f"invented {seed}", "first speculated", (1, 2, 3), dist_index(p), dist_index(q), base, draft, 0.0)
