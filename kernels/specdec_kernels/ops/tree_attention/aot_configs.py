"""Launch configurations of the Triton tree attention that are compiled ahead of time."""

from __future__ import annotations

from dataclasses import replace

from ...triton_shared.aot_config import ARCHITECTURES, Variant
from .config import (
    INVARIANT_ROWS,
    PROCESSORS,
    Config,
    choose_config,
    combine_shares_tile,
    combine_tile,
    programs_per_processor,
)
from .stream_k import PLAN_BLOCK


def _attend(
    name: str, dtype: str, config: Config, everyday: tuple[str, ...], kv: str = "", **special: object
) -> Variant:
    kv = kv or dtype
    constants: dict[str, object] = {
        "NUM_HEADS": 32, "GROUP_SIZE": 4, "PAGE_SIZE": 16, "HEAD_DIM": 128, "BLOCK_D": config.block_d,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_B": 16, "NUM_PIECES": 8, "TILES_PER_PIECE": 0,
        "IS_CAUSAL": False, "HAS_WINDOW": False, "HAS_SOFTCAP": False, "HAS_SINKS": False, "HAS_LSE": False,
        "HAS_SCALES": False, "SAME_STRIDES": True,
    }  # fmt: skip
    constants.update(special)
    arguments = {
        "query_ptr": f"*{dtype}", "key_cache_ptr": f"*{kv}", "value_cache_ptr": f"*{kv}", "page_table_ptr": "*i32",
        "lengths_ptr": "*i32", "offsets_ptr": "*i32", "ancestors_ptr": "*i32", "depth_ptr": "*i32",
        "sinks_ptr": "*fp32", "out_ptr": f"*{dtype}", "lse_ptr": "*fp32", "partial_ptr": "*fp32",
        "partial_lse_ptr": "*fp32", "key_scale_ptr": "*fp32", "value_scale_ptr": "*fp32", "scale": "fp32",
        "softcap": "fp32", "window": "i32", "num_requests": "i32", "num_nodes": "i32", "num_pages": "i32",
        "max_pages": "i32", "page_table_row_stride": "i32", "num_words": "i32", "query_node_stride": "i32:16",
        "query_head_stride": "i32:16", "key_page_stride": "i32:16", "key_slot_stride": "i32:16",
        "key_head_stride": "i32:16", "value_page_stride": "i32:16", "value_slot_stride": "i32:16",
        "value_head_stride": "i32:16", "out_node_stride": "i32:16", "out_head_stride": "i32:16",
    }  # fmt: skip
    return Variant(
        f"tree_attention/{name}", "tree_attention.triton_kernel:attend_pieces", arguments, constants, config.warps,
        config.stages, everyday, ARCHITECTURES if kv == dtype else ("sm_90", "sm_100"), most_registers=config.registers,
    )  # fmt: skip


def _combine(name: str, count: int, everyday: tuple[str, ...], dtype: str = "bf16", **special: object) -> Variant:
    constants = {
        "NUM_HEADS": 32,
        "HEAD_DIM": 128,
        "BLOCK_D": 128,
        "NUM_PIECES": count,
        "HAS_SINKS": False,
        "HAS_LSE": False,
        **special,
    }
    constants["BLOCK_P"], constants["BLOCK_H"] = combine_tile(count, int(str(constants["BLOCK_D"])))
    arguments = {
        "partial_ptr": "*fp32", "partial_lse_ptr": "*fp32", "sinks_ptr": "*fp32", "offsets_ptr": "*i32",
        "out_ptr": f"*{dtype}", "lse_ptr": "*fp32", "num_requests": "i32", "num_nodes": "i32",
        "out_node_stride": "i32:16", "out_head_stride": "i32:16",
    }  # fmt: skip
    kernel = "tree_attention.triton_kernel:combine_pieces"
    return Variant(f"tree_attention/{name}", kernel, arguments, constants, everyday=everyday)


def _shares(
    name: str, config: Config, everyday: tuple[str, ...], dtype: str = "bf16", kv: str = "", **special: object
) -> Variant:
    """Returns the variant of the kernel with a plan, from that of the kernel with pieces."""
    plain = _attend("", dtype, config, (), kv)
    arguments = {
        **plain.arguments,
        **dict.fromkeys(("starts_ptr", "block_rows_ptr", "first_blocks_ptr"), "*i32"),
        "num_blocks": "i32",
    }
    constants = {n: v for n, v in plain.constants.items() if n not in ("BLOCK_B", "NUM_PIECES", "TILES_PER_PIECE")}
    constants |= special
    constants["NUM_PROGRAMS"] = programs_per_processor(config) * PROCESSORS
    kernel = "tree_attention.triton_stream_k:attend_shares"
    return Variant(
        f"tree_attention/{name}", kernel, arguments, constants, config.warps, config.stages, everyday,
        plain.architectures, most_registers=config.registers,
    )  # fmt: skip


def _join_shares(
    name: str, config: Config, everyday: tuple[str, ...], dtype: str = "bf16", **special: object
) -> Variant:
    rows, parts = combine_shares_tile(config.block_d)
    constants = {
        "NUM_HEADS": 32, "GROUP_SIZE": 4, "HEAD_DIM": 128, "BLOCK_D": config.block_d, "BLOCK_M": config.block_m,
        "BLOCK_R": rows, "BLOCK_P": parts, "NUM_PROGRAMS": programs_per_processor(config) * PROCESSORS,
        "HAS_SINKS": False, "HAS_LSE": False, **special,
    }  # fmt: skip
    arguments = {
        "partial_ptr": "*fp32", "partial_lse_ptr": "*fp32", "starts_ptr": "*i32", "block_rows_ptr": "*i32",
        "offsets_ptr": "*i32", "sinks_ptr": "*fp32", "out_ptr": f"*{dtype}", "lse_ptr": "*fp32",
        **dict.fromkeys(("num_requests", "num_nodes", "num_blocks"), "i32"), "out_node_stride": "i32:16",
        "out_head_stride": "i32:16",
    }  # fmt: skip
    kernel = "tree_attention.triton_stream_k:combine_shares"
    return Variant(f"tree_attention/{name}", kernel, arguments, constants, everyday=everyday)


def _plan(name: str, everyday: tuple[str, ...], **special: object) -> Variant:
    arguments = dict.fromkeys(
        ("lengths_ptr", "offsets_ptr", "starts_ptr", "block_rows_ptr", "first_blocks_ptr"), "*i32"
    )
    arguments |= dict.fromkeys(("window", "num_requests", "num_nodes", "num_blocks", "max_tiles", "steps"), "i32")
    constants = {
        "NUM_KV_HEADS": 8, "GROUP_SIZE": 4, "BLOCK_M": 16, "BLOCK_N": 64, "IS_CAUSAL": False, "HAS_WINDOW": False,
        "NUM_PROGRAMS": 396, "PROGRAM_LANES": 512, "BLOCK": PLAN_BLOCK, **special,
    }  # fmt: skip
    return Variant(
        f"tree_attention/{name}", "tree_attention.triton_stream_k:plan_shares", arguments, constants, everyday=everyday
    )


_NOW = ("sm_90",)
# strides are arguments: head-first and token-first caches run the same code
VARIANTS = [
    *(_attend(f"bf16 rows {rows}", "bf16", choose_config(rows, 128, 2), ()) for rows in (32, 128)),
    _attend("bf16 rows 16", "bf16", choose_config(16, 128, 2), ()),
    # (instructions of sm_80 are those of the smaller GPUs, which every run compiles for too)
    _attend("bf16 rows 64", "bf16", choose_config(64, 128, 2), ("sm_90", "sm_100")),
    _attend("bf16 rows 16 page 64", "bf16", choose_config(16, 128, 2), (), PAGE_SIZE=64),
    _attend("bf16 rows 16 page 1", "bf16", choose_config(16, 128, 2), (), PAGE_SIZE=1),
    _attend("bf16 rows 64 width 64", "bf16", choose_config(64, 64, 2), (), HEAD_DIM=64),
    _attend("bf16 rows 16 width 80", "bf16", choose_config(16, 80, 2), (), HEAD_DIM=80),
    _attend("bf16 rows 16 width 96", "bf16", choose_config(16, 96, 2), (), HEAD_DIM=96),
    _attend("bf16 rows 16 width 256", "bf16", choose_config(16, 256, 2), (), HEAD_DIM=256),
    _attend("bf16 rows 32 width 256", "bf16", choose_config(32, 256, 2), (), HEAD_DIM=256),
    _attend("bf16 rows 64 width 256", "bf16", choose_config(64, 256, 2), (), HEAD_DIM=256),
    _attend("bf16 rows 128 width 64", "bf16", choose_config(128, 64, 2), (), HEAD_DIM=64),
    _attend("bf16 prefill", "bf16", choose_config(128, 128, 2), (), IS_CAUSAL=True, NUM_PIECES=1),
    _attend(
        "bf16 rows 32 window and softcap",
        "bf16",
        choose_config(32, 128, 2),
        (),
        HAS_WINDOW=True,
        HAS_SOFTCAP=True,
        HAS_LSE=True,
    ),
    _attend(
        "bf16 rows 64 one piece", "bf16", choose_config(64, 128, 2), (), NUM_PIECES=1, HAS_SINKS=True, HAS_LSE=True
    ),
    _attend("bf16 fixed pieces", "bf16", choose_config(INVARIANT_ROWS, 128, 2), (), TILES_PER_PIECE=16),
    _attend("fp16 rows 32", "fp16", choose_config(32, 128, 2), ()),
    _attend("fp32 rows 16", "fp32", choose_config(16, 128, 4), ()),
    _attend("fp32 rows 32 width 64", "fp32", choose_config(32, 64, 4), (), HEAD_DIM=64),
    _attend("bf16 rows 16 fp8 cache", "bf16", choose_config(16, 128, 2, True), (), kv="fp8e4nv", HAS_SCALES=True),
    _attend("bf16 rows 64 fp8 cache", "bf16", choose_config(64, 128, 2, True), (), kv="fp8e4nv", HAS_SCALES=True),
    _attend("fp32 rows 32 width 256", "fp32", choose_config(32, 256, 4), (), HEAD_DIM=256),
    _attend("bf16 rows 128 width 96", "bf16", choose_config(128, 96, 2), (), HEAD_DIM=96),
    _attend(
        "bf16 rows 64 width 256 fp8 cache",
        "bf16",
        choose_config(64, 256, 2, True),
        (),
        "fp8e4nv",
        HAS_SCALES=True,
        HEAD_DIM=256,
    ),
    _attend("bf16 rows 64 page 1", "bf16", choose_config(64, 128, 2), (), PAGE_SIZE=1),
    _attend("bf16 rows 16 page 48", "bf16", choose_config(16, 128, 2), (), PAGE_SIZE=48),
    _attend("bf16 rows 64 caches of other strides", "bf16", choose_config(64, 128, 2), (), SAME_STRIDES=False),
    _attend("fp16 rows 16", "fp16", choose_config(16, 128, 2), ()),
    _attend("bf16 rows 32 fp8 cache", "bf16", choose_config(32, 128, 2, True), (), kv="fp8e4nv", HAS_SCALES=True),
    _attend("bf16 rows 128 fp8 cache", "bf16", choose_config(128, 128, 2, True), (), kv="fp8e4nv", HAS_SCALES=True),
    _combine("join 8", 8, _NOW),
    *(_combine(f"join 8 {dtype}", 8, (), dtype) for dtype in ("fp16", "fp32")),
    _combine("join 32 sinks", 32, (), HAS_SINKS=True, HAS_LSE=True),
    _shares("bf16 shares rows 16", choose_config(16, 128, 2), _NOW),
    *(_shares(f"bf16 shares rows {rows}", choose_config(rows, 128, 2), ()) for rows in (32, 64, 128)),
    _shares("bf16 shares prefill", choose_config(128, 128, 2), (), IS_CAUSAL=True),
    _shares(
        "bf16 shares rows 32 window",
        choose_config(32, 128, 2),
        (),
        HAS_WINDOW=True,
        HAS_SOFTCAP=True,
        HAS_SINKS=True,
        HAS_LSE=True,
    ),
    _shares("bf16 shares rows 64 width 256", choose_config(64, 256, 2), (), HEAD_DIM=256),
    _shares("bf16 shares rows 16 fp8 cache", choose_config(16, 128, 2, True), (), kv="fp8e4nv", HAS_SCALES=True),
    _join_shares("join shares rows 16", choose_config(16, 128, 2), _NOW),
    _join_shares("join shares rows 128 sinks", choose_config(128, 128, 2), (), HAS_SINKS=True, HAS_LSE=True),
    _plan("plan", _NOW),
    _plan("plan window", (), HAS_WINDOW=True, IS_CAUSAL=True),
]


def _frugal(variant: Variant) -> Variant:
    """Returns the variant for GPUs with less shared memory. sm_86 has no float8_e4m3fn."""
    converts = "*fp8e4nv" in variant.arguments.values()
    return replace(variant, architectures=SMALLER[1:] if converts else SMALLER)


SMALLER = ("sm_86", "sm_89", "sm_120")
_SMALL = {rows: choose_config(rows, 128, 2, frugal=True) for rows in (16, 32, 64, 128)}
FRUGAL_VARIANTS = [
    *(_frugal(_attend(f"bf16 frugal rows {rows}", "bf16", small, ())) for rows, small in _SMALL.items()),
    *(_frugal(_shares(f"bf16 frugal shares rows {rows}", small, ())) for rows, small in _SMALL.items()),
    _frugal(_attend("bf16 frugal prefill", "bf16", _SMALL[128], (), IS_CAUSAL=True, NUM_PIECES=1)),
    _frugal(_attend("bf16 frugal window", "bf16", _SMALL[32], (), HAS_WINDOW=True, HAS_SOFTCAP=True, HAS_LSE=True)),
    _frugal(_attend("bf16 frugal width 256", "bf16", choose_config(64, 256, 2, frugal=True), (), HEAD_DIM=256)),
    _frugal(_attend("fp32 frugal rows 32", "fp32", choose_config(32, 128, 4, frugal=True), ())),
    _frugal(_attend("fp32 frugal width 256", "fp32", choose_config(32, 256, 4, frugal=True), (), HEAD_DIM=256)),
    _frugal(
        _shares(
            "fp32 frugal shares width 256",
            choose_config(32, 256, 4, frugal=True),
            (),
            "fp32",
            HEAD_DIM=256,
            IS_CAUSAL=True,
        )
    ),
    _frugal(
        _attend(
            "bf16 frugal fp8 cache",
            "bf16",
            choose_config(64, 128, 2, True, frugal=True),
            (),
            kv="fp8e4nv",
            HAS_SCALES=True,
        )
    ),
]
"""Compiled to check that they fit; no ceilings are recorded for these."""
