"""Verified positions of real texts, with the target's and the draft's distribution at each of them.

An engine runs each prompt with a recorder around its rule. Three positions are kept: the first draft position of a
text, the first one after a rejection, and the first bonus token. The target's distribution comes from the packed pass
that verified the position. The draft's distribution comes from a plain forward pass. The packed logits are also
compared with a plain forward pass of the target over the whole prefix, without the project's cache and attention.
The positions do not depend on the seed of the draws.
Tests: tests/lab/test_run.py and tests/lab/test_draft_logits_oracle.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.engine.engine import Engine
from specdec_fast.engine.prompts import Prompt
from specdec_fast.interfaces import Acceptance, Rng, Rule
from specdec_fast.lab.draft_logits_oracle import PlainDraft, plain_draft, plain_output
from specdec_fast.lab.rational_oracle import dist_of_logits
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import TreePlan, distribution_stats

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.06, torch.bfloat16: 0.5}
"""Difference that another order of summation may cause in a logit near 16: some units in the last place."""
KINDS = ("first speculated", "after a rejection", "bonus")
MOST_RUNS = 12
"""Largest number of texts per prompt."""
FIRST_SEED = 2**62
"""First seed of the texts that show places. Draws begin at seed << 40, below it, so no uniform is used twice."""


@dataclass(frozen=True, slots=True)
class Place:
    """One verified position.

    Attributes:
        prompt: Name of the prompt.
        kind: One of KINDS.
        tokens: The prefix.
        p: The target's distribution from the packed pass, one row.
        q: The draft's distribution from a plain forward pass, one row.
        base: Probabilities of p, float64 [V].
        draft: Probabilities of q, float64 [V].
        row_error: Largest difference between logits of the packed pass and of a plain forward pass of the target.
        allowed: Largest `row_error` that rounding explains.
    """

    prompt: str
    kind: str
    tokens: tuple[int, ...]
    p: TokenDistributions
    q: TokenDistributions
    base: np.ndarray
    draft: np.ndarray
    row_error: float
    allowed: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the packed logits are those of the target, up to rounding."""
        return self.row_error <= self.allowed

    @property
    def name(self) -> str:
        """Prompt and kind."""
        return f"{self.prompt}/{self.kind}"


@dataclass(slots=True)
class _Step:
    """One recorded step.

    Attributes:
        position: Position of the root.
        accepted: Accepted draft tokens.
        drafted: Whether the draft had tokens.
        complete: Whether the path ends at a leaf.
        root: The target's distribution at the root.
        last: The target's distribution at the end of the path.
    """

    position: int
    accepted: list[int]
    drafted: bool
    complete: bool
    root: TokenDistributions
    last: TokenDistributions


class Recorder:
    """Wraps a rule and records every step of a batch with one row.

    Args:
        rule: The wrapped rule.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.steps: list[_Step] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def __call__(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng) -> Acceptance:
        """Verifies with the wrapped rule and records the step."""
        acceptance = self._rule(draft, plan, target_dists, rng)
        path = [node for node in acceptance.path[0].tolist() if node >= 0]
        at = torch.tensor
        self.steps.append(
            _Step(
                int(rng.positions[0]),
                draft.tokens[path[1:]].tolist(),
                draft.num_nodes > 1,
                path[-1] not in draft.parents.tolist(),
                _copy(target_dists, at([0])),
                _copy(target_dists, at([path[-1]])),
            )
        )
        return acceptance


def _copy(dists: TokenDistributions, rows: Tensor) -> TokenDistributions:
    """Copies rows of distributions to the CPU."""
    own = dists.select(rows.to(dists.logits.device))
    mass = None if own.mass is None else own.mass.cpu().clone()
    inv_t, lse, cut, tie_id = (part.cpu().clone() for part in own.stats)
    return TokenDistributions(own.effective_logits().cpu().clone(), inv_t, lse, cut, tie_id, mass=mass)


@dataclass(slots=True)
class Placed:
    """Result of `find_places`.

    Attributes:
        places: The positions that were found.
        missing: Messages about kinds that did not occur.
    """

    places: list[Place] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def find_places(engine: Engine, prompts: Sequence[tuple[str, Prompt]], params: SamplingParams) -> Placed:
    """Finds the three kinds of positions for every prompt.

    Each prompt runs with a fixed sequence of seeds until all kinds have occurred. A kind never occurs if drafts are
    always or never accepted; it is then reported as missing.

    Args:
        engine: An engine with a drafter.
        prompts: Names and prompts.
        params: Sampling parameters; the seed is replaced.

    Returns:
        The positions, and messages about missing kinds.

    Raises:
        Exception: The error of a request that failed.
    """
    found = Placed()
    dist_after = plain_draft(engine)
    rule, recorder = engine.rule, Recorder(engine.rule)
    engine.rule = recorder
    try:
        for name, text in prompts:
            wanted: dict[str, tuple[list[int], TokenDistributions] | None] = dict.fromkeys(KINDS)
            for run in range(MOST_RUNS):
                recorder.steps.clear()
                handle = engine.submit(text, replace(params, seed=FIRST_SEED + run))
                while not handle.finished and None in wanted.values():
                    engine.step()
                    if handle.error is not None:
                        raise handle.error
                    _note(recorder.steps, [*handle.prompt, *handle.tokens], wanted)
                engine.cancel(handle)
                if None not in wanted.values():
                    break
            for kind, hit in wanted.items():
                if hit is None:
                    found.missing.append(f"{name}: no position of the kind '{kind}' in {MOST_RUNS} texts")
                else:
                    found.places.append(_place(engine, dist_after, name, kind, hit, params))
    finally:
        engine.rule = rule
    return found


def _note(steps: list[_Step], text: list[int], wanted: dict[str, Any]) -> None:
    """Stores the kinds of positions that occur in the newest step."""
    step = steps[-1]
    if not step.drafted:
        return
    before = steps[-2] if len(steps) > 1 else None
    if before is None or not any(each.drafted for each in steps[:-1]):
        wanted["first speculated"] = wanted["first speculated"] or (text[: step.position + 1], step.root)
    elif not before.complete:
        wanted["after a rejection"] = wanted["after a rejection"] or (text[: step.position + 1], step.root)
    if step.complete:
        prefix = [*text[: step.position + 1], *step.accepted]
        wanted["bonus"] = wanted["bonus"] or (prefix, step.last)


def _place(
    engine: Engine,
    dist_after: PlainDraft,
    name: str,
    kind: str,
    hit: tuple[list[int], TokenDistributions],
    params: SamplingParams,
) -> Place:
    """Computes both distributions at a prefix, and the difference from a plain forward pass."""
    prefix, p = hit
    settings = (params.temperature, params.top_k, params.top_p, params.min_p)
    target: Any = engine.target
    packed, plain = p.logits[0].double(), plain_logits(target, prefix).double()
    # compare logits, because most probabilities are too small to differ
    error = torch.where(packed == plain, 0.0, packed - plain).abs().max()
    allowed = ROUNDING[target.model.dtype] * max(1.0, float(plain[plain.isfinite()].abs().max()) / 16)
    base = dist_of_logits(packed.numpy(), *settings)
    q_logits = dist_after(prefix)[None]
    inv_t, lse, cut, tie_id, mass = distribution_stats(q_logits, *_packed(settings), masses=True)
    q = TokenDistributions(q_logits, inv_t, lse, cut, tie_id, mass=mass)
    draft = dist_of_logits(q_logits[0].double().numpy(), *settings)
    return Place(name, kind, tuple(prefix), p, q, base, draft, float(error), allowed)


def _packed(settings: tuple[float, int, float, float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    temperature, top_k, top_p, min_p = settings
    return (
        torch.tensor([temperature], dtype=torch.float32),
        torch.tensor([top_k], dtype=torch.int32),
        torch.tensor([top_p], dtype=torch.float32),
        torch.tensor([min_p], dtype=torch.float32),
    )


def plain_logits(target: Any, tokens: Sequence[int]) -> Tensor:
    """Returns logits float32 [V] after a text, from the model's own attention over the whole text without a cache."""
    return plain_output(target, tokens)[0]
