"""Triton backend of attention_plan, and the launches of tree attention on a fixed grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from triton import next_power_of_2

from .config import Config, combine_shares_tile
from .plan import AttentionPlan, check_plan_arguments, count_blocks, max_tiles_per_block, split_plan_tensors

PLAN_BLOCK = 256
"""Blocks that `plan_shares` processes at a time."""


def _bisection_steps(count: int) -> int:
    """Returns the bisection steps that find one of `count` entries."""
    return max(1, count).bit_length()


def attention_plan(
    lengths: Tensor,
    offsets: Tensor,
    nodes: int,
    *,
    kv_heads: int,
    group: int,
    block_m: int,
    block_n: int,
    programs: int,
    causal: bool = False,
    window: int = 0,
    out: Tensor | None = None,
) -> AttentionPlan:
    """Runs the operator in one launch of one program."""
    from .triton_stream_k import plan_shares

    check_plan_arguments(lengths, offsets, nodes, group, block_m, block_n, programs)
    batch = lengths.shape[0]
    blocks = count_blocks(nodes, batch, group, block_m)
    starts, rows, firsts = split_plan_tensors(out, lengths.device, blocks, programs)
    plan_shares[(1,)](
        lengths, offsets, starts, rows, firsts, window, batch, nodes, blocks, max_tiles_per_block(blocks, kv_heads),
        _bisection_steps(max(blocks, batch + 1)), NUM_KV_HEADS=kv_heads, GROUP_SIZE=group, BLOCK_M=block_m,
        BLOCK_N=block_n, IS_CAUSAL=causal, HAS_WINDOW=window > 0, NUM_PROGRAMS=programs,
        PROGRAM_LANES=next_power_of_2(programs), BLOCK=PLAN_BLOCK, num_warps=4,
    )  # fmt: skip
    return AttentionPlan(starts, rows, firsts, block_m, block_n, programs, kv_heads, group, causal, window)


def partial_size(plan: AttentionPlan, width: int) -> int:
    """Returns the float32 elements of all partial results; they depend on the grid alone."""
    return 2 * plan.programs * plan.block_m * (width + 1)


def check_plan(
    plan: AttentionPlan, numbers: Mapping[str, int], blocks: int, causal: bool, window: int, capacity: int
) -> None:
    """Checks that a plan fits the shapes and options of a call.

    Args:
        plan: The plan.
        numbers: Keyword arguments of `attention_plan` for the call. `programs` is not compared.
        blocks: Blocks of query rows.
        causal: Whether nodes form chains.
        window: Size of the attention window.
        capacity: Slots of a row of the page table.

    Raises:
        ValueError: If the plan does not fit, or if it cannot number so many slots.
    """
    want = {**numbers, "programs": plan.programs, "blocks": blocks, "causal": causal, "window": window}
    got = {name: plan.rows.shape[0] if name == "blocks" else getattr(plan, name) for name in want}
    if got != want:
        raise ValueError(
            f"tree_attention: plan has {got}; expected {want}; make one for these shapes and options with plan_for"
        )
    most = max_tiles_per_block(blocks, plan.kv_heads) * plan.block_n
    if capacity > most:
        raise ValueError(
            f"tree_attention: the page table has room for {capacity} tokens a row; expected at most {most} with a plan "
            f"of {blocks} blocks; call without one, as plan_for would"
        )


def launch_shares(
    plan: AttentionPlan, tensors: tuple[Any, ...], numbers: tuple[Any, ...], part: Tensor, kinds: dict[str, Any],
    config: Config,
) -> None:  # fmt: skip
    """Launches `attend_shares` and `combine_shares`. Arguments are in the order of the kernels."""
    from .triton_stream_k import attend_shares, combine_shares

    *inputs, sinks, out, lse, key_scale, value_scale = tensors
    scale, softcap, window, batch, nodes, pages, *strides = numbers
    blocks, width = plan.rows.shape[0], kinds["HEAD_DIM"]
    size = 2 * plan.programs * plan.block_m
    part, part_lse = part[: size * width], part[size * width : size * (width + 1)]
    attend_shares[(plan.programs,)](
        *inputs, sinks, out, lse, part, part_lse, key_scale, value_scale, plan.starts, plan.rows, plan.firsts,
        scale, softcap, window, batch, nodes, blocks, pages, *strides, NUM_PROGRAMS=plan.programs, **kinds,
        num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
    )  # fmt: skip
    rows, parts = combine_shares_tile(kinds["BLOCK_D"])
    shared = {
        name: kinds[name]
        for name in ("NUM_HEADS", "GROUP_SIZE", "HEAD_DIM", "BLOCK_D", "BLOCK_M", "HAS_SINKS", "HAS_LSE")
    }
    combine_shares[(blocks, kinds["NUM_HEADS"] // kinds["GROUP_SIZE"], plan.block_m // rows)](
        part, part_lse, plan.starts, plan.rows, inputs[5], sinks, out, lse, batch, nodes, blocks, *strides[-2:],
        BLOCK_R=rows, BLOCK_P=parts, NUM_PROGRAMS=plan.programs, **shared, num_warps=4,
    )  # fmt: skip
