"""C++ backend of edit_logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import expect
from .edits import Additions, Forced, NodePaths, Penalties, TokenMasks
from .reference import check

_edit_logits = torch.ops.specdec.edit_logits.default


def edit_logits(
    logits: Tensor,
    paths: NodePaths,
    penalties: Penalties | None = None,
    additions: Additions | None = None,
    forced: Forced | None = None,
    masks: TokenMasks | None = None,
) -> Tensor:
    p, a, f, m = penalties, additions, forced, masks
    edits: list[Tensor | None] = [
        *((paths.tokens, paths.parents, paths.offsets, paths.roots, paths.nodes)),
        *((None,) * 5 if p is None else (p.factors, p.rows, p.ids, p.counts, p.sizes)),
        *((None,) * 4 if a is None else (a.offsets, a.ids, a.values, a.until)),
        *((None,) * 3 if f is None else (f.offsets, f.positions, f.ids)),
        *((None,) * 2 if m is None else (m.words, m.index)),
    ]
    try:  # all arguments are checked before the first write, so a second try starts from the same logits
        _edit_logits(logits, *edits)
    except (RuntimeError, ValueError):
        check(logits, paths, penalties, additions, forced, masks)  # raises with a remedy
        _edit_logits(logits, *expect.contiguous(*edits))
    return logits
