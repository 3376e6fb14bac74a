"""A request and the handle its owner holds: prompt, parameters, what came out, why it ended, what it cost.

Tests: tests/engine/test_engine.py.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_fast.logprobs import TokenLogprob
from specdec_fast.sampling import SamplingParams
from specdec_fast.stats import RequestStats
from specdec_fast.stopping import StopChecker

Prompt = str | Sequence[int]
ACCEPTED, RECOVERED, BONUS, PLAIN = "accepted", "recovered", "bonus", "plain"


@dataclass(eq=False, slots=True)
class Handle:
    """One request, alive or ended.

    tokens: generated ids; origins: for each of them "accepted", "recovered", "bonus", or "plain" (nothing was
    drafted); logprobs: one per token, if asked for; text: generated text ("" without a tokenizer); finish_reason:
    "eos", "stop", "length", "cancelled", "error" or None while it runs; error: the exception that ended it, or None.
    """

    request_id: int
    prompt: Sequence[int]
    params: SamplingParams
    num_draft_tokens: int
    checker: StopChecker | None = None
    stop_ids: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    row: int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def remaining(self) -> int:
        """Tokens that it may still be given."""
        assert self.checker is not None
        return self.checker.remaining

    @property
    def text(self) -> str:
        return self.checker.text if self.checker is not None else ""

    def take(self, emitted: Sequence[int], num_accepted: int, num_drafted: int, depth: int) -> list[int]:
        """Keep emitted tokens up to the end of the text; sets `finish_reason` when it is reached."""
        assert self.checker is not None
        kept: list[int] = []
        for index, token in enumerate(emitted):
            kept.append(token)
            if index < num_accepted:
                origin = ACCEPTED
            elif num_drafted == 0:
                origin = PLAIN
            else:
                origin = BONUS if num_accepted == depth else RECOVERED
            self.origins.append(origin)
            self.finish_reason = self.checker.push(token)
            if self.finished:
                break
        self.tokens.extend(kept)
        self.stats.count(num_drafted, depth, num_accepted, len(kept))
        return kept

    def end(self, reason: str, error: Exception | None = None) -> None:
        """End it from outside (cancelled, error)."""
        self.finish_reason, self.error = reason, error
        if self.checker is not None:
            self.checker.close()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        asked = self.params.logprobs is not None
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "error": None if self.error is None else str(self.error),
            "seed": self.params.seed,
            "stats": self.stats.as_dict(),
            **({"logprobs": [each.as_dict() for each in self.logprobs]} if asked else {}),
        }


def encode(prompt: Prompt, tokenizer: Any, vocab_size: int) -> list[int]:
    """Token ids of a prompt. Raises ValueError for what a target of this vocabulary cannot read."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("prompt: got text and an engine without a tokenizer; pass token ids or tokenizer=")
        tokens = list(tokenizer.encode(prompt))
    else:
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError:
            raise ValueError(f"prompt: got {prompt!r:.60}; expected text or a sequence of token ids") from None
    if not tokens:
        raise ValueError("prompt: got no tokens; expected at least one")
    bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise ValueError(f"prompt: got token id {bad}; expected 0..{vocab_size - 1}; is this the target's tokenizer?")
    return tokens
