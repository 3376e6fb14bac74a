"""C++ backend of process_logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .processors import Additions, Forced, NodePaths, Penalties, TokenMasks
from .reference import check

_process_logits = torch.ops.specdec.process_logits.default


def process_logits(
    logits: Tensor,
    paths: NodePaths,
    penalties: Penalties | None = None,
    additions: Additions | None = None,
    forced: Forced | None = None,
    masks: TokenMasks | None = None,
) -> Tensor:
    """Calls the C++ operator. Arguments that it refuses are checked here, then passed again in contiguous memory."""
    p, a, f, m = penalties, additions, forced, masks
    parts: list[Tensor | None] = [
        *((paths.tokens, paths.parents, paths.offsets, paths.roots, paths.nodes)),
        *((None,) * 5 if p is None else (p.factors, p.rows, p.ids, p.counts, p.sizes)),
        *((None,) * 4 if a is None else (a.offsets, a.ids, a.values, a.until)),
        *((None,) * 3 if f is None else (f.offsets, f.positions, f.ids)),
        *((None,) * 2 if m is None else (m.words, m.index)),
    ]
    try:  # all arguments are checked before the first write, so a second try starts from the same logits
        _process_logits(logits, *parts)
    except (RuntimeError, ValueError):
        check(logits, paths, penalties, additions, forced, masks)  # names a remedy
        _process_logits(logits, *argument_checks.make_contiguous(*parts))
    return logits
