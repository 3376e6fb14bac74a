"""Grammars by llguidance: every text matches, and text with speculation equals plain decoding, in ragged batches."""

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
from specdec_fast.sampling.grammar import GrammarState, Matcher

pytest.importorskip("llguidance")

from specdec_fast.integrations.llguidance import json_schema, regex

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
PATTERNS = [r"[0-9]{2}-[0-9]{2}", r"(the|there|bc){1,5}ing!", r"a*b{3,7}(he)?"]


def target(**shape: Any) -> AutomatonTarget:
    return AutomatonTarget(random_logits(STATES, VOCAB, seed=6), **{"max_rows": 6, "max_length": 160} | shape)


def grammars() -> list[Any]:
    return [*(regex(pattern, TOKENIZER) for pattern in PATTERNS), json_schema(SCHEMA, TOKENIZER)]


def fits(index: int, text: str) -> bool:
    if index < len(PATTERNS):
        return re.fullmatch(PATTERNS[index], text) is not None
    found = json.loads(text)
    return {"name", "age"} <= found.keys() <= {"name", "age", "tags"} and 0 <= found["age"] <= 99


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("kind", ["chain", "tree", "model"])
def test_texts_match_and_do_not_depend_on_speculation(kind: str, temperature: float) -> None:
    prompts = [[1], [2, 3], [4], [5, 6, 7], [8]]
    end = TOKENIZER.eos_token_id
    wanted = [
        SamplingParams(temperature=temperature, seed=at, max_new_tokens=100, grammar=grammar, logit_bias={end: 4.0})
        for at, grammar in enumerate(grammars())
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


def test_masks_after_rollback_are_those_of_a_fresh_matcher() -> None:
    """A random tree of likely tokens, walked with one matcher, equals a fresh matcher per node."""
    source = torch.Generator().manual_seed(1)
    end = TOKENIZER.eos_token_id
    for grammar in grammars():
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


def test_the_adapter_is_a_matcher_and_refuses_bad_grammars() -> None:
    assert isinstance(regex("a", TOKENIZER), Matcher)
    for make, message in (
        (lambda: regex("(", TOKENIZER), r"^regex '\(': unclosed group; expected a regular expression as Rust .*\)$"),
        (lambda: json_schema("{", TOKENIZER), "not JSON"),
        (lambda: json_schema("[1]", TOKENIZER), "got list; expected an object"),
        (lambda: json_schema({"type": "nonsense"}, TOKENIZER), "^JSON schema: Invalid type: nonsense; expected the"),
        (lambda: regex("a", None), "got no tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    grammar = regex("ab", TOKENIZER)
    assert not grammar.advance(VOCAB + 5) and not grammar.advance(-1) and grammar.advance(TOKENIZER.encode("ab")[0])
    assert grammar.complete


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install -e '.\[grammar\]'"):
        regex("a", TOKENIZER)
