"""Edits that lie over logits: whoever reads the logits folds them in on load, and no copy in float32 is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORD = 32
"""Tokens of one word."""
PLANES = 3
"""Words of 32 tokens: which have another logit, how many such there are before them, which are forbidden."""


def words_of(vocab: int) -> int:
    """Words of a vocabulary."""
    return -(-vocab // WORD)


@dataclass(frozen=True, slots=True)
class Overlay:
    """What `process_logits_overlay` makes of the edits of R rows of logits.

    cells: int32 [R, 3 * W + C], contiguous, W = ceil(V / 32). Of the 32 tokens from 32 * w on, cell 3 * w has a bit for
        each that has another logit, 3 * w + 1 says how many such there are in the row before them, 3 * w + 2 has a bit
        for each that is forbidden (-inf is added, so that NaN and +inf stay visible as NaN). The bits of the other
        logits, float32 in order of ids, follow from cell 3 * W on: up to C of them.
    vocab: V, columns of the logits that it is for.
    """

    cells: Tensor
    vocab: int

    def select(self, index: Tensor) -> Overlay:
        """That of the given rows (int64 [R'])."""
        return Overlay(self.cells[index], self.vocab)

    def over(self, logits: Tensor) -> Tensor:
        """Logits [R, V] with the edits, a copy in float32: what reading through the overlay means."""
        rows = [_edited(*part) for part in zip(logits.split(_AT_ONCE), self.cells.split(_AT_ONCE))]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


_AT_ONCE = 32
"""Rows whose bits are spread out at a time: they take several times the room of the logits."""


def _edited(logits: Tensor, cells: Tensor) -> Tensor:
    vocab, device = logits.shape[1], logits.device
    words = words_of(vocab)
    planes = cells[:, : PLANES * words].unflatten(1, (words, PLANES))
    ids = torch.arange(vocab, device=device)
    moved, barred = ((planes[:, ids // WORD, plane] >> (ids % WORD)) & 1 for plane in (0, 2))
    level, values = logits.float(), cells[:, PLANES * words :].contiguous().view(torch.float32)
    if values.shape[1]:
        place = (moved.cumsum(1) - 1).clamp(0, values.shape[1] - 1)
        level = torch.where(moved == 1, values.gather(1, place), level)
    return torch.where(barred == 1, level - torch.inf, level)


def check(op: str, overlay: Any, logits: Tensor) -> Tensor:
    """The cells of an overlay. Raises ValueError for one that is not of these logits."""
    rows, vocab = logits.shape
    least = PLANES * words_of(vocab)
    cells = overlay.cells if isinstance(overlay, Overlay) else None
    if cells is None or cells.dtype != torch.int32 or cells.ndim != 2 or not cells.is_contiguous():
        got = type(overlay).__name__ if cells is None else f"{cells.dtype} {list(cells.shape)}"
        raise ValueError(
            f"{op}: overlay is {got}; expected an Overlay as process_logits_overlay returns it: contiguous int32"
        )
    fits = cells.shape[0] == rows and overlay.vocab == vocab and cells.shape[1] >= least
    if not fits or cells.device != logits.device:
        raise ValueError(
            f"{op}: overlay is {list(cells.shape)} for {overlay.vocab} tokens on {cells.device}; expected "
            f"[{rows}, {least} or more] for {vocab} on {logits.device}, like the logits; process_logits_overlay "
            f"makes them"
        )
    return cells


def folded(op: str, overlay: Overlay | None, logits: Tensor, nothing: Tensor) -> tuple[Tensor, int]:
    """(cells, how many a row has) for a launch; without an overlay `nothing`, any int32 tensor, and 0."""
    if overlay is None:
        return nothing, 0
    cells = check(op, overlay, logits)
    return cells, cells.shape[1]
