"""Exact distributions in rational arithmetic: the rules for chains, and texts of several steps.

Written from Leviathan et al. (2023), algorithm 1, and Chen et al. (2023), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import TypeVar

Text = tuple[int, ...]
Distribution = Sequence[Fraction]
Number = TypeVar("Number", Fraction, float)
ChainRule = Callable[[Text, Sequence[Distribution], Sequence[Distribution]], list[tuple[Fraction, Text]]]
"""Chain of K tokens, K + 1 target and K draft distributions -> outcomes (probability, emitted tokens)."""
Step = Callable[[Text], Iterable[tuple[Number, Text]]]


def residual(p: Distribution, q: Distribution) -> list[Fraction]:
    """Returns the unnormalised weights of the recovered token: the positive part of p - q."""
    return [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]


def point_mass(token: int, vocab: int) -> list[Fraction]:
    return [Fraction(int(other == token)) for other in range(vocab)]


def token_rule(chain: Text, p: Sequence[Distribution], q: Sequence[Distribution]) -> list[tuple[Fraction, Text]]:
    """Returns the outcomes (probability, emitted tokens) of rule `rejection` for one chain of K draft tokens.

    p: K + 1 target distributions, p[i] after i drafted tokens; q: K draft distributions.
    """
    outcomes, reached = [], Fraction(1)
    for depth, token in enumerate(chain):
        accept = min(Fraction(1), p[depth][token] / q[depth][token])
        rest = residual(p[depth], q[depth])
        total = sum(rest)
        for other, weight in enumerate(rest):
            if weight and accept < 1:
                outcomes.append((reached * (1 - accept) * weight / total, (*chain[:depth], other)))
        reached *= accept
        if not reached:
            return outcomes
    outcomes.extend((reached * weight, (*chain, token)) for token, weight in enumerate(p[-1]) if weight)
    return outcomes


def block_rule(chain: Text, p: Sequence[Distribution], q: Sequence[Distribution]) -> list[tuple[Fraction, Text]]:
    """Returns the outcomes of rule `block` (Sun et al. 2025, algorithm 2); arguments as in token_rule.

    All uniforms are tested, and the last one that passes counts.
    """
    weights = [Fraction(1)]
    for depth, token in enumerate(chain):
        weights.append(min(Fraction(1), weights[-1] * p[depth][token] / q[depth][token]))
    passes, rests = [Fraction(1)], []
    for depth in range(len(chain)):
        rests.append([max(weights[depth] * a - b, Fraction(0)) for a, b in zip(p[depth], q[depth], strict=True)])
        if depth:
            total = sum(rests[depth])
            denominator = total + 1 - weights[depth]
            passes.append(total / denominator if denominator else Fraction(1))
    rests.append(list(p[-1]))
    if chain:
        passes.append(weights[-1])
    outcomes, later_fail = [], Fraction(1)
    for depth in range(len(chain), -1, -1):
        here = later_fail * passes[depth]
        if here:
            total = sum(rests[depth])
            outcomes.extend(
                (here * weight / total, (*chain[:depth], other)) for other, weight in enumerate(rests[depth]) if weight
            )
        later_fail *= 1 - passes[depth]
    return outcomes


def chains(q_after: Callable[[Text], Distribution], context: Text, depth: int) -> list[tuple[Fraction, Text]]:
    """Returns all chains of `depth` tokens sampled from q, with their probabilities."""
    found: list[tuple[Fraction, Text]] = [(Fraction(1), ())]
    for _ in range(depth):
        found = [
            (chance * weight, (*chain, token))
            for chance, chain in found
            for token, weight in enumerate(q_after((*context, *chain)))
            if weight
        ]
    return found


def text_dist(step: Step[Number], length: int, one: Number) -> dict[Text, Number]:
    """Returns the joint distribution of the first `length` tokens of repeated steps."""
    found: dict[Text, Number] = {}
    pending: dict[Text, Number] = {(): one}
    while pending:
        context = min(pending, key=len)
        chance = pending.pop(context)
        for share, emitted in step(context):
            text = (*context, *emitted)
            place = found if len(text) >= length else pending
            text = text[:length]
            place[text] = place.get(text, 0) + chance * share  # type: ignore[operator]
    return found


def decoded_dist(
    rule: ChainRule,
    p_after: Callable[[Text], Distribution],
    q_after: Callable[[Text], Distribution],
    depth: int,
    length: int,
) -> dict[Text, Fraction]:
    """Returns the joint distribution of texts that a rule emits with sampled chains."""

    def step(context: Text) -> Iterable[tuple[Fraction, Text]]:
        for chance, chain in chains(q_after, context, depth):
            p = [p_after((*context, *chain[:at])) for at in range(depth + 1)]
            q = [q_after((*context, *chain[:at])) for at in range(depth)]
            for share, emitted in rule(chain, p, q):
                yield chance * share, emitted

    return {text: chance for text, chance in text_dist(step, length, Fraction(1)).items() if chance}


def target_dist(p_after: Callable[[Text], Distribution], length: int) -> dict[Text, Fraction]:
    """Returns the joint distribution of the first `length` tokens of plain decoding."""
    return text_dist(lambda context: [(w, (t,)) for t, w in enumerate(p_after(context)) if w], length, Fraction(1))
