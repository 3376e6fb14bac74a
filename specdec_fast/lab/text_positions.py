"""Positions of real texts that went through verification, with the distributions that stood there.

An engine runs each prompt with its rule wrapped in a recorder. Kept are the first speculated position of a text, the
first one after a rejection and the first bonus token, each with the target's distribution from the packed pass that
verified it, the draft's distribution, and how far the target's row is from that of a plain forward of the whole
prefix, without our cache or attention.
Places do not depend on the seed of the draws: runs with other seeds draw at the same ones.
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
from specdec_fast.engine.request import Prompt
from specdec_fast.interfaces import Acceptance, Rng, Rule
from specdec_fast.lab.draft_logits_oracle import PlainDraft, plain_draft, plain_output
from specdec_fast.lab.rational_oracle import dist_of_logits
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import TreePlan, distribution_stats

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.06, torch.bfloat16: 0.5}
"""How much a logit near 16 may be off by other orders of adding: some units in its last place."""
KINDS = ("first speculated", "after a rejection", "bonus")
MOST_RUNS = 12
FIRST_SEED = 2**62
"""First seed of the texts that show places. Draws begin at seed << 40, below it, so no uniform is used twice."""


@dataclass(frozen=True, slots=True)
class Place:
    """One position. p, q: packed distributions of one row each, and base, draft: the same in float64 [V], from the
    logits of the packed pass that verified and of a plain forward of the draft; row_error: how far a logit of the
    packed row is from that of a plain forward of the target; allowed: up to where that is rounding; tokens: the prefix.
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
        """Whether the packed row is the target's."""
        return self.row_error <= self.allowed

    @property
    def name(self) -> str:
        return f"{self.prompt}/{self.kind}"


@dataclass(slots=True)
class _Step:
    """accepted: the drafted tokens that were kept; drafted: whether there were any; complete: nothing was refused."""

    position: int
    accepted: list[int]
    drafted: bool
    complete: bool
    root: TokenDistributions
    last: TokenDistributions


class Recorder:
    """A rule that does what another does and keeps every step of a batch of one row."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.steps: list[_Step] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def __call__(self, draft: Draft, plan: TreePlan, target_dists: TokenDistributions, rng: Rng) -> Acceptance:
        answer = self._rule(draft, plan, target_dists, rng)
        path = [node for node in answer.path[0].tolist() if node >= 0]
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
        return answer


def _copy(dists: TokenDistributions, rows: Tensor) -> TokenDistributions:
    own = dists.select(rows.to(dists.logits.device))
    mass = None if own.mass is None else own.mass.cpu().clone()
    inv_t, lse, cut, tie_id = (part.cpu().clone() for part in own.stats)
    return TokenDistributions(own.effective_logits().cpu().clone(), inv_t, lse, cut, tie_id, mass=mass)


@dataclass(slots=True)
class Placed:
    """What was found, and what was not, in words."""

    places: list[Place] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def find_places(engine: Engine, prompts: Sequence[tuple[str, Prompt]], params: SamplingParams) -> Placed:
    """The three kinds of places for every (name, text) of `prompts`.

    A prompt is run with several seeds, always the same, until all kinds have occurred; a kind that never does (a draft
    that is always or never right) is reported, not invented.
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
    """Fill in the kinds that the newest step shows."""
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
    prefix, p = hit
    settings = (params.temperature, params.top_k, params.top_p, params.min_p)
    target: Any = engine.target
    packed, plain = p.logits[0].double(), plain_logits(target, prefix).double()
    # logits, not probabilities: of these most are small, whatever the text
    off = torch.where(packed == plain, 0.0, packed - plain).abs().max()
    allowed = ROUNDING[target.model.dtype] * max(1.0, float(plain[plain.isfinite()].abs().max()) / 16)
    base = dist_of_logits(packed.numpy(), *settings)
    q_logits = dist_after(prefix)[None]
    inv_t, lse, cut, tie_id, mass = distribution_stats(q_logits, *_packed(settings), masses=True)
    q = TokenDistributions(q_logits, inv_t, lse, cut, tie_id, mass=mass)
    draft = dist_of_logits(q_logits[0].double().numpy(), *settings)
    return Place(name, kind, tuple(prefix), p, q, base, draft, float(off), allowed)


def _packed(settings: tuple[float, int, float, float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    temperature, top_k, top_p, min_p = settings
    return (
        torch.tensor([temperature], dtype=torch.float32),
        torch.tensor([top_k], dtype=torch.int32),
        torch.tensor([top_p], dtype=torch.float32),
        torch.tensor([min_p], dtype=torch.float32),
    )


def plain_logits(target: Any, tokens: Sequence[int]) -> Tensor:
    """Logits float32 [V] after `tokens`, from the model's own attention over the whole text, without our cache."""
    return plain_output(target, tokens)[0]
