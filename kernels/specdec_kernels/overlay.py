"""Processed logits as a sparse overlay. Operators that read the logits apply it on load, without a float32 copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORD = 32
"""Tokens of one word."""
PLANES = 3
"""Words per 32 tokens: bits of replaced logits, number of replaced logits before them, bits of forbidden tokens."""


def num_words(vocab_size: int) -> int:
    """Returns the number of 32-bit words of a vocabulary."""
    return -(-vocab_size // WORD)


@dataclass(frozen=True, slots=True)
class Overlay:
    """Processed logits of R rows, as `process_logits_overlay` returns them.

    Attributes:
        words: int32 [R, 3 * W + C], contiguous, W = ceil(V / 32). For the 32 tokens from 32 * w on, word 3 * w has a
            bit for each replaced logit, word 3 * w + 1 counts the replaced logits of the row before them, and word
            3 * w + 2 has a bit for each forbidden token (-inf is added, so NaN and +inf stay visible as NaN). From word
            3 * W on follow the bits of up to C replaced logits, float32, in order of ids.
        vocab_size: V, columns of the logits.
    """

    words: Tensor
    vocab_size: int

    def select_rows(self, index: Tensor) -> Overlay:
        """Returns the overlay of some rows, int64 [R']."""
        return Overlay(self.words[index], self.vocab_size)

    def apply(self, logits: Tensor) -> Tensor:
        """Returns a float32 copy of logits [R, V] with the overlay applied. Kernels must agree with this definition."""
        pairs = zip(logits.split(_ROWS_AT_ONCE), self.words.split(_ROWS_AT_ONCE))
        rows = [_apply_words(*pair) for pair in pairs]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


_ROWS_AT_ONCE = 32
"""Rows to unpack at a time. Unpacked bits take several times the memory of the logits."""


def _apply_words(logits: Tensor, words: Tensor) -> Tensor:
    """Applies the words of an overlay to a few rows."""
    vocab_size, device = logits.shape[1], logits.device
    count = num_words(vocab_size)
    planes = words[:, : PLANES * count].unflatten(1, (count, PLANES))
    ids = torch.arange(vocab_size, device=device)
    replaced, forbidden = ((planes[:, ids // WORD, plane] >> (ids % WORD)) & 1 for plane in (0, 2))
    level, values = logits.float(), words[:, PLANES * count :].contiguous().view(torch.float32)
    if values.shape[1]:
        place = (replaced.cumsum(1) - 1).clamp(0, values.shape[1] - 1)
        level = torch.where(replaced == 1, values.gather(1, place), level)
    return torch.where(forbidden == 1, level - torch.inf, level)


def check_overlay(op: str, overlay: Any, logits: Tensor) -> Tensor:
    """Returns the words of an overlay. Raises ValueError if it does not belong to these logits."""
    rows, vocab_size = logits.shape
    least = PLANES * num_words(vocab_size)
    words = overlay.words if isinstance(overlay, Overlay) else None
    if words is None or words.dtype != torch.int32 or words.ndim != 2 or not words.is_contiguous():
        got = type(overlay).__name__ if words is None else f"{words.dtype} {list(words.shape)}"
        raise ValueError(
            f"{op}: overlay is {got}; expected an Overlay as process_logits_overlay returns it: contiguous int32"
        )
    fits = words.shape[0] == rows and overlay.vocab_size == vocab_size and words.shape[1] >= least
    if not fits or words.device != logits.device:
        raise ValueError(
            f"{op}: overlay is {list(words.shape)} for {overlay.vocab_size} tokens on {words.device}; expected "
            f"[{rows}, {least} or more] for {vocab_size} on {logits.device}, like the logits; process_logits_overlay "
            f"makes them"
        )
    return words


def launch_arguments(op: str, overlay: Overlay | None, logits: Tensor, absent: Tensor) -> tuple[Tensor, int]:
    """Returns (words, words per row) for a launch; without an overlay `absent`, any int32 tensor, and 0."""
    if overlay is None:
        return absent, 0
    words = check_overlay(op, overlay, logits)
    return words, words.shape[1]
