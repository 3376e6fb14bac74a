"""Requests: the handle that a caller holds, and the checks of lengths and parameters.

Tests: tests/engine/test_request.py, tests/engine/test_engine.py.
"""

from __future__ import annotations

import logging
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_fast.core.remedies import RefusedError, Remedy
from specdec_fast.engine.prompts import Prompt, Prompts, describe_excess, split_prompts
from specdec_fast.engine.stats import RequestStats
from specdec_fast.engine.stop_conditions import StopChecker
from specdec_fast.interfaces import Target
from specdec_fast.sampling.logprobs import TokenLogprob
from specdec_fast.sampling.params import SamplingParams

log = logging.getLogger("specdec_fast")

ACCEPTED, RECOVERED, BONUS, PLAIN = "accepted", "recovered", "bonus", "plain"


@dataclass(eq=False, slots=True)
class Handle:
    """One request, running or ended.

    Attributes:
        request_id: Number of the request in its engine; -1 if the engine refused it.
        prompt: Token ids of the prompt.
        params: Sampling parameters, with a seed.
        num_draft_tokens: Draft tokens per step that the request asks for.
        checker: Stop conditions and text of the request; None if the engine refused it.
        stop_ids: Token ids that end the text.
        tokens: Generated token ids.
        origins: Origin of each token: "accepted", "recovered", "bonus", or "plain" if nothing was drafted.
        logprobs: Log-probability of each token, if the parameters ask for it.
        prompt_logprobs: Log-probability of each prompt token, None for the first one. None before the prompt was
            computed, and if the parameters do not ask for it.
        finish_reason: "eos", "stop", "length", "cancelled" or "error"; None while the request is queued or running.
        error: The exception that ended the request, or None.
        stats: Counters of the request.
        row: Row of the decode state while the request runs, else None.
        page_names: Names of the pages that the text fills (`specdec_fast.cache.PageNames`). None if the request shares
            no prefixes.
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
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    error: Exception | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    row: int | None = None
    page_names: Any = None
    streams: set[object] = field(default_factory=set)

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated; 0 if the engine refused the request."""
        return self.checker.remaining if self.checker is not None else 0

    @property
    def limit(self) -> str | None:
        """Which limit ended a text of `finish_reason` "length"; None for other texts.

        "max_new_tokens", or "max_length" if prompt and text filled the context before. Then pass a larger `max_length`
        to `load`, as far as the model allows, or shorten the prompt.
        """
        if self.finish_reason != "length":
            return None
        return "max_new_tokens" if len(self.tokens) >= self.params.max_new_tokens else "max_length"

    def stable_text(self, shown: int) -> str:
        """Returns the text after its first `shown` characters that can no longer change."""
        return "" if self.checker is None else self.checker.text[shown : self.checker.released]

    @property
    def text(self) -> str:
        """Generated text; "" without a tokenizer."""
        return self.checker.text if self.checker is not None else ""

    def __repr__(self) -> str:
        state = self.finish_reason or ("queued" if self.row is None else "running")
        count = f"{len(self.tokens)} token{'' if len(self.tokens) == 1 else 's'}"
        shown: object = self.error if self.error is not None else self.text or self.tokens
        return f"Handle({self.request_id}, {state}, {count}, {reprlib.repr(shown)})"

    def append_step(
        self,
        emitted: Sequence[int],
        num_accepted: int,
        num_drafted: int,
        depth: int,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> list[int]:
        """Appends the tokens of a step up to the end of the text, and sets `finish_reason` there.

        Args:
            emitted: Accepted tokens and the next token.
            num_accepted: Accepted tokens.
            num_drafted: Draft tokens that were proposed.
            depth: Depth of the deepest draft token that was tested.
            logprobs: Log-probability of each emitted token, or none.

        Returns:
            The tokens that were kept.
        """
        assert self.checker is not None
        before, last = len(self.tokens), BONUS if num_accepted == depth else RECOVERED
        try:
            for token in emitted:
                self.finish_reason = self.checker.push(token)
                self.tokens.append(token)  # one by one, so that an interrupt leaves as many here as in the checker
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
        """Ends the request without another token.

        Args:
            reason: The `finish_reason`: "cancelled", "error", or "length" if no token was wanted.
            error: The exception that ended the request. If the text cannot be made, that exception is kept instead of
                None.
        """
        self.finish_reason, self.error = reason, error
        try:
            if self.checker is not None:
                self.checker.close()
        except Exception as broken:
            self.error = error or broken

    def as_dict(self) -> dict[str, Any]:
        """Returns the results for JSON."""
        has_logprobs, scores = self.params.logprobs is not None, self.prompt_logprobs
        prompt = None if scores is None else [None if each is None else each.as_dict() for each in scores]
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "limit": self.limit,
            "error": None if self.error is None else str(self.error),
            "seed": self.params.seed,
            "stats": self.stats.as_dict(),
            **({"logprobs": [each.as_dict() for each in self.logprobs]} if has_logprobs else {}),
            **({"prompt_logprobs": prompt} if prompt is not None else {}),
        }


def create_handle(
    request_id: int,
    tokens: list[int],
    params: SamplingParams,
    num_draft_tokens: int,
    *,
    tokenizer: Any,
    eos_ids: Sequence[int],
    target: Target,
) -> Handle:
    """Checks a request and creates its handle.

    Args:
        request_id: Number of the request in its engine.
        tokens: Token ids of the prompt.
        params: Sampling parameters with a seed.
        num_draft_tokens: Draft tokens per step that the request asks for.
        tokenizer: A transformers tokenizer, or None.
        eos_ids: End-of-sequence ids of the model.
        target: The target.

    Returns:
        The handle, which is not queued yet.

    Raises:
        ValueError: If the target cannot serve the request.
        RefusedError: For stop strings without a tokenizer, or if the pool of pages is too small.
    """
    cache: Any = target.cache
    is_integer = hasattr(num_draft_tokens, "__index__") and not isinstance(num_draft_tokens, bool)
    if not is_integer or num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens: got {num_draft_tokens!r}; expected an integer, 0 or more")
    stop_ids = (*(() if params.ignore_eos else eos_ids), *params.stop_token_ids)
    params = params.with_bad_word_ids(tokenizer)
    params.check(target.vocab_size, stop_ids)
    if params.stop and tokenizer is None:
        raise RefusedError("stop strings: got an engine without a tokenizer", Remedy.TOKENIZER_OR_STOP_IDS)
    limit = cache.max_length
    if len(tokens) > limit or (len(tokens) == limit and params.max_new_tokens):
        bound = "fewer than" if params.max_new_tokens else "at most"
        raise ValueError(f"prompt: got {len(tokens)} tokens; expected {bound} {explain_context_limit(target)}")
    longest = min(len(tokens) + params.max_new_tokens, limit)
    needed, available = cache.pages_for(longest), cache.pages.num_pages - 1
    if needed > available:
        raise RefusedError(
            f"request: {longest} tokens need {needed} pages of the cache; the pool has {available}", Remedy.MORE_PAGES
        )
    max_useful = max(longest - len(tokens) - 1, 0)  # the last token of a text needs no draft
    handle = Handle(request_id, tokens, params, min(operator.index(num_draft_tokens), max_useful))
    handle.stop_ids = stop_ids
    handle.checker = StopChecker(
        tokenizer,
        tokens,
        eos_ids=stop_ids,
        stop=params.stop,
        max_new_tokens=params.max_new_tokens,
        max_length=limit,
        min_new_tokens=params.min_new_tokens,
        skip_special_tokens=params.skip_special_tokens,
        include_stop=params.include_stop_str_in_output,
    )
    return handle


def check_text_length(prompt: Prompt, tokenizer: Any, target: Target) -> None:
    """Checks that a text is not far too long, before all of it is encoded. Other prompts pass.

    Raises:
        ValueError: If the text cannot fit into the context.
    """
    if isinstance(prompt, str) and tokenizer is not None:
        cache: Any = target.cache
        if (excess := describe_excess(prompt, tokenizer, cache.max_length)) is not None:
            raise ValueError(f"prompt: {excess}; expected fewer than {explain_context_limit(target)}")


def explain_context_limit(target: Target) -> str:
    """Returns, in words, the context limit of a target, where it comes from, and how to serve longer texts."""
    cache: Any = target.cache
    words, own = f"the context limit of {cache.max_length}", getattr(target, "context_limit", None)
    if own is not None and cache.max_length >= own:
        return f"{words}, which is the model's own; shorten it"
    most = f" up to {own}, the model's own limit," if own is not None and own < 2**31 - 1 else ","
    if getattr(target, "has_default_length", False):
        return f"{words}, which is the default of load; pass max_length to load{most} or shorten the prompt"
    return f"{words}, which is max_length; raise it{most} or shorten the prompt"


def pair_with_params(
    prompts: Prompts, params: SamplingParams | Iterable[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Pairs prompts with parameters.

    Args:
        prompts: A batch of prompts (`Prompts`).
        params: Parameters of all prompts, or one for each, or None.

    Returns:
        Each prompt with its parameters.

    Raises:
        ValueError: For a single prompt as prompts, for `params` of another kind, or if the numbers differ.
    """
    found = split_prompts(prompts)
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params) for prompt in found]
    if isinstance(params, Mapping | str | bytes) or not isinstance(params, Iterable):
        raise ValueError(_wrong_params(params, "SamplingParams, or one for each prompt"))
    each = list(params)
    if len(each) != len(found):
        raise ValueError(f"params: got {len(each)} for {len(found)} prompts; expected one, or one per prompt")
    return list(zip(found, each))


def resolve_params(params: Any, defaults: SamplingParams, seed: int | None = None) -> SamplingParams:
    """Returns parameters with a seed, the default ones for None.

    Args:
        params: Sampling parameters, or None.
        defaults: Parameters in place of None.
        seed: Seed of parameters that have none. None draws one.

    Returns:
        The parameters.

    Raises:
        ValueError: If `params` is of another type.
    """
    if params is not None and not isinstance(params, SamplingParams):
        raise ValueError(_wrong_params(params, "SamplingParams, or None for the defaults"))
    return (params or defaults).with_seed(seed)


def _wrong_params(params: Any, expected: str) -> str:
    """The words for parameters of another kind."""
    remedy = ""
    if isinstance(params, Mapping) and all(isinstance(name, str) and name.isidentifier() for name in params):
        remedy = f"; pass SamplingParams({', '.join(f'{name}={value!r}' for name, value in params.items()):.80})"
    return f"params: got {params!r:.80}; expected {expected}{remedy}"


def rejected_handle(params: Any, error: ValueError) -> Handle:
    """Returns the handle of a request that the engine refused, which has ended with `error`."""
    handle = Handle(-1, [], params if isinstance(params, SamplingParams) else SamplingParams(), 0)
    handle.finish("error", error)
    return handle


def warn_of_errors(handles: Sequence[Handle]) -> None:
    """Logs how many requests of a batch ended with an error, and the first error: their texts look empty."""
    failed = [(at, handle.error) for at, handle in enumerate(handles) if handle.error is not None]
    if failed:
        at, error = failed[0]
        log.warning(
            "%d of %d prompts ended with an error (Handle.error); prompt %d: %s",
            len(failed), len(handles), at, error,
        )  # fmt: skip
