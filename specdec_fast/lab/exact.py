"""The law that a rule emits, by enumeration of all its coins, next to the target's law in rational arithmetic.

A rule that tosses coins says what they are compared with (`thresholds`); every combination of passing and failing coins
is given to the rule itself (`uniforms`), so its own walk decides what is accepted, and the residual weights where it
ends give the law of the next token. Replay and greedy have no coins: every combination of the target's choices takes
their place. Emitted laws are joint over several tokens and steps. Tests: tests/lab/test_exact.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from specdec_fast.draft import Draft
from specdec_fast.interfaces import CoinRule, Needs, Rng, Rule
from specdec_fast.lab.oracle import Law, RationalModel, Text, target_law, text_law
from specdec_fast.lab.proposals import (
    CHAINS,
    DEEPEST,
    ON_CHAINS,
    POLICIES,
    PROPOSALS,
    TREES,
    DraftTree,
    Policy,
    Shape,
    all_drafts,
)
from specdec_fast.laws import Laws
from specdec_fast.rules import get_rule, rule_names
from specdec_fast.rules.replay import walk
from specdec_fast.sampling import SamplingParams
from specdec_kernels import law_stats, tree_plan, use_backend

TOLERANCE = 1e-12
_NUDGE = 1e-6  # coins lie this close to their thresholds, so that a threshold applied in another place shows

Outcomes = dict[Text, float]


def packed_laws(rows: Sequence[Law]) -> Laws:
    """Rational laws as the engine carries them: float64 logits and their statistics at temperature 1."""
    logits = torch.tensor([[float(weight) for weight in row] for row in rows], dtype=torch.float64).log()
    count = len(rows)
    temperature, top_k = torch.ones(count), torch.zeros(count, dtype=torch.int32)
    return Laws(logits, *law_stats(logits, temperature, top_k, torch.ones(count), torch.zeros(count)))


def depth_first(tree: DraftTree) -> DraftTree:
    """The same draft with every node directly followed by its first child: another layout, the same tree."""
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents[1:], 1):
        children[parent].append(node)
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    new = {node: at for at, node in enumerate(order)}
    return DraftTree(
        tree.chance,
        [tree.tokens[node] for node in order],
        [new.get(tree.parents[node], -1) for node in order],
        [tree.drawn[node] for node in order],
        [tree.law[node] for node in order],
        [tree.text[node] for node in order],
    )


def pack(trees: Sequence[DraftTree], after: Callable[[Text], Law], context: Text) -> tuple[Draft, Laws]:
    """All drafts of one context as one batch, ragged as they are, and the target's law at every node."""
    sources: dict[tuple[Fraction, ...], int] = {}
    tokens, parents, drawn, law_row, row_of, depth = [], [], [], [], [], 0
    targets: list[Law] = []
    for row, tree in enumerate(trees):
        for node, law in enumerate(tree.law):
            tokens.append(tree.tokens[node])
            parents.append(tree.parents[node])
            drawn.append(int(tree.drawn[node]))
            law_row.append(-1 if law is None else sources.setdefault(tuple(law), len(sources)))
            row_of.append(row)
            targets.append(after((*context, *tree.text[node])))
            depth = max(depth, len(tree.text[node]))
    counts = tuple(len(tree.tokens) for tree in trees)
    chain = all(parent == node - 1 for tree in trees for node, parent in enumerate(tree.parents))
    draft = Draft(
        rows=torch.arange(len(trees), dtype=torch.int32),
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents, dtype=torch.int32),
        offsets=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        drawn=torch.tensor(drawn, dtype=torch.int8),
        law_row=torch.tensor(law_row, dtype=torch.int32),
        row_of=torch.tensor(row_of),
        counts=counts,
        max_depth=depth,
        is_chain=chain,
        laws=packed_laws(list(sources)) if sources else None,
    )
    return draft, packed_laws(targets)


@dataclass(frozen=True, slots=True)
class Copies:
    """Rows of a batch, some of them several times: source row and number of every copy, source node of every node."""

    draft: Draft
    laws: Laws
    source: np.ndarray
    number: np.ndarray
    nodes: np.ndarray


def copies_of(draft: Draft, laws: Laws, times: np.ndarray) -> Copies:
    """Row r of the batch `times[r]` times, copies of a row side by side."""
    counts = np.asarray(draft.counts)
    source = np.repeat(np.arange(len(counts)), times)
    number = np.arange(len(source)) - np.repeat(np.cumsum(times) - times, times)
    sizes = counts[source]
    row_of = np.repeat(np.arange(len(source)), sizes)
    inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    nodes = draft.offsets.numpy()[:-1].astype(np.int64)[source][row_of] + inside
    index = torch.from_numpy(nodes)
    many = Draft(
        rows=torch.arange(len(source), dtype=torch.int32),
        tokens=draft.tokens[index],
        parents=draft.parents[index],
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)),
        drawn=draft.drawn[index],
        law_row=draft.law_row[index],
        row_of=torch.from_numpy(row_of),
        counts=tuple(sizes.tolist()),
        max_depth=draft.max_depth,
        is_chain=draft.is_chain,
        laws=draft.laws,
    )
    return Copies(many, laws.select(index), source, number, nodes)


def _rng(rows: int) -> Rng:
    return Rng(torch.arange(rows), torch.full((rows,), 9, dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of a step: their chances, where each walk ended, and the law of the token drawn there."""

    chance: np.ndarray
    emitted: list[Text]
    residual: np.ndarray


def coin_cells(rule: CoinRule, draft: Draft, laws: Laws, chances: np.ndarray) -> Cells:
    """All combinations of coins that pass and coins that fail. chances [B]: of the drafts."""
    plan = tree_plan(draft.parents, draft.offsets)
    threshold, residual = (part.double().numpy() for part in rule.thresholds(draft, plan, laws))
    inner = draft.parents.numpy() >= 0
    if not ((threshold >= 0) & (threshold <= 1)).all():
        raise AssertionError(f"rule {rule.name}: thresholds from {threshold.min()} to {threshold.max()} leave [0, 1]")
    coin = inner & (threshold > 1e-13) & (threshold < 1 - 1e-13)  # the others are decided
    of_row = draft.row_of.numpy()
    per_row = np.bincount(of_row[coin], minlength=len(draft.counts))
    before: np.ndarray = np.cumsum(coin) - coin
    bit = before - (np.cumsum(per_row) - per_row)[of_row]
    many = copies_of(draft, laws, 2**per_row)
    number = many.number[many.draft.row_of.numpy()]
    tossed, level = coin[many.nodes], threshold[many.nodes]
    passes = np.where(tossed, (number >> bit[many.nodes]) & 1, level > 0.5).astype(bool)
    beside = np.where(passes, level * (1 - _NUDGE), np.minimum(level * (1 + _NUDGE), (1 + level) / 2))
    uniforms = np.where(tossed, beside, 0.5).astype(np.float32)
    # in (0, 1), where coins live; a threshold of 1e-13 or more is further from both than any nudge
    uniforms = np.clip(uniforms, np.float32(2.0**-60), np.float32(1 - 2.0**-24))
    factor = np.where(tossed, np.where(passes, level, 1 - level), 1.0)
    weight = np.exp(np.bincount(many.draft.row_of.numpy(), weights=np.log(factor), minlength=len(many.source)))
    answer = rule(
        many.draft,
        tree_plan(many.draft.parents, many.draft.offsets),
        many.laws,
        _rng(len(many.source)),
        uniforms=torch.from_numpy(uniforms),
    )
    last = answer.path.gather(1, answer.num_accepted[:, None].long()).squeeze(1).long().numpy()
    return Cells(chances[many.source] * weight, emitted_paths(many.draft, answer), residual[many.nodes[last]])


def choice_cells(draft: Draft, laws: Laws, chances: np.ndarray) -> Cells:
    """All combinations of the target's choices at the nodes, walked as `replay` and `greedy` walk."""
    weights = laws.weights().numpy()
    support = weights > 0
    options = support.sum(1)
    start = draft.offsets.numpy()[:-1].astype(np.int64)
    times = np.multiply.reduceat(options, start)
    many = copies_of(draft, laws, times)
    of_row = many.draft.row_of.numpy()
    size = options[many.nodes]
    stride = np.ones(len(size), dtype=np.int64)  # mixed-radix digits of the copy's number, node by node
    for node in range(1, len(size)):
        if of_row[node] == of_row[node - 1]:
            stride[node] = stride[node - 1] * size[node - 1]
    digit = many.number[of_row] // stride % size
    ranked = np.argsort(~support, axis=1, kind="stable")  # tokens with weight first
    choice = ranked[many.nodes, digit]
    chosen = weights[many.nodes, choice]
    weight = np.exp(np.bincount(of_row, weights=np.log(chosen), minlength=len(many.source)))
    answer = walk(many.draft, tree_plan(many.draft.parents, many.draft.offsets), torch.from_numpy(choice))
    following = np.zeros((len(many.source), weights.shape[1]))
    following[np.arange(len(following)), answer.next_token.numpy()] = 1.0
    return Cells(chances[many.source] * weight, emitted_paths(many.draft, answer), following)


def emitted_paths(draft: Draft, answer: Any) -> list[Text]:
    """The accepted tokens of every row; every path must be one of the draft's."""
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    starts = draft.offsets.tolist()
    found = []
    for row, (path, count) in enumerate(zip(answer.path.tolist(), answer.num_accepted.tolist())):
        steps = path[: count + 1]
        whole = steps[0] == starts[row] and all(
            starts[row] + parents[node] == before for before, node in zip(steps, steps[1:])
        )
        if not whole or any(node >= 0 for node in path[count + 1 :]):
            raise AssertionError(f"row {row}: got path {path} of {count} accepted nodes; expected a path of the draft")
        found.append(tuple(tokens[node] for node in steps[1:]))
    return found


def step_outcomes(
    rule: Rule, trees: Sequence[DraftTree], after: Callable[[Text], Law], context: Text
) -> tuple[Outcomes, float]:
    """The law of what one step emits after `context`, and the expected number of accepted tokens."""
    layouts = [depth_first(tree) if at % 2 else tree for at, tree in enumerate(trees)]
    draft, laws = pack(layouts, after, context)
    chances = np.array([float(tree.chance) for tree in trees])
    cells = choice_cells(draft, laws, chances) if rule.replays else coin_cells(_coins(rule), draft, laws, chances)
    outcomes: Outcomes = {}
    accepted = 0.0
    for chance, path, rest in zip(cells.chance.tolist(), cells.emitted, cells.residual):
        accepted += chance * len(path)
        total = float(rest.sum())
        for token in np.nonzero(rest > 0)[0].tolist():
            text = (*path, token)
            outcomes[text] = outcomes.get(text, 0.0) + chance * float(rest[token]) / total
    return outcomes, accepted


def _coins(rule: Rule) -> CoinRule:
    if not isinstance(rule, CoinRule):
        raise ValueError(f"rule {rule.name}: got a rule without `thresholds`; expected one that shows its coins")
    return rule


@dataclass(frozen=True, slots=True)
class Exact:
    """One enumeration. error: largest difference of any text's probability from the target's; accepted: expected
    accepted tokens of the first step; drafts: how many the first step has.
    """

    rule: str
    proposal: str
    shape: str
    policy: str
    vocab: int
    length: int
    error: float
    accepted: float
    drafts: int
    backend: str

    @property
    def holds(self) -> bool:
        return self.error < TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}


@dataclass(frozen=True, slots=True)
class Case:
    """What one enumeration is about; `seed` makes the models."""

    rule: str
    proposal: str
    shapes: tuple[Shape, ...]
    policy: str
    vocab: int = 3
    length: int = 3
    seed: int = 0


def enumerate_case(case: Case, backend: str = "reference", rule: Rule | None = None) -> Exact:
    """The emitted law of a case against the target's. rule: instead of the named one (for wrong rules)."""
    found = rule or get_rule(case.rule)
    target = RationalModel(case.vocab, case.seed)
    q = RationalModel(case.vocab, case.seed + 50, like=target)
    other = RationalModel(case.vocab, case.seed + 90, like=target)
    policy: Policy = POLICIES[case.policy]
    known: dict[object, tuple[Outcomes, float, int]] = {}

    def outcomes_of(context: Text) -> tuple[Outcomes, float, int]:
        # `ragged` and `adaptive` also look at the sum of the tokens
        key = (target.key(context), sum(context) % 3 if case.policy in ("ragged", "adaptive") else 0)
        if case.policy == "adaptive":
            key = (target.key(context), sum(context))
        if key not in known:
            trees = all_drafts(context, q, other, case.proposal, case.shapes, policy)
            known[key] = (*step_outcomes(found, trees, target.after, context), len(trees))
        return known[key]

    def step(context: Text) -> Iterator[tuple[float, Text]]:
        yield from ((share, text) for text, share in outcomes_of(context)[0].items())

    with use_backend(backend):
        emitted = text_law(step, case.length)
    exact = target_law(target.after, case.length)
    error = max(abs(emitted.get(text, 0.0) - float(exact.get(text, 0))) for text in emitted.keys() | exact.keys())
    _, accepted, drafts = outcomes_of(())
    shape = " ".join("".join(map(str, one[1:])) for one in case.shapes)
    return Exact(
        found.name, case.proposal, shape, case.policy, case.vocab, case.length, error, accepted, drafts, backend
    )


def takes_trees(rule: Rule) -> bool:
    """Whether a rule verifies trees of drawn tokens, by its own word."""
    return rule.why_not(Needs(topology="tree", laws=True)) is None


def own_rules() -> list[str]:
    """Names of the lossless rules that verify on their own; one that picks another (`pick`) is tested as that one."""
    return [name for name in rule_names() if get_rule(name).lossless and not hasattr(get_rule(name), "pick")]


def has_a_law(rule: Rule) -> bool:
    """Whether a rule is lossless at temperature 1 (greedy refuses it, and its law is a point)."""
    return rule.lossless and rule.why_not_sampling(SamplingParams(temperature=1.0)) is None


def cases_for(name: str, *, small: bool = False) -> Iterator[Case]:
    """Every proposal law, shape and policy that a rule must hold for. small: one shape for each law and policy."""
    rule = get_rule(name)
    policies = [each.name for each in POLICIES.values() if not (each.anticipating and rule.uses_q)]
    for proposal in ON_CHAINS:
        for policy in policies:
            one_each = [(shape,) for shape in (CHAINS[2:] if small else CHAINS)]
            for at, shapes in enumerate([CHAINS] if policy == "adaptive" else one_each):
                yield Case(name, proposal, shapes, policy, seed=at)
        yield Case(name, proposal, (CHAINS[2],), "full", vocab=4, length=4, seed=7)
    if not takes_trees(rule):
        return
    for at, proposal in enumerate(PROPOSALS):
        for turn, policy in enumerate(policies):
            if policy == "adaptive":
                yield Case(name, proposal, TREES[:3], policy, length=2, seed=at)
                continue
            for shape in TREES if policy == "full" and not small else (TREES[(at + turn) % len(TREES)],):
                yield Case(name, proposal, (shape,), policy, length=2, seed=at + turn)
        yield Case(name, proposal, (TREES[0],), "full", vocab=4, length=3, seed=at + 11)
        yield Case(name, proposal, (DEEPEST,), "full", vocab=4, length=2, seed=at + 13)


def run_exact(
    names: Sequence[str], *, small: bool = False, backend: str = "reference", tick: Callable[[], None] = lambda: None
) -> list[Exact]:
    """All cases of all rules that have a law to keep."""
    found = []
    for name in names:
        if has_a_law(get_rule(name)):
            for case in cases_for(name, small=small):
                found.append(enumerate_case(case, backend))
                tick()
    return found
