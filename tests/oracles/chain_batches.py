"""All drafted chains of a small rational model as one batch for a rule."""

from __future__ import annotations

from fractions import Fraction

import torch

from oracles.exact import Text
from oracles.rational_models import After, laws_of
from specdec_fast.draft import Draft
from specdec_fast.laws import Laws


def batch(
    found: list[tuple[Fraction, Text]], context: Text, p: After, q: After | None, dtype: torch.dtype
) -> tuple[Draft, Laws]:
    """All drafted chains of one context as one batch, and the target's laws at every node."""
    drafted = [chain for _, chain in found]
    count = len(drafted[0])
    rows = [[p((*context, *chain[:depth])) for depth in range(count + 1)] for chain in drafted]
    draft_rows = [[(q or p)((*context, *chain[:depth])) for depth in range(count)] for chain in drafted]
    names = [[row * count + depth for depth in range(count)] for row in range(len(drafted))]
    draft = Draft.chains(
        list(range(len(drafted))),
        [[0, *chain] for chain in drafted],
        law_rows=None if q is None else names,
        laws=None if q is None else laws_of([law for laws in draft_rows for law in laws], dtype),
    )
    return draft, laws_of([law for laws in rows for law in laws], dtype)
