"""Plain and speculative decoding of the same prompts, interleaved: the measurement behind `specdec demo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from specdec_fast.engine import Engine
from specdec_fast.rules import get_rule
from specdec_fast.sampling import SamplingParams
from specdec_fast.stats import RequestStats
from specdec_kernels.random import replay_noise

if TYPE_CHECKING:
    from specdec_fast.commands.prompts import WorkItem
    from specdec_fast.request import Handle


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt at one temperature, decoded both ways; seconds: of whole requests, medians over the repeats.

    gap: by how much the plain token beat the other one where the texts part (None: they do not).
    """

    item: WorkItem
    temperature: float
    plain: Handle
    speculative: Handle
    plain_seconds: float
    speculative_seconds: float
    gap: float | None

    @property
    def identical(self) -> bool:
        return self.plain.tokens == self.speculative.tokens

    @property
    def first_difference(self) -> int | None:
        """Index of the first generated token that differs, or None."""
        if self.identical:
            return None
        return first_difference(self.plain.tokens, self.speculative.tokens)

    @property
    def plain_speed(self) -> float:
        """Tokens per second."""
        return len(self.plain.tokens) / self.plain_seconds

    @property
    def speculative_speed(self) -> float:
        """Tokens per second."""
        return len(self.speculative.tokens) / self.speculative_seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "id": self.item.id,
            "kind": self.item.kind,
            "temperature": self.temperature,
            "seed": self.speculative.params.seed,
            "new_tokens": len(self.speculative.tokens),
            **summary([self]),
            "first_difference": self.first_difference,
            "score_gap_at_difference": self.gap,
            "alpha_per_position": self.speculative.stats.alpha,
            "finish_reason": self.speculative.finish_reason,
            "prompt": self.item.prompt,
            "text": self.speculative.text,
            "plain_text": self.plain.text,
        }


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Index of the first entry that differs; the shorter length when one continues the other."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (mine, other) in pairs if mine != other), min(len(ours), len(theirs)))


def distinct(tokens: Sequence[int], size: int = 4) -> float:
    """Share of different n-grams (Li et al. 2016, section 4.2): 1 is no repetition; 1 for shorter texts."""
    grams = [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


_TOTALS = "plain_tokens_per_s", "speculative_tokens_per_s", "speedup", "tau", "alpha", "identical", "distinct_4"


def summary(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Totals: tokens over seconds, acceptance over all steps, whether every text is identical. Of nothing: all None."""
    if not comparisons:
        return dict.fromkeys(_TOTALS)
    stats = RequestStats()
    for each in comparisons:
        stats.merge(each.speculative.stats)
    plain = sum(len(c.plain.tokens) for c in comparisons) / sum(c.plain_seconds for c in comparisons)
    fast = sum(len(c.speculative.tokens) for c in comparisons) / sum(c.speculative_seconds for c in comparisons)
    same = all(c.identical for c in comparisons)
    variety = sum(distinct(c.speculative.tokens) for c in comparisons) / len(comparisons)
    return dict(zip(_TOTALS, (plain, fast, fast / plain, stats.tau, stats.mean_alpha, same, variety), strict=True))


def is_replaying(rule_name: str, temperature: float) -> bool:
    """Whether the speculative text must be the plain one, token by token (else only its law is, if that)."""
    rule = get_rule(rule_name)
    return rule.replays or (temperature == 0 and getattr(rule, "greedy_at_zero", rule.lossless))


def law_of(rule_name: str) -> str:
    """What texts have in common with plain decoding's where they need not be equal."""
    return "same law" if get_rule(rule_name).lossless else "another law"


class Comparer:
    """Runs prompts through an engine and through plain decoding with the same target, one request at a time.

    Plain decoding is the same engine code without a drafter: same forward pass, same kernels, same cache.
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
        """Run one prompt both ways, unmeasured: first calls allocate, choose kernels and compile.

        Returns the seconds that both ways take together, about: from a second run of a few tokens.
        """
        few = min(8, params.max_new_tokens)
        for _ in range(2):
            seconds = sum(self._run(engine, item, replace(params, max_new_tokens=few))[1] for engine in self._ways)
        return seconds * params.max_new_tokens / few

    def compare(self, items: Sequence[WorkItem], params: SamplingParams, repeats: int) -> Iterator[Comparison]:
        """Decode every item both ways `repeats` times, the two ways taking turns in going first."""
        for item in items:
            times: dict[Engine, list[float]] = {self.plain: [], self.engine: []}
            handles: dict[Engine, Handle] = {}
            order = list(self._ways)
            for _ in range(repeats):
                for engine in order:
                    handles[engine], seconds = self._run(engine, item, params)
                    times[engine].append(seconds)
                order.reverse()
            plain, fast = handles[self.plain], handles[self.engine]
            gap = None if plain.tokens == fast.tokens else self._gap(plain, fast)
            yield Comparison(
                item,
                params.temperature,
                plain,
                fast,
                median(times[self.plain]),
                median(times[self.engine]),
                gap,
            )

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
        """By how much plain decoding's token beat the other one where the texts part: rounding, or more?"""
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
