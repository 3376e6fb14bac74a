"""Regular expressions, JSON schemas, choices and Lark grammars, with the library llguidance (extra `grammar`).

    params = SamplingParams(grammar=regex(r"[0-9]{4}-[0-9]{2}", tokenizer))

Any number of requests may share a grammar, since each request forks it. Tests: tests/integrations/test_grammars.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from specdec_fast.extras import require
from specdec_fast.integrations.grammar_sources import check_choices, check_text, parse_schema
from specdec_fast.retrieval.tokenizer_fingerprint import vocabulary_size

_VOCABULARIES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _library() -> Any:
    require("grammar", "grammar")
    import llguidance
    import llguidance.hf  # noqa: F401  (read as an attribute)

    return llguidance


def _vocabulary(tokenizer: Any) -> Any:
    """Returns llguidance's form of a fast tokenizer, cached because making one takes up to a second."""
    library = _library()
    found = _VOCABULARIES.get(tokenizer)
    if found is None:
        try:
            found = library.hf.from_tokenizer(tokenizer, n_vocab=vocabulary_size(tokenizer))
        except Exception as error:
            raise ValueError(f"grammar: llguidance cannot read this tokenizer: {error}") from None
        _VOCABULARIES[tokenizer] = found
    return found


class LLGuidanceMatcher:
    """A `Matcher` (`specdec_fast.sampling.grammar`) over an `LLMatcher`, whose silent error state becomes an exception.

    Args:
        inner: The `LLMatcher`.
        vocab_size: Number of token ids.
    """

    def __init__(self, inner: Any, vocab_size: int) -> None:
        self._inner = inner
        self.vocab_size = vocab_size

    @property
    def complete(self) -> bool:
        """Whether the text so far is a whole text of the grammar."""
        done: bool = self._inner.is_accepting()
        return done

    def fork(self) -> LLGuidanceMatcher:
        """Returns an independent copy."""
        return LLGuidanceMatcher(self._inner.deep_copy(), self.vocab_size)

    def advance(self, token: int) -> bool:
        """Appends a token; returns whether the grammar allows it."""
        if not 0 <= token < self.vocab_size:
            return False
        taken: int = self._inner.try_consume_tokens([token])
        self._check()
        return taken == 1

    def rollback(self, count: int) -> None:
        """Removes the last `count` tokens."""
        if not self._inner.rollback(count):
            self._check()
            raise RuntimeError(f"llguidance: a rollback of {count} tokens failed")

    def fill_mask(self, words: Tensor) -> None:
        """Writes the mask of allowed tokens into `words`, int32 [ceil(V / 32)]."""
        self._inner.unsafe_compute_mask_ptr(words.data_ptr(), 4 * words.numel())
        self._check()

    def _check(self) -> None:
        if self._inner.is_error():
            raise RuntimeError(f"llguidance: {_reason(self._inner.get_error())}")


def _reason(words: str) -> str:
    """Returns the line of an error message that names the reason, without the picture of the pattern around it."""
    lines = [line.strip() for line in words.splitlines() if line.strip()] or ["refused by llguidance"]
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])


def _matcher(source: str, tokenizer: Any, what: str, expected: str) -> LLGuidanceMatcher:
    if tokenizer is None:
        raise ValueError(f"{what}: got no tokenizer; a grammar of text needs one")
    vocabulary = _vocabulary(tokenizer)
    inner = _library().LLMatcher(vocabulary, source, log_level=0)
    if inner.is_error():
        raise ValueError(f"{what}: {_reason(inner.get_error())}; expected {expected}")
    return LLGuidanceMatcher(inner, vocabulary.vocab_size)


def regex(pattern: str, tokenizer: Any) -> LLGuidanceMatcher:
    """Makes a grammar of the texts that match a regular expression as a whole.

    Args:
        pattern: Regular expression in Rust syntax, which has no look-around and no back-references.
        tokenizer: A fast transformers tokenizer.

    Returns:
        The grammar, for `SamplingParams(grammar=...)`.
    """
    source = _library().LLMatcher.grammar_from_regex(check_text("regex", pattern))
    expected = "a regular expression as Rust writes them (no look-around, no back-references)"
    return _matcher(source, tokenizer, f"regex {pattern!r}", expected)


def json_schema(schema: str | Mapping[str, Any], tokenizer: Any, *, whitespace: bool = False) -> LLGuidanceMatcher:
    """Makes a grammar of the JSON texts that a schema allows.

    Args:
        schema: A mapping, or JSON text.
        tokenizer: A fast transformers tokenizer.
        whitespace: Allow any whitespace between values. Otherwise the grammar fixes it.

    Returns:
        The grammar, for `SamplingParams(grammar=...)`.

    Raises:
        ValueError: If the schema is not a JSON object, or if llguidance refuses it.
    """
    source = _library().LLMatcher.grammar_from_json_schema(parse_schema(schema), {"whitespace_flexible": whitespace})
    return _matcher(source, tokenizer, "JSON schema", "the part of JSON Schema that llguidance supports")


def choice(texts: Sequence[str], tokenizer: Any) -> LLGuidanceMatcher:
    """Makes a grammar of given texts.

    Args:
        texts: The texts that are allowed.
        tokenizer: A fast transformers tokenizer.

    Returns:
        The grammar, for `SamplingParams(grammar=...)`.
    """
    rules = " | ".join(json.dumps(text, ensure_ascii=False) for text in check_choices(texts))
    rules = rules.replace("\x7f", r"\u007f")  # the only character that JSON leaves as it is and Lark refuses
    return lark(f"start: {rules}", tokenizer)


def lark(grammar: str, tokenizer: Any) -> LLGuidanceMatcher:
    """Makes a grammar of the texts of a context-free grammar.

    Args:
        grammar: Rules in the syntax of Lark, as llguidance reads it. The first rule is `start`.
        tokenizer: A fast transformers tokenizer.

    Returns:
        The grammar, for `SamplingParams(grammar=...)`.
    """
    source = _library().LLMatcher.grammar_from_lark(check_text("lark", grammar))
    return _matcher(source, tokenizer, "lark", "rules in Lark's syntax, with a rule start")


def ebnf(grammar: str, tokenizer: Any) -> LLGuidanceMatcher:
    """Refuses a grammar in EBNF, which llguidance does not read.

    Raises:
        ValueError: Always, with what to do.
    """
    raise ValueError("ebnf: llguidance reads no EBNF; expected rules in Lark's syntax, or grammar_backend 'xgrammar'")
