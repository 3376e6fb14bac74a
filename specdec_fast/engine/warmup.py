"""Warm-up: compiles kernels and captures CUDA graphs before the first request.

A rehearsal runs the engine's own steps on free rows and pages. Its engine shares target, drafter and programs, and has
a queue, statistics and a budget of its own. Tests: tests/launch/test_warm.py, tests/engine/test_warmup.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specdec_fast.adaptive.budget import Fixed
from specdec_fast.core.draft import Draft
from specdec_fast.engine.cuda_graph.eligibility import CaptureFailures
from specdec_fast.engine.drafter_runner import DrafterRunner
from specdec_fast.engine.drafter_speed import DrafterSpeed
from specdec_fast.engine.prefill import Prefill
from specdec_fast.engine.prefix_sharing import PrefixSharing
from specdec_fast.engine.stats import Clock, RequestStats
from specdec_fast.interfaces import Budget, Drafter, Rng, StateView
from specdec_fast.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec_fast.engine.engine import Engine

log = logging.getLogger("specdec_fast")

KINDS = (
    SamplingParams(temperature=0, seed=0),
    SamplingParams(temperature=1.0, seed=0),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=0),
)
"""Sampling parameters for which steps launch different kernels."""
PROMPT_LENGTH = 3
"""Tokens of the prompts of most rehearsals."""


def warm(engine: Engine, capacities: Iterable[tuple[int, int]] | None) -> None:
    """Warms an engine. See `Engine.warm`, which calls it and holds the engine's lock."""
    pairs = _resolve_capacities(engine, capacities)
    allowed = [params for params in KINDS if engine.rule.why_not_sampling(params) is None]
    if not allowed:
        return
    with torch.inference_mode():
        engine._prepare_for_warmup()
        captured = _capture_programs(engine, pairs, {params.temperature == 0 for params in allowed})
        for rows in sorted({rows for rows, _ in pairs}):
            most = max(drafted for own, drafted in pairs if own == rows)
            for params in allowed:
                _rehearse(engine, [PROMPT_LENGTH] * rows, most, params, _decreasing_budgets(most), captured=False)
        most = max(drafted for _, drafted in pairs)
        for length in _prompt_lengths(engine, most):
            _rehearse(engine, [length], most, allowed[0], [min(most, 1)], captured=False)
        if captured:  # rows also enter and leave CUDA-graph steps
            rows = min(rows for rows, _ in pairs)
            most = max(drafted for own, drafted in pairs if own == rows)
            _rehearse(engine, [PROMPT_LENGTH] * rows, most, allowed[0], [most], captured=True)


def _resolve_capacities(engine: Engine, capacities: Iterable[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """The requested capacities, or the default ones. Raises ValueError for capacities that the engine cannot serve."""
    most = engine.state.max_rows
    if capacities is None:
        counts = sorted({min(1 << place, most) for place in range(most.bit_length() + 1)})
        return [(rows, drafted) for rows in counts for drafted in sorted({0, engine._drafter_runner.num_draft_tokens})]
    pairs = []
    for rows, drafted in capacities:
        if not (1 <= rows <= most and drafted >= 0):
            raise ValueError(
                f"capacities: got ({rows}, {drafted}); expected 1..{most} rows (max_rows of load), and 0 or more "
                "draft tokens of each"
            )
        pairs.append((int(rows), min(int(drafted), engine._cache.max_length) if engine.drafter is not None else 0))
    return pairs or [(1, 0)]


def _capture_programs(engine: Engine, pairs: list[tuple[int, int]], greedy: set[bool]) -> bool:
    """Captures programs if steps may run as CUDA graphs. Returns whether they do."""
    if engine._graph_ineligible_reasons or engine._failures.reason is not None:
        return False
    for rows, drafted in pairs:
        for all_greedy in sorted(greedy):
            try:
                engine._graph_runner.prepare(rows, drafted, all_greedy)
            except Exception as error:  # as in a step, serving continues in sync mode
                log.error("%s", engine._failures.record_failure(engine._graph_runner.capacity, error), exc_info=error)
                return False
    return True


def _decreasing_budgets(most: int) -> list[int]:
    """Draft tokens of the steps of a rehearsal, decreasing as towards the end of a text."""
    return [most, *(1 << place for place in reversed(range(most.bit_length())) if 1 << place < most), 0][: most + 1]


def _prompt_lengths(engine: Engine, most: int) -> list[int]:
    """Prompt lengths whose passes use all tile sizes up to a prefill chunk."""
    # Each is two more than a power of two: one token above it, and the root, which is not prefilled.
    longest = min(engine._prefill_chunk + 1, engine._cache.max_length - most - 2)
    powers = [1 << place for place in range(2, engine._prefill_chunk.bit_length())]
    return [power + 2 for power in powers if power + 2 <= longest]


def _rehearse(
    engine: Engine, lengths: Sequence[int], most: int, params: SamplingParams, budgets: list[int], captured: bool
) -> None:
    """Runs one step per budget with prompts of these lengths, or with fewer prompts if rows or pages are in use."""
    cache, new = engine._cache, sum(budgets) + len(budgets) + 1
    new = min(new, cache.max_length - max(lengths))
    pages = cache.pages_for(min(max(lengths) + new + most, cache.max_length))
    count = min(len(lengths), engine.state.num_free, cache.pages.num_free // pages)
    if not count or new < 1:
        return
    twin = _rehearsal_engine(engine, budgets, captured)
    twin._prefill_chunk = max(twin._prefill_chunk, sum(lengths))  # all rows take part in every step
    params = replace(params, max_new_tokens=new)
    with ExitStack() as ends:  # all of them, even if one raises
        for length in lengths[:count]:
            prompt = [place % engine.target.vocab_size for place in range(length)]
            ends.callback(twin.cancel, twin.submit(prompt, params, num_draft_tokens=most))
        for _ in budgets:
            twin.step()


class _ScheduledBudget(Fixed):
    """A budget with a fixed number of draft tokens for each step."""

    def __init__(self, budgets: Sequence[int]) -> None:
        self._left = list(budgets)

    def nodes(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        """Returns the draft tokens of the next step, at most `most` of each row."""
        count = self._left.pop(0) if self._left else 0
        return [min(each, count) for each in most]


class _PlaceholderDrafter:
    """Replaces a drafter that works on the host or learns from texts, with drafts of the same shapes."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.name, self.needs, self._vocab_size = drafter.name, drafter.needs, vocab_size
        self.num_draft_tokens: int = getattr(drafter, "num_draft_tokens", 0)

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: Any) -> None:
        """Does nothing."""

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        """Returns chains, or trees with two branches, of the first tokens of the vocabulary."""
        trees = []
        for row, count in zip(rows, budget.nodes):
            parents = [-1, *range(count)]
            if self.needs.topology == "tree" and count > 1:
                parents[2] = 0
            trees.append(([view.tokens(row)[-1], *(node % self._vocab_size for node in range(count))], parents))
        if self.needs.topology == "chain":
            return Draft.chains(rows, [tokens for tokens, _ in trees], device=view.device)
        return Draft.trees(rows, trees, device=view.device)

    def observe(self, view: StateView, draft: Draft, acceptance: Any, output: Any) -> None:
        """Does nothing."""

    def release(self, rows: Sequence[int]) -> None:
        """Does nothing."""


def _rehearsal_engine(engine: Engine, budgets: Sequence[int], captured: bool) -> Engine:
    """An engine that shares target, drafter, rows and programs, and has requests of its own."""
    twin = copy(engine)
    twin._running, twin._queue, twin._updated_handles = {}, deque(), []
    twin._abandoned = deque()
    twin._lockstep = engine._lockstep.for_other_requests()
    twin.stats, twin.seconds = RequestStats(), Clock().seconds
    twin._prefixes = PrefixSharing(engine.target, engine.needs, enabled=False)
    twin._prefill = Prefill(engine.target, twin._prefixes.aux_hidden_states, engine.state.device)
    twin.tokenizer, twin.eos_token_ids = None, ()
    drafter = engine.drafter
    if drafter is not None and (drafter.needs.host_tokens or drafter.needs.cross_request):
        drafter = _PlaceholderDrafter(drafter, engine.target.vocab_size)
    twin._drafter_runner = DrafterRunner(
        drafter, _ScheduledBudget(budgets), twin._running, engine.rule, engine.target.vocab_size
    )
    twin._drafter_speed = DrafterSpeed(None, engine._drafter_runner.budget)  # rehearsals are not compared
    twin._graph_runner = engine._graph_runner.with_separate_rows(twin._drafter_runner)
    twin._graph_ineligible_reasons = [] if captured else ["a rehearsal of sync steps"]
    twin._failures = engine._failures if captured else CaptureFailures()
    twin._claim_cache = lambda: None  # type: ignore[method-assign] # cache and rows are the engine's
    return twin
