"""Estimates the accepted tokens of each way to draft on sample requests, for the choice of rule `best`.

The sample runs before the engine exists, with seeds of its own. So no uniform of the sample is used again, and the rule
that verifies a text depends on nothing that is sampled for it. Tests: tests/tune/test_rule_selection.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec_fast.adaptive.budget import BudgetPolicy
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.engine.engine import Engine
from specdec_fast.engine.prompts import Prompt
from specdec_fast.interfaces import Acceptance, Drafter, Needs, Rng, Target
from specdec_fast.rules import get_rule
from specdec_fast.rules.best import RULE
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import TreePlan

MOST_REQUESTS = 4
MOST_TOKENS = 24
"""New tokens of each sample text. Some twenty drafts take little time; rule `best` counts with their noise."""
FIRST_SEED = 2**61
"""Seed of the first sample text. Requests with smaller seeds share no uniform with the sample."""


class _EstimatingRule:
    """Rule traversal, which verifies any draft, with an estimate of every draft before its verification."""

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
) -> dict[str, torch.Tensor]:
    """Computes `Best.estimate_accepted` for drafts of the first requests.

    Requests that an engine refuses are skipped. So are those at temperature 0, where all rules accept the same tokens.
    The drafter should not be used afterwards, since one that learns from finished texts has learnt from the sample. A
    store on disk keeps these texts.

    Args:
        target: The target, without rows.
        drafter: A drafter that samples its tokens (`Needs.dists`).
        requests: Prompts with their sampling parameters.
        tokenizer: The target's tokenizer, for prompts that are text.
        budget: Budget policy.

    Returns:
        Estimates of each way to draft, float64 [N] for N drafts. Empty if no draft was made.
    """
    rule = _EstimatingRule(drafter.needs)
    engine = Engine(target, drafter, rule=rule, tokenizer=tokenizer, budget=budget)  # type: ignore[arg-type]
    for at, (prompt, params) in enumerate(requests[:MOST_REQUESTS]):
        if params.temperature > 0:
            few = min(params.max_new_tokens, MOST_TOKENS)
            try:
                engine.submit(prompt, replace(params, seed=FIRST_SEED + at, max_new_tokens=few, min_new_tokens=0))
            except ValueError:
                continue
    while not engine.idle:
        engine.step()
    found = {way: torch.cat(parts) for way, parts in rule.found.items()}
    return {way: values for way, values in found.items() if len(values)}
