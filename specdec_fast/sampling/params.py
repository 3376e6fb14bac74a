"""The sampling parameters of one request, checked when they are created. Tests: tests/sampling/test_params.py."""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from specdec_fast.core.former_names import accept_foreign_parameters, explain_names
from specdec_fast.core.remedies import RefusedError, Remedy
from specdec_fast.sampling.custom_processors import LogitsProcessor, check_processor
from specdec_fast.sampling.grammar import GrammarState, Matcher

_SEED_LIMIT = 2**63
_LARGEST_BIAS = 10_000
_SMALLEST_TOP_P = 1e-30  # smaller numbers become 0 in float32
_LONGEST_WORD = 1024  # tokens of an n-gram or bad word: all are compared at every node
_MAX_POSITION = 2**30  # positions are int32, and the prompt comes first


def _require(ok: bool, name: str, got: object, expected: str) -> None:
    """Raises ValueError for the argument `name` unless `ok`."""
    if not ok:
        raise ValueError(f"SamplingParams.{name}: got {got!r}; expected {expected}")


def _is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**63


def _is_id(value: object) -> bool:
    """Whether a value can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _ids(name: str, got: object) -> tuple[int, ...]:
    """Token ids from an iterable. Raises ValueError for anything else."""
    ok = isinstance(got, Iterable) and not isinstance(got, (str, bytes, Mapping))
    ids = tuple(got) if ok else ()  # type: ignore[arg-type]
    _require(ok and all(map(_is_id, ids)), name, got, "a sequence of token ids >= 0")
    return ids


def _encode(word: str, tokenizer: Any) -> list[int]:
    """Token ids of a bad word."""
    try:
        return list(tokenizer.encode(word, add_special_tokens=False))
    except Exception as error:  # tokenizers raise what they like, for example about lone surrogates
        raise ValueError(f"bad_words: got {word!r:.60}; expected text that the tokenizer encodes: {error}") from error


@accept_foreign_parameters
@explain_names()
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Parameters apply at every node of a draft, for the text that ends there. Order: custom processors; n-grams and bad
    words; penalties; bias, bans and minimum length; forced tokens; allowed tokens and grammar; temperature; top-k;
    top-p; min-p.

    Attributes:
        temperature: 0 decodes greedily and exactly. Otherwise 0.001 to 1,000,000.
        top_k: Keeps the k most probable tokens; 0 is off, and so is -1.
        top_p: Keeps the smallest set of most probable tokens whose probabilities add up to top_p; 1 is off.
        min_p: Keeps tokens whose probability is at least min_p times that of the most probable one; 0 is off.
        seed: 0 <= seed < 2**63. None draws a seed, which the request records. Requests of one seed share their noise:
            equal prompts give equal texts, other prompts correlated ones. Rules that do not replay key their uniforms
            by the prompt too. They add the number of the request in its engine in two cases: if drafts depend on other
            requests (`Needs.cross_request`, budget "goodput"), or if an equal prompt with that seed is running.
        max_new_tokens: Number of generated tokens at which the text ends. With 0 the request ends after its prefill,
            for `prompt_logprobs`; its prompt may fill the context.
        min_new_tokens: Number of generated tokens before which no end-of-sequence id is generated. Stop strings that
            are complete by then stay in the text.
        stop: Strings that end the text. They are not a part of it. Strings with special tokens of the tokenizer, such
            as "<|im_end|>", end it too, although the text lacks special tokens.
        stop_token_ids: Further end-of-sequence ids.
        ignore_eos: Drops the end-of-sequence ids of the model.
        skip_special_tokens: Whether the text lacks special tokens. False shows them, in streams too.
        include_stop_str_in_output: Whether the text includes what ended it: the stop string, or the end-of-sequence
            token as far as the text shows it.
        repetition_penalty: Divides positive logits and multiplies negative ones, for every token of the prompt or the
            generated text, as in transformers; 1 is off.
        presence_penalty: Subtracted from the logit of every generated token, as in vLLM and the OpenAI API; 0 is off.
        frequency_penalty: Subtracted from the logit of a token once per time it was generated; 0 is off.
        logit_bias: Token id -> number that is added to its logit.
        banned_token_ids: Token ids that are never generated.
        allowed_token_ids: The only token ids that are generated, or None for all.
        forced_tokens: Index of a generated token, from 0, -> the only token id allowed there. A sequence is a forced
            prefix.
        no_repeat_ngram_size: Size of n-grams that are not repeated, as in transformers; 0 is off. N-grams of the prompt
            are not repeated either.
        bad_words: Words that are never completed: texts, or sequences of token ids. The last token of a word is
            forbidden where the text, prompt included, ends with the others. A text stands for its tokens with and
            without a space before it. Other tokenizations of it stay possible.
        logits_processors: Callables (token_ids, logits) -> logits that are called at every node
            (`specdec_fast.LogitsProcessor`). Those of transformers work too.
        logprobs: Number of alternatives to report beside the log-probability of each token
            (`specdec_fast.sampling.logprobs`), or None for no log-probabilities.
        prompt_logprobs: The same for the tokens of the prompt, in `Handle.prompt_logprobs`, under the model's own
            distribution. Such a request computes its whole prompt, also the part that it could share.
        grammar: A `specdec_fast.sampling.grammar.Matcher` in its initial state, which the generated text must match.
            End-of-sequence ids are allowed exactly where the grammar is complete.

    Raises:
        ValueError: If a value is out of range, or if values contradict each other.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    banned_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    forced_tokens: Mapping[int, int] | Sequence[int] = field(default_factory=dict, hash=False)
    no_repeat_ngram_size: int = 0
    bad_words: Sequence[str | Sequence[int]] = ()
    logits_processors: Sequence[LogitsProcessor | Any] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Matcher | None = None

    def __post_init__(self) -> None:
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in ("temperature", "top_p", "min_p", *penalties):
            value = getattr(self, name)
            _require(_is_number(value), name, value, "a finite number")
        for name in ("top_k", "max_new_tokens", "min_new_tokens"):
            value = getattr(self, name)
            _require(isinstance(value, int) and not isinstance(value, bool), name, value, "an integer")
        _require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or a positive number")
        temperature = self.temperature
        in_range = temperature == 0 or 1e-3 <= temperature <= 1e6
        _require(in_range, "temperature", temperature, "0, or a number from 0.001 to 1,000,000")
        _require(-1 <= self.top_k < 2**31, "top_k", self.top_k, "0 or -1 (off), or a positive integer")
        object.__setattr__(self, "top_k", max(self.top_k, 0))  # vLLM writes -1 for all tokens
        _require(
            _SMALLEST_TOP_P <= self.top_p <= 1,
            "top_p",
            self.top_p,
            "a number above 0 (at least 1e-30), at most 1; 1 is off",
        )
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]; 0 is off")
        _require(self.max_new_tokens >= 0, "max_new_tokens", self.max_new_tokens, "at least 0")
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            f"0 to max_new_tokens ({self.max_new_tokens})",
        )
        _require(
            self.min_new_tokens < _MAX_POSITION, "min_new_tokens", self.min_new_tokens, f"less than {_MAX_POSITION}"
        )
        if self.seed is not None:
            _require(type(self.seed) is int and 0 <= self.seed < _SEED_LIMIT, "seed", self.seed, "0 <= seed < 2**63")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "True or False")
        stop = self.stop
        _require(isinstance(stop, Iterable) and not isinstance(stop, Mapping), "stop", stop, "non-empty strings")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        _require(all(isinstance(s, str) and s for s in stop), "stop", self.stop, "non-empty strings")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._check_processors()

    def _check_processors(self) -> None:
        """Checks and normalises everything that changes logits before temperature."""
        value = self.repetition_penalty
        _require(0.01 <= value <= 100, "repetition_penalty", value, "a number from 0.01 to 100; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-100 <= value <= 100, name, value, "a number from -100 to 100; 0 is off")
        bias = self.logit_bias
        good = isinstance(bias, Mapping) and all(
            _is_id(token) and _is_number(value) and abs(value) <= _LARGEST_BIAS for token, value in bias.items()
        )
        _require(
            good, "logit_bias", bias, f"token ids >= 0 -> numbers up to {_LARGEST_BIAS}; ban with banned_token_ids"
        )
        object.__setattr__(self, "logit_bias", dict(bias))
        object.__setattr__(self, "banned_token_ids", _ids("banned_token_ids", self.banned_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            _require(bool(allowed), "allowed_token_ids", self.allowed_token_ids, "at least one id, or None")
            object.__setattr__(self, "allowed_token_ids", allowed)
        forced = self.forced_tokens
        if not isinstance(forced, Mapping):
            forced = dict(enumerate(_ids("forced_tokens", forced)))
        _require(
            all(_is_id(index) and _is_id(token) for index, token in forced.items()),
            "forced_tokens",
            self.forced_tokens,
            "index of a generated token -> token id, or a sequence of ids",
        )
        last, bound = max(forced, default=-1), min(self.max_new_tokens, _MAX_POSITION)
        _require(
            last < bound, "forced_tokens", last, f"an index below {bound} (max_new_tokens, at most {_MAX_POSITION})"
        )
        object.__setattr__(self, "forced_tokens", dict(forced))
        self._check_text_processors()
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or (_is_id(count) and count <= 1000), name, count, "None, or a count from 0 to 1000")
        is_matcher = self.grammar is None or isinstance(self.grammar, Matcher)
        _require(is_matcher, "grammar", self.grammar, "a specdec_fast.sampling.grammar.Matcher, or None")

    def _check_text_processors(self) -> None:
        """Checks and normalises the processors that read the text of every node."""
        size = self.no_repeat_ngram_size
        in_range = _is_id(size) and size <= _LONGEST_WORD
        _require(in_range, "no_repeat_ngram_size", size, f"a positive integer up to {_LONGEST_WORD}, or 0 (off)")
        words = self.bad_words
        listed = isinstance(words, Iterable) and not isinstance(words, (str, bytes, Mapping))
        _require(listed, "bad_words", words, "a sequence of texts or of sequences of token ids")
        found = [word if isinstance(word, str) else _ids("bad_words", word) for word in words]
        _require(all(found), "bad_words", words, "words that are not empty")
        longest = max((len(word) for word in found if not isinstance(word, str)), default=0)
        _require(longest <= _LONGEST_WORD, "bad_words", f"{longest} tokens", f"words of at most {_LONGEST_WORD} tokens")
        object.__setattr__(self, "bad_words", tuple(found))
        given = self.logits_processors
        listed = isinstance(given, list) or (isinstance(given, Iterable) and not callable(given))
        _require(listed, "logits_processors", given, "a sequence of callables; put a single one into a list")
        processors = tuple(given)  # an iterator is read once
        for each in processors:
            expected = check_processor(each)
            _require(expected is None, "logits_processors", each, str(expected))
        object.__setattr__(self, "logits_processors", processors)

    @property
    def bad_word_ids(self) -> tuple[tuple[int, ...], ...]:
        """`bad_words` as token ids. Texts must have been replaced (`with_bad_word_ids`)."""
        if any(isinstance(word, str) for word in self.bad_words):
            raise ValueError(f"bad_words: got texts in {self.bad_words!r:.80}; expected ids; call with_bad_word_ids")
        return self.bad_words  # type: ignore[return-value]

    @property
    def forced(self) -> Mapping[int, int]:
        """`forced_tokens` as a mapping from index to token id."""
        assert isinstance(self.forced_tokens, Mapping)
        return self.forced_tokens

    def check(self, vocab_size: int, stop_ids: Sequence[int] = ()) -> None:
        """Checks the parameters against a vocabulary.

        Args:
            vocab_size: V of the target.
            stop_ids: Token ids that end the text.

        Raises:
            ValueError: If an id is outside of the vocabulary, or if no token is left to generate.
        """
        banned, forced, allowed = set(self.banned_token_ids), self.forced, self.allowed_token_ids
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
            ("banned_token_ids", banned),
            ("allowed_token_ids", allowed or ()),
            ("forced_tokens", forced.values()),
            ("bad_words", [token for word in self.bad_words if not isinstance(word, str) for token in word]),
        ):
            bad = next((token for token in ids if token >= vocab_size), None)
            if bad is not None:
                raise ValueError(f"{name}: got {bad}; expected ids below {vocab_size}, the target's vocabulary")
        left = (set(range(vocab_size)) if allowed is None else set(allowed)) - banned if banned or allowed else None
        if left is not None and not left:
            raise ValueError("banned_token_ids: got all tokens that are allowed; expected at least one to be left")
        if self.min_new_tokens and not (set(range(vocab_size)) if left is None else left) - set(stop_ids):
            raise ValueError(
                "min_new_tokens: got only end-of-sequence ids left to choose from; expected another allowed token, or 0"
            )
        for index, token in forced.items():
            if left is not None and token not in left:
                raise ValueError(
                    f"forced_tokens: got {token}, which is banned or not allowed; expected no contradiction"
                )
            if index < self.min_new_tokens and token in stop_ids:
                raise ValueError(
                    f"forced_tokens: got {token}, which ends the text, at {index}; expected none before min_new_tokens "
                    f"({self.min_new_tokens})"
                )
        if self.grammar is not None:
            if not stop_ids:
                raise ValueError(
                    "grammar: got a request without an end-of-sequence id; expected one, so that the text can end "
                    "where the grammar does; pass stop_token_ids, and do not ignore_eos"
                )
            try:
                begins = GrammarState(self.grammar, stop_ids).can_start()
            except Exception as error:
                raise ValueError(f"grammar: {error}") from error
            if not begins:
                raise ValueError("grammar: got one that no token of the vocabulary can start; expected at least one")

    def with_seed(self, seed: int | None = None) -> SamplingParams:
        """Returns these parameters if they have a seed, else a copy with the given seed, or with a random one."""
        if self.seed is not None:
            return self
        return replace(self, seed=secrets.randbelow(_SEED_LIMIT) if seed is None else seed)

    def with_bad_word_ids(self, tokenizer: Any) -> SamplingParams:
        """Returns a copy whose `bad_words` are token ids; these parameters if they are already.

        Args:
            tokenizer: A transformers tokenizer, or None.

        Raises:
            ValueError: If a text has no tokens.
            RefusedError: If there are texts and no tokenizer.
        """
        if not any(isinstance(word, str) for word in self.bad_words):
            return self
        if tokenizer is None:
            raise RefusedError(
                "bad_words: got texts and an engine without a tokenizer", Remedy.TOKENIZER_OR_BAD_WORD_IDS
            )
        found: dict[tuple[int, ...], None] = {}
        for word in self.bad_words:
            bare = word.lstrip(" ") if isinstance(word, str) else ""
            texts = (bare, f" {bare}") if bare else (word,)
            for text in texts:
                ids = _encode(text, tokenizer) if isinstance(text, str) else text
                if not ids:
                    raise ValueError(f"bad_words: got {word!r:.60}, which has no tokens; expected another text")
                found[tuple(ids)] = None
        return replace(self, bad_words=tuple(found))

    def with_derived_seed(self, prompt: Sequence[int], number: int | None = None) -> SamplingParams:
        """Returns a copy whose seed is a function of this seed, a prompt, and a number.

        Args:
            prompt: Token ids of the prompt.
            number: Number of the request in its engine, or None.

        Returns:
            The copy; its seed is below 2**61.
        """
        digest = blake2b(f"{self.seed}/{number}/".encode(), digest_size=8)
        digest.update(array("q", prompt).tobytes())
        return replace(self, seed=int.from_bytes(digest.digest(), "little") >> 3)
