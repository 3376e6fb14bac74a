"""Plain PyTorch definition of process_logits_overlay.

Tests: tests/kernels/test_process_logits_overlay.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...overlay import PLANES, WORD, Overlay, num_words
from ..process_logits.processors import Additions, Forced, NodePaths, Penalties, TokenMasks
from ..process_logits.reference import check as check_processors
from ..process_logits.reference import process_logits

NOWHERE = -1
"""An id outside of every vocabulary."""


def check(
    logits: Tensor,
    paths: NodePaths,
    penalties: Penalties | None = None,
    additions: Additions | None = None,
    forced: Forced | None = None,
    masks: TokenMasks | None = None,
) -> None:
    """Raises ValueError for arguments that process_logits_overlay cannot take."""
    check_processors(logits, paths, penalties, additions, forced, masks)
    if logits.dtype == torch.float64:
        raise ValueError(
            "process_logits_overlay: logits has dtype torch.float64; expected a half format or float32, because an "
            "overlay stores float32 logits; process_logits takes float64 in place"
        )


def overlay_shape(
    logits: Tensor, paths: NodePaths, penalties: Penalties | None, additions: Additions | None
) -> tuple[int, int]:
    """Computes the shape of the overlay's words, with space for all tokens that processors can change.

    The number of words per row is a multiple of 16, so different numbers of nodes do not recompile kernels.

    Returns:
        Rows and words per row.
    """
    rows, vocab_size = logits.shape
    listed = 0 if penalties is None else penalties.ids.shape[1] + paths.tokens.shape[0]
    listed += 0 if additions is None else additions.ids.shape[0]
    return rows, -(-(PLANES * num_words(vocab_size) + min(vocab_size, listed)) // 16) * 16


def process_logits_overlay(
    logits: Tensor,
    paths: NodePaths,
    penalties: Penalties | None = None,
    additions: Additions | None = None,
    forced: Forced | None = None,
    masks: TokenMasks | None = None,
) -> Overlay:
    """Computes the effect of `process_logits` as a sparse `Overlay`. The logits are not written, and few are read.

    Shapes: R rows of logits, V token ids.

    Operators with `overlay=` apply it as they load the logits. Penalties are as exact as in float32, and no float32
    copy of the logits is made: an overlay takes 3 bits per token, and 4 bytes per replaced logit. Replaced are the
    committed tokens and path tokens of requests with penalties, and tokens with a bias. All other processed tokens are
    forbidden. Reading through the overlay equals `process_logits` of the logits in float32, bit by bit.

    Args:
        logits: float32, bfloat16 or float16 [R, V]; the row stride is free.
        paths: Packed trees, and the node that each row of logits follows.
        penalties: Repetition, presence and frequency penalties, or None.
        additions: Numbers added to logits, or None.
        forced: Tokens without an alternative, or None.
        masks: Bit masks of allowed tokens, or None.

    Returns:
        The overlay, int32 [R, 3 * ceil(V / 32) + C] words with C replaced logits per row at most.

    Raises:
        ValueError: As process_logits, or if the logits are float64.

    Source:
        As process_logits.
    """
    check(logits, paths, penalties, additions, forced, masks)
    shifts, bans = _by_value(additions, False), _by_value(additions, True)
    level = process_logits(logits.to(torch.float32, copy=True), paths, penalties, shifts)
    replaced = process_logits(torch.ones_like(level), paths, _penalise_ones(penalties), _ones(shifts)) != 1
    forbidden = process_logits(torch.zeros_like(level), paths, None, bans, forced, masks) == -torch.inf
    rows, row_words = overlay_shape(logits, paths, penalties, additions)
    words = torch.zeros(rows, row_words, dtype=torch.int32, device=logits.device)
    count = num_words(logits.shape[1])
    planes = words[:, : PLANES * count].unflatten(1, (count, PLANES))
    per_word = _group_words(replaced, count).sum(2)
    planes[:, :, 0], planes[:, :, 2] = _pack_bits(replaced, count), _pack_bits(forbidden, count)
    planes[:, :, 1] = per_word.cumsum(1) - per_word
    row, token = replaced.nonzero().unbind(1)
    words[row, PLANES * count + (replaced.cumsum(1) - 1)[row, token]] = level[row, token].view(torch.int32)
    return Overlay(words, logits.shape[1])


def _by_value(additions: Additions | None, forbidding: bool) -> Additions | None:
    """Additions that forbid tokens, or the others."""
    if additions is None:
        return None
    wanted = (additions.values == -torch.inf) == forbidding
    return replace(additions, ids=torch.where(wanted, additions.ids, NOWHERE))


def _ones(additions: Additions | None) -> Additions | None:
    return None if additions is None else replace(additions, values=torch.ones_like(additions.values))


def _penalise_ones(penalties: Penalties | None) -> Penalties | None:
    """Penalties that change a logit of 1 wherever the given ones apply."""
    if penalties is None:
        return None
    factors = penalties.factors
    off = (factors == factors.new_tensor([1.0, 0.0, 0.0])).all(1, keepdim=True)
    return replace(penalties, factors=torch.where(off, factors, factors.new_tensor([2.0, 0.0, 0.0])))


def _group_words(bits: Tensor, count: int) -> Tensor:
    """Converts bool [R, V] to int64 [R, count, 32]."""
    return torch.nn.functional.pad(bits.long(), (0, count * WORD - bits.shape[1])).unflatten(1, (count, WORD))


def _pack_bits(bits: Tensor, count: int) -> Tensor:
    return (_group_words(bits, count) << torch.arange(WORD, device=bits.device)).sum(2).int()
