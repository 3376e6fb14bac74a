"""C++ backend of ngram_match: one backward scan of every history."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .reference import check_arguments

_ngram_match = torch.ops.specdec.ngram_match.default


def ngram_match(
    tokens: Tensor,
    starts: Tensor,
    lengths: Tensor,
    n_max: int,
    n_min: int,
    num_tokens: int,
    frequent: bool = False,
) -> tuple[Tensor, ...]:
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    sizes = (n_max, n_min, num_tokens, frequent)
    try:
        found: tuple[Tensor, ...] = _ngram_match(tokens, starts, lengths, *sizes)
    except (RuntimeError, ValueError):
        check_arguments(tokens, starts, lengths, n_max, n_min, num_tokens)  # raises with a message that says what to do
        found = _ngram_match(*argument_checks.make_contiguous(tokens, starts, lengths), *sizes)
    return found
