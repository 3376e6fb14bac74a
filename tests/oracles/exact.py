"""Exact distributions of speculative decoding: the chain rules in rational arithmetic, and the distribution of a text
made of many steps.

Written from Leviathan et al. (2023), algorithm 1, and Chen et al. (2023), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import TypeVar

Text = tuple[int, ...]
Distribution = Sequence[Fraction]
Number = TypeVar("Number", Fraction, float)
Step = Callable[[Text], Iterable[tuple[Number, Text]]]


def residual(p: Distribution, q: Distribution) -> list[Fraction]:
    """Unnormalised weights of the token after a rejection: the positive part of p - q."""
    return [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]


def point_mass(token: int, vocab: int) -> list[Fraction]:
    return [Fraction(int(other == token)) for other in range(vocab)]


def token_rule(chain: Text, p: Sequence[Distribution], q: Sequence[Distribution]) -> list[tuple[Fraction, Text]]:
    """Outcomes (probability, emitted tokens) of verifying one drafted chain of K tokens.

    p: K + 1 target distributions, p[i] after i drafted tokens; q: K distributions the drafted tokens were drawn from.
    """
    outcomes, alive = [], Fraction(1)
    for depth, token in enumerate(chain):
        accept = min(Fraction(1), p[depth][token] / q[depth][token])
        rest = residual(p[depth], q[depth])
        total = sum(rest)
        for other, weight in enumerate(rest):
            if weight and accept < 1:
                outcomes.append((alive * (1 - accept) * weight / total, (*chain[:depth], other)))
        alive *= accept
        if not alive:
            return outcomes
    outcomes.extend((alive * weight, (*chain, token)) for token, weight in enumerate(p[-1]) if weight)
    return outcomes


def block_rule(chain: Text, p: Sequence[Distribution], q: Sequence[Distribution]) -> list[tuple[Fraction, Text]]:
    """Outcomes of block verification (Sun et al. 2025, algorithm 2), arguments as in token_rule.

    Every accept test is made, and the last that passes counts.
    """
    worth = [Fraction(1)]
    for depth, token in enumerate(chain):
        worth.append(min(Fraction(1), worth[-1] * p[depth][token] / q[depth][token]))
    passes, rests = [Fraction(1)], []
    for depth in range(len(chain)):
        rests.append([max(worth[depth] * a - b, Fraction(0)) for a, b in zip(p[depth], q[depth], strict=True)])
        if depth:
            total = sum(rests[depth])
            denominator = total + 1 - worth[depth]
            passes.append(total / denominator if denominator else Fraction(1))
    rests.append(list(p[-1]))
    if chain:
        passes.append(worth[-1])
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
    """All chains of `depth` tokens drawn one by one from q, with their probabilities."""
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
    """The joint distribution of the first `length` tokens when steps are repeated until there are enough."""
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


def target_dist(p_after: Callable[[Text], Distribution], length: int) -> dict[Text, Fraction]:
    """The joint distribution of plain decoding."""
    return text_dist(lambda context: [(w, (t,)) for t, w in enumerate(p_after(context)) if w], length, Fraction(1))
