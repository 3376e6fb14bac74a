"""The contract of drafters, run for every registered name. A new drafter is tested without further entries."""

from __future__ import annotations

import atexit
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from oracles import heads, models
from oracles.automaton import AutomatonTarget, random_logits
from oracles.automaton_head import AutomatonHead
from oracles.head_drafts import begin, commit

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter, get_rule
from specdec_fast.core.draft import Draft, ProposalKind
from specdec_fast.drafters import drafter_names, make_drafter
from specdec_fast.engine.state import DecodeState
from specdec_fast.heads.blockwise import BlockwiseHeads
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.interfaces import Budget, Drafter, Needs
from specdec_fast.retrieval.datastore import Datastore, build
from specdec_fast.rules import rule_names
from specdec_kernels import tree_plan

VOCAB, STATES, ROWS = 8, 23, 6


def close_model(**shape: Any) -> AutomatonTarget:
    """Returns a model that is often right about `target`."""
    logits = random_logits(STATES, VOCAB, seed=2) + 0.5 * random_logits(STATES, VOCAB, seed=3)
    return AutomatonTarget(logits, **{"max_rows": ROWS, **shape})


def target(**shape: Any) -> AutomatonTarget:
    return AutomatonTarget(random_logits(STATES, VOCAB, seed=2), **{"max_rows": ROWS, **shape})


def some_heads(own: bool, ids: int | None) -> MedusaHeads:
    """Three random heads over the automaton's state."""
    torch.manual_seed(0)
    heads = MedusaHeads(STATES, VOCAB, 3, own_lm_head=own, token_ids=ids)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    if heads.token_ids is not None:
        heads.token_ids.copy_(torch.arange(ids) + 2)
    return heads


@lru_cache(maxsize=1)
def two_datastores() -> list[Datastore]:
    """Writes texts of the automaton into two files, which stay mapped until the tests end."""
    source, folder = random.Random(6), Path(mkdtemp())
    atexit.register(rmtree, folder, ignore_errors=True)
    for at in range(2):
        params = [SamplingParams(temperature=0.5, seed=100 * at + seed, max_new_tokens=30) for seed in range(20)]
        texts = Engine(target()).generate([[source.randrange(VOCAB)] for _ in params], params)
        build(folder / str(at), [[*handle.prompt, *handle.tokens] for handle in texts], VOCAB)
    return [Datastore(folder / str(at)) for at in range(2)]


def recycling(shared: bool, pick: str) -> Any:
    return get_drafter("recycling")(num_draft_tokens=6, top_k=3, shared=shared, pick=pick)


# How to build a drafter over the automaton: name -> variants. A drafter without an entry is built without
# arguments; one with an empty entry cannot work over the automaton (its own tests and test_contract_models.py try it).
BUILD: dict[str, dict[str, Callable[[], Any]]] = {
    "auto": {
        pick: (lambda pick=pick: get_drafter("auto")([get_drafter("suffix")(pick=pick), recycling(False, pick)], 6))
        for pick in ("coupled", "greedy")
    },
    "blockwise": {
        pick: (lambda pick=pick: get_drafter("blockwise")(target(), BlockwiseHeads(STATES, VOCAB, 3), pick=pick))
        for pick in ("coupled", "greedy")
    },
    "draft_model": {
        pick: (lambda pick=pick: get_drafter("draft_model")(close_model(), num_draft_tokens=4, pick=pick))
        for pick in ("coupled", "sampled", "greedy")
    }
    | {"entropy": lambda: get_drafter("draft_model")(close_model(), pick="sampled", entropy_stop=0.45)},
    "eagle": {
        how: (lambda how=how: get_drafter("eagle")(target(), AutomatonHead(close_model()), how=how, depth=0, width=3))
        for how in ("coupled", "greedy", "sampled", "hybrid")
    }
    | {"dynamic": lambda: get_drafter("eagle")(target(), AutomatonHead(close_model()), depth=4, width=3)},
    "eagle3": {
        f"{how}_{depth}": (
            lambda how=how, depth=depth: get_drafter("eagle3")(
                target(), AutomatonHead(close_model(), kept=(0, 1, 2, 5, 7)), how=how, depth=depth, width=3
            )
        )
        for how, depth in (("coupled", 4), ("greedy", 4), ("coupled", 0), ("sampled", 0))
    },
    "draft_tree": {
        how: (lambda how=how: get_drafter("draft_tree")(close_model(), widths=(3, 2, 1), how=how))
        for how in ("coupled", "hybrid", "iid", "top_k", "without_replacement")
    }
    | {
        f"best_{how}": (lambda how=how: get_drafter("draft_tree")(close_model(), depth=4, width=3, how=how))
        for how in ("coupled", "top_k")
    },
    "forest": {
        pick: (
            lambda pick=pick: get_drafter("forest")(
                [get_drafter("ngram")(n_min=1), get_drafter("draft_model")(close_model(), pick=pick)], adapt=False
            )
        )
        for pick in ("coupled", "sampled")
    },
    "layer_skip": {
        pick: (lambda pick=pick: get_drafter("layer_skip")(target(), exit_after=2, pick=pick, threshold=0.3))
        for pick in ("coupled", "sampled", "greedy")
    },
    "medusa": {
        name: (lambda pick=pick, own=own, ids=ids: get_drafter("medusa")(target(), some_heads(own, ids), pick=pick))
        for name, pick, own, ids in (
            ("coupled", "coupled", True, None),
            ("greedy", "greedy", False, None),
            ("reduced", "coupled", True, 5),
        )
    },
    "mtp": {
        how: (lambda how=how: get_drafter("mtp")(target(), AutomatonHead(close_model()), how=how, num_draft_tokens=4))
        for how in ("coupled", "greedy", "sampled")
    }
    | {"dynamic": lambda: get_drafter("mtp")(target(), AutomatonHead(close_model()), depth=4, width=3)},
    "ngram": {
        match: (lambda match=match: get_drafter("ngram")(num_draft_tokens=5, n_min=1, match=match))
        for match in ("last", "frequent")
    },
    "recycling": {"prompts": lambda: make_drafter("recycling", {}, target=target())}
    | {
        name: (lambda shared=shared, pick=pick: recycling(shared, pick))
        for name, shared, pick in (("own", False, "greedy"), ("shared", True, "greedy"), ("coupled", False, "coupled"))
    },
    "rest": {
        pick: (
            lambda pick=pick: get_drafter("rest")(
                num_draft_tokens=6, min_match=1, datastore=two_datastores(), pick=pick
            )
        )
        for pick in ("coupled", "greedy")
    },
    "suffix": {
        "own": lambda: get_drafter("suffix")(num_draft_tokens=6, min_match=1),
        "coupled": lambda: get_drafter("suffix")(num_draft_tokens=6, min_match=1, pick="coupled"),
        "shared": lambda: get_drafter("suffix")(num_draft_tokens=6, min_match=1, shared=True, max_tokens=60),
    },
}
VARIANTS = [
    pytest.param(build, id=f"{name}-{variant}")
    for name in drafter_names()
    for variant, build in BUILD.get(name, {"default": get_drafter(name)}).items()
]
every_drafter = pytest.mark.parametrize("build", VARIANTS)
# What these propose depends on the target's results for their own drafts too, which a fresh drafter has not observed:
# test_contract_learning.py replays the same steps to a fresh one.
LEARNS_FROM_RESULTS = [
    name for name in drafter_names() if get_drafter(name).needs.node_choices or get_drafter(name).needs.logits
]
by_text_alone = pytest.mark.parametrize(
    "build", [each for each in VARIANTS if each.id.split("-")[0] not in LEARNS_FROM_RESULTS]
)


def rules_for(needs: Needs) -> list[str]:
    return [name for name in rule_names() if get_rule(name).why_not(needs) is None]


def state_of(prompts: list[list[int]], **changes: Any) -> tuple[DecodeState, list[int]]:
    state = DecodeState(ROWS, 64)
    return state, [
        state.join(prompt, SamplingParams(seed=at, **changes), len(prompt), ()) for at, prompt in enumerate(prompts)
    ]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(VOCAB) for _ in range(source.randrange(1, 14))] for _ in range(count)]


@torch.inference_mode()
def proposal(made: Any, state: DecodeState, rows: list[int], limits: list[int]) -> Draft:
    draft: Draft | None = made.propose(state, rows, Budget(limits), state.rng(rows))
    if draft is None:  # the engine makes it then
        draft = Draft.chains(rows, [state.tokens(row)[-1:] for row in rows], device=state.device)
    return draft


def check(draft: Draft, state: DecodeState, rows: list[int], limits: list[int], needs: Needs) -> None:
    draft.check(VOCAB)
    assert draft.rows.tolist() == rows
    offsets = draft.offsets.tolist()
    plan = tree_plan(draft.parents, draft.offsets)
    assert offsets[-1] == draft.num_nodes and int(plan.depth.max()) <= draft.max_depth
    for at, (row, limit) in enumerate(zip(rows, limits, strict=True)):
        start, stop = offsets[at], offsets[at + 1]
        assert int(draft.tokens[start]) == state.tokens(row)[-1], "node 0 is the newest committed token"
        assert stop - start - 1 <= limit, "more nodes than the budget"
        if needs.aux_hidden_states and limit and state.length(row) > 1:
            assert stop - start > 1, "the states of all tokens are known, and nothing is drafted"
    assert draft.is_chain or needs.topology == "tree"
    assert needs.dists or set(draft.proposal_kinds.tolist()) <= {int(ProposalKind.DETERMINISTIC)}
    inner = set(range(draft.num_nodes)) - set(offsets[:-1])
    for node in inner:
        if int(draft.proposal_kinds[node]) != ProposalKind.DETERMINISTIC:
            assert draft.dists is not None
            weights, ids = draft.dists.select(draft.dist_index[node : node + 1].long()).probs(), draft.dists.token_ids
            column = int(draft.tokens[node]) if ids is None else ids.tolist().index(int(draft.tokens[node]))
            assert float(weights[0, column]) > 0, "sampled from a distribution that forbids it"


@every_drafter
def test_it_implements_the_interface(build: Callable[[], Any]) -> None:
    made = build()
    assert isinstance(made, Drafter) and isinstance(made.needs, Needs)
    assert made.name in drafter_names() and made.num_draft_tokens >= 1
    assert {"replay", "greedy"} <= set(rules_for(made.needs))


@every_drafter
def test_drafts_are_well_formed_and_within_budget(build: Callable[[], Any]) -> None:
    source, made = random.Random(5), build()
    state, rows = state_of(prompts(4))
    begin(made, target(), state, rows)
    for _ in range(12):
        open_rows = [row for row in rows if state.length(row) < 50]
        some = source.sample(open_rows, source.randrange(1, 1 + len(open_rows)))
        limits = [source.randrange(0, 7) for _ in some]
        draft = proposal(made, state, some, limits)
        check(draft, state, some, limits, made.needs)
        commit(made, target(), state, draft, source)


@every_drafter
def test_a_proposal_depends_on_its_own_row_only(build: Callable[[], Any]) -> None:
    """The drafts are the same alone, in a batch and in another order."""
    texts = prompts(4, seed=3)

    def drafted(order: list[int]) -> dict[int, list[int]]:
        made = build()
        state, rows = state_of(texts)
        begin(made, target(), state, rows)
        draft = proposal(made, state, [rows[at] for at in order], [4] * len(order))
        check(draft, state, [rows[at] for at in order], [4] * len(order), made.needs)
        bounds, tokens = draft.offsets.tolist(), draft.tokens.tolist()
        return {at: tokens[bounds[place] : bounds[place + 1]] for place, at in enumerate(order)}

    together = drafted([0, 1, 2, 3])
    assert drafted([2, 0, 3, 1]) == together
    assert {at: drafted([at])[at] for at in range(4)} == together


@every_drafter
def test_proposing_again_after_a_failed_step_gives_the_same_draft(build: Callable[[], Any]) -> None:
    made = build()
    state, rows = state_of(prompts(3))
    begin(made, target(), state, rows)
    first = proposal(made, state, rows, [4, 4, 4])
    check(first, state, rows, [4, 4, 4], made.needs)
    second = proposal(made, state, rows, [4, 4, 4])
    assert torch.equal(first.tokens, second.tokens) and torch.equal(first.offsets, second.offsets)


@every_drafter
def test_released_rows_leave_no_data(build: Callable[[], Any]) -> None:
    """The drafts of a reused row equal those of a fresh drafter."""
    texts = prompts(3, seed=8)
    made = build()
    state, rows = state_of(prompts(3, seed=9))
    begin(made, target(), state, rows)
    proposal(made, state, rows, [4, 4, 4])
    made.release(rows)
    made.release(rows)  # idempotent
    if made.needs.aux_hidden_states:  # a row that returns without its hidden states gets no drafts
        made.begin(state, rows, None)
        assert proposal(made, state, rows, [4, 4, 4]).num_nodes == len(rows)
        made.release(rows)

    def drafts(drafter: Any) -> list[int]:
        fresh, same = state_of(texts)
        begin(drafter, target(), fresh, same)
        draft = proposal(drafter, fresh, same, [4, 4, 4])
        check(draft, fresh, same, [4, 4, 4], drafter.needs)
        drafter.release(same)
        found: list[int] = draft.tokens.tolist()
        return found

    assert drafts(made) == drafts(build())
    model = getattr(made, "model", None)
    assert model is None or model.cache.pages.num_used == 0


@every_drafter
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_plain_decoding(build: Callable[[], Any], temperature: float) -> None:
    """Under replay, with rows that join and leave, in a pool that is too small for all."""
    texts = prompts(12, seed=1)
    params = [
        SamplingParams(seed=at, temperature=temperature, max_new_tokens=5 + 2 * at, min_new_tokens=at % 5)
        for at in range(12)
    ]
    want = [handle.tokens for handle in Engine(target(), eos_token_ids=(3,)).generate(texts, params)]
    engine = Engine(target(num_pages=24, page_size=4), build(), eos_token_ids=(3,))
    handles = engine.generate(texts, params)
    assert [handle.tokens for handle in handles] == want
    assert engine.target.cache.pages.num_used == 0 and engine.stats.num_draft_tokens > 0


@by_text_alone
def test_after_some_steps_it_proposes_as_a_fresh_one(build: Callable[[], Any]) -> None:
    made = build()
    assert not made.needs.node_choices and not made.needs.logits
    engine = Engine(target(), made)
    for at, prompt in enumerate(prompts(3, seed=5)):
        engine.submit(prompt, SamplingParams(seed=at, temperature=[0.0, 0.7, 1.0][at], max_new_tokens=40))
    for _ in range(4):
        engine.step()
    state, rows = engine.state, list(engine._running)
    kept, fresh = proposal(made, state, rows, [4, 5, 6]), build()
    begin(fresh, target(), state, rows)
    again = proposal(fresh, state, rows, [4, 5, 6])
    check(again, state, rows, [4, 5, 6], fresh.needs)
    for name in ("tokens", "parents", "offsets", "proposal_kinds"):
        assert torch.equal(getattr(kept, name), getattr(again, name)), name


@every_drafter
def test_it_never_costs_a_target_pass_and_a_second_call_repeats_the_first(build: Callable[[], Any]) -> None:
    texts = prompts(4, seed=11)
    params = [SamplingParams(seed=at, temperature=[0.0, 1.0][at % 2], max_new_tokens=9 + 3 * at) for at in range(4)]
    alone = target()
    want = [handle.tokens for handle in Engine(alone, eos_token_ids=(3,)).generate(texts, params)]
    engine = Engine(target(), build(), eos_token_ids=(3,))
    for _ in range(2):
        before = engine.target.passes
        handles = engine.generate(texts, params)
        assert [handle.tokens for handle in handles] == want
        assert engine.target.passes - before <= alone.passes
        assert all(handle.stats.steps <= handle.stats.new_tokens for handle in handles)


@every_drafter
def test_an_opposite_target_costs_no_extra_pass(build: Callable[[], Any]) -> None:
    """This target's likeliest tokens are the least likely ones of the draft model."""
    texts = prompts(3, seed=12)
    params = [SamplingParams(seed=at, temperature=[0.0, 1.0, 0.0][at], max_new_tokens=9 + at) for at in range(3)]
    engines = [Engine(AutomatonTarget(-target().table), made) for made in (None, build())]
    plain, against = (engine.generate(texts, params) for engine in engines)
    assert [handle.tokens for handle in against] == [handle.tokens for handle in plain]
    assert engines[1].target.passes <= engines[0].target.passes and engines[1].stats.faults == 0
    if engines[1].drafter.needs.own_cache:
        assert against[0].stats.num_draft_tokens > 9 and sum(against[0].stats.accepted_per_position) <= 2


@every_drafter
def test_it_works_under_every_rule_that_accepts_it(build: Callable[[], Any]) -> None:
    texts = prompts(6, seed=2)
    for rule in rules_for(build().needs):
        params = SamplingParams(temperature=0.0 if rule == "greedy" else 0.9, seed=4, max_new_tokens=16)
        engine = Engine(target(), build(), rule=rule)
        handles = engine.generate(texts, params)
        assert all(len(handle.tokens) == 16 and handle.error is None for handle in handles), rule
        if get_rule(rule).replays:
            assert [h.tokens for h in handles] == [h.tokens for h in Engine(target()).generate(texts, params)]


@every_drafter
def test_a_request_may_ask_for_no_draft(build: Callable[[], Any]) -> None:
    engine = Engine(target(), build())
    handles = [
        engine.submit([1, 2, 1, 2], SamplingParams(seed=1, max_new_tokens=9), num_draft_tokens=n) for n in (0, 3)
    ]
    while not engine.idle:
        engine.step()
    assert handles[0].tokens == handles[1].tokens and handles[0].stats.num_draft_tokens == 0


def test_every_drafter_that_takes_a_model_works_over_transformers(tmp_path: Path) -> None:
    for name in drafter_names():
        small = HuggingFaceTarget(models.kin("llama"), max_length=128)
        large = HuggingFaceTarget(models.own("llama"), max_length=128)
        options: dict[str, Any] = {"datastore": two_datastores()} if name == "rest" else {}
        if name in models.HEADS:
            options["head"] = models.HEADS[name](large)
        if name in ("eagle", "eagle3", "mtp"):
            options = heads.options(name, tmp_path)
        made = make_drafter(name, options, target=large, draft=lambda small=small: small)
        engine = Engine(large, made)
        handles = engine.generate(
            [models.prompt(17), models.prompt(5)], SamplingParams(temperature=0, max_new_tokens=12)
        )
        assert [handle.tokens for handle in handles] == [models.greedy_text("llama", n, 12) for n in (17, 5)]
