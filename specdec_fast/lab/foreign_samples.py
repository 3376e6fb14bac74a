"""Draws of other samplers, from a file or a callable, with the distributions that they should follow.

The file is an .npz with the arrays of `FIELDS`. To test a joint distribution, give every prefix its own context: the
second token of a text is then a draw in the context of its first token. Tests: tests/lab/test_foreign_samples.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec_fast.lab.count_distances import certified_distance
from specdec_fast.lab.draw_counts import arrays_in, named
from specdec_fast.lab.rational_oracle import dist_of_logits
from specdec_fast.lab.statistics import Test, check_dist, chi_square, g_test, rate_test

FIELDS = {
    "tokens": "int [N]: the emitted tokens",
    "p": "float [C, V] (or [V]): the target's distribution in each of C contexts; or instead of it",
    "logits": "float [C, V]: the target's logits, with `temperature` (a number, default 1), `top_k`, `top_p`, `min_p`",
    "context": "int [N]: the context of every token (may be left out when C = 1)",
    "q": "float [C, V]: the draft's distribution (optional: acceptance rate and branches of single sampled tokens)",
    "branch": "int [N]: 0 accepted, 1 recovered, 2 bonus (optional)",
    "drafted": "int [N]: the drafted token that was tested, -1 for none (optional: checks that q allows it)",
}
BRANCHES = ("accepted", "recovered", "bonus")

Sampler = Callable[[np.ndarray, np.ndarray, int, int], Any]
"""sampler(p [V], q [V], count, seed) -> tokens int [count], or (tokens, branch) with branch int [count]."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Checked draws.

    Attributes:
        tokens: Emitted tokens, int64 [N].
        context: Context of every token, int64 [N].
        branch: Index in BRANCHES of every token, int64 [N]; -1 if unknown.
        p: The target's distributions, float64 [C, V].
        q: The draft's distributions, float64 [C, V], or None.
        source: Where the draws come from, for messages.
    """

    tokens: np.ndarray
    context: np.ndarray
    branch: np.ndarray
    p: np.ndarray
    q: np.ndarray | None
    source: str

    @classmethod
    def make(
        cls,
        tokens: Any,
        p: Any,
        *,
        context: Any = None,
        q: Any = None,
        branch: Any = None,
        drafted: Any = None,
        source: str = "recorded",
    ) -> Recorded:
        """Checks draws; the arrays are described in `FIELDS`.

        Args:
            tokens: Emitted tokens, int [N].
            p: The target's distributions, float [C, V] or [V].
            context: Context of every token, int [N]. May be None if C = 1.
            q: The draft's distributions, float [C, V] or [V], or None.
            branch: Index in BRANCHES of every token, int [N], or None.
            drafted: Tested draft token of every draw, int [N], -1 for none; or None.
            source: Where the draws come from, for messages.

        Returns:
            The checked draws.

        Raises:
            ValueError: If shapes disagree, a distribution is invalid, or q of a draft token is 0.
        """
        dists = np.atleast_2d(check_dist(p, f"{source}: p"))
        contexts, vocab = dists.shape
        found = _integers(tokens, f"{source}: tokens", None, 0, vocab)
        if len(found) == 0:
            raise ValueError(f"{source}: got no tokens; expected at least one draw")
        if context is None and contexts > 1:
            raise ValueError(f"{source}: got {contexts} contexts and no `context`; expected one number per token")
        of = np.zeros(len(found), np.int64) if context is None else context
        of = _integers(of, f"{source}: context", len(found), 0, contexts)
        how = np.full(len(found), -1) if branch is None else branch
        how = _integers(how, f"{source}: branch", len(found), -1, len(BRANCHES))
        drafts = None
        if q is not None:
            drafts = np.atleast_2d(check_dist(q, f"{source}: q"))
            if drafts.shape != dists.shape:
                raise ValueError(
                    f"{source}: got q {drafts.shape} and p {dists.shape}; expected equal shapes; scatter a smaller "
                    "draft vocabulary into the target's, cut padding off a larger one"
                )
        if drafted is not None:
            _check_drafted(_integers(drafted, f"{source}: drafted", len(found), -1, vocab), of, drafts, source)
        return cls(found, of, how, dists, drafts, source)

    @classmethod
    def load(cls, path: Path) -> Recorded:
        """Reads a file that has the arrays of `FIELDS`.

        Args:
            path: An .npz file.

        Returns:
            The checked draws.

        Raises:
            ValueError: If the file does not exist or its arrays are invalid.
        """
        if not path.exists():
            raise ValueError(f"--recorded: {path} does not exist; expected an .npz file")
        try:
            arrays = arrays_in(path)
        except ValueError as error:
            raise ValueError(f"--recorded: {error}") from None
        settings = {name: arrays.pop(name, None) for name in ("temperature", "top_k", "top_p", "min_p")}
        unknown = sorted(arrays.keys() - FIELDS.keys())
        if unknown or "tokens" not in arrays or ("p" in arrays) == ("logits" in arrays):
            expected = "; ".join(f"{name}: {words}" for name, words in FIELDS.items())
            raise ValueError(f"--recorded {path}: got arrays {sorted(arrays)}; expected {expected}")
        logits = arrays.pop("logits", None)
        if logits is not None:
            arrays["p"] = _dists_of(np.atleast_2d(logits), settings, str(path))
        return cls.make(arrays.pop("tokens"), arrays.pop("p"), **arrays, source=str(path))


def _dists_of(logits: np.ndarray, settings: dict[str, Any], source: str) -> np.ndarray:
    """Distributions of logits [C, V] under the sampling settings of a file."""

    def number(name: str, default: float, expected: str, fits: Callable[[float], bool]) -> float:
        value = default if settings[name] is None else np.asarray(settings[name])
        try:
            found = float(np.asarray(value).reshape(()))
        except (TypeError, ValueError):
            found = math.nan
        if not (math.isfinite(found) and fits(found)):
            raise ValueError(f"{source}: {name}: got {value}; expected {expected}")
        return found

    temperature = number("temperature", 1.0, "0 (greedy) or a positive number", lambda t: t >= 0)
    top_k = number("top_k", 0, "a whole number, 0 or -1 for off", lambda k: k >= -1 and k == int(k))
    top_p = number("top_p", 1.0, "a number above 0, up to 1, which is off", lambda p: 0 < p <= 1)
    min_p = number("min_p", 0.0, "a number from 0, which is off, to 1", lambda p: 0 <= p <= 1)
    rows = []
    for at, row in enumerate(logits):
        try:
            rows.append(dist_of_logits(row, temperature, max(int(top_k), 0), top_p, min_p))
        except ValueError as error:
            raise ValueError(f"{source}: context {at}: {error}") from None
    return np.stack(rows)


def _integers(values: Any, what: str, count: int | None, low: int, high: int) -> np.ndarray:
    """Converts values in low..high - 1 to int64 [count]."""
    found = np.asarray(values)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer) or (count is not None and len(found) != count):
        raise ValueError(
            f"{what}: got {found.dtype} {found.shape}; expected integers [{'N' if count is None else count}]"
        )
    bad = np.nonzero((found < low) | (found >= high))[0]
    if len(bad):
        raise ValueError(f"{what}[{bad[0]}]: got {found[bad[0]]}; expected {low}..{high - 1}")
    return found.astype(np.int64)


def _check_drafted(drafted: np.ndarray, context: np.ndarray, q: np.ndarray | None, source: str) -> None:
    """Raises ValueError if q cannot propose a draft token."""
    if q is None:
        raise ValueError(
            f"{source}: got `drafted` without `q`; expected the distribution that the drafts were sampled from"
        )
    tested = np.nonzero(drafted >= 0)[0]
    bad = tested[q[context[tested], drafted[tested]] == 0]
    if len(bad):
        at = bad[0]
        raise ValueError(
            f"{source}: drafted[{at}] is token {drafted[at]}, which has q = 0 in context {context[at]}; expected a "
            "token that q can propose; record the distribution that the draft was sampled from"
        )


def from_sampler(sampler: Sampler, p: Any, q: Any, count: int, seed: int = 0, source: str = "sampler") -> Recorded:
    """Draws tokens from a callable in each context.

    Args:
        sampler: The sampler under test.
        p: The target's distributions, float [C, V] or [V].
        q: The draft's distributions, of the same shape.
        count: Number of draws in each context.
        seed: Seed of the first context. Context c gets seed + c.
        source: Name of the sampler, for messages.

    Returns:
        The checked draws.

    Raises:
        ValueError: If the distributions or the returned tokens are invalid.
    """
    target, draft = np.atleast_2d(check_dist(p, "p")), np.atleast_2d(check_dist(q, "q"))
    tokens, branches, context = [], [], []
    for at, (dist, other) in enumerate(zip(target, draft)):
        result = sampler(dist, other, count, seed + at)
        own, how = result if isinstance(result, tuple) else (result, np.full(count, -1))
        own = np.asarray(own)
        if own.shape != (count,):
            raise ValueError(f"{source}: got tokens of shape {own.shape}; expected ({count},), one per draw")
        tokens.append(own)
        branches.append(np.asarray(how))
        context.append(np.full(count, at))
    joined, contexts, how = (np.concatenate(each) for each in (tokens, context, branches))
    return Recorded.make(joined, target, context=contexts, q=draft, branch=how, source=source)


def contexts_of(recorded: Recorded) -> list[tuple[int, np.ndarray]]:
    """Returns (context, counts int64 [V]) of every context that has draws."""
    vocab = recorded.p.shape[1]
    return [
        (int(at), np.bincount(recorded.tokens[recorded.context == at], minlength=vocab))
        for at in np.unique(recorded.context)
    ]


def checks_of(recorded: Recorded) -> list[Test]:
    """Runs chi-square and G tests per context; with q and branches, also tests of each branch and of the rate."""
    found = []
    for at, counts in contexts_of(recorded):
        p = recorded.p[at]
        where = f"context {at}, "
        found.append(named(where + "chi-square", chi_square(counts, p)))
        found.append(named(where + "G", g_test(counts, p)))
        here = recorded.context == at
        branch, tokens = recorded.branch[here], recorded.tokens[here]

        def seen(which: int, tokens: np.ndarray = tokens, branch: np.ndarray = branch) -> np.ndarray:
            return np.bincount(tokens[branch == which], minlength=recorded.p.shape[1])

        if (branch == 2).any():
            found.append(named(where + "bonus tokens", chi_square(seen(2), p)))
        tested = int(((branch == 0) | (branch == 1)).sum())
        if recorded.q is not None and tested:
            accepted = np.minimum(p, recorded.q[at])
            rest = p - accepted
            found.append(rate_test(where + "acceptance rate", int((branch == 0).sum()), tested, min(accepted.sum(), 1)))
            if accepted.sum() > 1e-9:
                found.append(named(where + "accepted tokens", chi_square(seen(0), accepted / accepted.sum())))
            if rest.sum() > 1e-9:
                found.append(named(where + "recovered tokens", chi_square(seen(1), rest / rest.sum())))
    return found


def summary_of(recorded: Recorded) -> list[dict[str, Any]]:
    """Returns draws and certified distance per context."""
    return [
        {"context": at, "draws": int(counts.sum()), "certified_distance": certified_distance(counts, recorded.p[at])}
        for at, counts in contexts_of(recorded)
    ]
