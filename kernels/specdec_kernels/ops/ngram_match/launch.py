"""Triton backend of ngram_match: launch configurations and the call."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, result_tensors
from ...triton_shared.variant import Variant
from .reference import check_sizes

TILE = 1024
OTHERS, ROWS = 256, 64
"""Places of a tile and of a block of `count`: it compares what follows each of the block with what follows the tile."""
PROGRAMS = 264
MOST_PIECES = 64
REGISTERS = 128
"""Per thread of `count`. Left to itself ptxas aims at fewer, and spills."""
BLOCK = 32
"""Tokens that `copy` writes at a time."""


def _pieces(size: int, batch: int) -> int:
    """Programs per history, a power of two; what they find does not depend on it."""
    wanted = min(PROGRAMS // max(1, batch), size // TILE, MOST_PIECES)
    return 1 << max(0, wanted.bit_length() - 1)


def _scratch(
    tokens: Tensor, starts: Tensor, lengths: Tensor, n_max: int, n_min: int, num_tokens: int, frequent: bool = False
) -> list[TensorSpec]:
    batch = starts.shape[0]
    return [((batch, _pieces(tokens.shape[0], batch)), torch.int64)] * (1 + frequent)


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
    """The operator in two launches, three with `frequent`. A history that leaves `tokens` counts as empty."""
    from .triton_kernel import copy, count, search

    check_sizes(tokens, starts, lengths, n_max, n_min, num_tokens)
    batch, size, device = starts.shape[0], tokens.shape[0], tokens.device
    shapes: list[TensorSpec] = [((batch, num_tokens), torch.int64), ((batch,), torch.int32)]
    drafts, matched = result_tensors("ngram_match", out, shapes, device)
    pieces = _pieces(size, batch)
    wanted = _scratch(tokens, starts, lengths, n_max, n_min, num_tokens, frequent)
    (best, *more), _ = carve_workspace("ngram_match", workspace, wanted, device)
    counts = more[0] if more else best
    where = argument_checks.make_contiguous(tokens, starts, lengths)
    if batch == 0:
        return drafts, matched
    search[(batch, pieces)](*where, best, size, n_max, n_min, TILE=TILE, num_warps=4)
    if frequent:
        count[(batch, pieces)](
            *where, best, counts, size, MOST=MOST_PIECES, TILE=OTHERS, ROWS=ROWS, num_warps=8, maxnreg=REGISTERS
        )
    copy[(batch,)](
        *where, best, counts, drafts, matched, size, num_tokens, pieces, MOST=MOST_PIECES, FREQUENT=frequent,
        BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    return drafts, matched


_WHERE = {"tokens": "*i64", "starts": "*i64", "lengths": "*i32", "best": "*i64"}
VARIANTS = [
    Variant(
        "ngram_match/search", "ngram_match.triton_kernel:search",
        _WHERE | {"size": "i32", "n_max": "i32", "n_min": "i32"}, {"TILE": TILE}, stages=1,
    ),
    Variant(
        "ngram_match/count", "ngram_match.triton_kernel:count", _WHERE | {"counts": "*i64", "size": "i32"},
        {"MOST": MOST_PIECES, "TILE": OTHERS, "ROWS": ROWS}, 8, stages=1, most_registers=REGISTERS,
    ),
    Variant(
        "ngram_match/copy", "ngram_match.triton_kernel:copy",
        _WHERE | {"counts": "*i64", "drafts": "*i64", "matched": "*i32"}
        | dict.fromkeys(("size", "num_tokens", "pieces"), "i32"),
        {"MOST": MOST_PIECES, "FREQUENT": True, "BLOCK": BLOCK}, 1, stages=1,
    ),
]  # fmt: skip
