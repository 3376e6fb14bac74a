"""Experiment A: greedy texts with and without speculation are compared token by token.

In float32 the texts are equal except at ties. In half precision, a matrix product with more rows may sum in another
order. The first difference is therefore reported with the gap between the two tokens' logits and the largest logit.
Tests: tests/lab/test_run.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec_fast.engine.engine import Engine
from specdec_fast.engine.prompts import Prompt
from specdec_fast.lab.text_positions import ROUNDING, plain_logits
from specdec_fast.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class GreedyText:
    """Comparison of one prompt at one length.

    Attributes:
        prompt: Name of the prompt.
        length: Maximum number of new tokens.
        dtype: Data type of the target.
        tokens: Number of tokens with speculation.
        difference: Index of the first token that differs, or None.
        gap: Largest logit at the difference minus the lower logit of the two tokens, or None.
        tokens_per_pass: Emitted tokens per forward pass with speculation.
        allowed: Largest gap that rounding explains.
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
        """Whether the two texts are the same."""
        return self.difference is None

    @property
    def holds(self) -> bool:
        """Whether the texts are identical or differ first at a tie."""
        return self.identical or (self.gap is not None and self.gap <= self.allowed)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self) | {"identical": self.identical, "holds": self.holds}


def compare_greedy(
    engine: Engine,
    prompts: Sequence[tuple[str, Prompt]],
    lengths: Sequence[int] = (16, 48, 96),
    tick: Callable[[], None] = lambda: None,
) -> list[GreedyText]:
    """Generates every prompt at every length with and without speculation.

    Args:
        engine: The engine with speculation.
        prompts: Names and prompts.
        lengths: Maximum numbers of new tokens.
        tick: Called after each comparison.

    Returns:
        One comparison for each prompt and length.

    Raises:
        Exception: The error of a request that failed.
    """
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
        for (name, _), plain_handle, handle in zip(prompts, *both):
            for each in (plain_handle, handle):
                if each.error is not None:
                    raise each.error
            at = _first_difference(plain_handle.tokens, handle.tokens)
            gap = None
            if at is not None and at < min(len(plain_handle.tokens), len(handle.tokens)):
                logits = plain_logits(target, [*plain_handle.prompt, *plain_handle.tokens[:at]])
                gap = float(logits.max() - logits[[plain_handle.tokens[at], handle.tokens[at]]].min())
            found.append(
                GreedyText(
                    name,
                    length,
                    str(dtype).removeprefix("torch."),
                    len(handle.tokens),
                    at,
                    gap,
                    handle.stats.tau,
                    ROUNDING[dtype],
                )
            )
            tick()
    return found


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first difference of two texts. None if they are equal."""
    if list(ours) == list(theirs):
        return None
    pairs = enumerate(zip(ours, theirs))
    return next((at for at, (mine, other) in pairs if mine != other), min(len(ours), len(theirs)))
