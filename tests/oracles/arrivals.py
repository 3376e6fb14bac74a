"""Requests that arrive at random times, and their texts."""

from __future__ import annotations

import random
from typing import Any

from specdec_fast import Engine, SamplingParams

DISTS: list[dict[str, Any]] = [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}]


def requests(count: int, temperatures: tuple[float, ...], vocab: int = 9) -> list[tuple[list[int], SamplingParams]]:
    """Returns prompts of 1 to 11 tokens with parameters; the seed is the request's number."""
    source, made = random.Random(3), []
    for seed in range(count):
        prompt = [source.randrange(vocab) for _ in range(source.randrange(1, 12))]
        new, temperature = source.randrange(1, 25), source.choice(temperatures)
        made.append(
            (prompt, SamplingParams(temperature=temperature, seed=seed, max_new_tokens=new, **source.choice(DISTS)))
        )
    return made


def texts(engine: Engine, wanted: list[tuple[list[int], SamplingParams]], source: random.Random) -> list[Any]:
    """Runs requests that arrive at random times, with their own budgets. Returns tokens and finish reason of each."""
    waiting, handles = list(enumerate(wanted)), {}
    source.shuffle(waiting)
    while waiting or not engine.idle:
        while waiting and source.random() < 0.6:
            at, (prompt, params) = waiting.pop()
            budget = source.choice([None, 0, 1, 5]) if engine.drafter is not None else None
            handles[at] = engine.submit(prompt, params, num_draft_tokens=budget)
        engine.step()
        assert engine.why_not_graph() == [] or engine._graph_ineligible_reasons == ["step_mode is sync"]
    assert engine.target.cache.pages.num_used == 0  # type: ignore[attr-defined]
    return [(handles[at].tokens, handles[at].finish_reason) for at in range(len(wanted))]
