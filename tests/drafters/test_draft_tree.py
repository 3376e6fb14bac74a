"""Trees of a draft model: shapes are fixed before sampling, tokens follow their distributions, and the cache holds the
accepted tokens.
"""

from __future__ import annotations

from collections import Counter
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from oracles import models
from oracles.automaton import AutomatonTarget, random_logits
from oracles.chi_square import p_value
from oracles.distributions import dist, joint
from oracles.kv_recompute import holds

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter, load
from specdec_fast.core.draft import Draft, ProposalKind
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Budget
from specdec_kernels.random import replay_noise

VOCAB, ROWS = 8, 200
HOWS = ("coupled", "hybrid", "iid", "top_k", "without_replacement")
MARKS = {
    "coupled": [ProposalKind.DETERMINISTIC] * 3,
    "top_k": [ProposalKind.DETERMINISTIC] * 3,
    "iid": [ProposalKind.SAMPLED] * 3,
    "without_replacement": [ProposalKind.SAMPLED_WITHOUT_EARLIER] * 3,
    "hybrid": [ProposalKind.SAMPLED_WITHOUT_DETERMINISTIC, ProposalKind.DETERMINISTIC, ProposalKind.DETERMINISTIC],
}


def automaton(seed: int = 2, vocab: int = VOCAB, **shape: int) -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, vocab, seed=seed), **{"max_rows": ROWS, **shape})


def drafter(how: str, model: Any = None, **settings: Any) -> Any:
    return get_drafter("draft_tree")(automaton() if model is None else model, how=how, **settings)


def joined(made: Any, prompts: list[list[int]], first_seed: int = 10, **changes: Any) -> tuple[DecodeState, list[int]]:
    state = DecodeState(ROWS, 64)
    rows = [
        state.join(prompt, SamplingParams(seed=first_seed + at, **changes), len(prompt), ())
        for at, prompt in enumerate(prompts)
    ]
    made.begin(state, rows, None)
    return state, rows


def propose(made: Any, state: DecodeState, rows: list[int], limits: list[int]) -> Draft:
    with torch.inference_mode():
        draft: Draft = made.propose(state, rows, Budget(limits), state.rng(rows))
    draft.check(VOCAB)
    return draft


def families(draft: Draft, row: int) -> dict[int, list[int]]:
    """Returns the packed children of every node of a row, in order."""
    start, stop = draft.offsets.tolist()[row : row + 2]
    found: dict[int, list[int]] = {}
    for node in range(start + 1, stop):
        found.setdefault(start + int(draft.parents[node]), []).append(node)
    return found


def path_to(draft: Draft, row: int, node: int) -> list[int]:
    """Returns the tokens below the root down to a node."""
    start, tokens = int(draft.offsets[row]), []
    while node != start:
        tokens.append(int(draft.tokens[node]))
        node = start + int(draft.parents[node])
    return tokens[::-1]


@pytest.mark.parametrize("how", HOWS)
def test_the_shape_follows_widths_and_budget_alone(how: str) -> None:
    """The tree grows by levels until the budget is spent, and is the same for every seed: samples do not change it."""
    want = {
        9: [3, 2, 2, 2],
        15: [3, 2, 2, 2, 1, 1, 1, 1, 1, 1],
        4: [3, 1],
        2: [2],
        1: [1],
        0: [],
        99: [3, 2, 2, 2] + [1] * 6,
    }
    for seed in range(5):
        made = drafter(how, widths=(3, 2, 1))
        assert made.num_draft_tokens == 15
        state, rows = joined(made, [[1, 2, at % VOCAB] for at in range(len(want))], first_seed=100 * seed)
        draft = propose(made, state, rows, list(want))
        for row, counts in enumerate(want.values()):
            assert [len(children) for children in families(draft, row).values()] == counts
            assert draft.counts[row] == 1 + sum(counts)
        assert draft.max_depth == 3 and not draft.is_chain


@pytest.mark.parametrize("how", HOWS)
def test_siblings_carry_their_kinds_and_the_distribution_of_their_parent(how: str) -> None:
    changes = {"temperature": 0.9, "top_k": 6, "top_p": 0.97}
    made = drafter(how, widths=(3, 2))
    prompts = [[1, 2], [3], [4, 5, 6]]
    state, rows = joined(made, prompts, **changes)
    draft = propose(made, state, rows, [9, 4, 9])
    assert made.needs.dists == (draft.dists is not None) == (how not in ("coupled", "top_k"))
    for row, prompt in enumerate(prompts):
        for parent, children in families(draft, row).items():
            want = dist(made.model.logits_after([*prompt, *path_to(draft, row, parent)]), **changes)
            tokens = [int(draft.tokens[node]) for node in children]
            marks = [int(draft.proposal_kinds[node]) for node in children]
            assert marks == [int(mark) for mark in MARKS[how][: len(children)]]
            assert all(want[token] > 0 for token in tokens)
            assert how == "iid" or len(set(tokens)) == len(tokens)
            likeliest = np.argsort(-want, kind="stable").tolist()
            if how == "top_k":
                assert tokens == likeliest[: len(tokens)]
            if how == "hybrid":
                assert tokens[1:] == likeliest[: len(tokens) - 1] and tokens[0] not in tokens[1:]
            for node, mark in zip(children, marks, strict=True):
                if mark != ProposalKind.DETERMINISTIC:
                    assert draft.dists is not None
                    mine = draft.dists.select(draft.dist_index[node : node + 1].long()).probs()[0]
                    assert np.allclose(mine.numpy(), want, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_coupled_siblings_are_the_largest_under_the_target_s_noise(temperature: float) -> None:
    made = drafter("coupled", widths=(3, 2, 1))
    state, rows = joined(made, [[1, 2], [5]], temperature=temperature)
    draft = propose(made, state, rows, [15, 15])
    for row, prompt in enumerate([[1, 2], [5]]):
        for parent, children in families(draft, row).items():
            path = path_to(draft, row, parent)
            score = torch.tensor(made.model.logits_after([*prompt, *path])).float()
            if temperature:
                position = torch.tensor([len(prompt) + len(path)], dtype=torch.int32)
                score = score / temperature + replay_noise(torch.tensor([10 + row]), position, VOCAB)[0]
            best = score.argsort(descending=True)[: len(children)].tolist()
            assert [int(draft.tokens[node]) for node in children] == best


@pytest.mark.parametrize("how", ["hybrid", "iid", "without_replacement"])
def test_siblings_follow_their_joint_distribution(how: str) -> None:
    """Two children of the root and one of the first, over many seeds: draws of a step are independent."""
    vocab = 4
    made = drafter(how, automaton(vocab=vocab), widths=(2, 1))
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(0, 6000, ROWS):
        state, rows = joined(made, [[1]] * ROWS, first_seed=start)
        with torch.inference_mode():
            draft = made.propose(state, rows, Budget([3] * ROWS), state.rng(rows))
        seen.update(tuple(own) for own in draft.tokens.reshape(ROWS, 4)[:, 1:].tolist())
        made.release(rows)
    q = dist(made.model.logits_after([1]), 1.0)
    after = [dist(made.model.logits_after([1, token]), 1.0) for token in range(vocab)]
    exact: dict[tuple[int, ...], float] = {}
    top = int(q.argmax())
    for a, b, c in product(range(vocab), repeat=3):
        if how == "iid":
            pair = q[a] * q[b]
        elif how == "without_replacement":
            pair = q[a] * q[b] / (1 - q[a]) if a != b else 0.0
        else:
            pair = q[a] / (1 - q[top]) if b == top and a != top else 0.0
        exact[a, b, c] = float(pair * after[a][c])
    assert sum(exact.values()) == pytest.approx(1)
    assert p_value(seen, exact) > 1e-3


@pytest.mark.parametrize("how", HOWS)
def test_a_distribution_with_few_tokens_gives_few_children(how: str) -> None:
    made = drafter(how, widths=(4, 1))
    state, rows = joined(made, [[1, 2]], top_k=2)
    draft = propose(made, state, rows, [8])
    children = families(draft, 0)[0]
    tokens = [int(draft.tokens[node]) for node in children]
    kept = set(np.argsort(-made.model.logits_after([1, 2]))[:2].tolist())
    assert set(tokens) <= kept and len(tokens) == (4 if how == "iid" else 2)
    state, rows = joined(drafter(how), [[1, 2]], temperature=0.0)
    greedy = propose(drafter_with(made, how), state, rows, [3])
    order = np.argsort(-made.model.logits_after([1, 2]), kind="stable")[:3].tolist()
    got = [int(greedy.tokens[node]) for node in families(greedy, 0)[0]]
    assert sorted(got) == sorted(order) and set(greedy.proposal_kinds.tolist()) == {0} and greedy.dists is None


def drafter_with(other: Any, how: str) -> Any:
    """Returns a fresh drafter over the same table, with row 0 begun."""
    made = drafter(how)
    made.begin(DecodeState(1, 8), [0], None)
    return made


def test_minimum_lengths_and_penalties_hold_at_every_node() -> None:
    ends = (1, 2, 3)
    for how in HOWS:
        made = drafter(how, widths=(3, 2))
        state = DecodeState(2, 32)
        params = SamplingParams(seed=1, min_new_tokens=2, repetition_penalty=1.7, temperature=0.8)
        rows = [state.join([1, 2], params, 2, ends)]
        made.begin(state, rows, None)
        draft = propose(made, state, rows, [9])
        assert not set(draft.tokens[1:].tolist()) & set(ends)
        if draft.dists is None:
            continue
        for parent, children in families(draft, 0).items():
            path = path_to(draft, 0, parent)
            level = made.model.logits_after([1, 2, *path]).copy()
            for token in {1, 2, *path}:
                level[token] = level[token] / 1.7 if level[token] > 0 else level[token] * 1.7
            level[list(ends)] = -np.inf
            sampled = [node for node in children if int(draft.proposal_kinds[node]) != ProposalKind.DETERMINISTIC]
            mine = draft.dists.select(draft.dist_index[sampled[:1]].long()).probs()[0]
            assert np.allclose(mine.numpy(), dist(level, 0.8), atol=1e-6)


@pytest.mark.parametrize("how", HOWS)
def test_the_cache_holds_accepted_tokens_and_none_is_processed_twice(how: str) -> None:
    """With a transformers model, along paths of every length, with rows that skip steps."""
    made = drafter(how, HuggingFaceTarget(models.kin("llama"), max_length=160, max_rows=4), widths=(3, 2, 1))
    fed: list[int] = []
    extend = made.model.extend

    def spy(rows: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        fed.append(len(tokens))
        return extend(rows, tokens, *args, **kwargs)

    made.model.extend = spy
    state = DecodeState(4, 160)
    lengths = (9, 4, 17)
    rows = [
        state.join(models.prompt(length), SamplingParams(seed=at, temperature=0.8), length, ())
        for at, length in enumerate(lengths)
    ]
    made.begin(state, rows, None)
    for step in range(9):
        some = rows if step % 3 else rows[:2]
        fed.clear()
        with torch.inference_mode():
            draft = made.propose(state, some, Budget([15, 6 + step % 4, 15][: len(some)]), state.rng(some))
        if 2 < step < 6:
            assert sum(fed) <= 1 + 2 * (step % 3 == 1), "only leaves of the last level, and a row that sat out"
        for row in some:
            text = list(state.tokens(row))
            holds(made.model, row, text[:-1], _kin())
        for at, row in enumerate(some):
            leaf, depth = int(draft.offsets[at]), (step + row) % 4  # the path of the last child at every node
            for _ in range(depth):
                leaf = families(draft, at).get(leaf, [leaf])[-1]
            state.append([row], [[*path_to(draft, at, leaf), int(draft.tokens[leaf]) % 50 + 1]])
    made.release(rows)
    assert made.model.cache.pages.num_used == 0


def test_a_dynamic_tree_is_recorded_as_it_was_scored_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with different budgets stop growing at different levels, one of them at its root."""
    made = drafter("top_k", depth=4, width=3)
    state, rows = joined(made, [[1, 2], [3], [4, 1]])
    scored: dict[int, tuple[list[int], list[int]]] = {}
    recorded: list[Any] = []
    score = made.source.score

    def spy(rows: list[int], draft: Draft) -> Any:
        ends = draft.offsets.tolist()
        for row, start, stop in zip(rows, ends, ends[1:]):
            if stop > start:
                scored[row] = draft.tokens.tolist()[start:stop], draft.parents.tolist()[start:stop]
        return score(rows, draft)

    record = made.source.record_trees
    monkeypatch.setattr(made.source, "score", spy)
    monkeypatch.setattr(made.source, "record_trees", lambda trees: (recorded.append(trees), record(trees)))
    propose(made, state, rows, [20, 1, 4])
    sizes = [len(tokens) for tokens, _ in scored.values()]
    assert sizes[0] > sizes[2] > sizes[1] >= 1
    assert recorded == [[(row, scored[row]) for row in rows]]
    assert [made.source._stored[row][1].num_nodes for row in rows] == sizes, "all of that is staged"


def _kin() -> Any:
    model = models.kin("llama")
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize(("rule", "how"), [("recursive_rejection", "hybrid"), ("recursive_rejection", "iid"),
    ("recursive_rejection", "without_replacement"),
                                           ("traversal", "hybrid"), ("traversal", "iid"),
                                           ("traversal", "without_replacement"), ("replay", "coupled")])  # fmt: skip
def test_the_text_keeps_its_joint_distribution_over_steps(rule: str, how: str) -> None:
    vocab, length = 4, 3
    shape = {"vocab": vocab, "max_length": 16}
    close = 0.5 * random_logits(23, vocab, seed=2) + 0.5 * random_logits(23, vocab, seed=9)
    made = drafter(how, AutomatonTarget(close, max_rows=ROWS, max_length=16), widths=(2, 2), num_draft_tokens=5)
    engine = Engine(automaton(**shape), made, rule=rule)
    handles = [engine.submit([1], SamplingParams(seed=seed, max_new_tokens=length + 2)) for seed in range(3000)]
    while not engine.idle:
        engine.step()
    reader = automaton(**shape)
    exact = joint(lambda text: dist(reader.logits_after([1, *text]), 1.0), length, vocab)
    assert p_value(Counter(tuple(handle.tokens[:length]) for handle in handles), exact) > 1e-3
    assert engine.stats.steps > 3000 and 0.1 < engine.stats.alpha < 0.98


def test_vocabularies_of_different_sizes() -> None:
    params = [SamplingParams(seed=seed, max_new_tokens=20) for seed in range(4)]
    prompts = [[1, 7], [7, 7, 3], [0], [6, 7]]
    want = [handle.tokens for handle in Engine(automaton()).generate(prompts, params)]
    for vocab in (6, 12):
        for rule, how in (("replay", "coupled"), ("recursive_rejection", "hybrid")):
            made = drafter(how, automaton(vocab=vocab), vocab_size=VOCAB)
            handles = Engine(automaton(), made, rule=rule).generate(prompts, params)
            assert [handle.error for handle in handles] == [None] * 4
            assert rule == "recursive_rejection" or [handle.tokens for handle in handles] == want
            assert made.model.cache.pages.num_used == 0


def test_an_empty_pool_or_a_short_context_means_no_draft() -> None:
    made = drafter("hybrid", automaton(num_pages=3, page_size=4))
    state, rows = joined(made, [[1, 2, 3], [4, 5]])
    assert propose(made, state, rows, [4, 4]).counts == (5, 1)
    made = drafter("hybrid", automaton(max_length=6))
    state, rows = joined(made, [[1, 2, 3]])
    assert [propose(made, state, rows, [limit]).counts for limit in (3, 4)] == [(4,), (1,)]


def test_the_rule_decides_how_siblings_are_picked() -> None:
    for rule, how in (
        ("replay", "coupled"),
        ("greedy", "top_k"),
        ("recursive_rejection", "hybrid"),
        ("traversal", "hybrid"),
    ):
        engine = load(models.own("llama"), models.kin("llama"), drafter="draft_tree", rule=rule, max_length=64)
        assert engine.drafter is not None and engine.drafter.how == how
        params = SamplingParams(temperature=0, max_new_tokens=12)
        assert engine.generate([models.prompt(5)], params)[0].tokens == models.greedy_text("llama", 5, 12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"widths": ()}, r"draft_tree widths: got \(\); expected one number of at least 1 per level"),
        ({"widths": (2, 0)}, r"draft_tree widths: got \(2, 0\)"),
        ({"num_draft_tokens": 0}, "draft_tree num_draft_tokens: got 0; expected at least 1"),
        ({"how": "best"}, "draft_tree how: got 'best'; expected one of coupled, hybrid, iid, top_k"),
    ],
)
def test_bad_options(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_drafter("draft_tree")(automaton(), **settings)


def test_orders_of_siblings_are_all_possible() -> None:
    """Without replacement every order occurs: the first sampled token is not always the likeliest."""
    made = drafter("without_replacement", automaton(vocab=3), widths=(3,))
    seen = set()
    for seed in range(0, 3 * ROWS, ROWS):
        state, rows = joined(made, [[1]] * ROWS, first_seed=seed)
        with torch.inference_mode():
            tokens = made.propose(state, rows, Budget([3] * ROWS), state.rng(rows)).tokens
        seen |= {tuple(own) for own in tokens.reshape(ROWS, 4)[:, 1:].tolist()}
        made.release(rows)
    assert seen == set(permutations(range(3)))
