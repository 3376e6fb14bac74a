"""Triton backend of distribution_stats: launch configurations and the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, result_tensors
from ...overlay import Overlay, folded
from ...random import BLOCK
from ...triton_shared.jit import unaligned_vocab
from ...triton_shared.variant import Variant, size_type
from .reference import FARTHEST, check
from .triton_kernel import join, scan

GROUP = 8
"""Race blocks that one program scans: 8,192 logits, 32 per thread."""
ROOM = 2048
"""Contenders of a row that are decided in registers."""
WARPS = 8
TILE_BLOCKS = 2
"""Race blocks of a tile while a cut is looked for; larger tiles spill with an older ptxas."""
JOIN_REGISTERS = 255
"""Per thread of `join`. Left to itself ptxas may aim at fewer, and spills."""


def scratch(logits: Tensor, *args: object, pivots: object = None, **kwargs: object) -> list[TensorSpec]:
    """Per block: the largest, the total, an id or a number, what is above the pivot; per row: contenders; nowhere."""
    (rows, vocab), single = logits.shape, torch.float32
    blocks = -(-vocab // BLOCK)
    tables: list[TensorSpec] = [((rows, blocks), single), ((rows, blocks), single), ((rows, blocks), torch.int32)]
    above: TensorSpec = ((rows if pivots is not None else 0, blocks), single)
    return [*tables, above, ((rows, ROOM), torch.int64), ((1,), single)]


@declare_scratch(scratch)
def distribution_stats(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    masses: bool = False,
    pivots: Tensor | None = None,
    overlay: Overlay | None = None,
    out: Sequence[Tensor] | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, ...]:
    check(logits, temperature, top_k, top_p, min_p, pivots)
    rows, vocab = logits.shape
    blocks, device = -(-vocab // BLOCK), logits.device
    sizes = scratch(logits, pivots=pivots)
    (top, total, place, over, contenders, nowhere), _ = carve_workspace("distribution_stats", workspace, sizes, device)
    single = torch.float32
    made: list[TensorSpec] = [((rows,), single), ((rows,), single), ((rows,), single), ((rows,), torch.int32)]
    found = result_tensors("distribution_stats", out, [*made, ((rows, blocks), single)] if masses else made, device)
    if rows:
        filters = [part.contiguous() for part in (temperature, top_k, top_p, min_p)]
        hints, known = (place, 0) if pivots is None else (pivots.contiguous(), pivots.shape[0])
        tables = (hints, top, place, total, over)
        cells, room = folded("distribution_stats", overlay, logits, place)
        unaligned = unaligned_vocab(vocab, logits.stride(0))
        scan[(rows, -(-blocks // GROUP))](
            logits, filters[0], *tables, cells, room, vocab, blocks, logits.stride(0), known, GROUP,
            pivots is not None, room > 0, unaligned, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        join[(rows,)](
            logits, *filters, *tables, contenders, *found[:4], found[4] if masses else nowhere, cells,
            room, vocab, blocks, logits.stride(0), known, 1 << (blocks - 1).bit_length(), ROOM, masses, FARTHEST,
            pivots is not None, room > 0, unaligned, TILE_BLOCKS, num_warps=WARPS, maxnreg=JOIN_REGISTERS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return tuple(found)


def beside(some: Tensor, found: Tensor, index: Tensor) -> Tensor:
    """bool [nodes]: whether a node is none of some (-1: no node). Scratch: found bool [nodes + 1], index int64."""
    index.copy_(some.view(-1))
    return found.fill_(True).index_fill_(0, index, False)[:-1]  # padding marks the last place


def forget(rows: Tensor, stats: Sequence[Tensor]) -> None:
    """Marks statistics of rows (bool [R]) as those that nobody asked for, in place and as `only` does."""
    for each, nothing in zip(stats, (0, torch.inf, 0, 0)):
        each.masked_fill_(rows, nothing)
    stats[4].masked_fill_(rows[:, None], torch.nan)


def _variant(
    kernel: str, dtype: str, everyday: tuple[str, ...], blocks: int = 256, masses: bool = True, pivots: bool = True,
    fold: bool = False, unaligned: bool = False,
) -> Variant:  # fmt: skip
    logits = {"logits": f"*{dtype}", "temperature": "*fp32", "blocks": "i32", "stride": "i32:16"}
    logits["vocab"] = size_type(unaligned)
    tables = {"pivots": "*i64" if pivots else "*i32", "tops": "*fp32", "places": "*i32", "sums": "*fp32"}
    tables |= {"over": "*fp32", "known": "i32", "cells": "*i32", "room": "i32:16"}
    bare = ("" if pivots else " without pivots") + (" with an overlay" if fold else "")
    bare += " unaligned vocabulary" if unaligned else ""
    if kernel == "scan":
        return Variant(
            f"distribution_stats/scan {dtype}{bare}", "distribution_stats.triton_kernel:scan", logits | tables,
            {"GROUP": GROUP, "PIVOTS": pivots, "FOLD": fold, "UNALIGNED": unaligned}, WARPS, everyday=everyday,
            fusion=False,
        )  # fmt: skip
    answers = {"out_inv_t": "*fp32", "out_lse": "*fp32", "out_cut": "*fp32", "out_tie": "*i32", "mass": "*fp32"}
    filters = {"top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32", "contenders": "*i64"}
    name = f"distribution_stats/join {dtype} {blocks} blocks{'' if masses else ' without masses'}{bare}"
    constants = {"PLACES": blocks, "ROOM": ROOM, "MASSES": masses, "FARTHEST": FARTHEST, "PIVOTS": pivots}
    constants |= {"FOLD": fold, "UNALIGNED": unaligned, "BLOCKS": TILE_BLOCKS}
    return Variant(
        name, "distribution_stats.triton_kernel:join", logits | tables | filters | answers, constants, WARPS,
        everyday=everyday,
        fusion=False, most_registers=JOIN_REGISTERS,
    )  # fmt: skip


VARIANTS = [
    *(_variant("scan", dtype, ("sm_90",) if dtype == "bf16" else ()) for dtype in ("bf16", "fp16", "fp32")),
    *(_variant("join", dtype, ("sm_90",) if dtype == "bf16" else ()) for dtype in ("bf16", "fp16", "fp32")),
    _variant("join", "bf16", (), blocks=32),
    _variant("join", "bf16", (), masses=False),
    _variant("scan", "bf16", (), pivots=False),
    _variant("join", "bf16", (), pivots=False),
    _variant("scan", "bf16", (), fold=True),
    _variant("join", "bf16", (), fold=True),
    *(_variant(kernel, dtype, (), unaligned=True) for kernel in ("scan", "join") for dtype in ("bf16", "fp32")),
    _variant("scan", "bf16", (), fold=True, unaligned=True),
]
