"""Regular expressions, JSON schemas, choices and EBNF as grammars, with the library xgrammar (extra `xgrammar`).

    params = SamplingParams(grammar=regex(r"[0-9]{4}-[0-9]{2}", tokenizer))

Any number of requests may share a grammar, since each request forks it. Tests: tests/integrations/test_grammars.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specdec_fast.extras import require
from specdec_fast.integrations.grammar_sources import check_choices, check_text, parse_schema
from specdec_fast.integrations.xgrammar_schema import find_ignored, patterns
from specdec_fast.retrieval.tokenizer_fingerprint import vocabulary_size

_MAX_SCHEMA = 2**15
"""Most characters of a JSON schema: 1 to 4 s of work. The time of xgrammar grows with the square."""

_COMPILERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _library() -> Any:
    require("xgrammar", "grammar")
    import xgrammar

    return xgrammar


def _compiler(tokenizer: Any, what: str) -> tuple[Any, int]:
    """Returns xgrammar's compiler for a fast tokenizer, and the number of token ids. Making one may take a second."""
    library = _library()
    if tokenizer is None:
        raise ValueError(f"{what}: got no tokenizer; a grammar of text needs one")
    found = _COMPILERS.get(tokenizer)
    if found is None:
        try:
            info = library.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary_size(tokenizer))
        except Exception as error:
            raise ValueError(f"grammar: xgrammar cannot read this tokenizer: {error}") from None
        found = _COMPILERS[tokenizer] = library.GrammarCompiler(info, max_threads=1), info.vocab_size
    return found


class XGrammarMatcher:
    """A `Matcher` (`specdec_fast.sampling.grammar`) over a `GrammarMatcher`, which never sees ids that end a text.

    Args:
        inner: The `GrammarMatcher`.
        vocab_size: Number of token ids.
        stops: Mask of the ids that end a text for xgrammar, and of what follows the last id, int32 [ceil(V / 32)].
    """

    def __init__(self, inner: Any, vocab_size: int, stops: Tensor) -> None:
        self._inner = inner
        self.vocab_size = vocab_size
        self._stops = stops

    @property
    def complete(self) -> bool:
        """Whether the text so far is a whole text of the grammar."""
        done: bool = self._inner.is_completed()
        return done

    def fork(self) -> XGrammarMatcher:
        """Returns an independent copy."""
        return XGrammarMatcher(self._inner.fork(), self.vocab_size, self._stops)

    def advance(self, token: int) -> bool:
        """Appends a token; returns whether the grammar allows it."""
        if not 0 <= token < self.vocab_size or token in self._inner.stop_token_ids:
            return False
        taken: bool = self._inner.accept_token(token)
        return taken

    def rollback(self, count: int) -> None:
        """Removes the last `count` tokens."""
        self._inner.rollback(count)

    def fill_mask(self, words: Tensor) -> None:
        """Writes the mask of allowed tokens into `words`, int32 [ceil(V / 32)]."""
        if not self._inner.fill_next_token_bitmask(words):
            words.fill_(-1)  # everything is allowed
        words &= ~self._stops


def _reason(error: Exception) -> str:
    """Returns an error message without the place in the library's source and the time."""
    words = str(error).strip().splitlines() or ["refused by xgrammar"]
    return re.sub(r"^(\[[\d:]+\] )?\S+:\d+: ", "", words[0])


def _matcher(compile: Callable[[Any], Any], tokenizer: Any, what: str, expected: str) -> XGrammarMatcher:
    compiler, size = _compiler(tokenizer, what)
    try:
        inner = _library().GrammarMatcher(compile(compiler))
    except Exception as error:
        raise ValueError(f"{what}: {_reason(error)}; expected {expected}") from None
    return XGrammarMatcher(inner, size, _pack(inner.stop_token_ids, size))


def _pack(stop_ids: Sequence[int], size: int) -> Tensor:
    """A mask of the ids that end a text and of the bits behind the last of `size` ids, int32."""
    words = [0] * -(-size // 32)
    for token in (*stop_ids, *range(size, 32 * len(words))):
        words[token // 32] |= 1 << token % 32
    return torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32)


def regex(pattern: str, tokenizer: Any) -> XGrammarMatcher:
    """Makes a grammar of the texts that match a regular expression as a whole.

    Args:
        pattern: Regular expression without look-around and back-references.
        tokenizer: A fast transformers tokenizer.

    Returns:
        The grammar, for `SamplingParams(grammar=...)`.
    """
    expected = "a regular expression that xgrammar reads (no look-around, no back-references)"
    check_text("regex", pattern)
    return _matcher(lambda compiler: compiler.compile_regex(pattern), tokenizer, f"regex {pattern!r}", expected)


def _check_pattern(pattern: str) -> None:
    """Refuses a pattern of a schema that xgrammar does not read alone.

    Inside of a schema it ignores look-around, and deeply nested groups overflow the stack, which ends the process.

    Raises:
        ValueError: With the reason.
    """
    try:
        _library().Grammar.from_regex(pattern)
    except Exception as error:
        words = f"JSON schema: pattern {pattern!r:.60}: {_reason(error)}"
        raise ValueError(f"{words}; expected a regular expression that xgrammar reads, or use llguidance") from None


def json_schema(schema: str | Mapping[str, Any], tokenizer: Any, *, whitespace: bool = False) -> XGrammarMatcher:
    """Makes a grammar of the JSON texts that a schema allows.

    Properties come in the order of the schema.

    Args:
        schema: A mapping, or JSON text.
        tokenizer: A fast transformers tokenizer.
        whitespace: Allow any whitespace between values. Otherwise the grammar fixes it.

    Returns:
        The grammar, for `SamplingParams(grammar=...)`.

    Raises:
        ValueError: If the schema is not a JSON object, or if xgrammar refuses it or would ignore a part of it.
    """
    parsed = parse_schema(schema)
    ignored = find_ignored(parsed)
    if ignored is not None:
        raise ValueError(f"JSON schema: got {ignored}, which xgrammar ignores; leave it out, or use llguidance")
    text = json.dumps(parsed)
    if len(text) > _MAX_SCHEMA:
        got = f"JSON schema: got {len(text)} characters"
        raise ValueError(
            f"{got}; expected at most {_MAX_SCHEMA}, since xgrammar takes minutes for more; use llguidance"
        )
    for pattern in patterns(parsed):
        _check_pattern(pattern)

    def compiled(compiler: Any) -> Any:
        return compiler.compile_json_schema(text, any_whitespace=whitespace, strict_mode=False)

    return _matcher(compiled, tokenizer, "JSON schema", "the part of JSON Schema that xgrammar supports")


def choice(texts: Sequence[str], tokenizer: Any) -> XGrammarMatcher:
    """Makes a grammar of given texts.

    Args:
        texts: The texts that are allowed.
        tokenizer: A fast transformers tokenizer.

    Returns:
        The grammar, for `SamplingParams(grammar=...)`.
    """
    rules = " | ".join(json.dumps(text, ensure_ascii=False) for text in check_choices(texts))
    return ebnf(f"root ::= {rules}", tokenizer)


def ebnf(grammar: str, tokenizer: Any) -> XGrammarMatcher:
    """Makes a grammar of the texts of a context-free grammar.

    Args:
        grammar: Rules `name ::= ...` in the EBNF of xgrammar, which is that of GBNF. The first rule is `root`.
        tokenizer: A fast transformers tokenizer.

    Returns:
        The grammar, for `SamplingParams(grammar=...)`.
    """
    expected = "rules in EBNF, with a rule root"
    check_text("ebnf", grammar)
    return _matcher(lambda compiler: compiler.compile_grammar(grammar), tokenizer, "ebnf", expected)


def lark(grammar: str, tokenizer: Any) -> XGrammarMatcher:
    """Makes a grammar of the texts of a context-free grammar in the syntax of Lark, as far as xgrammar reads it.

    Args:
        grammar: Rules in Lark's syntax. The first rule is `start`.
        tokenizer: A fast transformers tokenizer.

    Returns:
        The grammar, for `SamplingParams(grammar=...)`.
    """
    expected = "rules in Lark's syntax, with a rule start"
    check_text("lark", grammar)
    return _matcher(lambda compiler: compiler.compile_lark(grammar), tokenizer, "lark", expected)
