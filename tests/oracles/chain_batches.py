"""All draft chains of a small rational model as one batch for a rule."""

from __future__ import annotations

from fractions import Fraction

import torch

from oracles.exact import Text
from oracles.rational_models import After, dists_of
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft


def batch(
    found: list[tuple[Fraction, Text]], context: Text, p: After, q: After | None, dtype: torch.dtype
) -> tuple[Draft, TokenDistributions]:
    """Returns all draft chains of one context as one batch, and the target's distributions at every node."""
    drafted = [chain for _, chain in found]
    count = len(drafted[0])
    rows = [[p((*context, *chain[:depth])) for depth in range(count + 1)] for chain in drafted]
    draft_rows = [[(q or p)((*context, *chain[:depth])) for depth in range(count)] for chain in drafted]
    names = [[row * count + depth for depth in range(count)] for row in range(len(drafted))]
    draft = Draft.chains(
        list(range(len(drafted))),
        [[0, *chain] for chain in drafted],
        dist_rows=None if q is None else names,
        dists=None if q is None else dists_of([dist for dists in draft_rows for dist in dists], dtype),
    )
    return draft, dists_of([dist for dists in rows for dist in dists], dtype)
