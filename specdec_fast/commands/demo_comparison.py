"""Plain and speculative decoding of the same prompts, interleaved: the measurement behind `specdec demo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from specdec_fast.engine.engine import Engine
from specdec_fast.engine.stats import RequestStats
from specdec_fast.rules import get_rule
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels.random import replay_noise

if TYPE_CHECKING:
    from specdec_fast.commands.prompts import WorkItem
    from specdec_fast.engine.request import Handle


ABOVE_TAU = 1.0
"""Margin by which a speed-up may exceed tau. A step is no faster than a plain one, so tau bounds the speed-up."""

MOST_SPREAD = 2.0
"""Largest ratio between repeated measurements on a machine without other load."""


@dataclass(slots=True)
class Comparison:
    """One prompt at one temperature, decoded plainly and speculatively in every round.

    Args:
        item: The prompt.
        params: Sampling parameters of both requests.
        plain: The request of the first round without speculation.
        speculative: The request of the first round with speculation.
        plain_seconds: Seconds of the plain request in each round.
        speculative_seconds: Seconds of the speculative request in each round.
        plain_first: Whether the latest round began with plain decoding.
        gap: Score of the plain token minus that of the other token at the first difference; None without one.
    """

    item: WorkItem
    params: SamplingParams
    plain: Handle
    speculative: Handle
    plain_seconds: list[float]
    speculative_seconds: list[float]
    plain_first: bool = True
    gap: float | None = None

    @property
    def temperature(self) -> float:
        """Sampling temperature."""
        return self.params.temperature

    @property
    def identical(self) -> bool:
        """Whether both texts have the same tokens."""
        return self.plain.tokens == self.speculative.tokens

    @property
    def first_difference(self) -> int | None:
        """Index of the first generated token that differs, or None."""
        if self.identical:
            return None
        return first_difference(self.plain.tokens, self.speculative.tokens)

    @property
    def ratios(self) -> list[float]:
        """Speed-up of each round."""
        tokens = len(self.speculative.tokens) / len(self.plain.tokens)
        return [tokens * a / b for a, b in zip(self.plain_seconds, self.speculative_seconds, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Returns the comparison as JSON values."""
        return {
            "id": self.item.id,
            "kind": self.item.kind,
            "temperature": self.temperature,
            "seed": self.speculative.params.seed,
            "new_tokens": len(self.speculative.tokens),
            **summary([self]),
            "first_difference": self.first_difference,
            "score_gap_at_difference": self.gap,
            "alpha_per_position": self.speculative.stats.alpha_per_position,
            "finish_reason": self.speculative.finish_reason,
            "prompt": self.item.prompt,
            "text": self.speculative.text,
            "plain_text": self.plain.text,
        }


def spread(values: Sequence[float]) -> float:
    """Returns the ratio of the largest to the smallest value; of eight or more, drops an eighth at each end."""
    ordered = sorted(values)
    cut = _num_dropped(ordered)
    return ordered[-1 - cut] / ordered[cut]


def _num_dropped(values: Sequence[float]) -> int:
    """Returns how many values `spread` drops at each end."""
    return len(values) // 8


def _measurements(texts: int, rounds: int) -> str:
    """Describes the speed-ups that `doubt` compares."""
    if texts == 1:
        return f"the speed-ups of {rounds} rounds"
    if rounds == 1:
        return f"the speed-ups of the {texts} texts, each divided by its tau,"
    return f"the speed-ups of the {texts} texts in {rounds} rounds, each divided by its tau,"


def doubt(comparisons: Sequence[Comparison], speedup: float, tau: float) -> str | None:
    """Returns why a measured speed-up is not the effect of speculation, or None.

    Other programs on the machine slow some runs down. A ratio of two such runs is meaningless.

    Args:
        comparisons: The texts that were measured.
        speedup: Ratio of their speeds.
        tau: Their tokens per target pass.

    Returns:
        The reason, or None.
    """
    if speedup > tau + ABOVE_TAU:
        most = tau + ABOVE_TAU
        return f"the measured ratio is {speedup:.1f}x, but {tau:.2f} tokens per target pass allow at most {most:.2f}x"
    # speed-ups grow with tau, so ratios to tau are compared
    rounds = [ratio / each.speculative.stats.tau for each in comparisons for ratio in each.ratios]
    apart = spread(rounds)
    if apart > MOST_SPREAD:
        what, cut = _measurements(len(comparisons), len(comparisons[0].ratios)), _num_dropped(rounds)
        ends = "" if cut == 0 else " even without the highest and the lowest" + (f" {cut}" if cut > 1 else "")
        return f"{what} differ by a factor of {apart:.1f}{ends}"
    return None


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Returns the index of the first difference, or the shorter length if one continues the other."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (mine, other) in pairs if mine != other), min(len(ours), len(theirs)))


def distinct(tokens: Sequence[int], size: int = 4) -> float:
    """Returns the share of distinct n-grams; 1 means no repetition.

    Source:
        Li et al. 2016, section 4.2.
    """
    grams = [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


_TOTALS = (
    *("plain_tokens_per_s", "speculative_tokens_per_s", "speedup", "speedup_doubt", "speedup_rounds"),
    *("tau", "alpha", "identical", "distinct_4"),
)


def summary(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Computes totals of texts.

    Speeds are tokens per second, with the median of the rounds as a text's seconds. `speedup` is the ratio of the two
    speeds. If it is withheld, it is None and `speedup_doubt` has the reason. `speedup_rounds` has the ratio of every
    round of every text.

    Args:
        comparisons: The texts.

    Returns:
        The totals as JSON values, all None if there are no texts.
    """
    if not comparisons:
        return dict.fromkeys(_TOTALS)
    stats = RequestStats()
    for each in comparisons:
        stats.merge(each.speculative.stats)
    plain = sum(len(c.plain.tokens) for c in comparisons) / sum(median(c.plain_seconds) for c in comparisons)
    fast = sum(len(c.speculative.tokens) for c in comparisons) / sum(median(c.speculative_seconds) for c in comparisons)
    reason = doubt(comparisons, fast / plain, stats.tau)
    speedup = None if reason is not None else fast / plain
    rounds = [each.ratios for each in comparisons]
    same = all(c.identical for c in comparisons)
    variety = sum(distinct(c.speculative.tokens) for c in comparisons) / len(comparisons)
    totals = plain, fast, speedup, reason, rounds, stats.tau, stats.alpha, same, variety
    return dict(zip(_TOTALS, totals, strict=True))


def is_replaying(rule_name: str, temperature: float) -> bool:
    """Returns whether the speculative text must equal the plain one token by token."""
    rule = get_rule(rule_name)
    return rule.replays or (temperature == 0 and getattr(rule, "greedy_at_zero", rule.lossless))


def distribution_of(rule_name: str) -> str:
    """Returns whether speculative texts have the distribution of plain ones, in words."""
    return "same distribution" if get_rule(rule_name).lossless else "another distribution"


class Comparer:
    """Runs prompts through an engine and through plain decoding with the same target, one request at a time.

    Plain decoding uses the same engine without a drafter: the same forward pass, kernels and cache.

    Args:
        engine: The engine with a drafter.
        tick: Called after every request.
    """

    def __init__(self, engine: Engine, tick: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self.plain = Engine(
            engine.target,
            None,
            rule=engine.rule,
            tokenizer=engine.tokenizer,
            eos_token_ids=engine.eos_token_ids,
        )
        self._ways = (self.plain, engine)
        self._tick = tick

    def warm_up(self, item: WorkItem, params: SamplingParams) -> float:
        """Decodes one prompt with and without speculation, so that memory is allocated and code is compiled.

        Args:
            item: The prompt.
            params: Sampling parameters.

        Returns:
            Estimated seconds of both requests together, from a second run of a few tokens.
        """
        few = min(8, params.max_new_tokens)
        for _ in range(2):
            seconds = sum(self._run(engine, item, replace(params, max_new_tokens=few))[1] for engine in self._ways)
        return seconds * params.max_new_tokens / few

    def compare(self, items: Sequence[WorkItem], params: SamplingParams) -> Iterator[Comparison]:
        """Yields the first round: every prompt with and without speculation, in alternating order."""
        for index, item in enumerate(items):
            plain_first = index % 2 == 0
            handles, seconds = self._both(item, params, plain_first)
            plain, fast = handles[self.plain], handles[self.engine]
            gap = None if plain.tokens == fast.tokens else self._gap(plain, fast)
            times = [seconds[self.plain]], [seconds[self.engine]]
            yield Comparison(item, params, plain, fast, *times, plain_first, gap)

    def repeat(self, comparisons: Sequence[Comparison]) -> None:
        """Runs a further round over all texts in the opposite order and adds its seconds."""
        for each in comparisons:
            each.plain_first = not each.plain_first
            _, seconds = self._both(each.item, each.params, each.plain_first)
            each.plain_seconds.append(seconds[self.plain])
            each.speculative_seconds.append(seconds[self.engine])

    def _both(
        self, item: WorkItem, params: SamplingParams, plain_first: bool
    ) -> tuple[dict[Engine, Handle], dict[Engine, float]]:
        ways = self._ways if plain_first else self._ways[::-1]
        done = {engine: self._run(engine, item, params) for engine in ways}
        return {engine: run[0] for engine, run in done.items()}, {engine: run[1] for engine, run in done.items()}

    def _run(self, engine: Engine, item: WorkItem, params: SamplingParams) -> tuple[Handle, float]:
        start = perf_counter()
        handle = engine.submit(item.prompt, params)
        while not handle.finished:
            engine.step()
        seconds = perf_counter() - start
        if handle.error is not None:
            raise handle.error
        self._tick()
        return handle, seconds

    @torch.inference_mode()
    def _gap(self, plain: Handle, fast: Handle) -> float | None:
        """Returns the logit gap between the two tokens where the texts differ, to tell rounding from errors."""
        at = first_difference(plain.tokens, fast.tokens)
        if at >= min(len(plain.tokens), len(fast.tokens)):
            return None
        target: Any = self.engine.target
        tokens = [*plain.prompt, *plain.tokens[:at]]
        if not target.cache.reserve(0, len(tokens)):
            return None
        output = target.extend(
            torch.zeros(1, dtype=torch.int32, device=target.device),
            torch.tensor(tokens, device=target.device),
            torch.tensor([0, len(tokens)], dtype=torch.int32, device=target.device),
            logits=True,
        )
        target.cache.release([0])
        scores = output.logits[0].double()
        if plain.params.temperature > 0:
            seed, position = torch.tensor([plain.params.seed]), torch.tensor([len(tokens)])
            noise = replay_noise(seed, position, scores.shape[0])[0].to(scores)
            scores = scores / plain.params.temperature + noise
        return float(scores[plain.tokens[at]] - scores[fast.tokens[at]])
