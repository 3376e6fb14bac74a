"""What the ways to draft are expected to bring, over a sample of the drafts at hand: for rule `best` to choose by.

A sample is made before an engine is, of texts with seeds of their own: no coin of it is tossed again, and what rule
verifies a text depends on nothing that is drawn for it. Tests: tests/tune/test_rule_selection.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec_fast.adaptive.budget import BudgetPolicy
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.engine.engine import Engine
from specdec_fast.engine.request import Prompt
from specdec_fast.interfaces import Acceptance, Drafter, Needs, Rng, Target
from specdec_fast.rules import get_rule
from specdec_fast.rules.best import RULE
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import TreePlan

MOST_REQUESTS = 4
MOST_TOKENS = 24
"""Of each text of a sample: some twenty drafts, few enough to be no burden and no forecast to the third digit."""
FIRST_SEED = 2**61
"""Of the texts of a sample. Requests with a seed of their own below it meet none of its coins."""


class _Weighing:
    """Rule traversal, which takes every draft, weighing each before it verifies it."""

    def __init__(self, needs: Needs) -> None:
        self._rule, self._needs = get_rule("traversal"), needs
        self.found: dict[str, list[torch.Tensor]] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._rule, name)

    def __call__(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng) -> Acceptance:
        drafted = torch.tensor(draft.counts) > 1
        for way, values in RULE.estimate_accepted(self._needs, draft, target_dists).items():
            self.found.setdefault(way, []).append(values[drafted])
        return self._rule(draft, plan, target_dists, rng)


def sample_ways(
    target: Target,
    drafter: Drafter,
    requests: Sequence[tuple[Prompt, SamplingParams]],
    tokenizer: object = None,
    budget: str | BudgetPolicy = "fixed",
) -> dict[str, float]:
    """Means of `Best.estimate_accepted` over the drafts of the first requests; empty if no draft is made.

    The drafter must draw its tokens (`Needs.dists`). Requests that an engine refuses are passed over, and so are
    those at temperature 0, where all rules accept the same. The drafter is used up: one that learns from finished texts
    has learnt from these (a store on disk keeps them).
    """
    weighing = _Weighing(drafter.needs)
    engine = Engine(target, drafter, rule=weighing, tokenizer=tokenizer, budget=budget)  # type: ignore[arg-type]
    for at, (prompt, params) in enumerate(requests[:MOST_REQUESTS]):
        if params.temperature > 0:
            few = min(params.max_new_tokens, MOST_TOKENS)
            try:
                engine.submit(prompt, replace(params, seed=FIRST_SEED + at, max_new_tokens=few, min_new_tokens=0))
            except ValueError:
                continue
    while not engine.idle:
        engine.step()
    found = {way: torch.cat(parts) for way, parts in weighing.found.items()}
    return {way: float(values.mean()) for way, values in found.items() if len(values)}
