"""Failures of one request do not change others: models that return NaN; models, tokenizers and drafters that raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, mixing, random_logits
from oracles.noisy_oracle import NoisyChain, NoisyTree
from oracles.toy_tokenizer import byte_tokenizer

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Budget
from specdec_kernels import distribution_stats

VOCAB, STATES = 8, 23
POISON = VOCAB - 1  # after this token the model returns NaN
PARAMS = SamplingParams(seed=3, max_new_tokens=14)


def target(poison: bool = False, value: float = float("nan"), **shape: int) -> AutomatonTarget:
    logits = random_logits(STATES, VOCAB, seed=2)
    logits[:, POISON] = -20.0
    transitions = mixing(STATES, VOCAB)
    if poison:
        logits = torch.cat([logits, torch.full((1, VOCAB), value)])
        transitions = torch.cat([transitions, torch.full((1, VOCAB), STATES)])
        transitions[:, POISON] = STATES
    return AutomatonTarget(logits, transitions, **shape)


def texts() -> list[list[int]]:
    return [handle.tokens for handle in Engine(target()).generate([[1], [2], [1, 2, 3]], PARAMS)]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("rule", ["replay", "greedy", "rejection", "block", "recursive_rejection", "traversal"])
@pytest.mark.parametrize("drafted", [False, True])
def test_a_row_of_nan_ends_alone(value: float, rule: str, drafted: bool) -> None:
    params = SamplingParams(seed=3, max_new_tokens=14, temperature=0.0 if rule == "greedy" else 1.0)
    want = Engine(target()).generate([[1], [2]], params)
    drafter = NoisyChain([[1, *want[0].tokens], [2, *want[1].tokens]], 0.8, VOCAB - 1) if drafted else None
    engine = Engine(target(poison=True, value=value), drafter, rule=rule)
    handles = engine.generate([[1], [1, POISON, 2], [2]], params)
    assert handles[1].finish_reason == "error" and handles[1].tokens == []
    assert "NaN or no finite logit" in str(handles[1].error)
    assert [len(handles[0].tokens), len(handles[2].tokens)] == [14, 14]
    if engine.rule.replays:
        assert handles[0].tokens == want[0].tokens and handles[2].tokens == want[1].tokens
    assert engine.target.cache.pages.num_used == 0 and engine.idle


@pytest.mark.parametrize("rule", ["replay", "rejection", "block", "recursive_rejection", "traversal"])
def test_a_rejected_node_of_nan_ends_no_request(rule: str) -> None:
    """A draft token that leads to NaN is rejected, so plain decoding never reaches it."""

    class Poisoner(NoisyChain):
        def guess(self, following: Any, at: int) -> int:
            return POISON if at == 1 else super().guess(following, at)

    want = texts()
    drafter = Poisoner([[1, *want[0]], [2, *want[1]]], 1.0, VOCAB - 1)
    engine = Engine(target(poison=True), drafter, rule=rule)
    handles = engine.generate([[1], [2]], PARAMS)
    assert [handle.error for handle in handles] == [None, None]
    if rule == "replay":
        assert [handle.tokens for handle in handles] == want[:2]


def test_a_model_with_a_broken_row_of_its_own() -> None:
    """The same with a transformers model, where the embedding of one token is NaN."""
    model = models.own("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[95] = float("nan")
    engine = Engine(HuggingFaceTarget(model, max_length=64), get_drafter("ngram")(n_min=1))
    prompts = [models.prompt(17), [5, 95, 7], models.prompt(5)]
    handles = engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=20))
    assert [handle.finish_reason for handle in handles] == ["length", "error", "length"]
    assert handles[0].tokens == models.greedy_text("llama", 17, 20)
    assert handles[2].tokens == models.greedy_text("llama", 5, 20)


def failing(at: int) -> Callable[[], None]:
    """Raises at the given passes of a model."""
    count = [0]

    def before_pass() -> None:
        count[0] += 1
        if count[0] in (at, at + 1):
            raise RuntimeError("out of memory")

    return before_pass


def drafters(kind: str, want: list[list[int]]) -> Any:
    if kind == "draft_model":
        close = random_logits(STATES, VOCAB, seed=2) + 0.4 * random_logits(STATES, VOCAB, seed=4)
        return get_drafter("draft_model")(AutomatonTarget(close), num_draft_tokens=3)
    if kind == "ngram":
        return get_drafter("ngram")(n_min=1)
    kinds = {"chain": NoisyChain, "tree": NoisyTree}
    prompts = [[1], [2], [1, 2, 3]]
    return kinds[kind]([[*prompt, *text] for prompt, text in zip(prompts, want, strict=True)], 0.8, VOCAB)


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "chain", "tree"])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_model_that_raises_may_be_tried_again(kind: str, at: int) -> None:
    """In prefill, first steps and later steps, the exception reaches the caller. Continuing gives the same text."""
    want = texts()
    engine = Engine(target(), drafters(kind, want))
    engine.target.before_pass = failing(at)
    handles = [engine.submit(prompt, PARAMS) for prompt in ([1], [2], [1, 2, 3])]
    failures = 0
    while not engine.idle:
        try:
            engine.step()
        except RuntimeError:
            failures += 1
    assert failures == 2
    assert [handle.tokens for handle in handles] == want
    assert engine.target.cache.pages.num_used == 0


@pytest.mark.parametrize("at", [1, 3])
def test_generate_frees_what_its_requests_held(at: int) -> None:
    engine = Engine(target(), drafters("draft_model", []))
    other = engine.submit([1], PARAMS)
    engine.target.before_pass = failing(at)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate([[2], [1, 2, 3]], PARAMS)
    assert not other.finished and engine.num_running + engine.num_queued == 1
    engine.target.before_pass = None
    while not engine.idle:
        engine.step()
    assert other.tokens == texts()[0]
    assert engine.target.cache.pages.num_used == 0 and engine.drafter.model.cache.pages.num_used == 0


PROMPTS = [[1], [2], [1, 2, 3]]


class FailingDrafter(NoisyTree):
    """Raises in one method for the row whose text begins with a given token."""

    verb, first, begins = "propose", 2, 0
    needs = replace(NoisyTree.needs, node_choices=True)

    def _fail(self, verb: str, view: Any, rows: Any) -> None:
        if verb == self.verb and any(view.tokens(row)[0] == self.first for row in rows):
            raise OverflowError("no such row")

    def begin(self, view: Any, rows: Any, output: Any) -> None:
        super().begin(view, rows, output)
        self._fail("begin", view, rows)

    def propose(self, view: Any, rows: Any, budget: Any, rng: Any) -> Any:
        assert all(row in self.known for row in rows), "proposes for a row that was released"
        self._fail("propose", view, rows)
        return super().propose(view, rows, budget, rng)

    def observe(self, view: Any, draft: Any, acceptance: Any, output: Any) -> None:
        rows, bounds = draft.rows.tolist(), draft.offsets.tolist()
        assert all(row in self.known for row in rows), "observes a row that was released"
        assert output.logits.shape[0] == draft.num_nodes == acceptance.node_choice.shape[0]
        for row, start, stop, path in zip(rows, bounds[:-1], bounds[1:], acceptance.path.tolist(), strict=True):
            assert path[0] == start and max(path) < stop
            emitted = int(acceptance.next_token[rows.index(row)])
            assert view.tokens(row)[-1] == emitted or len(view.tokens(row)) >= 15
        self._fail("observe", view, rows)


@pytest.mark.parametrize("verb", ["begin", "propose", "observe"])
def test_a_row_on_which_the_drafter_raises_continues_without_drafts(verb: str, faults: list[str]) -> None:
    """No text changes. Other rows keep their drafts if the failing row is known. One log line names a remedy."""
    want = texts()
    drafter = FailingDrafter([[*prompt, *text] for prompt, text in zip(PROMPTS, want, strict=True)], 0.9, VOCAB)
    drafter.verb = verb
    engine = Engine(target(), drafter)
    handles = engine.generate(PROMPTS, PARAMS)
    assert [handle.tokens for handle in handles] == want
    assert [handle.error for handle in handles] == [None] * 3
    assert handles[1].stats.faults == 1 and engine.stats.as_dict()["faults"] >= 1
    assert handles[1].stats.num_draft_tokens == 0 or verb == "observe"
    assert handles[0].stats.faults == handles[2].stats.faults == 0
    assert min(handles[0].stats.tau, handles[2].stats.tau) > 1.5 > handles[1].stats.tau
    assert len(faults) == 1 and f"drafter noisy_oracle raised in {verb}: OverflowError: no such row" in faults[0]
    assert "choose another" in faults[0]
    again = engine.generate([[1, 2, 3]], PARAMS)[0]  # the row can be used by other requests
    assert again.tokens == want[2] and (again.stats.num_draft_tokens > 0) and again.stats.faults == 0
    assert engine.target.cache.pages.num_used == 0


@pytest.mark.parametrize("verb", ["begin", "propose", "observe"])
def test_a_request_that_is_given_up_stays_so_after_a_preemption(verb: str, faults: list[str]) -> None:
    """In a pool that is too small for all, the drafter is not called again for a request that it failed on."""
    params = SamplingParams(seed=3, max_new_tokens=30)
    want = [handle.tokens for handle in Engine(target()).generate([[2], [1]], params)]
    drafter = FailingDrafter([[2, *want[0]], [1, *want[1]]], 0.9, VOCAB)
    drafter.verb = verb
    engine = Engine(target(num_pages=9, page_size=4), drafter)
    handles = engine.generate([[1], [2]], params)
    assert [handle.tokens for handle in handles] == want[::-1]
    assert handles[1].stats.preemptions > 0 and [handle.stats.faults for handle in handles] == [0, 1]
    assert handles[0].stats.tau > 1.5 > handles[1].stats.tau
    assert engine.generate([[1]], params)[0].stats.tau > 1.5 and not engine._drafter_runner._given_up


@pytest.mark.parametrize("chunk", [2048, 3])
def test_a_bad_row_joins_alone_when_rows_join_with_aux_hidden_states(chunk: int, faults: list[str]) -> None:
    """Each row gets the hidden states of its own tokens, for any split of prompts into passes."""
    given: dict[int, torch.Tensor] = {}

    class Observing(FailingDrafter):
        needs = replace(NoisyTree.needs, aux_hidden_states=("final_norm",))

        def begin(self, view: Any, rows: Any, output: Any) -> None:
            super().begin(view, rows, output)
            given[view.tokens(rows[0])[0]] = output.aux_hidden_states["final_norm"]

        def observe(self, view: Any, draft: Any, acceptance: Any, output: Any) -> None:
            pass

    prompts = [[1, 3, 5], [2, 4], [6, 1, 2, 3, 4]]
    want = Engine(target()).generate(prompts, PARAMS)
    drafter = Observing([[*prompt, *handle.tokens] for prompt, handle in zip(prompts, want)], 0.9, VOCAB)
    drafter.verb = "begin"
    handles = Engine(target(), drafter, prefill_chunk=chunk).generate(prompts, PARAMS)
    assert [handle.tokens for handle in handles] == [handle.tokens for handle in want]
    assert [handle.stats.faults for handle in handles] == [0, 1, 0] and len(faults) == 1
    assert handles[0].stats.num_draft_tokens > 0 and handles[1].stats.num_draft_tokens == 0
    for prompt in (prompts[0], prompts[2]):
        alone = target()
        alone.cache.reserve(0, 8)
        row, offsets = torch.tensor([0], dtype=torch.int32), torch.tensor([0, len(prompt) - 1], dtype=torch.int32)
        aux_hidden_states = alone.extend(
            row, torch.tensor(prompt[:-1]), offsets, logits=False, aux_hidden_states=("final_norm",)
        ).aux_hidden_states
        assert torch.equal(given[prompt[0]], aux_hidden_states["final_norm"])


@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_a_draft_model_that_raises_at_times_ends_no_request(at: int, faults: list[str]) -> None:
    engine = Engine(target(), drafters("draft_model", []))
    engine.drafter.model.before_pass = failing(at)
    handles = engine.generate(PROMPTS, PARAMS)
    assert [handle.tokens for handle in handles] == texts()
    assert engine.stats.faults >= 1 and len(faults) == 1
    assert sum(handle.stats.num_draft_tokens > 0 for handle in handles) >= 2
    assert engine.target.cache.pages.num_used == engine.drafter.model.cache.pages.num_used == 0


def test_a_drafter_that_raises_while_it_releases_does_not_keep_rows(faults: list[str]) -> None:
    class Clinging(NoisyChain):
        def release(self, *args: Any) -> None:
            raise RuntimeError("release")

    engine = Engine(target(), Clinging([], 0.5, VOCAB))
    handle = engine.generate([[1]], PARAMS)[0]
    assert handle.tokens == texts()[0] and engine.idle and engine.target.cache.pages.num_used == 0
    assert len(faults) == 1 and "raised in release" in faults[0]


def test_a_drafter_over_budget_is_stopped_before_it_overwrites_other_rows(faults: list[str]) -> None:
    class Spender(NoisyChain):
        def propose(self, view: Any, rows: Any, budget: Any, rng: Any) -> Any:
            return super().propose(view, rows, Budget([limit + 1 for limit in budget.nodes]), rng)

    engine = Engine(target(), Spender([], 0.5, VOCAB, num_draft_tokens=3))
    assert [handle.tokens for handle in engine.generate([[1], [2]], PARAMS)] == texts()[:2]
    assert engine.stats.num_draft_tokens == 0 and engine.target.cache.pages.num_used == 0
    assert len(faults) == 1 and "nodes; expected 1 +" in faults[0]


def flat(rows: int, columns: int, token_ids: torch.Tensor | None = None) -> TokenDistributions:
    """Draft distributions that are uniform."""
    logits, one, none = torch.zeros(rows, columns), torch.ones(rows), torch.zeros(rows)
    return TokenDistributions(logits, *distribution_stats(logits, one, none.int(), one, none), token_ids)


def at(column: torch.Tensor, node: int, value: int) -> torch.Tensor:
    changed = column.clone()
    changed[node] = value
    return changed


def sampled(draft: Draft, node: int, dists: TokenDistributions, dist_index: int = 0, mark: int = 1) -> Draft:
    return replace(
        draft,
        proposal_kinds=at(draft.proposal_kinds, node, mark),
        dist_index=at(draft.dist_index, node, dist_index),
        dists=dists,
    )


CHAINS: dict[str, Callable[[Draft, int], Draft]] = {  # functions of a draft and of a node other than the root
    "token beyond the vocabulary": lambda draft, node: replace(draft, tokens=at(draft.tokens, node, VOCAB)),
    "token below 0": lambda draft, node: replace(draft, tokens=at(draft.tokens, node, -1)),
    "distribution row that does not exist": lambda draft, node: sampled(draft, node, flat(1, VOCAB), dist_index=99),
    "distribution row without distributions": lambda draft, node: replace(
        sampled(draft, node, flat(1, VOCAB)), dists=None
    ),
    "distributions that are too wide": lambda draft, node: sampled(draft, node, flat(1, VOCAB + 1)),
    "distributions of unknown tokens": lambda draft, node: sampled(draft, node, flat(1, 2, torch.tensor([0, VOCAB]))),
    "unknown proposal kind": lambda draft, node: sampled(draft, node, flat(1, VOCAB), mark=4),
    "offsets of others": lambda draft, node: replace(draft, offsets=draft.offsets.flip(0)),
    "rows of others": lambda draft, node: replace(draft, rows=draft.rows + 1),
    "another root": lambda draft, node: replace(draft, tokens=torch.where(draft.parents < 0, 0, draft.tokens)),
    "depth that is too small": lambda draft, node: replace(draft, max_depth=0),
    "tree": lambda draft, node: replace(draft, is_chain=False),
    "score_only": lambda draft, node: replace(draft, score_only=draft.parents >= 0),
}
TREES: dict[str, Callable[[Draft, int], Draft]] = {
    "parent behind its child": lambda draft, node: replace(draft, parents=at(draft.parents, node, 7)),
    "second root": lambda draft, node: replace(draft, parents=at(draft.parents, node, -1)),
    "sampled score-only node": lambda draft, node: replace(
        sampled(draft, node, flat(1, VOCAB)), score_only=draft.parents >= 0
    ),
}


@pytest.mark.parametrize(
    ("rule", "spoilt"),
    [
        *((rule, spoilt) for rule in ("replay", "rejection") for spoilt in CHAINS),
        *(("recursive_rejection", spoilt) for spoilt in TREES),
    ],
)
def test_a_malformed_draft_affects_its_row_only(rule: str, spoilt: str, faults: list[str]) -> None:
    params = PARAMS if rule == "replay" else replace(PARAMS, temperature=0.0)
    want = [handle.tokens for handle in Engine(target()).generate(PROMPTS, params)]

    class Careless(NoisyTree if spoilt in TREES else NoisyChain):  # type: ignore[misc]
        def propose(self, view: Any, rows: Any, budget: Any, rng: Any) -> Draft:
            draft = super().propose(view, rows, budget, rng)
            found = [place for place, row in enumerate(rows) if view.tokens(row)[0] == 2 and draft.counts[place] > 1]
            return (TREES | CHAINS)[spoilt](draft, sum(draft.counts[: found[0] + 1]) - 1) if found else draft

    drafter = Careless([[*prompt, *text] for prompt, text in zip(PROMPTS, want, strict=True)], 0.9, VOCAB)
    handles = Engine(target(), drafter, rule=rule).generate(PROMPTS, params)
    assert [handle.tokens for handle in handles] == want
    assert [handle.stats.faults for handle in handles] == [0, 1, 0] and handles[1].stats.num_draft_tokens == 0
    assert min(handles[0].stats.tau, handles[2].stats.tau) > 1.5
    assert len(faults) == 1 and "drafter noisy_oracle raised in propose: ValueError" in faults[0]
    assert "expected" in faults[0] and "choose another" in faults[0]


@pytest.mark.parametrize(("rule", "pick"), [("replay", "coupled"), ("rejection", "sampled"), ("block", "sampled")])
def test_a_draft_model_of_nan_fails_in_its_row_only(rule: str, pick: str, faults: list[str]) -> None:
    """That row goes on without drafts, and the target's distribution does not change."""
    params = replace(PARAMS, temperature=1.0 if rule == "replay" else 0.0)
    prompts = [[1], [1, POISON, 2], [1, 2, 3]]
    want = [handle.tokens for handle in Engine(target()).generate(prompts, params)]
    engine = Engine(target(), get_drafter("draft_model")(target(poison=True), pick=pick), rule=rule)
    handles = engine.generate(prompts, params)
    assert [handle.tokens for handle in handles] == want and [handle.error for handle in handles] == [None] * 3
    assert handles[1].stats.tau < 2 < min(handles[0].stats.tau, handles[2].stats.tau)
    assert [handle.stats.faults for handle in handles] == [0, 1, 0]
    assert len(faults) == 1 and "logits that are not finite" in faults[0]


def test_a_draft_with_too_few_rows_is_named(faults: list[str]) -> None:
    small = AutomatonTarget(random_logits(STATES, VOCAB, seed=2), max_rows=2)
    engine = Engine(target(max_rows=4), get_drafter("draft_model")(small))
    assert [len(handle.tokens) for handle in engine.generate([[1], [2]], PARAMS)] == [14, 14]
    assert engine.stats.faults == 0
    assert [handle.tokens for handle in engine.generate(PROMPTS, PARAMS)] == texts()
    assert "draft with room for 2 rows; expected at least as many as the target has" in faults[0]
    assert engine.idle and engine.target.cache.pages.num_used == small.cache.pages.num_used == 0


def test_a_tokenizer_that_raises_ends_its_request_only() -> None:
    tokenizer = byte_tokenizer()

    class FailingTokenizer:
        def decode(self, tokens: list[int], **options: Any) -> str:
            if 5 in tokens and 1 in tokens[:1]:
                raise OverflowError("no such token")
            return str(tokenizer.decode(tokens, **options))

    model = target()
    engine = Engine(model, tokenizer=FailingTokenizer())
    params = SamplingParams(seed=3, max_new_tokens=40, stop=("zzz",))
    handles = [engine.submit(prompt, params) for prompt in ([1], [2], [3])]
    while not engine.idle:
        engine.step()
    assert 5 in Engine(target()).generate([[1]], SamplingParams(seed=3, max_new_tokens=40))[0].tokens
    assert handles[0].finish_reason == "error" and isinstance(handles[0].error, OverflowError)
    assert [len(handle.tokens) for handle in handles[1:]] == [40, 40]
    assert model.cache.pages.num_used == 0
