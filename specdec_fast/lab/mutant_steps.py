"""Decoding steps of the mutants on small models, as exact distributions: every outcome with its probability.

A step is a function of two models and a context. It yields the probability of each emitted text.
`specdec_fast.lab.mutant_rules` lists the mistakes. Tests: tests/lab/test_kill_matrix.py.
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
class ModelPair:
    """A target and a draft model over one vocabulary.

    Attributes:
        p: The target's distribution after a text.
        q: The draft's distribution after a text.
        vocab: Number of tokens.
    """

    p: After
    q: After
    vocab: int


Step = Callable[[ModelPair, Text], Outcomes]


def random_models(vocab: int, seed: int) -> ModelPair:
    """Returns random models. Some probabilities are zero, and the draft agrees with the target in some contexts."""
    target = RationalModel(vocab, seed)
    draft = RationalModel(vocab, seed + 50, like=target)
    return ModelPair(
        lambda text: [float(weight) for weight in target.after(text)],
        lambda text: [float(weight) for weight in draft.after(text)],
        vocab,
    )


def normalised(weights: Sequence[float]) -> Distribution:
    """Divides weights by their sum. All-zero weights are returned unchanged."""
    total = sum(weights)
    return [weight / total for weight in weights] if total else list(weights)


def positive_part(p: Sequence[float], q: Sequence[float]) -> Distribution:
    """Returns max(p - q, 0) of every token."""
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def point_mass(token: int, vocab: int) -> Distribution:
    """Returns the distribution that has only one token."""
    return [float(other == token) for other in range(vocab)]


def likeliest(dist: Sequence[float], count: int = 1) -> list[int]:
    """Returns the most likely tokens, the most likely first. Ties go to the lower id."""
    return sorted(range(len(dist)), key=lambda token: (-dist[token], token))[:count]


def top_k(dist: Distribution, k: int) -> Distribution:
    """Returns the distribution after top-k."""
    kept = likeliest(dist, k)
    return normalised([weight if token in kept else 0.0 for token, weight in enumerate(dist)])


def at_half_temperature(dist: Distribution) -> Distribution:
    """Returns the distribution at temperature 0.5."""
    return normalised([weight**2 for weight in dist])


def accept_probability(p: Distribution, q: Distribution, token: int) -> float:
    """Returns min(1, p / q) of a token."""
    return min(1.0, p[token] / q[token]) if q[token] > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Chain:
    """Rule `rejection` on chains. Mutants replace one of its parts.

    Attributes:
        depth: Number of draft tokens.
        draft_dist: Computes the distribution that draft tokens are sampled from, from q.
        tested_dist: Computes the distribution that the test divides by, from q.
        target_dist: Computes the distribution that the test uses as p, from p.
        accept: Returns the probability that a draft token is accepted, from p, q and the token.
        residual: Returns the unnormalised weights of the recovered token, from p, q and the rejected token.
        bonus_dist: Computes the distribution of the bonus token, from p.
        keeps: Returns whether a sampled token is tested at all, from q and the token. Otherwise the draft ends there.
    """

    depth: int = 2
    draft_dist: Callable[[Distribution], Distribution] = lambda q: q
    tested_dist: Callable[[Distribution], Distribution] = lambda q: q
    target_dist: Callable[[Distribution], Distribution] = lambda p: p
    accept: Callable[[Distribution, Distribution, int], float] = accept_probability
    residual: Callable[[Distribution, Distribution, int], Distribution] = lambda p, q, token: positive_part(p, q)
    bonus_dist: Callable[[Distribution], Distribution] = lambda p: p
    keeps: Callable[[Distribution, int], bool] = lambda q, token: True

    def __call__(self, models: ModelPair, context: Text) -> Outcomes:
        """Yields the probability of every emitted text."""

        def verify(reached: float, drafted: Text) -> Outcomes:
            text = (*context, *drafted)
            if len(drafted) == self.depth:
                yield from ((reached * w, (*drafted, y)) for y, w in enumerate(self.bonus_dist(models.p(text))) if w)
                return
            p, q = self.target_dist(models.p(text)), models.q(text)
            for token, chance in enumerate(self.draft_dist(q)):
                if chance == 0:
                    continue
                if not self.keeps(q, token):  # the draft ends here: the step emits a token of p
                    yield from ((reached * chance * w, (*drafted, y)) for y, w in enumerate(p) if w)
                    continue
                tested = self.tested_dist(q)
                accepted = self.accept(p, tested, token)
                weights = self.residual(p, tested, token)
                recovered = normalised(weights) if sum(weights) > 0 else p
                yield from (
                    (reached * chance * (1 - accepted) * w, (*drafted, y))
                    for y, w in enumerate(recovered)
                    if w and accepted < 1
                )
                if accepted > 0:
                    yield from verify(reached * chance * accepted, (*drafted, token))

        yield from verify(1.0, ())


def accept_with_the_sampling_uniform(p: Distribution, q: Distribution, token: int) -> float:
    """Acceptance probability if the uniform that selected the token from the cumulative sum of q also tests it."""
    low = sum(q[:token])
    return max(0.0, min(low + q[token], accept_probability(p, q, token)) - low) / q[token] if q[token] else 0.0


def accept_typical(p: Distribution, q: Distribution, token: int) -> float:
    """Typical acceptance with epsilon 0.09 and delta 0.3: 1 for typical tokens, 0 for the others."""
    entropy = -sum(weight * math.log(weight) for weight in p if weight)
    return float(p[token] > min(0.09, 0.3 * math.exp(-entropy)))


def rounded_to_bfloat16(q: Distribution) -> Distribution:
    """Rounds probabilities to eight bits of mantissa."""
    return [math.ldexp(round(math.ldexp(m, 8)), e - 8) for m, e in map(math.frexp, q)]


def after_a_rejection(after: Callable[[ModelPair, Text, int, int], Distribution]) -> Step:
    """Returns a step that is right but for the token after a recovered one.

    Args:
        after: Returns the distribution of that token, from the models, the context, the rejected and the recovered
            token.
    """

    def step(models: ModelPair, context: Text) -> Outcomes:
        p, q = models.p(context), models.q(context)
        for token, chance in enumerate(q):
            accepted = accept_probability(p, q, token)
            if chance and accepted:
                yield chance * accepted, (token,)
            if chance and accepted < 1:
                for other, weight in enumerate(normalised(positive_part(p, q))):
                    for following, w in enumerate(after(models, context, token, other)):
                        if weight * w:
                            yield chance * (1 - accepted) * weight * w, (other, following)

    return step


def of_other_text(state: Callable[[Text, int, int], Text]) -> Step:
    """Returns a step in which the token after a recovered one follows a wrong text.

    Args:
        state: Returns this text, from the context, the rejected and the recovered token.
    """
    return after_a_rejection(lambda models, context, rejected, recovered: models.p(state(context, rejected, recovered)))


def penalise_rejected(models: ModelPair, context: Text, rejected: int, recovered: int) -> Distribution:
    """The distribution after a recovered token, with a penalty on the rejected one."""
    dist = models.p((*context, recovered))
    return normalised([w / 2 if token == rejected else w for token, w in enumerate(dist)])


def use_dist_of_sibling(models: ModelPair, context: Text) -> Outcomes:
    """The token after an accepted node follows the distribution at the node's sibling."""
    first = likeliest(models.q(context), 2)
    for token, weight in enumerate(models.p(context)):
        if weight and token not in first:
            yield weight, (token,)
        elif weight:
            other = first[1 - first.index(token)]
            yield from ((weight * w, (token, y)) for y, w in enumerate(models.p((*context, other))) if w)


def two_sampled_siblings(update_residual: bool, without_replacement: bool) -> Step:
    """Returns a step that tests two sampled siblings in order.

    Args:
        update_residual: The second sibling is tested against the residual after the first rejection, not against p.
        without_replacement: The second sibling is sampled without the first one's token, but tested against plain q.
    """

    def step(models: ModelPair, context: Text) -> Outcomes:
        p, q = models.p(context), models.q(context)
        for x, chance in enumerate(q):
            left = [0.0 if v == x and without_replacement else w for v, w in enumerate(q)]
            if not chance:
                continue
            if sum(left) == 0:
                a = accept_probability(p, q, x)
                yield chance * a, (x,)
                rest = positive_part(p, q)
                yield from ((chance * (1 - a) * w, (y,)) for y, w in enumerate(normalised(rest)) if w and a < 1)
                continue
            for z, again in enumerate(normalised(left)):
                if not again:
                    continue
                share, first = chance * again, accept_probability(p, q, x)
                if first:
                    yield share * first, (x,)
                residual = positive_part(p, q)
                if first == 1 or not sum(residual):
                    continue
                r = normalised(residual) if update_residual else p
                second = accept_probability(r, q, z)
                if second:
                    yield share * (1 - first) * second, (z,)
                last = positive_part(r, q)
                last = normalised(last) if sum(last) else r
                yield from ((share * (1 - first) * (1 - second) * w, (y,)) for y, w in enumerate(last) if w)

    return step


def sample_per_path(models: ModelPair, context: Text) -> Outcomes:
    """Every path of the tree samples its own token at the shared root, and the first path that matches wins."""
    p, proposed = models.p(context), likeliest(models.q(context), 2)
    for y, w in enumerate(p):
        for z, v in enumerate(p):
            if w * v:
                token = y if y == proposed[0] else z if z == proposed[1] else y
                yield w * v, (token,)


def verify_duplicates_twice(models: ModelPair, context: Text) -> Outcomes:
    """A deterministic token that occurs twice is tested twice against p."""
    p, x = models.p(context), likeliest(models.q(context))[0]
    accepted = 1 - (1 - p[x]) ** 2
    yield accepted, (x,)
    rest = [0.0 if v == x else w for v, w in enumerate(p)]
    if accepted < 1:
        yield from (((1 - accepted) * w, (y,)) for y, w in enumerate(normalised(rest)) if w)


def repeat_end_token(models: ModelPair) -> After:
    """Returns the target if token 0 ends a text: only token 0 follows it."""
    return lambda text: point_mass(0, models.vocab) if 0 in text else models.p(text)


def ignore_end_inside_step(models: ModelPair, context: Text) -> Outcomes:
    """An end-of-sequence token takes effect only after the step that accepts it."""
    if 0 in context:
        yield 1.0, (0,)
        return
    yield from Chain()(models, context)


def block_of_two(stop_at_failure: bool, rejection_residual: bool) -> Step:
    """Returns block verification of two draft tokens.

    Args:
        stop_at_failure: The path ends at the first uniform that fails, not at the last one that passes.
        rejection_residual: The recovered token follows (p - q)+, not (w p - q)+.
    """

    def step(models: ModelPair, context: Text) -> Outcomes:
        p0, q0 = models.p(context), models.q(context)
        for x, cx in enumerate(q0):
            if not cx:
                continue
            p1, q1 = models.p((*context, x)), models.q((*context, x))
            w1 = accept_probability(p0, q0, x)
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
                end = models.p((*context, x, y))
                yield from ((chance * two * w, (x, y, z)) for z, w in enumerate(end) if w * two)
                scale = 1.0 if rejection_residual else w1
                rest = [max(scale * a - b, 0.0) for a, b in zip(p1, q1)]
                rest = normalised(rest) if sum(rest) else p1
                yield from ((chance * one * w, (x, z)) for z, w in enumerate(rest) if w * one)
                first = positive_part(p0, q0)
                first = normalised(first) if sum(first) else p0
                yield from ((chance * none * w, (z,)) for z, w in enumerate(first) if w * none > 0)

    return step
