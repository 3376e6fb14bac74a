"""Rules with a planted mistake, for tests that must see them, and places with invented laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_fast.draft import Draft
from specdec_fast.interfaces import Acceptance, Rng, Rule
from specdec_fast.lab.agreement import law_row
from specdec_fast.lab.oracle import law_of_logits
from specdec_fast.lab.places import Place
from specdec_fast.laws import Laws
from specdec_kernels import TreePlan


class Planted:
    """A rule whose thresholds, residuals, coins or answers pass through functions that may spoil them."""

    def __init__(
        self,
        rule: Rule,
        *,
        threshold: Callable[[Tensor], Tensor] = lambda found: found,
        residual: Callable[[Tensor, Laws], Tensor] = lambda found, laws: found,
        coins: Callable[[Tensor], Tensor] = lambda found: found,
        rng: Callable[[Rng], Rng] = lambda found: found,
        answer: Callable[[Acceptance, Draft, Laws, Rng], Acceptance] = lambda found, draft, laws, rng: found,
    ) -> None:
        self.rule, self.spoil_threshold, self.spoil_residual = rule, threshold, residual
        self.spoil_coins, self.spoil_rng, self.spoil_answer = coins, rng, answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def __call__(
        self, draft: Draft, plan: TreePlan, target_laws: Laws, rng: Rng, uniforms: Tensor | None = None
    ) -> Acceptance:
        more = {} if uniforms is None else {"uniforms": self.spoil_coins(uniforms)}
        found = self.rule(draft, plan, target_laws, self.spoil_rng(rng), **more)
        return self.spoil_answer(found, draft, target_laws, rng)

    def thresholds(self, draft: Draft, plan: TreePlan, target_laws: Laws) -> tuple[Tensor, Tensor]:
        threshold, residual = self.rule.thresholds(draft, plan, target_laws)
        return self.spoil_threshold(threshold), self.spoil_residual(residual, target_laws)


def place(vocab: int = 60, seed: int = 0, noise: float = 1.0, masked: int = 0) -> Place:
    """A place whose laws are random; `masked` tokens have no probability in the target's."""
    source = torch.Generator().manual_seed(seed)
    p = torch.randn(1, vocab, generator=source) * 1.5
    q = p + noise * torch.randn(1, vocab, generator=source)
    p[:, :masked] = float("-inf")
    base, draft = (law_of_logits(logits[0].double().numpy(), 1.0) for logits in (p, q))
    return Place(f"invented {seed}", "first speculated", (1, 2, 3), law_row(p), law_row(q), base, draft, 0.0)
