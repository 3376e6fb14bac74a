"""All sampling parameters through the engine: penalties, bias, bans, forced tokens, masks and grammars per row.

Text with speculation equals plain decoding, which equals an oracle written from the definitions. Under the rejection
rule the joint distribution is exact.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits
from oracles.chi_square import p_value
from oracles.distributions import joint
from oracles.noisy_oracle import NoisyChain, NoisyTree
from oracles.plain_decoding import recompute
from oracles.processed_decoding import processed_decode, processed_dist
from oracles.sampled_chain import SampledChain
from oracles.toy_grammar import ToyMatcher, counting

from specdec_fast import Engine, SamplingParams, get_drafter

VOCAB, STATES, NEW = 9, 29, 26
ENDS = (8,)


def no_token_after_itself(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[token_ids[-1]] = -torch.inf
    return logits


def hashed_bias(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A bias that depends on all tokens of the text, as a watermark's may."""
    state = 7
    for token in token_ids:
        state = (31 * state + token) % 1009
    noise = torch.tensor([(state * (token + 3)) % 17 / 8 for token in range(len(logits))])
    return logits + noise.to(logits)


SURFACE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.6},
    "reward": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.6},
    "negative": {"frequency_penalty": -0.3, "presence_penalty": -0.5},
    "bias": {"logit_bias": {1: 2.0, 4: -3.0}},
    "banned": {"banned_token_ids": (2, 3)},
    "allowed": {"allowed_token_ids": (0, 1, 4, 5, 6)},
    "prefix": {"forced_tokens": (5, 5, 0)},
    "forced": {"forced_tokens": {4: 7, 5: 7, 9: 1}},
    "minimum": {"min_new_tokens": 12, "logit_bias": {8: 5.0}},
    "grammar": {"grammar": counting(VOCAB)},
    "trigrams": {"no_repeat_ngram_size": 3},
    "bigrams": {"no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "bad words": {"bad_words": ((2,), (1, 4), (4, 1), (0, 5, 3), (5, 5))},
    "custom": {"logits_processors": (no_token_after_itself, hashed_bias)},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {0: 1.0},
        "banned_token_ids": (3,),
        "allowed_token_ids": (0, 1, 2, 4, 5, 7, 8),
        "forced_tokens": {6: 5},
        "min_new_tokens": 5,
        "grammar": counting(VOCAB, 5),
        "no_repeat_ngram_size": 5,
        "bad_words": ((0, 1, 4),),
        "logits_processors": (hashed_bias,),
        "top_k": 5,
        "top_p": 0.95,
    },
}
PROMPTS = [[1], [2, 2], [3, 1, 4, 1, 5], [6, 0, 6, 0, 6, 0, 7], [5, 4], [7]]


def table(noise: float = 0.0) -> torch.Tensor:
    """Returns logits [STATES, VOCAB] that rarely end a text."""
    logits = random_logits(STATES, VOCAB, seed=3) + noise * random_logits(STATES, VOCAB, seed=8)
    logits[:, ENDS] -= 2.5
    return logits


def automaton(**shape: int) -> AutomatonTarget:
    return AutomatonTarget(table(), **{"max_rows": 6, "max_length": 64} | shape)


def rows(temperature: float, seed: int, kinds: list[str]) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=seed + at, max_new_tokens=NEW, **SURFACE[kind])
        for at, kind in enumerate(kinds)
    ]


def drafter(kind: str, texts: list[list[int]], alpha: float = 0.8) -> Any:
    if kind == "plain":
        return None
    if kind == "model":
        return get_drafter("draft_model")(AutomatonTarget(table(noise=0.3), max_rows=6), num_draft_tokens=4)
    if kind == "chain":
        return NoisyChain(texts, alpha, VOCAB, num_draft_tokens=6)
    made = NoisyTree(texts, alpha, VOCAB, num_draft_tokens=12)
    made.score_only_rate = 0.1
    return made


@pytest.mark.parametrize("kind", ["plain", "model", "chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.4])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_ragged_batches_follow_the_oracle_row_by_row(kind: str, temperature: float, part: int) -> None:
    """Six rows at a time, each with its own parameters, equal the oracle for each row alone."""
    kinds = [list(SURFACE)[(6 * part + 5 * at) % len(SURFACE)] for at in range(6)]
    wanted = rows(temperature, 10 * part, kinds)
    target = automaton()
    want = [processed_decode(target.logits_after, p, own, ENDS) for p, own in zip(PROMPTS, wanted, strict=True)]
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, want, strict=True)]
    engine = Engine(target, drafter(kind, texts), eos_token_ids=ENDS)
    handles = engine.generate(PROMPTS, wanted)
    for name, handle, text in zip(kinds, handles, want, strict=True):
        assert handle.error is None, (name, handle.error)
        assert handle.tokens == text, name
    if kind != "plain":
        assert engine.stats.tau > 1.2, "nothing was accepted: the test would prove little"
    assert target.cache.pages.num_used == 0


def test_every_kind_occurs_and_has_an_effect() -> None:
    met = {(6 * part + 5 * at) % len(SURFACE) for part in range(3) for at in range(6)}
    assert met == set(range(len(SURFACE)))
    target = automaton()
    for name, changes in SURFACE.items():
        differs = []
        for temperature in (0.0, 0.8):
            base = {"temperature": temperature, "seed": 3, "max_new_tokens": NEW}
            for prompt in PROMPTS:
                texts = [
                    processed_decode(target.logits_after, prompt, SamplingParams(**base, **more), ENDS)
                    for more in (changes, {})
                ]
                differs.append(texts[0] != texts[1])
        assert any(differs) == (name != "nothing"), name


@pytest.mark.parametrize("kind", ["chain", "tree", "model"])
def test_preempted_rows_count_what_they_had(kind: str) -> None:
    """In a pool that is too small, rows are preempted, return with their tokens, and end as if alone."""
    wanted = rows(0.9, 40, ["frequency", "presence", "forced", "grammar", "all", "grammar"])
    target = automaton(page_size=2, num_pages=40)
    want = [processed_decode(target.logits_after, p, own, ENDS) for p, own in zip(PROMPTS, wanted, strict=True)]
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, want, strict=True)]
    engine = Engine(target, drafter(kind, texts), eos_token_ids=ENDS)
    handles = engine.generate(PROMPTS, wanted)
    assert [handle.tokens for handle in handles] == want
    assert sum(handle.stats.preemptions for handle in handles) > 0


def test_the_draft_s_distribution_has_the_same_processors() -> None:
    """Without them, most tokens of a draft model that equals the target would be rejected."""
    for kind in ("repetition", "banned", "bias", "grammar", "frequency", "forced", "all"):
        target = automaton()
        same = AutomatonTarget(table(), max_rows=6)
        for pick, rule in (("coupled", "replay"), ("sampled", "rejection")):
            engine = Engine(
                target, get_drafter("draft_model")(same, num_draft_tokens=4, pick=pick), rule=rule, eos_token_ids=ENDS
            )
            handles = engine.generate(PROMPTS, rows(1.0, 5, [kind] * 6))
            assert [handle.error for handle in handles] == [None] * 6
            assert engine.stats.alpha == 1.0, (kind, pick)


def test_plain_decoding_of_a_model_is_the_cache_free_oracle() -> None:
    logits_after = recompute(models.untouched("gpt2"))
    changes = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logit_bias": {4: 1.0}}
    wanted = SamplingParams(seed=4, temperature=0.9, top_p=0.9, max_new_tokens=14, banned_token_ids=(5,), **changes)
    prompts = [models.prompt(5), models.prompt(17)]
    for prompt, handle in zip(prompts, Engine(models.target("gpt2")).generate(prompts, wanted), strict=True):
        assert handle.tokens == processed_decode(logits_after, prompt, wanted)


def test_a_short_text_may_follow_a_longer_one_in_its_row() -> None:
    """The counts of the longer text's last step are never read."""
    target = AutomatonTarget(random_logits(7, 80, seed=1), max_rows=1, max_length=128)
    engine, asked = Engine(target), {"repetition_penalty": 1.2, "presence_penalty": 0.3, "seed": 3}
    everything = {index: index + 2 for index in range(64)}
    (long,) = engine.generate([[1]], SamplingParams(max_new_tokens=64, forced_tokens=everything, **asked))
    assert len({1, *long.tokens}) == 65
    params = SamplingParams(max_new_tokens=20, **asked)
    (short,) = engine.generate([[1]], params)
    assert short.tokens == processed_decode(target.logits_after, [1], params)


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 0.9, "presence_penalty": 0.5},
        {"repetition_penalty": 0.6, "logit_bias": {0: 1.0}, "banned_token_ids": (2,), "top_k": 2},
        {"grammar": counting(4), "stop_token_ids": (3,), "min_new_tokens": 6},
        {"logits_processors": (no_token_after_itself,), "no_repeat_ngram_size": 3, "bad_words": ((0, 2), (3, 1, 0))},
    ],
    ids=["repetition", "counts", "mixed", "grammar", "texts"],
)
@pytest.mark.parametrize("kind", ["model", "unedited"])
def test_rejection_keeps_the_joint_distribution_under_processors(kind: str, changes: dict[str, Any]) -> None:
    """Drafts are sampled from a distribution with the same processors, and from one without. The text's distribution
    is the target's.
    """
    vocab, prompt, requests, length = 4, [1], 3000, 3
    shape = {"max_rows": 500, "max_length": 16, "page_size": 4}
    target = AutomatonTarget(random_logits(7, vocab, seed=4), **shape)
    table = 0.5 * random_logits(7, vocab, seed=4) + 0.5 * random_logits(7, vocab, seed=77)
    if kind == "model":
        made: Any = get_drafter("draft_model")(AutomatonTarget(table, **shape), num_draft_tokens=3, pick="sampled")
    else:
        made = SampledChain(lambda text: table[target.state_after(text)], 3)
    engine = Engine(target, made, rule="rejection")
    base = SamplingParams(max_new_tokens=length + 3, **changes)
    handles = [
        engine.submit(prompt, SamplingParams(seed=s, max_new_tokens=length + 3, **changes)) for s in range(requests)
    ]
    while not engine.idle:
        engine.step()
    assert all(handle.error is None for handle in handles)
    seen = Counter(tuple(handle.tokens[:length]) for handle in handles)
    ends = changes.get("stop_token_ids", ())

    def after(text: tuple[int, ...]) -> Any:
        if any(token in ends for token in text):
            return [1.0] + [0.0] * (vocab - 1)
        try:
            return processed_dist(target.logits_after([*prompt, *text]), base, prompt, text, ends)
        except KeyError:  # the oracle never has this grammar: the text has probability 0
            return [0.0] * vocab

    assert p_value(seen, {text: p for text, p in joint(after, length, vocab).items() if p}) > 1e-3
    assert 0.1 < engine.stats.alpha < 0.999


# -- grammars that cannot continue -------------------------------------------------------------------------------------


def stuck(vocab: int = VOCAB) -> ToyMatcher:
    """A grammar of three tokens that is never complete."""
    return ToyMatcher({0: {1: 1, 2: 1}, 1: {3: 2, 4: 2}, 2: {5: 3}, 3: {}}, [], vocab)


class Broken(ToyMatcher):
    """A matcher that raises in the given method after two tokens."""

    verb = "fill_mask"

    def fill_mask(self, words: Any) -> None:
        if self.verb == "fill_mask" and len(self.states) > 2:
            raise RuntimeError("the library gave up")
        super().fill_mask(words)

    def advance(self, token: int) -> bool:
        if self.verb == "advance" and len(self.states) > 2:
            raise RuntimeError("the library gave up")
        if self.verb == "refuse" and len(self.states) > 2:
            return False
        return super().advance(token)


class Forks(Broken):
    """A matcher whose forks raise in the same method."""

    def fork(self) -> Any:
        made = super().fork()
        made.verb = self.verb
        return made


RULES_OF_KINDS = {
    "plain": ("replay", "greedy", "rejection"),
    "chain": ("replay", "greedy", "rejection", "block"),
    "recursive_rejection": ("replay", "greedy", "recursive_rejection", "traversal"),
    "model": ("replay", "greedy", "rejection", "block"),
}


@pytest.mark.parametrize(("kind", "rule"), [(kind, rule) for kind, rules in RULES_OF_KINDS.items() for rule in rules])
@pytest.mark.parametrize("case", ["stuck", "fill_mask", "advance", "refuse"])
def test_a_grammar_that_cannot_continue_ends_its_request_alone(kind: str, rule: str, case: str) -> None:
    if case == "stuck":
        grammar: Any = stuck()
    else:
        grammar = Forks(counting(VOCAB).moves, counting(VOCAB).ends, VOCAB)
        grammar.verb = case
    temperature = 0.0 if rule == "greedy" else 0.9
    common = {"temperature": temperature, "max_new_tokens": NEW, "min_new_tokens": 20}
    wanted = [
        SamplingParams(seed=1, **common),
        SamplingParams(seed=2, grammar=grammar, **common),
        SamplingParams(seed=3, repetition_penalty=1.4, **common),
    ]
    target = automaton()
    want = [processed_decode(target.logits_after, PROMPTS[at], wanted[at], ENDS) for at in (0, 2)]
    (alone,) = Engine(target, eos_token_ids=ENDS).generate(PROMPTS[1:2], wanted[1])
    assert len(alone.tokens) == (2 if case == "fill_mask" else 3)
    texts = [[*PROMPTS[0], *want[0]], [*PROMPTS[2], *want[1]], [*PROMPTS[1], *alone.tokens, 1, 1, 1]]
    engine = Engine(target, drafter(kind, texts), rule=rule, eos_token_ids=ENDS)
    handles = engine.generate(PROMPTS[:3], wanted)
    assert handles[1].finish_reason == alone.finish_reason == "error"
    for handle in (alone, handles[1]):
        assert str(handle.error).partition(": ")[2].startswith("grammar: "), handle.error
    assert len(handles[1].tokens) == len(alone.tokens)
    assert [handles[0].error, handles[2].error] == [None, None]
    if engine.rule.replays or temperature == 0:
        assert handles[1].tokens == alone.tokens
        assert [handles[0].tokens, handles[2].tokens] == want
    assert target.cache.pages.num_used == 0 and engine.idle


def test_a_model_that_leaves_no_allowed_token_is_an_error_of_its_own() -> None:
    logits = random_logits(STATES, VOCAB, seed=3)
    logits[:, :3] = float("-inf")
    target = AutomatonTarget(logits)
    wanted = [SamplingParams(seed=1, allowed_token_ids=(0, 1)), SamplingParams(seed=2, max_new_tokens=8)]
    bad, good = Engine(target).generate([[1], [2]], wanted)
    assert "leave no token to choose from" in str(bad.error) and bad.tokens == []
    assert good.error is None and len(good.tokens) == 8
    nan = AutomatonTarget(torch.full((STATES, VOCAB), float("nan")))
    nothing = AutomatonTarget(torch.full((STATES, VOCAB), float("-inf")))
    biased = SamplingParams(seed=1, logit_bias={2: 1.0})  # the error does not name what removed the tokens
    for model, params in ((nan, wanted[0]), (nothing, biased)):
        (handle,) = Engine(model).generate([[1]], params)
        assert "the model returned NaN or no finite logit" in str(handle.error)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"banned_token_ids": (VOCAB,)}, r"banned_token_ids: got 9; expected ids below 9"),
    ({"allowed_token_ids": (1, 99)}, r"allowed_token_ids: got 99"),
    ({"logit_bias": {77: 1.0}}, r"logit_bias: got 77"),
    ({"forced_tokens": {0: 12}}, r"forced_tokens: got 12"),
    ({"banned_token_ids": range(VOCAB)}, r"expected at least one to be left"),
    ({"banned_token_ids": (1,), "allowed_token_ids": (1,)}, r"expected at least one to be left"),
    ({"banned_token_ids": (5,), "forced_tokens": (5,)}, r"forced_tokens: got 5, which is banned or not allowed"),
    ({"allowed_token_ids": (4,), "forced_tokens": (5,)}, r"forced_tokens: got 5, which is banned or not allowed"),
    ({"forced_tokens": (8,), "min_new_tokens": 2}, r"forced_tokens: got 8, which ends the text"),
    ({"allowed_token_ids": (8,), "min_new_tokens": 2}, r"min_new_tokens: got only end-of-sequence ids"),
    ({"grammar": counting(VOCAB), "ignore_eos": True}, r"grammar: got a request without an end-of-sequence id"),
    ({"grammar": ToyMatcher({0: {}}, [], VOCAB)}, r"grammar: got one that no token of the vocabulary can start"),
    ({"grammar": ToyMatcher({}, [], VOCAB)}, r"grammar: 0"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_contradictions_are_refused_before_they_run(changes: dict[str, Any], message: str) -> None:
    engine = Engine(automaton(), eos_token_ids=ENDS)
    with pytest.raises(ValueError, match=message):
        engine.submit([1], SamplingParams(**changes))
    refused, served = engine.generate(
        [[1], [2]], [SamplingParams(**changes), SamplingParams(max_new_tokens=3, ignore_eos=True)]
    )
    assert refused.finish_reason == "error" and len(served.tokens) == 3


def test_requests_without_processors_run_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_fast.sampling import logits_processors

    calls = []
    monkeypatch.setattr(logits_processors, "process_logits", lambda *args: calls.append(args))
    engine = Engine(automaton(), drafter("model", []), eos_token_ids=ENDS)
    engine.generate(PROMPTS, SamplingParams(seed=1, max_new_tokens=8, top_p=0.9))
    assert calls == [] and engine.state.sampling([]).logits_processors is None
    with pytest.raises(Exception):  # noqa: B017  the fake changes no logits, so something must break
        engine.generate([[1]], SamplingParams(seed=1, max_new_tokens=4, forced_tokens=(3, 3, 3, 3)))
        assert calls == []
