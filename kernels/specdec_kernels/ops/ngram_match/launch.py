"""Triton backend of ngram_match: argument checks, the launches and their variants."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, result_tensors
from ...triton_shared.aot_config import Variant
from .reference import check_sizes

TILE = 1024
OTHER_TILE, ROWS = 256, 64
"""Positions of a tile and of a block in `count_followers`, which compares their following tokens."""
PROGRAMS = 264
MAX_PIECES = 64
MAX_REGISTERS = 128
"""Registers of a thread of `count_followers`. Without a limit ptxas aims at fewer and spills."""
BLOCK = 32
"""Tokens that `copy_continuation` writes at a time."""


def _num_pieces(size: int, batch: int) -> int:
    """Returns the programs per history, a power of two; results do not depend on it."""
    wanted = min(PROGRAMS // max(1, batch), size // TILE, MAX_PIECES)
    return 1 << max(0, wanted.bit_length() - 1)


def _scratch(
    tokens: Tensor, starts: Tensor, lengths: Tensor, n_max: int, n_min: int, num_tokens: int, frequent: bool = False
) -> list[TensorSpec]:
    """Returns the specs of the keys that the pieces find, and with `frequent` of those that they count."""
    batch = starts.shape[0]
    return [((batch, _num_pieces(tokens.shape[0], batch)), torch.int64)] * (1 + frequent)


@declare_scratch(_scratch)
def ngram_match(
    tokens: Tensor,
    starts: Tensor,
    lengths: Tensor,
    n_max: int,
    n_min: int,
    num_tokens: int,
    frequent: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Runs the operator in two launches, three with `frequent`. A history that leaves `tokens` counts as empty."""
    from .triton_kernel import copy_continuation, count_followers, find_longest

    check_sizes(tokens, starts, lengths, n_max, n_min, num_tokens)
    batch, size, device = starts.shape[0], tokens.shape[0], tokens.device
    shapes: list[TensorSpec] = [((batch, num_tokens), torch.int64), ((batch,), torch.int32)]
    drafts, matched = result_tensors("ngram_match", out, shapes, device)
    pieces = _num_pieces(size, batch)
    wanted = _scratch(tokens, starts, lengths, n_max, n_min, num_tokens, frequent)
    (best, *more), _ = carve_workspace("ngram_match", workspace, wanted, device)
    counts = more[0] if more else best
    where = argument_checks.make_contiguous(tokens, starts, lengths)
    if batch == 0:
        return drafts, matched
    find_longest[(batch, pieces)](*where, best, size, n_max, n_min, TILE=TILE, num_warps=4)
    if frequent:
        count_followers[(batch, pieces)](
            *where,
            best,
            counts,
            size,
            MAX_PIECES=MAX_PIECES,
            TILE=OTHER_TILE,
            ROWS=ROWS,
            num_warps=8,
            maxnreg=MAX_REGISTERS,
        )
    copy_continuation[(batch,)](
        *where, best, counts, drafts, matched, size, num_tokens, pieces, MAX_PIECES=MAX_PIECES, FREQUENT=frequent,
        BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    return drafts, matched


_HISTORIES = {
    "tokens_ptr": "*i64",
    "starts_ptr": "*i64",
    "lengths_ptr": "*i32",
    "best_ptr": "*i64",
    "num_tokens": "i32",
}
VARIANTS = [
    Variant(
        "ngram_match/search", "ngram_match.triton_kernel:find_longest",
        _HISTORIES | {"n_max": "i32", "n_min": "i32"}, {"TILE": TILE}, stages=1,
    ),
    Variant(
        "ngram_match/count", "ngram_match.triton_kernel:count_followers", _HISTORIES | {"counts_ptr": "*i64"},
        {"MAX_PIECES": MAX_PIECES, "TILE": OTHER_TILE, "ROWS": ROWS}, 8, stages=1, most_registers=MAX_REGISTERS,
    ),
    Variant(
        "ngram_match/copy", "ngram_match.triton_kernel:copy_continuation",
        _HISTORIES | {"counts_ptr": "*i64", "drafts_ptr": "*i64", "matched_ptr": "*i32"}
        | dict.fromkeys(("num_drafts", "num_pieces"), "i32"),
        {"MAX_PIECES": MAX_PIECES, "FREQUENT": True, "BLOCK": BLOCK}, 1, stages=1,
    ),
]  # fmt: skip
