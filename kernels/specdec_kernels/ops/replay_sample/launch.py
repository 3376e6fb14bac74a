"""Triton backend of replay_sample: launch configurations and the call."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, result_tensors
from ...overlay import Overlay, folded
from ...triton_shared.jit import unaligned_vocab
from ...triton_shared.variant import Variant, size_type
from .reference import check
from .triton_kernel import choose, pieces

TILE = 2048
TILES = 2
"""Tiles of one program: noise costs about a hundred instructions a token, so pieces are short and many."""
WARPS = 8


def scratch(logits: Tensor, *args: object, **kwargs: object) -> list[TensorSpec]:
    rows, vocab = logits.shape
    return [((rows, -(-vocab // (TILE * TILES))), torch.int64)]


@declare_scratch(scratch)
def replay_sample(
    logits: Tensor,
    inv_t: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    seeds: Tensor,
    positions: Tensor,
    noise: Tensor | None = None,
    *,
    overlay: Overlay | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    check(logits, inv_t, cut, tie_id, seeds, positions, noise)
    rows, vocab = logits.shape
    (best,), _ = carve_workspace("replay_sample", workspace, scratch(logits), logits.device)
    (tokens,) = result_tensors("replay_sample", out, [((rows,), torch.int64)], logits.device)
    if rows:
        count = best.shape[1]
        dist = [part.contiguous() for part in (inv_t, cut, tie_id, seeds, positions)]
        added = logits if noise is None else noise.contiguous()
        cells, room = folded("replay_sample", overlay, logits, dist[2])
        pieces[(rows, count)](
            logits, *dist, added, best, cells, room, vocab, logits.stride(0), vocab, TILE, TILES, noise is not None,
            room > 0, unaligned_vocab(vocab, logits.stride(0)), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        choose[(rows,)](dist[0], dist[2], best, tokens, count, 1 << (count - 1).bit_length(), num_warps=1)
    return tokens


def _pieces(
    dtype: str, everyday: tuple[str, ...], explicit: bool = False, fold: bool = False, unaligned: bool = False
) -> Variant:
    arguments = {
        "logits": f"*{dtype}", "inv_t": "*fp32", "cut": "*fp32", "tie_id": "*i32", "seeds": "*i64",
        "positions": "*i32", "noise": "*fp32", "best": "*i64", "cells": "*i32", "room": "i32:16",
        "vocab": size_type(unaligned), "stride": "i32:16", "noise_stride": "i32",
    }  # fmt: skip
    special = (" given noise" if explicit else "") + (" with an overlay" if fold else "")
    special += " unaligned vocabulary" if unaligned else ""
    constants = {"TILE": TILE, "TILES": TILES, "EXPLICIT": explicit, "FOLD": fold, "UNALIGNED": unaligned}
    return Variant(
        f"replay_sample/pieces {dtype}{special}", "replay_sample.triton_kernel:pieces", arguments, constants, WARPS,
        everyday=everyday, fusion=False,
    )  # fmt: skip


VARIANTS = [
    *(_pieces(dtype, ("sm_90",) if dtype == "bf16" else ()) for dtype in ("bf16", "fp16", "fp32")),
    _pieces("bf16", (), explicit=True),
    _pieces("bf16", (), fold=True),
    *(_pieces(dtype, (), unaligned=True) for dtype in ("bf16", "fp32")),
    _pieces("bf16", (), fold=True, unaligned=True),
    Variant(
        "replay_sample/choose", "replay_sample.triton_kernel:choose",
        {"inv_t": "*fp32", "tie_id": "*i32", "best": "*i64", "tokens": "*i64", "count": "i32"}, {"PIECES": 64}, 1,

    ),
]  # fmt: skip
