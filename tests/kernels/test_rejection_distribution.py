"""The distribution of rejection_verify: every cell of uniforms in exact arithmetic, and a million keyed draws."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import pytest
import torch
from oracles.proposal_checks import models, p_value
from scipy import stats as statistics
from torch import Tensor

from specdec_kernels import distribution_stats, draft_sample, rejection_thresholds, rejection_verify, use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.random import ACCEPT, uniform, words

BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])
FAST = BACKENDS[-1]
Row = list[Fraction]
Prefix = tuple[int, ...]
Cells = dict[tuple[Prefix, int], Any]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dist(logits: Tensor) -> tuple[Tensor, ...]:
    rows = len(logits)
    return (
        logits,
        *distribution_stats(
            logits, torch.ones(rows), torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows)
        ),
    )


class Model:
    """Random rational target and draft distributions after every prefix. A draft step may be deterministic, or claim a
    sampled token that its distribution excludes.
    """

    def __init__(self, seed: int, vocab: int, length: int, kinds: str) -> None:
        rng = random.Random(seed)
        self.vocab, self.length = vocab, length
        self.p: dict[Prefix, Row] = {}
        self.q: dict[Prefix, Row] = {}
        self.deterministic: dict[Prefix, int | None] = {}
        self.stray: dict[Prefix, int | None] = {}
        for size in range(length + 1):
            for prefix in itertools.product(range(vocab), repeat=size):
                self.p[prefix], self.q[prefix] = self.row(rng), self.row(rng)
                kind = rng.choice(
                    kinds
                )  # c: deterministic, d: sampled, e: sampled from the target's distribution, s: falsely sampled
                if kind == "e":
                    self.q[prefix] = self.p[prefix]
                token = rng.randrange(vocab) if kind in "cs" else None
                self.deterministic[prefix] = token if kind == "c" else None
                self.stray[prefix] = token if kind == "s" else None
                if kind == "s":
                    self.q[prefix] = [Fraction(int(v != token), vocab - 1) for v in range(vocab)]

    def row(self, rng: random.Random) -> Row:
        weights = [rng.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(self.vocab)]
        weights[rng.randrange(self.vocab)] += 1
        return [Fraction(w, sum(weights)) for w in weights]

    def proposal(self, path: Prefix) -> Fraction:
        """Probability that the drafter proposes this path."""
        product = Fraction(1)
        for i, token in enumerate(path):
            sure = self.deterministic[path[:i]] if self.stray[path[:i]] is None else self.stray[path[:i]]
            product *= self.q[path[:i]][token] if sure is None else Fraction(int(token == sure))
        return product

    def accept(self, prefix: Prefix, token: int) -> Fraction:
        if self.stray[prefix] is not None:
            return Fraction(0)
        q = self.q[prefix][token] if self.deterministic[prefix] is None else Fraction(1)
        return min(Fraction(1), self.p[prefix][token] / q)

    def residual(self, prefix: Prefix, token: int | None) -> Row:
        """The distribution after a prefix whose proposed continuation (if any) was rejected."""
        p = self.p[prefix]
        if token is None or self.stray[prefix] is not None:
            return p
        if self.deterministic[prefix] is not None:
            rest = [Fraction(0) if v == token else w for v, w in enumerate(p)]
        else:
            rest = [max(a - b, Fraction(0)) for a, b in zip(p, self.q[prefix], strict=True)]
        return rest if sum(rest) > 0 else p


def ends(accept: list[Any], rule: str) -> list[Any]:
    """Probability that a path ends at each of its nodes: after the last uniform that passes, or before the first that
    fails.
    """
    found, left = [], accept[0]
    for accepted in [*accept[1:], 0] if rule == "rejection" else accept[:0:-1] + accept[:1]:
        found.append(left * (1 - accepted if rule == "rejection" else accepted))
        left = left * (accepted if rule == "rejection" else 1 - accepted)
    return found if rule == "rejection" else found[::-1]


def step_dist(
    model: Model, accept: Cells, residual: Cells, zero: Fraction | float, rule: str = "rejection"
) -> dict[Prefix, Fraction | float]:
    """Distribution of the first length + 1 tokens: one step by the given cells, then plain sampling from the target."""
    total: dict[Prefix, Fraction | float] = dict.fromkeys(
        itertools.product(range(model.vocab), repeat=model.length + 1), zero
    )
    for path in itertools.product(range(model.vocab), repeat=model.length):
        if model.proposal(path) == 0:
            continue
        for n, end in enumerate(ends([accept[path, n] for n in range(model.length + 1)], rule)):
            weights = residual[path, n]
            for token in range(model.vocab):
                here = (model.proposal(path) + zero) * end * weights[token] / sum(weights)
                if here == 0:
                    continue
                head = (*path[:n], token)
                for rest in itertools.product(range(model.vocab), repeat=model.length - n):
                    tail, sequence = zero + 1, head
                    for next_token in rest:
                        tail *= model.p[sequence][next_token]
                        sequence = (*sequence, next_token)
                    total[sequence] += here * tail
    return total


def target_dist(model: Model) -> dict[Prefix, Fraction]:
    return {
        s: Fraction(1) * _product(model.p[s[:i]][token] for i, token in enumerate(s))
        for s in itertools.product(range(model.vocab), repeat=model.length + 1)
    }


def _product(factors: Iterable[Fraction]) -> Fraction:
    out = Fraction(1)
    for factor in factors:
        out *= factor
    return out


def cells(model: Model, backend: str, rule: str = "rejection") -> tuple[Cells, Cells]:
    """Returns thresholds and residuals of the operator for every possible path, in one call."""
    paths = [p for p in itertools.product(range(model.vocab), repeat=model.length) if model.proposal(p) > 0]
    width = model.length + 1

    def logits(rows: list[Row]) -> Tensor:
        return torch.tensor([[float(w) for w in row] for row in rows], dtype=torch.float64).log()

    prefixes = [path[:i] for path in paths for i in range(width)]
    tokens = [token for path in paths for token in (0, *path)]
    kinds = [
        0 if i == 0 or model.deterministic[path[: i - 1]] is not None else 1 for path in paths for i in range(width)
    ]
    # the distribution of node i's token belongs to its parent's prefix
    rows = [max(k - 1, 0) for k in range(len(prefixes))]
    with use_backend(backend):
        accept, residual = rejection_thresholds(
            torch.tensor(tokens),
            int32([width * i for i in range(len(paths) + 1)]),
            torch.tensor(kinds, dtype=torch.int8),
            int32(rows),
            dist(logits([model.p[prefix] for prefix in prefixes])),
            dist(logits([model.q[prefix] for prefix in prefixes])),
            None,
            rule=rule,
        )
    keys = [(path, i) for path in paths for i in range(width)]
    return (
        dict(zip(keys, accept.tolist(), strict=True)),
        dict(zip(keys, residual.tolist(), strict=True)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("vocab", "length"), [(3, 1), (4, 1), (3, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("kinds", ["c", "d", "e", "cd", "cde", "cds"])
def test_one_step_emits_the_target_s_distribution_exactly(backend: str, vocab: int, length: int, kinds: str) -> None:
    model = Model(hash((vocab, length)) + len(kinds), vocab, length, kinds)
    accept, residual = cells(model, backend)
    exact_accept = {
        (path, i): Fraction(1) if i == 0 else model.accept(path[: i - 1], path[i - 1]) for path, i in accept
    }
    exact_residual = {(path, i): model.residual(path[:i], path[i] if i < length else None) for path, i in accept}
    for cell in accept:
        assert accept[cell] == pytest.approx(float(exact_accept[cell]), abs=1e-12)
        # rounding may leave a residue of p - q where the exact residual is empty; such a cell has probability 0
        if model.proposal(cell[0]) > 0 and (cell[1] == length or exact_accept[cell[0], cell[1] + 1] < 1):
            assert residual[cell] == pytest.approx([float(w) for w in exact_residual[cell]], abs=1e-12)
    want = target_dist(model)
    assert step_dist(model, exact_accept, exact_residual, Fraction(0)) == want  # the rule, in rational arithmetic
    got = step_dist(model, accept, residual, 0.0)  # the operator's cells
    for sequence, probability in want.items():
        assert got[sequence] == pytest.approx(float(probability), abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("vocab", "length"), [(3, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("kinds", ["d", "s", "cds"])
def test_one_step_of_rule_block_too(backend: str, vocab: int, length: int, kinds: str) -> None:
    model = Model(3 * vocab + length, vocab, length, kinds)
    got = step_dist(model, *cells(model, backend, "block"), 0.0, "block")
    for sequence, probability in target_dist(model).items():
        assert got[sequence] == pytest.approx(float(probability), abs=1e-12)


def generate(
    p: Tensor,
    q: Tensor,
    deterministic: Tensor,
    requests: int,
    length: int,
    tokens_wanted: int,
    rule: str,
    uniforms_of: Any = None,
) -> Tensor:
    """Returns the first tokens of many requests through draft_sample and rejection_verify, step by step as in an
    engine.

    uniforms_of: called with (seeds, positions of the roots [requests], nodes of a chain) for uniforms [requests, nodes]
    in place of the keyed ones.
    """
    seeds = torch.arange(requests) * 7919 + 3
    sequence = torch.zeros(requests, tokens_wanted + length + 2, dtype=torch.int64)
    size = torch.ones(requests, dtype=torch.int64)  # token 0 is the prompt
    width = length + 1
    offsets = torch.arange(0, requests * width + 1, width, dtype=torch.int32)
    row = torch.arange(requests)
    p_dist, q_dist = dist(p), dist(q)
    for _ in range(tokens_wanted):
        if bool((size > tokens_wanted).all()):
            break
        position = (size - 1).int()
        nodes = torch.zeros(requests, width, dtype=torch.int64)
        nodes[:, 0] = sequence[row, size - 1]
        kinds = torch.zeros(requests, width, dtype=torch.int8)
        dist_index = torch.zeros(requests, width, dtype=torch.int32)
        for i in range(1, width):
            before = nodes[:, i - 1]
            draft = [part[before] for part in q_dist]
            index = torch.full((requests,), i, dtype=torch.int32)
            token = draft_sample(*draft, seeds, position, index)
            nodes[:, i] = torch.where(deterministic[before] >= 0, deterministic[before], token)
            kinds[:, i] = (deterministic[before] < 0).to(torch.int8)
            dist_index[:, i] = before.int()
        target = tuple(part[nodes.flatten()] for part in p_dist)
        _, accepted, emitted = rejection_verify(
            nodes.flatten(), offsets, kinds.flatten(), dist_index.flatten(), target, q_dist, None, seeds, position,
            None if uniforms_of is None else uniforms_of(seeds, position, width).flatten(), max_depth=length, rule=rule,
        )  # fmt: skip
        live = size <= tokens_wanted
        for i in range(1, width):
            take = live & (i <= accepted)
            sequence[row[take], size[take] + i - 1] = nodes[take, i]
        sequence[row[live], (size + accepted)[live]] = emitted[live]
        size = torch.where(live, size + accepted + 1, size)
    return sequence[:, 1 : tokens_wanted + 1]


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["proposal_kinds", "mixed"])
def test_keyed_draws_have_the_joint_distribution_over_steps(kind: str, rule: str) -> None:
    """Several tokens and steps: a uniform draw or noise used twice, or shared between streams, shows in the joint
    distribution.
    """
    vocab, length, wanted, requests = 3, 2, 4, 1_000_000
    g = torch.Generator().manual_seed(5)
    p, q = torch.randn(vocab, vocab, generator=g) * 1.2, torch.randn(vocab, vocab, generator=g) * 1.2
    p[1, 2] = -float("inf")
    deterministic = torch.tensor([-1, 2, -1]) if kind == "mixed" else torch.tensor([-1, -1, -1])
    with use_backend(FAST):
        assert p_value(generate(p, q, deterministic, requests, length, wanted, rule), p) > 1e-3


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(("dtype", "level"), [(torch.bfloat16, 64), (torch.float16, 512)])
def test_drafts_in_float32_leave_a_target_of_half_precision_its_distribution(
    dtype: torch.dtype, level: float, rule: str
) -> None:
    """Small drafts are loaded in float32. Levels are coarse on purpose, so that the distribution of unrounded ones
    would be detected.
    """
    g = torch.Generator().manual_seed(6)
    p, q = torch.randn(3, 3, generator=g) * 1.2, torch.randn(3, 3, generator=g) * 1.2
    p += level  # values whose halves both formats represent
    with use_backend(FAST):
        tokens = generate(p.to(dtype), q, torch.full((3,), -1), 60_000, 2, 3, rule)
    assert p_value(tokens, p.to(dtype).float()) > 1e-3
    assert p_value(tokens, p) < 1e-6


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
@pytest.mark.parametrize(("rule", "noticed"), [("block", True), ("rejection", False)])
def test_uniforms_keyed_by_a_token_s_own_position_are_detected(rule: str, noticed: bool) -> None:
    """Rule `block` reads uniforms after the place where it stops, so the next step must not use them again. (Rule
    `rejection` stops at the first uniform that fails, so it would pass.)
    """
    p, q = models()

    def reused(seeds: Tensor, roots: Tensor, nodes: int) -> Tensor:
        return uniform(words(seeds[:, None], roots[:, None] + torch.arange(nodes), 0, ACCEPT, 0))

    with use_backend(FAST):
        tokens = generate(p, q, torch.full((3,), -1), 60_000, 3, 3, rule, reused)
    assert (p_value(tokens, p) < 1e-6) is noticed


@pytest.mark.skipif("cpu" not in BACKENDS, reason="CPU extension not built")
def test_uniforms_and_gumbel_noise_are_independent_of_the_drafts() -> None:
    """One step over a uniform target: the next token must not depend on the uniform."""
    requests, vocab = 1_000_000, 4
    target = dist(torch.zeros(1, vocab))
    q = dist(torch.tensor([[2.0, 1.0, 0.0, -1.0]]))
    seeds, zero = torch.arange(requests), torch.zeros(requests, dtype=torch.int32)
    token = draft_sample(*(part.expand(requests, *part.shape[1:]) for part in q), seeds, zero, zero + 1)
    nodes = torch.stack([torch.zeros_like(token), token], 1).flatten()
    with use_backend(FAST):
        _, accepted, emitted = rejection_verify(
            nodes,
            torch.arange(0, 2 * requests + 1, 2, dtype=torch.int32),
            torch.ones(2 * requests, dtype=torch.int8),
            torch.zeros(2 * requests, dtype=torch.int32),
            tuple(part.expand(2 * requests, *part.shape[1:]) for part in target),
            q,
            None,
            seeds,
            zero,
            max_depth=1,
        )
    first = torch.where(accepted == 1, token, emitted)
    counts = torch.bincount(first, minlength=vocab)
    assert statistics.chisquare(counts.numpy()).pvalue > 1e-3
    both = accepted == 1
    table = torch.bincount(token[both] * vocab + emitted[both], minlength=vocab**2).view(vocab, vocab)
    assert statistics.chi2_contingency(table.numpy()).pvalue > 1e-3
