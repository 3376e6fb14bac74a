"""Plain PyTorch definition of process_logits_overlay."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...overlay import PLANES, WORD, Overlay, words_of
from ..process_logits.processors import Additions, Forced, NodePaths, Penalties, TokenMasks
from ..process_logits.reference import check as check_edits
from ..process_logits.reference import process_logits

NOWHERE = -1
"""An id that edits nothing."""


def check(
    logits: Tensor,
    paths: NodePaths,
    penalties: Penalties | None = None,
    additions: Additions | None = None,
    forced: Forced | None = None,
    masks: TokenMasks | None = None,
) -> None:
    """Raises ValueError for arguments that process_logits_overlay cannot take."""
    check_edits(logits, paths, penalties, additions, forced, masks)
    if logits.dtype == torch.float64:
        raise ValueError(
            "process_logits_overlay: logits has dtype torch.float64; expected a half format or float32, in which an "
            "overlay "
            "keeps its logits; process_logits edits float64 in place"
        )


def cells_of(
    logits: Tensor, paths: NodePaths, penalties: Penalties | None, additions: Additions | None
) -> tuple[int, int]:
    """Shape of the overlay's cells: room for all that could be listed, whatever the data says; a multiple of 16, so
    that kernels are not compiled anew where a batch has another number of nodes."""
    rows, vocab = logits.shape
    listed = 0 if penalties is None else penalties.ids.shape[1] + paths.tokens.shape[0]
    listed += 0 if additions is None else additions.ids.shape[0]
    return rows, -(-(PLANES * words_of(vocab) + min(vocab, listed)) // 16) * 16


def process_logits_overlay(
    logits: Tensor,
    paths: NodePaths,
    penalties: Penalties | None = None,
    additions: Additions | None = None,
    forced: Forced | None = None,
    masks: TokenMasks | None = None,
) -> Overlay:
    """The edits of `process_logits` as an `Overlay`: nothing is written to the logits, of which few are read.

    Operators with `overlay=` fold it in as they load the logits, so that penalties are as exact as in float32 and no
    copy of that size is made: an overlay takes 3 bits a token, and 4 bytes for each that has another logit. Those are
    the committed tokens and the path's of requests with penalties, and what has a bias; all others that edits touch are
    forbidden. Reading through it is reading `process_logits` of the logits in float32, bit by bit.

    Args:
        logits: [R, V] float32, bfloat16 or float16; the row stride is free.
        paths: `NodePaths`.
        penalties: `Penalties` or None.
        additions: `Additions` or None.
        forced: `Forced` or None.
        masks: `TokenMasks` or None.

    Raises:
        ValueError: as `process_logits`; float64 logits.

    Source: as `process_logits`.
    """
    check(logits, paths, penalties, additions, forced, masks)
    shifts, bans = _by_value(additions, False), _by_value(additions, True)
    level = process_logits(logits.to(torch.float32, copy=True), paths, penalties, shifts)
    moved = process_logits(torch.ones_like(level), paths, _marks(penalties), _ones(shifts)) != 1
    barred = process_logits(torch.zeros_like(level), paths, None, bans, forced, masks) == -torch.inf
    rows, room = cells_of(logits, paths, penalties, additions)
    cells = torch.zeros(rows, room, dtype=torch.int32, device=logits.device)
    words = words_of(logits.shape[1])
    planes = cells[:, : PLANES * words].unflatten(1, (words, PLANES))
    counts = _grouped(moved, words).sum(2)
    planes[:, :, 0], planes[:, :, 2] = _packed(moved, words), _packed(barred, words)
    planes[:, :, 1] = counts.cumsum(1) - counts
    row, token = moved.nonzero().unbind(1)
    cells[row, PLANES * words + (moved.cumsum(1) - 1)[row, token]] = level[row, token].view(torch.int32)
    return Overlay(cells, logits.shape[1])


def _by_value(additions: Additions | None, forbidding: bool) -> Additions | None:
    """Those that forbid, or the others."""
    if additions is None:
        return None
    wanted = (additions.values == -torch.inf) == forbidding
    return replace(additions, ids=torch.where(wanted, additions.ids, NOWHERE))


def _ones(additions: Additions | None) -> Additions | None:
    return None if additions is None else replace(additions, values=torch.ones_like(additions.values))


def _marks(penalties: Penalties | None) -> Penalties | None:
    """Penalties that change a logit of 1 wherever these count tokens."""
    if penalties is None:
        return None
    factors = penalties.factors
    off = (factors == factors.new_tensor([1.0, 0.0, 0.0])).all(1, keepdim=True)
    return replace(penalties, factors=torch.where(off, factors, factors.new_tensor([2.0, 0.0, 0.0])))


def _grouped(bits: Tensor, words: int) -> Tensor:
    """bool [R, V] as int64 [R, words, 32]."""
    return torch.nn.functional.pad(bits.long(), (0, words * WORD - bits.shape[1])).unflatten(1, (words, WORD))


def _packed(bits: Tensor, words: int) -> Tensor:
    return (_grouped(bits, words) << torch.arange(WORD, device=bits.device)).sum(2).int()
