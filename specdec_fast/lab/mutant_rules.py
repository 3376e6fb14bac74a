"""Wrong ways to verify, taken from defects of public systems, as distributions that can be computed to the last digit.

Each is a step of decoding over a small model: all outcomes with their chances. `lab.mutants` measures how far the
text's distribution is from the target's and how many draws show it. `origin` says where a defect was seen.
Tests: tests/lab/test_mutants.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specdec_fast.lab.rational_oracle import RationalModel, Text

Distribution = list[float]
After = Callable[[Text], Distribution]
Outcomes = Iterator[tuple[float, Text]]


@dataclass(frozen=True, slots=True)
class World:
    """Target p and draft q after a text, both float; `truth`: the distribution that should come out (p unless
    processed).
    """

    p: After
    q: After
    vocab: int


def world(vocab: int, seed: int) -> World:
    """Models with zeros in them, the draft near the target."""
    target = RationalModel(vocab, seed)
    draft = RationalModel(vocab, seed + 50, like=target)
    return World(
        lambda text: [float(weight) for weight in target.after(text)],
        lambda text: [float(weight) for weight in draft.after(text)],
        vocab,
    )


def normal(weights: Sequence[float]) -> Distribution:
    """Weights that add up to 1; nothing stays nothing."""
    total = sum(weights)
    return [weight / total for weight in weights] if total else list(weights)


def positive_part(p: Sequence[float], q: Sequence[float]) -> Distribution:
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def point(token: int, vocab: int) -> Distribution:
    return [float(other == token) for other in range(vocab)]


def likeliest(dist: Sequence[float], count: int = 1) -> list[int]:
    return sorted(range(len(dist)), key=lambda token: (-dist[token], token))[:count]


def top(dist: Distribution, count: int) -> Distribution:
    """The distribution after top-k."""
    kept = likeliest(dist, count)
    return normal([weight if token in kept else 0.0 for token, weight in enumerate(dist)])


def sharp(dist: Distribution) -> Distribution:
    """The distribution at temperature 0.5."""
    return normal([weight**2 for weight in dist])


def ratio(p: Distribution, q: Distribution, token: int) -> float:
    return min(1.0, p[token] / q[token]) if q[token] > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Chain:
    """The rejection rule on chains of `depth`, every part of which can be swapped for a wrong one.

    draws: distribution the draft is drawn from, given q; tests: distribution that the test divides by; target: p as
    the test sees it; accepts: chance to accept; rest: unnormalised weights after a rejection; bonus: distribution
    after everything was accepted; keeps: whether a drawn token is put to the test at all.
    """

    depth: int = 2
    draws: Callable[[Distribution], Distribution] = lambda q: q
    tests: Callable[[Distribution], Distribution] = lambda q: q
    target: Callable[[Distribution], Distribution] = lambda p: p
    accepts: Callable[[Distribution, Distribution, int], float] = ratio
    rest: Callable[[Distribution, Distribution, int], Distribution] = lambda p, q, token: positive_part(p, q)
    bonus: Callable[[Distribution], Distribution] = lambda p: p
    keeps: Callable[[Distribution, int], bool] = lambda q, token: True

    def __call__(self, world: World, context: Text) -> Outcomes:
        def go(alive: float, drafted: Text) -> Outcomes:
            text = (*context, *drafted)
            p, q = self.target(world.p(text)), world.q(text)
            drawn = self.draws(q)
            for token, chance in enumerate(drawn):
                if len(drafted) == self.depth:
                    break
                if chance == 0:
                    continue
                if not self.keeps(q, token):  # the step ends here, with a token of the target's distribution
                    yield from ((alive * chance * w, (*drafted, y)) for y, w in enumerate(p) if w)
                    continue
                tested = self.tests(q)
                accepted = self.accepts(p, tested, token)
                weights = self.rest(p, tested, token)
                rest = normal(weights) if sum(weights) > 0 else p
                yield from (
                    (alive * chance * (1 - accepted) * w, (*drafted, y))
                    for y, w in enumerate(rest)
                    if w and accepted < 1
                )
                if accepted > 0:
                    yield from go(alive * chance * accepted, (*drafted, token))
            if len(drafted) == self.depth:
                yield from ((alive * w, (*drafted, y)) for y, w in enumerate(self.bonus(world.p(text))) if w)

        yield from go(1.0, ())


Step = Callable[[World, Text], Outcomes]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A wrong step. truth: the distribution that should come out after a text, from the world."""

    name: str
    origin: str
    step: Step
    truth: Callable[[World], After] = lambda world: world.p


def _shared_coin(p: Distribution, q: Distribution, token: int) -> float:
    """The coin that picked the token in q's cumulative sum also tests it."""
    low = sum(q[:token])
    return max(0.0, min(low + q[token], ratio(p, q, token)) - low) / q[token] if q[token] else 0.0


def _typical(p: Distribution, q: Distribution, token: int) -> float:
    entropy = -sum(weight * math.log(weight) for weight in p if weight)
    return float(p[token] > min(0.09, 0.3 * math.exp(-entropy)))


def _half_bits(q: Distribution) -> Distribution:
    """q rounded to eight bits of mantissa."""
    return [math.ldexp(round(math.ldexp(m, 8)), e - 8) for m, e in map(math.frexp, q)]


def _stale(world: World, context: Text) -> Outcomes:
    """After a rejection the next token is conditioned on the rejected one: its keys and values stay in the cache."""
    p, q = world.p(context), world.q(context)
    for token, chance in enumerate(q):
        accepted = ratio(p, q, token)
        if chance and accepted:
            yield chance * accepted, (token,)
        rest = positive_part(p, q)
        if chance and accepted < 1:
            for other, weight in enumerate(normal(rest)):
                for after, w in enumerate(world.p((*context, token))):
                    if weight * w:
                        yield chance * (1 - accepted) * weight * w, (other, after)


def _penalised(world: World, context: Text) -> Outcomes:
    """A rejected token counts as said: it is penalised in the token after it."""
    p, q = world.p(context), world.q(context)
    for token, chance in enumerate(q):
        accepted = ratio(p, q, token)
        if chance and accepted:
            yield chance * accepted, (token,)
        if chance and accepted < 1:
            for other, weight in enumerate(normal(positive_part(p, q))):
                dist = world.p((*context, other))
                changed = [w / 2 if v == token else w for v, w in enumerate(dist)]
                for after, w in enumerate(normal(changed)):
                    if weight * w:
                        yield chance * (1 - accepted) * weight * w, (other, after)


def _wrong_parent(world: World, context: Text) -> Outcomes:
    """The distribution at a node is that of its sibling."""
    first = likeliest(world.q(context), 2)
    for token, weight in enumerate(world.p(context)):
        if weight and token not in first:
            yield weight, (token,)
        elif weight:
            other = first[1 - first.index(token)]
            yield from ((weight * w, (token, y)) for y, w in enumerate(world.p((*context, other))) if w)


def _two_drawn(update: bool, without: bool) -> Step:
    """Two siblings from q; update: the residual moves on after the first; without: drawn without replacement."""

    def step(world: World, context: Text) -> Outcomes:
        p, q = world.p(context), world.q(context)
        for x, chance in enumerate(q):
            left = [0.0 if v == x and without else w for v, w in enumerate(q)]
            if not chance:
                continue
            if sum(left) == 0:
                a = ratio(p, q, x)
                yield chance * a, (x,)
                rest = positive_part(p, q)
                yield from ((chance * (1 - a) * w, (y,)) for y, w in enumerate(normal(rest)) if w and a < 1)
                continue
            for z, again in enumerate(normal(left)):
                if not again:
                    continue
                share, first = chance * again, ratio(p, q, x)
                if first:
                    yield share * first, (x,)
                residual = positive_part(p, q)
                if first == 1 or not sum(residual):
                    continue
                r = normal(residual) if update else p
                second = ratio(r, q, z)
                if second:
                    yield share * (1 - first) * second, (z,)
                last = positive_part(r, q)
                last = normal(last) if sum(last) else r
                yield from ((share * (1 - first) * (1 - second) * w, (y,)) for y, w in enumerate(last) if w)

    return step


def _row_resampled(world: World, context: Text) -> Outcomes:
    """Every path of the tree draws its own token at the shared root, and the luckiest path wins (Medusa, REST)."""
    p, chosen = world.p(context), likeliest(world.q(context), 2)
    for y, w in enumerate(p):
        for z, v in enumerate(p):
            if w * v:
                token = y if y == chosen[0] else z if z == chosen[1] else y
                yield w * v, (token,)


def _duplicates(world: World, context: Text) -> Outcomes:
    """A chosen token that is listed twice is tested twice against the same distribution."""
    p, x = world.p(context), likeliest(world.q(context))[0]
    accepted = 1 - (1 - p[x]) ** 2
    yield accepted, (x,)
    rest = [0.0 if v == x else w for v, w in enumerate(p)]
    if accepted < 1:
        yield from (((1 - accepted) * w, (y,)) for y, w in enumerate(normal(rest)) if w)


def _ended(world: World) -> After:
    """Token 0 ends a text: nothing but 0 follows."""
    return lambda text: point(0, world.vocab) if 0 in text else world.p(text)


def _past_the_end(world: World, context: Text) -> Outcomes:
    """An end of sequence inside an accepted block is overlooked until the step is over."""
    if 0 in context:
        yield 1.0, (0,)
        return
    yield from Chain()(world, context)


def _block(stop_at_failure: bool, token_residual: bool) -> Step:
    """Block verification of two tokens: the last coin that passes counts, with the residual of its own weight."""

    def step(world: World, context: Text) -> Outcomes:
        p0, q0 = world.p(context), world.q(context)
        for x, cx in enumerate(q0):
            if not cx:
                continue
            p1, q1 = world.p((*context, x)), world.q((*context, x))
            w1 = ratio(p0, q0, x)
            s1 = sum(max(w1 * a - b, 0.0) for a, b in zip(p1, q1))
            h1 = 1.0 if s1 + 1 - w1 == 0 else s1 / (s1 + 1 - w1)
            for y, cy in enumerate(q1):
                if not cy:
                    continue
                w2 = min(1.0, w1 * p1[y] / q1[y])
                two = h1 * w2 if stop_at_failure else w2
                one = h1 * (1 - w2)
                none = 1 - one - two
                chance = cx * cy
                end = world.p((*context, x, y))
                yield from ((chance * two * w, (x, y, z)) for z, w in enumerate(end) if w * two)
                scale = 1.0 if token_residual else w1
                rest = [max(scale * a - b, 0.0) for a, b in zip(p1, q1)]
                rest = normal(rest) if sum(rest) else p1
                yield from ((chance * one * w, (x, z)) for z, w in enumerate(rest) if w * one)
                first = positive_part(p0, q0)
                first = normal(first) if sum(first) else p0
                yield from ((chance * none * w, (z,)) for z, w in enumerate(first) if w * none > 0)

    return step


TWO_OF = 2
RIGHT: dict[str, Step] = {
    "token rule": Chain(),
    "block rule": _block(stop_at_failure=False, token_residual=False),
    "two independent siblings": _two_drawn(update=True, without=False),
}
"""The same code without its mistake: it must pass every check that kills a mutant."""

MUTANTS: tuple[Mutant, ...] = (
    Mutant("arg-max draft, softmax q", "Draft & Verify; jaymody #3; transformers #47932",
           Chain(draws=lambda q: point(likeliest(q)[0], len(q)))),
    Mutant("redraw from p after a rejection", "Medusa and REST, nucleus path", Chain(rest=lambda p, q, x: p)),
    Mutant("q recorded before top-k", "transformers #47932", Chain(draws=lambda q: top(q, TWO_OF))),
    Mutant("bonus without temperature", "EAGLE v1",
           Chain(target=sharp, draws=sharp, tests=sharp), lambda w: lambda t: sharp(w.p(t))),
    Mutant("siblings without replacement, plain q", "EAGLE #74", _two_drawn(update=True, without=True)),
    Mutant("residual not updated between siblings", "multi-round rejection, common slip",
           _two_drawn(update=False, without=False)),
    Mutant("unlikely drawn token dropped", "confidence pruning, several systems",
           Chain(keeps=lambda q, x: q[x] >= 0.4)),
    Mutant("one coin draws and tests", "LLMSpeculativeSampling, random_seed", Chain(accepts=_shared_coin)),
    Mutant("lenience 0.5", "Leviathan et al. A.5", Chain(accepts=lambda p, q, x: min(1.0, 2 * ratio(p, q, x)))),
    Mutant("residual of q - p", "sign slip", Chain(rest=lambda p, q, x: positive_part(q, p))),
    Mutant("inverted comparison", "sign slip", Chain(accepts=lambda p, q, x: 1 - ratio(p, q, x))),
    Mutant("typical acceptance", "Medusa",
           Chain(draws=lambda q: point(likeliest(q)[0], len(q)), accepts=_typical, rest=lambda p, q, x: p)),
    Mutant("arg-max acceptance at T > 0", "greedy walk used for sampling",
           Chain(accepts=lambda p, q, x: float(x == likeliest(p)[0]), rest=lambda p, q, x: p)),
    Mutant("padded vocabulary", "target heads padded to a multiple of 64",
           Chain(target=lambda p: normal([*p, 0.05]), draws=lambda q: [*q, 0.0], tests=lambda q: [*q, 0.0])),
    Mutant("draft vocabulary off by one", "EAGLE-3 tables: NeMo #2447",
           Chain(tests=lambda q: [q[-1], *q[:-1]])),
    Mutant("processors on the bonus token only", "vLLM #42744",
           Chain(bonus=lambda p: top(p, TWO_OF)), lambda w: lambda t: top(w.p(t), TWO_OF)),
    Mutant("temperature on the draft only", "SGLang on ROCm #39253",
           Chain(draws=sharp, tests=sharp), lambda w: lambda t: sharp(w.p(t))),
    Mutant("raw q, processed p", "DFlash in transformers #47932",
           Chain(tests=lambda q: [1.5 * w for w in q])),
    Mutant("q in bfloat16", "DeepSpec #31", Chain(tests=_half_bits)),
    Mutant("coin 0 accepts", "EAGLE, LLMSpeculativeSampling",
           Chain(accepts=lambda p, q, x: max(ratio(p, q, x), 2.0**-24))),
    Mutant("stale keys and values", "cache not rolled back", _stale),
    Mutant("rejected draft is penalised", "vmlx-swift #357", _penalised),
    Mutant("distribution of the wrong parent", "tree mask or index slip", _wrong_parent),
    Mutant("every path draws for itself", "Medusa and REST, nucleus mask; fms-extras #12", _row_resampled),
    Mutant("duplicate siblings", "unmerged sources", _duplicates),
    Mutant("end of sequence inside a block", "transformers #47912", _past_the_end, _ended),
    Mutant("block rule stops at the first failure", "review of vllm-ascend #11985",
           _block(stop_at_failure=True, token_residual=False)),
    Mutant("block rule with the token residual", "vllm-ascend #7807",
           _block(stop_at_failure=False, token_residual=True)),
)  # fmt: skip
"""Known mistakes."""
