"""Captured steps with trained heads: texts and drafts are those of other steps, and nothing in them defies capture."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import models
from oracles.arrivals import requests, texts
from oracles.automaton import AutomatonTarget, random_logits, scripted
from oracles.capture_guard import check_repeats, guard_programs

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.draft import Draft
from specdec_fast.heads.blockwise import BlockwiseHeads
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.interfaces import CapturedRows, CapturedTrees

VOCAB = 9
WIDE = (-1, 0, 1, 0, 1, 3, 0, 2)  # neither level by level nor depth first


def automaton(**shape: int) -> AutomatonTarget:
    """The next state is mostly the following one, so that heads who look ahead are right often."""
    transitions = (torch.arange(61)[:, None] + 1 + (torch.arange(VOCAB) % 4 == 0)) % 61
    return AutomatonTarget(random_logits(61, VOCAB, seed=4), transitions, **shape)


def medusa(target: Any, shape: Any = WIDE, **options: Any) -> Any:
    """Head k knows what is k + 2 ahead of a target whose state does not depend on tokens."""
    states = len(target.table)
    heads = MedusaHeads(states, target.vocab_size, 3, num_layers=0)
    assert heads.lm_head is not None
    with torch.no_grad():
        for head in range(3):
            heads.lm_head[head] = target.table[(torch.arange(states) + 1 + head).clamp(max=states - 1)].T
    return get_drafter("medusa")(target, heads, shape=shape, **options)


def blockwise(target: Any) -> Any:
    """The same knowledge in the other kind of heads."""
    states = len(target.table)
    heads = BlockwiseHeads(states, target.vocab_size, 3, inner_size=states)
    with torch.no_grad():
        heads.inner.weight.copy_(torch.eye(states).repeat(3, 1))
        heads.inner.bias.zero_()
        for head in range(3):
            own = slice(head * states, (head + 1) * states)
            ahead = (torch.arange(states) + 1 + head).clamp(max=states - 1)
            heads.outer.weight[own, own] = torch.eye(states)[ahead].T - torch.eye(states)
    return get_drafter("blockwise")(target, heads)


MADE: dict[str, Callable[[Any], Any]] = {"medusa": medusa, "blockwise": blockwise}
CHAINS: dict[str, Callable[[Any], Any]] = {
    "medusa": lambda target: medusa(target, (-1, 0, 1, 2)),
    "blockwise": blockwise,
}

Paths = frozenset[tuple[int, ...]]


def paths(tokens: list[int], parents: list[int]) -> Paths:
    """The texts that a tree holds, its root's not counted."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    assert len(set(found)) == len(found), "two siblings hold one token"
    return frozenset(found[1:])


def watched(engine: Engine) -> dict[tuple[int, int], Paths]:
    """What is drafted from now on: by seed and length of the text."""
    seen: dict[tuple[int, int], Paths] = {}
    drafter: Any = engine.drafter
    plain = drafter.propose

    def propose(view: Any, rows: Any, budget: Any, rng: Any) -> Draft:
        draft: Draft = plain(view, rows, budget, rng)
        tokens, parents, bounds = draft.tokens.tolist(), draft.parents.tolist(), draft.offsets.tolist()
        for at, row in enumerate(rows):
            own = slice(bounds[at], bounds[at + 1])
            seen[engine._running[row].params.seed, view.length(row)] = paths(tokens[own], parents[own])  # type: ignore[index]
        return draft

    drafter.propose = propose
    proposals = engine._captured._proposals
    if proposals is None:
        return seen
    captured = proposals.propose

    def propose_captured(batch: CapturedRows) -> CapturedTrees:
        trees = captured(batch)
        width = trees.tokens.shape[1]
        chains = torch.arange(width, dtype=torch.int32).expand(len(batch.rows), width)
        each = [batch.sampling.seeds, batch.lengths, batch.drafts, trees.counts, trees.tokens]
        parents = chains if trees.parents is None else trees.parents
        for seed, length, most, count, tokens, above in zip(*(part.tolist() for part in (*each, parents)), strict=True):
            assert 0 <= count <= most
            if most:
                seen[seed, length] = paths([0, *tokens[:count]], [-1, *above[:count]])
        return trees

    proposals.propose = propose_captured  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize(("rule", "temperatures"), [("replay", (0.0, 0.7, 1.0)), ("greedy", (0.0,))])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_texts_and_drafts_are_those_of_steps_that_are_not_captured(
    kind: str, rule: str, temperatures: tuple[float, ...], rows: int
) -> None:
    wanted, made, drafts, told = requests(20, temperatures), {}, {}, {}
    for mode in ("sync", "graph"):
        target = automaton(max_rows=rows)
        engine = Engine(target, MADE[kind](target), rule=rule, eos_token_ids=(3,), step_mode=mode)
        drafts[mode] = watched(engine)
        made[mode] = texts(engine, wanted, random.Random(rows))
        told[mode] = engine.stats.steps, engine.stats.drafted, engine.stats.accepted, engine.stats.mean_alpha
        assert engine.stats.faults == 0
    assert made["graph"] == made["sync"] and told["graph"] == told["sync"]
    both = drafts["graph"].keys() & drafts["sync"].keys()
    assert len(both) > 40 and sum(bool(drafts["sync"][key]) for key in both) > 20
    assert {key: drafts["graph"][key] for key in both} == {key: drafts["sync"][key] for key in both}
    assert engine.stats.mean_alpha > 0.3
    plain = Engine(automaton(max_rows=8), rule=rule, eos_token_ids=(3,), step_mode="sync")
    assert texts(plain, wanted, random.Random(rows)) == made["graph"]


def script(length: int) -> list[int]:
    source = random.Random(0)
    return [source.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("kind", CHAINS)
def test_who_knows_the_text_is_accepted_whole(kind: str) -> None:
    """From the second step on where the prompt is one token: before it no hidden state is known."""
    target = scripted(script(60), VOCAB)
    engine = Engine(target, CHAINS[kind](target), step_mode="graph")
    handles = engine.generate([script(4), script(1)], SamplingParams(temperature=0, max_new_tokens=33))
    assert [handle.tokens for handle in handles] == [script(60)[4:37], script(60)[1:34]]
    assert [handle.stats.steps for handle in handles] == [9, 9] and engine.step_mode == "graph"
    assert handles[0].stats.drafted == 8 * 3 and handles[1].stats.drafted == 8 * 3


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("end", [1, 2, 3])
def test_an_end_inside_an_accepted_run_cuts_the_text_there(kind: str, end: int) -> None:
    words = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    target = scripted(words, VOCAB)
    engine = Engine(target, CHAINS[kind](target), step_mode="graph")
    params = SamplingParams(temperature=0, stop_token_ids=(words[1 + end],), max_new_tokens=9)
    handle = engine.generate([words[:2]], params)[0]
    assert handle.tokens == words[2 : 2 + end] and handle.finish_reason == "eos" and handle.stats.steps == 1


@pytest.mark.parametrize("kind", CHAINS)
def test_rows_that_change_their_mode_draft_on(kind: str) -> None:
    """A request with a bias comes and goes: what is known of the others goes with them, both ways."""
    target = scripted(script(62), VOCAB)
    engine = Engine(target, CHAINS[kind](target), step_mode="graph")
    handle = engine.submit(script(4), SamplingParams(temperature=0, max_new_tokens=48))
    modes = []
    for turn in range(20):
        if turn in (2, 6):
            engine.submit([4, 5], SamplingParams(temperature=0, max_new_tokens=9, logit_bias={2: 3.0}))
        engine.step()
        modes.append(engine.step_mode)
    assert engine.idle and handle.tokens == script(62)[4:52]
    assert modes.count("sync") > 1 and "graph" in modes[: modes.index("sync")] and modes[-1] == "graph"
    assert handle.stats.steps == 12, "every draft was right"


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("verb", ["observe", "propose"])
@pytest.mark.parametrize("call", [1, 3])
def test_a_step_that_fails_half_way_costs_no_token(
    kind: str, verb: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other verbs go on: a row that knows more than its text tells drafts again as soon as it may."""
    target = scripted(script(60), VOCAB)
    engine = Engine(target, CHAINS[kind](target), step_mode="graph")
    proposals, count = engine._captured._proposals, [0]
    whole = getattr(proposals, verb)

    def failing(*args: Any) -> Any:
        found, count[0] = whole(*args), count[0] + 1
        if count[0] == call:
            raise RuntimeError("half-way")
        return found

    monkeypatch.setattr(proposals, verb, failing)
    handle = engine.generate([script(4)], SamplingParams(temperature=0, max_new_tokens=40))[0]
    assert handle.tokens == script(60)[4:44] and count[0] == call
    assert "a captured step failed: RuntimeError: half-way" in engine.explain()
    assert handle.stats.steps <= 11, "one step without a draft at most"


@pytest.mark.parametrize("kind", models.HEADS)
def test_a_step_can_be_captured_and_meets_the_same_tensors_every_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [models.prompt(length) for length in (1, 5, 17)]
    wanted = [
        SamplingParams(temperature=t, seed=3, max_new_tokens=n, top_p=0.9) for t, n in ((0, 4), (1, 9), (0.7, 24))
    ]
    target = models.target("llama", max_rows=4, max_length=64)
    plain = Engine(target).generate(prompts, wanted)
    runs = guard_programs(monkeypatch)
    engine = Engine(target, get_drafter(kind)(target, models.HEADS[kind](target)), step_mode="graph")
    handles = engine.generate(prompts, wanted)
    assert [handle.tokens for handle in handles] == [handle.tokens for handle in plain]
    assert engine.step_mode == "graph" and engine.stats.drafted > 30 and engine.stats.faults == 0
    assert "specdec.tree_expand.default" in check_repeats(runs)
