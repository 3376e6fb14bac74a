"""Triton backend of tree_attention: partition of a call, argument checks, and launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, result_tensors
from ...triton_shared.jit import lanes_for
from . import stream_k
from .aot_configs import VARIANTS as VARIANTS
from .checks import check_arguments
from .config import (
    INVARIANT_ROWS,
    LARGE_SHARED_MEMORY,
    MAX_PIECES,
    PROCESSORS,
    SMALL_SHARED_MEMORY,
    Config,
    choose_config,
    choose_pieces,
    combine_tile,
    programs_per_processor,
)
from .plan import AttentionPlan, count_blocks, max_tiles_per_block

PIECE_SLOTS = 1024
"""Slots of a piece in the batch-invariant mode. Pieces then begin at fixed slots, whatever else is in the batch."""
MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOG2_E = 1.4426950408889634


@lru_cache(maxsize=8)
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS


@lru_cache(maxsize=8)
def _shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return LARGE_SHARED_MEMORY
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", LARGE_SHARED_MEMORY))


@dataclass(frozen=True)
class Partition:
    """Partition of one call into programs. It follows from shapes, not from lengths.

    Attributes:
        config: Block sizes.
        blocks: Blocks of query rows.
        pieces: Pieces of the keys.
        piece_tiles: Tiles of a piece in the batch-invariant mode, else 0.
    """

    config: Config
    blocks: int
    pieces: int
    piece_tiles: int


@lru_cache(maxsize=4096)
def _partition(
    nodes: int, batch: int, heads: int, kv_heads: int, width: int, itemsize: int, narrow: bool, capacity: int,
    invariant: bool, processors: int, frugal: bool,
) -> Partition:  # fmt: skip
    group = heads // kv_heads
    rows = INVARIANT_ROWS if invariant else -(-nodes // max(1, batch)) * group
    config = choose_config(rows, width, itemsize, narrow, frugal)
    blocks = count_blocks(nodes, batch, group, config.block_m)
    if invariant:
        return Partition(config, blocks, max(2, -(-capacity // PIECE_SLOTS)), PIECE_SLOTS // config.block_n)
    return Partition(config, blocks, choose_pieces(blocks * kv_heads, capacity, config, processors), 0)


def partition_call(query: Tensor, key_cache: Tensor, page_table: Tensor, batch_invariant: bool = False) -> Partition:
    """Returns the partition of a call with these tensors."""
    nodes, heads, width = query.shape
    batch, columns = page_table.shape
    _, page_size, kv_heads, _ = key_cache.shape
    narrow = key_cache.element_size() == 1
    shape = (nodes, batch, heads, kv_heads, width, query.element_size(), narrow, columns * page_size)
    return _partition(
        *shape, batch_invariant, _num_processors(query.device), _shared_memory(query.device) < LARGE_SHARED_MEMORY
    )


def _scratch(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, *args: Any,
    batch_invariant: bool = False, plan: AttentionPlan | None = None, **kwargs: Any,
) -> list[TensorSpec]:  # fmt: skip
    """Returns the specs of float32 memory for partial results."""
    if plan is not None and not batch_invariant:
        return [((stream_k.partial_size(plan, query.shape[2]),), torch.float32)]
    count = partition_call(query, key_cache, page_table, batch_invariant).pieces
    size = 0 if count == 1 else count * query.shape[0] * query.shape[1] * (query.shape[2] + 1)
    return [((size,), torch.float32)]


def plan_numbers(query: Tensor, key_cache: Tensor, page_table: Tensor) -> dict[str, int]:
    """Returns the keyword arguments of `attention_plan` for calls with these tensors."""
    config, kv_heads = partition_call(query, key_cache, page_table).config, key_cache.shape[2]
    held = programs_per_processor(config) if _shared_memory(query.device) >= LARGE_SHARED_MEMORY else 1
    return {
        "kv_heads": kv_heads,
        "group": query.shape[1] // kv_heads,
        "block_m": config.block_m,
        "block_n": config.block_n,
        "programs": held * _num_processors(query.device),
    }


def fits_plan(query: Tensor, key_cache: Tensor, page_table: Tensor) -> bool:
    """Returns whether a plan can number the tiles of requests as long as the page table allows."""
    shape, (_, page_size, kv_heads, _) = partition_call(query, key_cache, page_table), key_cache.shape
    return page_table.shape[1] * page_size <= max_tiles_per_block(shape.blocks, kv_heads) * shape.config.block_n


def why_not(query: Tensor, key_cache: Tensor, *args: object, **kwargs: object) -> str | None:
    """Returns why the kernels cannot serve these shapes and dtypes, or None."""
    if query.dtype not in DTYPES:
        return f"queries are {query.dtype}; served are float32, bfloat16 and float16"
    if key_cache.dtype not in (query.dtype, torch.float8_e4m3fn):
        return f"the cache is {key_cache.dtype}; served are {query.dtype} and float8_e4m3fn"
    old = query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 9)
    if key_cache.dtype == torch.float8_e4m3fn and old:
        return "this GPU has no float8_e4m3fn; sm_89 and later have"
    if query.shape[-1] > MAX_HEAD_DIM:
        return f"heads are {query.shape[-1]} wide; served are up to {MAX_HEAD_DIM}"
    if _shared_memory(query.device) < SMALL_SHARED_MEMORY:
        words = f"this GPU gives a program {_shared_memory(query.device)} bytes of shared memory"
        return f"{words}; needed are {SMALL_SHARED_MEMORY}"
    return None


@declare_scratch(_scratch)
def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    ancestors: Tensor | None = None,
    depth: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    workspace: Tensor | None = None,
    batch_invariant: bool = False,
    plan: AttentionPlan | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Runs the operator: one launch for one piece, two for several pieces and with a plan.

    Args as in the reference, and `lse`: contiguous float32 [M, H], to which `return_lse` writes.

    Returns:
        The output, and with `return_lse` also the log-sum-exp.
    """
    from .triton_kernel import attend_pieces, combine_pieces

    tensors = (query, key_cache, value_cache, page_table, lengths, offsets, ancestors, depth)
    check_arguments(
        *tensors, softcap=softcap, window=window, sinks=sinks, out=out, key_scale=key_scale, value_scale=value_scale
    )
    result = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    nodes, heads, width = query.shape
    pages, page_size, kv_heads, _ = key_cache.shape
    batch, columns = page_table.shape
    if return_lse:
        (lse,) = result_tensors("tree_attention", lse, [((nodes, heads), torch.float32)], query.device)
    if nodes == 0:
        return result if lse is None else (result, lse)
    shape = partition_call(query, key_cache, page_table, batch_invariant)
    config, count = shape.config, shape.pieces
    if plan is not None and not batch_invariant:
        numbered = plan_numbers(query, key_cache, page_table)
        stream_k.check_plan(plan, numbered, shape.blocks, ancestors is None, window, columns * page_size)
    else:
        plan = None
    wanted = _scratch(query, key_cache, value_cache, page_table, batch_invariant=batch_invariant, plan=plan)
    (memory,), _ = carve_workspace("tree_attention", workspace, wanted, query.device)
    strides = (
        columns, page_table.stride(0), 0 if ancestors is None else ancestors.shape[1],
        query.stride(0), query.stride(1), key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
        value_cache.stride(0), value_cache.stride(1), value_cache.stride(2), result.stride(0), result.stride(1),
    )  # fmt: skip
    numbers = (scale if softcap else scale * LOG2_E, softcap, window, batch, nodes, pages, *strides)
    kinds = {
        "NUM_HEADS": heads, "GROUP_SIZE": heads // kv_heads, "PAGE_SIZE": page_size, "HEAD_DIM": width,
        "BLOCK_D": config.block_d, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "IS_CAUSAL": ancestors is None,
        "HAS_WINDOW": window > 0, "HAS_SOFTCAP": softcap > 0, "HAS_SINKS": sinks is not None, "HAS_LSE": return_lse,
        "HAS_SCALES": key_scale is not None, "SAME_STRIDES": key_cache.stride() == value_cache.stride(),
    }  # fmt: skip
    if plan is not None:
        given = (*tensors, sinks, result, lse, key_scale, value_scale)
        stream_k.launch_shares(plan, given, numbers, memory, kinds, config)
        return result if lse is None else (result, lse)
    size = count * nodes * heads
    part, part_lse = (memory[: size * width], memory[size * width :]) if count > 1 else (None, None)
    attend_pieces[(shape.blocks, kv_heads, count)](
        *tensors, sinks, result, lse, part, part_lse, key_scale, value_scale, *numbers, **kinds,
        BLOCK_B=lanes_for(batch + 1, 16), NUM_PIECES=count, TILES_PER_PIECE=shape.piece_tiles,
        num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
    )  # fmt: skip
    if count > 1:
        # in the batch-invariant mode the order of addition must not depend on the number of pieces
        block_p, block_h = combine_tile(MAX_PIECES if batch_invariant else count, config.block_d)
        combine_pieces[(nodes, -(-heads // block_h))](
            part, part_lse, sinks, offsets, result, lse, batch, nodes, result.stride(0), result.stride(1),
            NUM_HEADS=heads, HEAD_DIM=width, BLOCK_D=config.block_d, BLOCK_H=block_h, BLOCK_P=block_p, NUM_PIECES=count,
            HAS_SINKS=sinks is not None, HAS_LSE=return_lse, num_warps=4,
        )  # fmt: skip
    return result if lse is None else (result, lse)
