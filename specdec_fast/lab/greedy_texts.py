"""Experiment A: greedy texts with and without speculation, token for token, and how close the call was if they part.

In float32 the texts are equal but for ties. In half precision a matrix product may add in another order when it has
more rows, so a first difference is reported with how far the logits of both tokens lie below the largest one there.
Tests: tests/lab/test_run.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec_fast.engine.engine import Engine
from specdec_fast.engine.request import Prompt
from specdec_fast.lab.text_positions import ROUNDING, plain_logits
from specdec_fast.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class GreedyText:
    """One prompt at one length. difference: index of the first token that differs, or None; gap: of the two tokens
    there, how far the lower logit lies below the largest of all; allowed: up to where that is rounding.
    """

    prompt: str
    length: int
    dtype: str
    tokens: int
    difference: int | None
    gap: float | None
    tokens_per_pass: float
    allowed: float

    @property
    def identical(self) -> bool:
        return self.difference is None

    @property
    def holds(self) -> bool:
        return self.identical or (self.gap is not None and self.gap <= self.allowed)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"identical": self.identical, "holds": self.holds}


def compare_greedy(
    engine: Engine,
    prompts: Sequence[tuple[str, Prompt]],
    lengths: Sequence[int] = (16, 48, 96),
    tick: Callable[[], None] = lambda: None,
) -> list[GreedyText]:
    """Every (name, text) of `prompts` at every length, batched as the engine's rows allow."""
    plain = Engine(
        engine.target, None, rule=engine.rule, tokenizer=engine.tokenizer, eos_token_ids=engine.eos_token_ids
    )
    target: Any = engine.target
    dtype = target.model.dtype
    found = []
    for length in lengths:
        params = SamplingParams(temperature=0.0, max_new_tokens=length, seed=0)
        texts = [text for _, text in prompts]
        both = [each.generate(texts, params) for each in (plain, engine)]
        for (name, _), without, with_ in zip(prompts, *both):
            for handle in (without, with_):
                if handle.error is not None:
                    raise handle.error
            at = _first_difference(without.tokens, with_.tokens)
            gap = None
            if at is not None and at < min(len(without.tokens), len(with_.tokens)):
                logits = plain_logits(target, [*without.prompt, *without.tokens[:at]])
                gap = float(logits.max() - logits[[without.tokens[at], with_.tokens[at]]].min())
            found.append(
                GreedyText(
                    name,
                    length,
                    str(dtype).removeprefix("torch."),
                    len(with_.tokens),
                    at,
                    gap,
                    with_.stats.tau,
                    ROUNDING[dtype],
                )
            )
            tick()
    return found


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    if list(ours) == list(theirs):
        return None
    pairs = enumerate(zip(ours, theirs))
    return next((at for at, (mine, other) in pairs if mine != other), min(len(ours), len(theirs)))
