"""Grammars by llguidance and xgrammar: texts match and do not depend on speculation; nothing is ignored in silence."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits
from oracles.noisy_oracle import NoisyChain, NoisyTree
from oracles.toy_tokenizer import byte_tokenizer

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.integrations.grammars import BACKENDS, make_grammar
from specdec_fast.sampling.grammar import GrammarState, Matcher

TOKENIZER = byte_tokenizer()
VOCAB = len(TOKENIZER) + 6  # a padded vocabulary: the last ids are no tokens
STATES = 13
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["the", "in", "abc"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
EITHER = pytest.mark.parametrize("backend", BACKENDS)
PATTERNS = [r"[0-9]{2}-[0-9]{2}", r"(the|there|bc){1,5}ing!", r"a*b{3,7}(he)?"]


def target(**shape: Any) -> AutomatonTarget:
    return AutomatonTarget(random_logits(STATES, VOCAB, seed=6), **{"max_rows": 6, "max_length": 160} | shape)


def make(backend: str, kind: str, source: Any, tokenizer: Any = TOKENIZER) -> Any:
    pytest.importorskip(backend)
    return make_grammar(kind, source, tokenizer, grammar_backend=backend)


def grammars(backend: str) -> list[Any]:
    return [
        *(make(backend, "regex", pattern) for pattern in PATTERNS),
        make(backend, "json_schema", schema_of(backend)),
    ]


def schema_of(backend: str) -> dict[str, Any]:
    """The schema, without the length beside a pattern that xgrammar does not enforce."""
    if backend == "llguidance":
        return SCHEMA
    properties = {**SCHEMA["properties"], "name": {"type": "string", "pattern": "^[a-z]{1,6}$"}}  # type: ignore[dict-item]
    return {**SCHEMA, "properties": properties}


def fits(index: int, text: str) -> bool:
    if index < len(PATTERNS):
        return re.fullmatch(PATTERNS[index], text) is not None
    found = json.loads(text)
    return {"name", "age"} <= found.keys() <= {"name", "age", "tags"} and 0 <= found["age"] <= 99


@EITHER
@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("kind", ["chain", "tree", "model"])
def test_texts_match_and_do_not_depend_on_speculation(kind: str, temperature: float, backend: str) -> None:
    prompts = [[1], [2, 3], [4], [5, 6, 7], [8]]
    end = TOKENIZER.eos_token_id
    wanted = [
        SamplingParams(temperature=temperature, seed=at, max_new_tokens=100, grammar=grammar, logit_bias={end: 4.0})
        for at, grammar in enumerate(grammars(backend))
    ]
    wanted.append(SamplingParams(temperature=temperature, seed=9, max_new_tokens=30, repetition_penalty=1.2))
    plain = Engine(target(), tokenizer=TOKENIZER, eos_token_ids=[end]).generate(prompts, wanted)
    texts = [[*prompt, *handle.tokens] for prompt, handle in zip(prompts, plain, strict=True)]
    if kind == "model":
        close = random_logits(STATES, VOCAB, seed=6) + 0.2 * random_logits(STATES, VOCAB, seed=7)
        drafter: Any = get_drafter("draft_model")(AutomatonTarget(close, max_rows=6, max_length=160))
    elif kind == "chain":
        drafter = NoisyChain(texts, 0.8, VOCAB, num_draft_tokens=5)
    else:
        drafter = NoisyTree(texts, 0.8, VOCAB, num_draft_tokens=10)
    engine = Engine(target(), drafter, tokenizer=TOKENIZER, eos_token_ids=[end])
    handles = engine.generate(prompts, wanted)
    for at, (handle, other) in enumerate(zip(handles, plain, strict=True)):
        assert handle.error is None and handle.tokens == other.tokens
        if at < 4:
            assert handle.finish_reason == "eos" and fits(at, handle.text), handle.text
    assert engine.stats.tau > 1.3


@EITHER
def test_masks_after_rollback_are_those_of_a_fresh_matcher(backend: str) -> None:
    """A random tree of likely tokens, walked with one matcher, equals a fresh matcher per node."""
    source = torch.Generator().manual_seed(1)
    end = TOKENIZER.eos_token_id
    for grammar in grammars(backend):
        guide = GrammarState(grammar, [end])
        tokens, parents, paths = [0], [-1], [[]]
        words = torch.zeros(1, guide.width, dtype=torch.int32)
        while len(tokens) < 25:
            parent = int(torch.randint(0, len(tokens), (1,), generator=source))
            fresh = GrammarState(grammar, [end], paths[parent])
            fresh.fill_masks([0], [-1], words)
            allowed = [t for t in range(VOCAB) if int(words[0, t // 32]) >> t % 32 & 1 and t != end]
            if allowed:
                token = allowed[int(torch.randint(0, len(allowed), (1,), generator=source))]
                tokens.append(token)
                parents.append(parent)
                paths.append([*paths[parent], token])
            elif not any(len(path) == 0 for path in paths[1:]) and len(tokens) > 10:
                break
        whole = torch.zeros(len(tokens), guide.width, dtype=torch.int32)
        assert all(guide.fill_masks(tokens, parents, whole)) and guide.error is None
        for node, path in enumerate(paths):
            GrammarState(grammar, [end], path).fill_masks([0], [-1], words)
            assert torch.equal(whole[node], words[0]), (node, path)


def nested(levels: int) -> dict[str, Any]:
    """A schema of as many objects inside of each other, two levels of JSON each."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BAD: list[tuple[str, Any, str]] = [
    ("regex", "(", r"^regex '\(': .*clos.*; expected a regular expression "),
    ("json_schema", "{", "not JSON"),
    ("json_schema", "[1]", "got list; expected an object"),
    ("json_schema", 5, "got int; expected an object"),
    ("json_schema", [1], "got list; expected an object"),
    ("json_schema", '{"a":' * 3000 + "1" + "}" * 3000, "got more than 128 levels"),
    ("json_schema", nested(400), "got more than 128 levels"),
    ("json_schema", nested(5000), "got more than 128 levels"),  # overflows a stack in llguidance
    *(
        ("json_schema", schema, "^JSON schema: ")
        for schema in (
            {"type": 5},
            {"type": ["string", ["x"]]},
            {"type": "object", "properties": [1]},
            {"type": "object", "required": 5},
            {"type": "object", "properties": {"a": {}}, "required": [["a"]]},
            {"anyOf": 5},
            {"enum": 5, "type": "string"},
            {"type": "string", "format": ["date"]},
            {"type": "array", "items": {"type": {}}},
        )
    ),
    ("regex", 5, "^regex: got int; expected the grammar as a string"),
    ("lark", 5, "^lark: got int; expected the grammar as a string"),
    ("json_schema", {"type": "nonsense"}, "^JSON schema: .*[tT]ype.*nonsense.*; expected the part"),
    ("choice", [], "^choice: got .*; expected a list of texts"),
    ("choice", "ab", "^choice: got 'ab'; expected a list of texts"),
    ("choice", ["a", ""], "^choice: got .*; expected a list of texts"),
    ("lark", 'start: "a', "^lark: .*; expected rules in Lark's syntax"),
]


@EITHER
def test_the_adapter_is_a_matcher_and_refuses_bad_grammars(backend: str) -> None:
    for kind, source, message in BAD:
        with pytest.raises(ValueError, match=message):
            make(backend, kind, source)
    with pytest.raises(ValueError, match="got no tokenizer"):
        make(backend, "regex", "a", None)
    grammar = make(backend, "regex", "ab")
    assert isinstance(grammar, Matcher)
    assert not grammar.advance(VOCAB + 5) and not grammar.advance(-1) and not grammar.advance(TOKENIZER.eos_token_id)
    assert grammar.advance(TOKENIZER.encode("ab")[0]) and grammar.complete


def accepts(grammar: Any, text: str) -> bool:
    grammar = grammar.fork()
    return (
        all(grammar.advance(token) for token in TOKENIZER.encode(text, add_special_tokens=False)) and grammar.complete
    )


@EITHER
def test_choices_and_context_free_grammars(backend: str) -> None:
    words = ['the "in"', "a\\b", "é|x", "\U0001f600", "a\n\x01\x7f"]
    chosen = make(backend, "choice", words)
    assert [accepts(chosen, text) for text in (*words, "the", 'the "in"x')] == [True] * 5 + [False] * 2
    recursive = make(backend, "lark", 'start: "(" start ")" | "x"')
    assert accepts(recursive, "((x))") and not accepts(recursive, "((x)")
    rules = 'root ::= "(" root ")" | "x"'
    if backend == "llguidance":
        with pytest.raises(ValueError, match=r"ebnf: llguidance reads no EBNF; .* grammar_backend 'xgrammar'"):
            make(backend, "ebnf", rules)
    else:
        recursive = make(backend, "ebnf", rules)
        assert accepts(recursive, "((x))") and not accepts(recursive, "((x)")
        with pytest.raises(ValueError, match=r"^ebnf: EBNF parser error .*; expected rules in EBNF"):
            make(backend, "ebnf", "root ::= ")


@EITHER
def test_a_grammar_of_everything_leaves_out_what_is_no_text(backend: str) -> None:
    """Ids beyond the vocabulary, and ids that end a text, are never in a matcher's mask."""
    grammar = make(backend, "regex", "(.|\n)*")
    words = torch.zeros(-(-grammar.vocab_size // 32), dtype=torch.int32)
    grammar.fill_mask(words)
    allowed = [v for v in range(32 * len(words)) if int(words[v // 32]) >> v % 32 & 1]
    assert max(allowed) < len(TOKENIZER) and ord("a") in allowed
    if backend == "xgrammar":
        assert TOKENIZER.eos_token_id not in allowed


VIOLATIONS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "integer", "multipleOf": 5}, 7),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1]),
    ({"type": "array", "contains": {"type": "string"}}, [1]),
    ({"not": {"type": "string"}}, "a"),
    ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1}),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, 7),
    ({"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 5}]}, "abc"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "aaa"),
    ({"type": "string", "format": "iri"}, " x"),
    ({"type": "string", "format": "date"}, "x"),
    ({"type": "string", "format": "date-time"}, "2020-01-01"),
    ({"type": "string", "format": "time"}, "x"),
    ({"type": "string", "format": "email"}, "x"),
    ({"type": "string", "format": "uuid"}, "x"),
    ({"type": "string", "format": "ipv4"}, "1.2.3"),
    ({"type": "string", "format": "ipv6"}, "x"),
    ({"type": "object", "properties": {"z": {}}, "patternProperties": {"^a": {"type": "integer"}}}, {"a": "x"}),
    ({"type": "object", "properties": {"b": {}}, "required": ["a"]}, {"b": 1}),
    ({"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, {"b": 1}),
    ({"minimum": 3}, 1),
    ({"maxLength": 1}, "aaa"),
    ({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer"}}}, 1),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer", "maximum": 3}}}, 4),
    ({"enum": [1, "a"], "type": "string"}, 1),
    ({"$dynamicRef": "#x"}, "x"),
    ({"type": ["integer", "string"], "minimum": 3, "maxLength": 1}, 1),
    ({"type": "object", "minProperties": 1}, {}),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, {"a": 1, "b": 2}),
    ({"type": "object", "additionalProperties": {"type": "array", "items": {"minLength": 2}}}, {"a": ["b"]}),
    ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "null"}]}, "aa"),
    ({"type": "string", "pattern": "^(?!b)[ab]$"}, "b"),
    ({"type": "array", "items": {"type": "object", "patternProperties": {"^(?!b)[ab]$": {}}}}, [{"b": 1}]),
    ({"$ref": "http://example.com/integer"}, "a"),
]
HARMFUL: list[dict[str, Any]] = [
    {"type": "string", "pattern": "(" * 60_000 + "a" + ")" * 60_000},
    {"type": "object", "patternProperties": {"(" * 60_000 + "a" + ")" * 60_000: {"type": "string"}}},
    {"type": "string", "maxLength": 10**18},
    {"anyOf": []},
    {"type": "array", "items": {"type": "null"}, "maxItems": 2**32},
]
"""Schemas that overflow the stack or a counter of a library, and one that no text fits."""


@EITHER
def test_a_schema_is_enforced_or_refused(backend: str) -> None:
    """Nothing in a schema is ignored in silence."""
    enforced = 0
    for schema, value in VIOLATIONS:
        try:
            grammar = make(backend, "json_schema", schema)
        except ValueError as error:
            assert str(error).startswith("JSON schema: ")
            continue
        enforced += 1
        assert not accepts(grammar, json.dumps(value)), schema
        assert not accepts(grammar, json.dumps(value, separators=(",", ":"))), schema
    assert enforced >= 10


@EITHER
def test_harmful_schemas_are_refused(backend: str) -> None:
    for schema in HARMFUL:
        try:
            grammar = make(backend, "json_schema", schema)
        except ValueError as error:
            assert str(error).startswith("JSON schema: ")
        else:
            assert backend == "llguidance" and accepts(grammar, "[null]")


def test_schemas_that_xgrammar_compiles_for_minutes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"JSON schema: got \d+ characters; expected at most 32768, .* use llguidance"):
        make("xgrammar", "json_schema", {"const": "x" * 40_000})
    with pytest.raises(ValueError, match=r"enum: got '1001 values'; expected at most 1000 .* use llguidance"):
        make("xgrammar", "json_schema", {"enum": list(range(1001))})


@EITHER
def test_common_schemas_are_served(backend: str) -> None:
    item = {"title": "Item", "type": "object", "properties": {"id": {"type": "integer", "description": "number"},
            "kind": {"enum": ["a", "b"], "type": "string"}}, "required": ["id"]}  # fmt: skip
    schema = {"$defs": {"Item": item}, "type": "object", "title": "All", "required": ["items"],
              "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "maxItems": 3},
                             "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}}}  # fmt: skip
    grammar = make(backend, "json_schema", schema)
    value = {"items": [{"id": 3, "kind": "a"}, {"id": 4}], "note": None}
    assert any(accepts(grammar, json.dumps(value, separators=marks)) for marks in ((",", ":"), (", ", ": ")))
    anything = make(backend, "json_schema", {"type": "object"})
    assert any(accepts(anything, json.dumps(value, separators=marks)) for marks in ((",", ":"), (", ", ": ")))


@EITHER
def test_a_missing_library_is_named_with_its_remedy(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, backend, None)
    extra = {"llguidance": "grammar"}.get(backend, backend)
    with pytest.raises(ValueError, match=rf"pip install -e '.\[{extra}\]'"):
        make_grammar("regex", "a", TOKENIZER, grammar_backend=backend)


def test_unknown_names_are_refused_with_a_hint() -> None:
    with pytest.raises(ValueError, match=r"grammar_backend: got 'xgramar'; .*did you mean 'xgrammar'"):
        make_grammar("regex", "a", TOKENIZER, grammar_backend="xgramar")
    with pytest.raises(ValueError, match=r"grammar: got 'regexp'; .*did you mean 'regex'"):
        make_grammar("regexp", "a", TOKENIZER)
