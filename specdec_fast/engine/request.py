"""A request and the handle its owner holds: prompt, parameters, what came out, why it ended, what it cost.

Tests: tests/engine/test_request.py, tests/engine/test_engine.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_fast.engine.stats import RequestStats
from specdec_fast.engine.stop_conditions import StopChecker
from specdec_fast.sampling.logprobs import TokenLogprob
from specdec_fast.sampling.params import SamplingParams

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
        """Tokens that it may still be given; none after a refusal."""
        return self.checker.remaining if self.checker is not None else 0

    def stable_text(self, shown: int) -> str:
        """The text behind its first `shown` characters that can no longer change."""
        return "" if self.checker is None else self.checker.text[shown : self.checker.released]

    @property
    def text(self) -> str:
        return self.checker.text if self.checker is not None else ""

    def append_step(
        self,
        emitted: Sequence[int],
        num_accepted: int,
        num_drafted: int,
        depth: int,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> list[int]:
        """Keep emitted tokens up to the end of the text, with their log-probabilities; sets `finish_reason` there."""
        assert self.checker is not None
        before, last = len(self.tokens), BONUS if num_accepted == depth else RECOVERED
        try:
            for token in emitted:
                self.finish_reason = self.checker.push(token)
                self.tokens.append(token)  # one by one, as the checker takes them: broken off, both have as many
                if self.finish_reason is not None:
                    break
        finally:
            kept = self.tokens[before:]
            origins = [ACCEPTED] * num_accepted + [last if num_drafted else PLAIN]
            self.origins += origins[: len(kept)]
            self.logprobs += logprobs[: len(kept)]
        self.stats.record_step(num_drafted, depth, num_accepted, len(kept))
        return kept

    def finish(self, reason: str, error: Exception | None = None) -> None:
        """End it from outside (cancelled, error); a text that cannot be made is an error of its own, and no more."""
        self.finish_reason, self.error = reason, error
        try:
            if self.checker is not None:
                self.checker.close()
        except Exception as broken:
            self.error = error or broken

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


def create_handle(
    request_id: int,
    tokens: list[int],
    params: SamplingParams,
    num_draft_tokens: int,
    *,
    tokenizer: Any,
    eos_ids: Sequence[int],
    vocab_size: int,
    cache: Any,
) -> Handle:
    """A handle for a request that a target of this vocabulary and cache can serve. eos_ids: the model's.

    Raises ValueError for one that cannot be served.
    """
    whole = hasattr(num_draft_tokens, "__index__") and not isinstance(num_draft_tokens, bool)
    if not whole or num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens: got {num_draft_tokens!r}; expected an integer, 0 or more")
    stop_ids = (*(() if params.ignore_eos else eos_ids), *params.stop_token_ids)
    params.check(vocab_size, stop_ids)
    if params.stop and tokenizer is None:
        raise ValueError("stop strings: got an engine without a tokenizer; pass tokenizer=, or use stop_token_ids")
    limit = cache.max_length
    if len(tokens) >= limit:
        raise ValueError(
            f"prompt: got {len(tokens)} tokens; expected fewer than the context limit of {limit}; shorten it"
        )
    longest = min(len(tokens) + params.max_new_tokens, limit)
    needed, there = cache.pages_for(longest), cache.pages.num_pages - 1
    if needed > there:
        raise ValueError(
            f"request: {longest} tokens need {needed} pages of the cache; the pool has {there}; lower max_new_tokens "
            "or raise num_pages"
        )
    most = max(longest - len(tokens) - 1, 0)
    handle = Handle(request_id, tokens, params, min(operator.index(num_draft_tokens), most))
    handle.stop_ids = stop_ids
    handle.checker = StopChecker(
        tokenizer,
        tokens,
        eos_ids=stop_ids,
        stop=params.stop,
        max_new_tokens=params.max_new_tokens,
        max_length=limit,
        min_new_tokens=params.min_new_tokens,
    )
    return handle


def pair_with_params(
    prompts: Iterable[Prompt], params: SamplingParams | Iterable[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Every prompt with its parameters: the same for all, or one for each. Raises ValueError for other numbers."""
    if isinstance(prompts, str | bytes):
        raise ValueError(f"prompts: got one text, {prompts!r:.60}; expected a list of prompts")
    prompts = list(prompts)
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params) for prompt in prompts]
    each = list(params)
    if len(each) != len(prompts):
        raise ValueError(f"params: got {len(each)} for {len(prompts)} prompts; expected one, or one per prompt")
    return list(zip(prompts, each))


def resolve_params(params: Any) -> SamplingParams:
    """A request's parameters, a seed among them. Raises ValueError for what are none."""
    if params is not None and not isinstance(params, SamplingParams):
        raise ValueError(f"params: got {params!r:.80}; expected SamplingParams, or None for the defaults")
    return (params or SamplingParams()).with_seed()


def rejected_handle(params: Any, error: ValueError) -> Handle:
    """The handle of a request that was never accepted."""
    handle = Handle(-1, [], params if isinstance(params, SamplingParams) else SamplingParams(), 0)
    handle.finish("error", error)
    return handle


def encode_prompt(prompt: Prompt, tokenizer: Any, vocab_size: int) -> list[int]:
    """Token ids of a prompt. Raises ValueError for what a target of this vocabulary cannot read."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("prompt: got text and an engine without a tokenizer; pass token ids or tokenizer=")
        try:
            tokens = list(tokenizer.encode(prompt))
        except Exception as error:
            raise ValueError(
                f"prompt: got {prompt!r:.60}, which the tokenizer refuses ({type(error).__name__}: {error}); expected "
                "Unicode text, without halves of surrogate pairs; repair it, or pass token ids"
            ) from error
    else:
        try:
            tokens = list(prompt)
            if isinstance(prompt, bytes | bytearray) or bool in set(map(type, tokens)):
                raise TypeError
            tokens = [*map(operator.index, tokens)]
        except TypeError:
            raise ValueError(f"prompt: got {prompt!r:.60}; expected text or a sequence of token ids") from None
    if not tokens:
        raise ValueError("prompt: got no tokens; expected at least one")
    bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise ValueError(f"prompt: got token id {bad}; expected 0..{vocab_size - 1}; is this the target's tokenizer?")
    return tokens
