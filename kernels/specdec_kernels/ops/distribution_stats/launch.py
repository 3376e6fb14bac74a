"""Triton backend of distribution_stats: launch configurations and the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, result_tensors
from ...overlay import Overlay, launch_arguments
from ...random import BLOCK
from ...triton_shared.aot_config import Variant, size_type
from ...triton_shared.jit import unaligned_vocab
from .reference import FARTHEST, check
from .triton_kernel import join_blocks, scan_blocks

GROUP = 8
"""Noise blocks that one program scans: 8,192 logits, 32 per thread."""
CONTENDERS = 2048
"""Contenders of a row that are decided in registers."""
WARPS = 8
TILE_BLOCKS = 2
"""Noise blocks of a tile during the search for a cut; larger tiles spill with an older ptxas."""
JOIN_REGISTERS = 255
"""Registers per thread of `join_blocks`. By default ptxas may aim at fewer and spill."""


def scratch(logits: Tensor, *args: object, pivots: object = None, **kwargs: object) -> list[TensorSpec]:
    """Per block: largest logit, sum, place, mass before the pivot. Per row: contenders. Then an unread mass."""
    (rows, vocab_size), single = logits.shape, torch.float32
    blocks = -(-vocab_size // BLOCK)
    tables: list[TensorSpec] = [((rows, blocks), single), ((rows, blocks), single), ((rows, blocks), torch.int32)]
    above: TensorSpec = ((rows if pivots is not None else 0, blocks), single)
    return [*tables, above, ((rows, CONTENDERS), torch.int64), ((1,), single)]


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
    """Runs the operator in two launches."""
    op = "distribution_stats"
    check(logits, temperature, top_k, top_p, min_p, pivots)
    (rows, vocab_size), device, stride = logits.shape, logits.device, logits.stride(0)
    blocks, single = -(-vocab_size // BLOCK), torch.float32
    parts, _ = carve_workspace(op, workspace, scratch(logits, pivots=pivots), device)
    block_top, block_sum, block_place, block_above, contenders, no_mass = parts
    specs: list[TensorSpec] = [((rows,), single), ((rows,), single), ((rows,), single), ((rows,), torch.int32)]
    found = result_tensors(op, out, [*specs, ((rows, blocks), single)] if masses else specs, device)
    if rows:
        filters = [part.contiguous() for part in (temperature, top_k, top_p, min_p)]
        given_pivots, num_pivots = (block_place, 0) if pivots is None else (pivots.contiguous(), pivots.shape[0])
        tables = (given_pivots, block_top, block_place, block_sum, block_above)
        words, overlay_stride = launch_arguments(op, overlay, logits, block_place)
        sizes = (vocab_size, blocks, stride, num_pivots)
        has_pivots, has_overlay, unaligned = pivots is not None, overlay_stride > 0, unaligned_vocab(vocab_size, stride)
        scan_blocks[(rows, -(-blocks // GROUP))](
            logits, filters[0], *tables, words, overlay_stride, *sizes, GROUP, has_pivots, has_overlay, unaligned,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        join_blocks[(rows,)](
            logits, *filters, *tables, contenders, *found[:4], found[4] if masses else no_mass, words, overlay_stride,
            *sizes, 1 << (blocks - 1).bit_length(), CONTENDERS, masses, FARTHEST, has_pivots, has_overlay, unaligned,
            TILE_BLOCKS, num_warps=WARPS, maxnreg=JOIN_REGISTERS, enable_fp_fusion=False,
        )  # fmt: skip
    return tuple(found)


def unlisted_nodes(listed: Tensor, unlisted: Tensor, index: Tensor) -> Tensor:
    """Returns which nodes are not listed, bool [nodes].

    Args:
        listed: Packed nodes, int32, any shape; -1 for none.
        unlisted: Scratch, bool [nodes + 1].
        index: Scratch, int64, as many as `listed`.
    """
    index.copy_(listed.view(-1))
    return unlisted.fill_(True).index_fill_(0, index, False)[:-1]  # padding marks the last place


def clear_stats(rows: Tensor, stats: Sequence[Tensor]) -> None:
    """Clears the statistics of rows (bool [R]) in place, as `reference.keep_rows` does."""
    for each, cleared in zip(stats, (0, torch.inf, 0, 0)):
        each.masked_fill_(rows, cleared)
    stats[4].masked_fill_(rows[:, None], torch.nan)


def _variant(
    kernel: str,
    dtype: str,
    everyday: tuple[str, ...],
    blocks: int = 256,
    masses: bool = True,
    pivots: bool = True,
    overlay: bool = False,
    unaligned: bool = False,
) -> Variant:
    shared = {
        "logits_ptr": f"*{dtype}", "temperature_ptr": "*fp32", "num_blocks": "i32", "logits_stride": "i32:16",
        "vocab_size": size_type(unaligned), "pivots_ptr": "*i64" if pivots else "*i32", "block_top_ptr": "*fp32",
        "block_place_ptr": "*i32", "block_sum_ptr": "*fp32", "block_above_ptr": "*fp32", "num_pivots": "i32",
        "overlay_ptr": "*i32", "overlay_stride": "i32:16",
    }  # fmt: skip
    special = ("" if pivots else " without pivots") + (" with an overlay" if overlay else "")
    special += " unaligned vocabulary" if unaligned else ""
    constants = {"HAS_PIVOTS": pivots, "HAS_OVERLAY": overlay, "UNALIGNED": unaligned}
    if kernel == "scan_blocks":
        return Variant(
            f"distribution_stats/scan_blocks {dtype}{special}", "distribution_stats.triton_kernel:scan_blocks", shared,
            {"GROUP": GROUP, **constants}, WARPS, everyday=everyday, fusion=False,
        )  # fmt: skip
    own = {
        "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32", "contenders_ptr": "*i64", "inv_t_ptr": "*fp32",
        "lse_ptr": "*fp32", "cut_ptr": "*fp32", "tie_id_ptr": "*i32", "mass_ptr": "*fp32",
    }  # fmt: skip
    constants |= {"HAS_MASSES": masses}
    numbers = {"PLACES": blocks, "CONTENDERS": CONTENDERS, "FARTHEST": FARTHEST, "TILE_BLOCKS": TILE_BLOCKS}
    return Variant(
        f"distribution_stats/join_blocks {dtype} {blocks} blocks{'' if masses else ' without masses'}{special}",
        "distribution_stats.triton_kernel:join_blocks", shared | own, constants | numbers, WARPS, everyday=everyday,
        fusion=False, most_registers=JOIN_REGISTERS,
    )  # fmt: skip


VARIANTS = [
    *(_variant("scan_blocks", dtype, ("sm_90",) if dtype == "bf16" else ()) for dtype in ("bf16", "fp16", "fp32")),
    *(_variant("join_blocks", dtype, ("sm_90",) if dtype == "bf16" else ()) for dtype in ("bf16", "fp16", "fp32")),
    _variant("join_blocks", "bf16", (), blocks=32),
    _variant("join_blocks", "bf16", (), masses=False),
    _variant("scan_blocks", "bf16", (), pivots=False),
    _variant("join_blocks", "bf16", (), pivots=False),
    _variant("scan_blocks", "bf16", (), overlay=True),
    _variant("join_blocks", "bf16", (), overlay=True),
    *(
        _variant(kernel, dtype, (), unaligned=True)
        for kernel in ("scan_blocks", "join_blocks")
        for dtype in ("bf16", "fp32")
    ),
    _variant("scan_blocks", "bf16", (), overlay=True, unaligned=True),
]
