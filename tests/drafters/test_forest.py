"""Joined drafts: duplicates become one node, sampled tokens stay first, every drafter observes its own part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits
from oracles.automaton_head import AutomatonHead
from oracles.chi_square import p_value
from oracles.distributions import dist, joint

from specdec_fast import Engine, SamplingParams, get_drafter, load
from specdec_fast.core.draft import Draft, ProposalKind
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Acceptance, Budget, Needs, TargetOutput

VOCAB = 8


class Fixed:
    """Drafts the same tree for every row, cut to its budget, and records what it observes."""

    name, num_draft_tokens = "fixed_tree", 9

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        self.tree = (list(tokens), list(parents))
        self.needs = Needs(topology="tree", node_choices=True)
        self.observed: list[tuple[Draft, Acceptance, TargetOutput]] = []
        self.limits: list[int] = []

    def begin(self, *args: Any) -> None:
        pass

    def propose(self, view: Any, rows: Any, budget: Any, rng: Any) -> Draft:
        self.limits = list(budget.nodes)
        tokens, parents = self.tree
        trees = [
            ([view.tokens(row)[-1], *tokens[:limit]], [-1, *parents[:limit]])
            for row, limit in zip(rows, budget.nodes, strict=True)
        ]
        return Draft.trees(rows, trees)

    def observe(self, view: Any, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        self.observed.append((draft, acceptance, output))

    def release(self, rows: Any) -> None:
        pass


def forest(*sources: Any, **options: Any) -> Any:
    return get_drafter("forest")(sources, **options)


def automaton(seed: int = 2, **shape: int) -> AutomatonTarget:
    return AutomatonTarget(random_logits(23, VOCAB, seed=seed), **shape)


def proposal(made: Any, prompts: list[list[int]], limits: list[int], **params: Any) -> Draft:
    state = DecodeState(8, 64)
    rows = [
        state.join(prompt, SamplingParams(seed=7 + at, **params), len(prompt), ()) for at, prompt in enumerate(prompts)
    ]
    made.begin(state, rows, None)
    with torch.inference_mode():
        draft: Draft = made.propose(state, rows, Budget(limits), state.rng(rows))
    draft.check(VOCAB)
    return draft


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """Returns every node of the only row as its path of tokens."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        found.append((*found[parent], token) if parent >= 0 else ())
    return found


def test_equal_paths_become_one_node() -> None:
    one, other = Fixed([1, 2, 3], [0, 1, 2]), Fixed([1, 4, 2, 5], [0, 0, 1, 3])
    draft = proposal(forest(one, other, adapt=False), [[6]], [8])
    assert sorted(paths(draft)) == sorted({(), (1,), (1, 2), (1, 2, 3), (4,), (1, 2, 5)})
    assert draft.num_nodes == 6 and draft.max_depth == 3


def test_sampled_tokens_stay_first_and_keep_their_distributions() -> None:
    """Equal deterministic tokens merge into them, with their subtrees."""
    sampled = get_drafter("draft_model")(automaton(), num_draft_tokens=3, pick="sampled")
    alone = proposal(get_drafter("draft_model")(automaton(), num_draft_tokens=3, pick="sampled"), [[6]], [3])
    first = alone.tokens.tolist()[1]
    beside = (first + 1) % VOCAB
    deterministic = Fixed([beside, first, 0], [0, 0, 2])
    draft = proposal(forest(sampled, deterministic, adapt=False), [[6]], [6])
    children = [node for node, parent in enumerate(draft.parents.tolist()) if parent == 0]
    assert [int(draft.tokens[node]) for node in children] == [first, beside]
    assert [int(draft.proposal_kinds[node]) for node in children] == [ProposalKind.SAMPLED, ProposalKind.DETERMINISTIC]
    assert (first, 0) in paths(draft)
    for node in range(draft.num_nodes):
        if int(draft.proposal_kinds[node]) != ProposalKind.DETERMINISTIC:
            at = alone.tokens.tolist().index(int(draft.tokens[node]), 1)
            assert torch.equal(draft.dists.logits[draft.dist_index[node]], alone.dists.logits[alone.dist_index[at]])
    assert int((draft.proposal_kinds == ProposalKind.SAMPLED).sum()) == 3


def test_a_token_that_two_drafters_sample_is_tested_twice() -> None:
    sure = [AutomatonTarget(random_logits(23, VOCAB, seed=2) * 50) for _ in range(2)]
    equal = [get_drafter("draft_model")(model, num_draft_tokens=2, pick="sampled") for model in sure]
    draft = proposal(forest(*equal, adapt=False), [[6]], [4])
    assert draft.num_nodes == 5 and int((draft.proposal_kinds == ProposalKind.SAMPLED).sum()) == 4
    assert len(set(draft.dist_index.tolist())) == 5 and len(set(draft.tokens.tolist()[1:3])) == 1


def test_every_drafter_observes_its_own_nodes() -> None:
    """Choices, logits and the accepted path are those of a drafter alone."""
    model = automaton()
    text = Engine(model).generate([[6]], SamplingParams(temperature=0, max_new_tokens=6))[0].tokens
    wrong = [(token + 1) % VOCAB for token in text]
    one = Fixed([wrong[0], text[0], text[1], wrong[2]], [0, 0, 2, 3])
    other = Fixed([text[0], wrong[1], text[1], text[2]], [0, 1, 1, 3])
    engine = Engine(automaton(), forest(one, other, adapt=False, num_draft_tokens=8))
    engine.submit([6], SamplingParams(temperature=0, max_new_tokens=30))
    engine.step()
    for source, accepted, following in ((one, 2, text[2]), (other, 3, text[3])):
        draft, acceptance, output = source.observed[0]
        assert draft.tokens.tolist() == [6, *source.tree[0]]
        assert int(acceptance.num_accepted[0]) == accepted and int(acceptance.next_token[0]) == following
        path = [node for node in acceptance.path[0].tolist() if node >= 0]
        assert [int(draft.tokens[node]) for node in path[1:]] == text[:accepted]
        for node, tokens in enumerate(paths(draft)):
            state = model.state_after([6, *tokens])
            assert torch.equal(output.logits[node], model.table[state])
            assert int(acceptance.node_choice[node]) == int(model.table[state].argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_oracle_keeps_its_full_depth_next_to_a_wrong_drafter(temperature: float) -> None:
    models = automaton(), AutomatonTarget(-automaton().table)
    made = forest(*[get_drafter("draft_model")(model, num_draft_tokens=4) for model in models], adapt=False)
    engine = Engine(automaton(), made)
    handle = engine.submit(
        [1, 2], SamplingParams(temperature=temperature, seed=3, max_new_tokens=40), num_draft_tokens=8
    )
    for step in range(1, 6):
        engine.step()
        assert len(handle.tokens) == 5 * step


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_heads_continue_from_tokens_of_others(temperature: float) -> None:
    """A perfect head drafts one token, another one three: both observe all accepted tokens."""
    target = automaton(max_rows=3)
    short, deep = (
        get_drafter("eagle")(target, AutomatonHead(automaton(max_rows=3)), depth=0, shape=shape)
        for shape in ((-1, 0), (-1, 0, 1, 2))
    )
    sizes: list[int] = []
    propose = short.propose

    def watched(view: Any, rows: Any, budget: Budget, rng: Any) -> Draft:
        draft = propose(view, rows, budget, rng)
        sizes.extend(count for count, limit in zip(draft.counts, budget.nodes) if limit)
        return draft

    short.propose = watched
    made = forest(short, deep, num_draft_tokens=4, adapt=False)
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=17)
    handles = Engine(target, made).generate([[1, 2], [5, 0, 7], [3] * 6], params)
    assert all(handle.stats.faults == 0 and handle.stats.tau > 2 for handle in handles)
    assert set(sizes) == {2}, "a head that lacks a state of the target drafts nothing"


def test_the_budget_goes_to_the_accepted_drafter() -> None:
    script = AutomatonTarget(random_logits(23, VOCAB, seed=2), max_length=256)
    good = get_drafter("draft_model")(AutomatonTarget(random_logits(23, VOCAB, seed=2), max_length=256))
    bad = Fixed([3, 3, 3, 3, 3, 3, 3], [0, 1, 2, 3, 4, 5, 6])
    made = forest(bad, good, num_draft_tokens=8)
    engine = Engine(script, made)
    engine.generate([[1, 2]], SamplingParams(seed=1, max_new_tokens=120))
    assert bad.limits == [1] or max(bad.limits) <= 2, "one node keeps it in sight"
    assert engine.stats.tau > 4


def test_a_single_node_goes_to_the_accepted_drafter() -> None:
    """A budget smaller than the number of drafters does not go to the first ones by default."""
    script = AutomatonTarget(random_logits(23, VOCAB, seed=2), max_length=256)
    good = get_drafter("draft_model")(AutomatonTarget(random_logits(23, VOCAB, seed=2), max_length=256))
    engine = Engine(script, forest(Fixed([3], [0]), good, num_draft_tokens=1))
    engine.generate([[1, 2]], SamplingParams(seed=1, max_new_tokens=60))
    assert engine.stats.tau > 1.7


def test_the_joint_distribution_under_the_tree_rules() -> None:
    """Two sampling draft models and a deterministic drafter in one tree; three tokens against exact probabilities."""
    vocab, states = 4, 7
    table = random_logits(states, vocab, seed=4)

    def target() -> AutomatonTarget:
        return AutomatonTarget(table, max_rows=400, max_length=24)

    def source(seed: int) -> Any:
        near = AutomatonTarget(0.5 * table + 0.5 * random_logits(states, vocab, seed=seed), max_rows=400, max_length=24)
        return get_drafter("draft_model")(near, num_draft_tokens=2, pick="sampled")

    for rule in ("recursive_rejection", "traversal"):
        made = forest(Fixed([1, 2, 0], [0, 0, 1]), source(5), source(6), num_draft_tokens=7)
        engine = Engine(target(), made, rule=rule)
        handles = [engine.submit([1], SamplingParams(seed=seed, max_new_tokens=6)) for seed in range(4000)]
        while not engine.idle:
            engine.step()
        reader = target()
        exact = joint(lambda text: dist(reader.logits_after([1, *text]), temperature=1.0), 3, vocab)  # noqa: B023
        assert p_value(Counter(tuple(handle.tokens[:3]) for handle in handles), exact) > 1e-3
        assert engine.stats.faults == 0 and 0.2 < engine.stats.alpha < 0.98


@pytest.mark.parametrize("rule", ["recursive_rejection", "traversal"])
def test_sampled_siblings_of_two_drafters_are_independent(rule: str) -> None:
    """Two equal drafters far from the target: shared uniforms would bias a single token."""
    stay, vocab = torch.zeros(1, 4, dtype=torch.long), 4
    table, near = torch.tensor([[0.0, 0.7, 1.4, -0.5]]), torch.tensor([[1.6, 0.0, -0.2, 0.4]])

    def model(logits: torch.Tensor) -> AutomatonTarget:
        return AutomatonTarget(logits, stay, max_rows=1000, max_length=12)

    sources = [get_drafter("draft_model")(model(near), num_draft_tokens=1, pick="sampled") for _ in range(2)]
    target = model(table)
    engine = Engine(target, forest(*sources, num_draft_tokens=2, adapt=False), rule=rule)
    handles = [engine.submit([1], SamplingParams(seed=seed, max_new_tokens=3)) for seed in range(4000)]
    while not engine.idle:
        engine.step()
    exact = joint(lambda text: dist(target.logits_after([1, *text]), temperature=1.0), 1, vocab)
    assert p_value(Counter((handle.tokens[0],) for handle in handles), exact) > 1e-3


def test_drafters_that_cannot_be_joined() -> None:
    model = automaton()
    alone = get_drafter("draft_tree")(model, how="hybrid")
    with pytest.raises(ValueError, match="sampled without their deterministic siblings"):
        forest(alone, Fixed([1, 2, 0], [0, 0, 1]))
    engine = load(
        "demo-target",
        "demo-draft",
        rule="recursive_rejection",
        drafter="forest",
        drafter_options={"of": "ngram,draft_tree"},
        max_rows=1,
    )
    handle = engine.generate(["Once upon a time"], SamplingParams(seed=4, max_new_tokens=24))[0]
    assert handle.stats.num_draft_tokens > 0 and handle.stats.faults == 0


def test_score_only_nodes_do_not_count_as_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window without guesses cannot be accepted, so it does not lower the drafter's rate."""
    outcomes: list[Any] = []
    made = forest(get_drafter("lookahead")(pool_from_prompt=False), num_draft_tokens=12)
    monkeypatch.setattr(made._cost_models[0], "observe", lambda rows, asked, found: outcomes.extend(found))
    engine = Engine(automaton(max_rows=1), made)
    engine.submit([1, 2], SamplingParams(seed=3, max_new_tokens=30))
    engine.step()
    assert outcomes[0].num_scored > 0 == outcomes[0].num_drafted and not outcomes[0].path


def test_distributions_over_part_of_a_vocabulary_cannot_be_joined() -> None:
    """With another sampling drafter they are refused at construction; with a deterministic one they work."""

    def head(how: str, kept: tuple[int, ...] | None = (0, 1, 2, 5, 7)) -> Any:
        return get_drafter("eagle3")(automaton(), AutomatonHead(automaton(), kept=kept), how=how, depth=0, width=3)

    draft = get_drafter("draft_model")(automaton(), pick="sampled")
    with pytest.raises(
        ValueError, match="forest of: got eagle3, which samples from distributions over part of the vocabulary"
    ):
        forest(head("sampled"), draft)
    assert (
        forest(head("top_k"), draft).needs.partial_dists is False and forest(head("sampled", None), draft).needs.dists
    )
    made = forest(head("sampled"), Fixed([1, 2, 0], [0, 0, 1]))
    engine = Engine(automaton(), made, rule="recursive_rejection")
    assert made.needs.partial_dists
    assert engine.generate([[1, 2]], SamplingParams(seed=1, max_new_tokens=20))[0].stats.faults == 0


def test_by_name_with_options_and_a_draft_model() -> None:
    params = SamplingParams(seed=4, max_new_tokens=24)
    plain = load("demo-target", drafter="none", max_rows=1).generate(["Once upon a time"], params)[0].tokens
    options = {"of": {"ngram": {"n_min": 1}, "draft_model": {}}, "num_draft_tokens": 8}
    engine = load("demo-target", "demo-draft", drafter="forest", drafter_options=options, max_rows=1)
    assert [source.name for source in engine.drafter.sources] == ["ngram", "draft_model"]
    assert engine.generate(["Once upon a time"], params)[0].tokens == plain and engine.stats.tau > 1.5
    with pytest.raises(ValueError, match="drafter draft_model: got no draft model"):
        load("demo-target", drafter="forest", drafter_options={"of": "ngram,draft_model"}, max_rows=1)


def test_bad_options_are_named() -> None:
    for of in ((), ("ngram",)):
        with pytest.raises(ValueError, match="forest of: got"):
            get_drafter("forest")(of)
    with pytest.raises(ValueError, match="forest num_draft_tokens: got 0"):
        forest(Fixed([1], [0]), num_draft_tokens=0)
    with pytest.raises(ValueError, match=r"^drafter forest: of: got a forest"):
        load("demo-target", drafter="forest", drafter_options={"of": "ngram,forest"}, max_rows=1)


def test_forget_reaches_the_shared_data_of_its_drafters() -> None:
    shared = get_drafter("recycling")()
    made = get_drafter("forest")([get_drafter("ngram")(), shared])
    before = shared._shared_table
    made.forget()
    assert shared._shared_table is not before
