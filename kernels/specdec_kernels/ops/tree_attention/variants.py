"""Launch configurations of the Triton tree attention that are compiled to be looked at."""

from __future__ import annotations

from dataclasses import replace

from ...triton_shared.variant import ARCHITECTURES, Variant
from .config import (
    INVARIANT_ROWS,
    PROCESSORS,
    Config,
    choose_config,
    combine_shares_tile,
    combine_tile,
    programs_per_processor,
)
from .shares import PLAN_BLOCK


def _attend(
    name: str, dtype: str, config: Config, everyday: tuple[str, ...], kv: str = "", **special: object
) -> Variant:
    kv = kv or dtype
    constants: dict[str, object] = {
        "HEADS": 32, "GROUP": 4, "PAGE": 16, "WIDTH": 128, "BLOCK_D": config.block_d, "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "BLOCK_B": 16, "PIECES": 8, "PIECE_TILES": 0, "CAUSAL": False, "WINDOW": False,
        "SOFTCAP": False, "SINKS": False, "LSE": False, "SCALED": False, "ALIKE": True,
    }  # fmt: skip
    constants.update(special)
    arguments = {
        "query": f"*{dtype}", "key_cache": f"*{kv}", "value_cache": f"*{kv}", "table": "*i32", "lengths": "*i32",
        "offsets": "*i32", "ancestors": "*i32", "depth": "*i32", "sinks": "*fp32", "out": f"*{dtype}", "lse": "*fp32",
        "part": "*fp32", "part_lse": "*fp32", "key_scale": "*fp32", "value_scale": "*fp32", "scale": "fp32",
        "softcap": "fp32", "window": "i32", "batch": "i32", "nodes": "i32", "pages": "i32", "pages_per_row": "i32",
        "table_row": "i32", "words_per_node": "i32", "q_node": "i32:16", "q_head": "i32:16", "k_page": "i32:16",
        "k_slot": "i32:16", "k_head": "i32:16", "v_page": "i32:16", "v_slot": "i32:16", "v_head": "i32:16",
        "o_node": "i32:16", "o_head": "i32:16",
    }  # fmt: skip
    return Variant(
        f"tree_attention/{name}", "tree_attention.triton_kernel:attend", arguments, constants, config.warps,
        config.stages, everyday, ARCHITECTURES if kv == dtype else ("sm_90", "sm_100"), most_registers=config.registers,
    )  # fmt: skip


def _combine(name: str, count: int, everyday: tuple[str, ...], dtype: str = "bf16", **special: object) -> Variant:
    constants = {"HEADS": 32, "WIDTH": 128, "BLOCK_D": 128, "PIECES": count, "SINKS": False, "LSE": False, **special}
    constants["BLOCK_P"], constants["BLOCK_H"] = combine_tile(count, int(str(constants["BLOCK_D"])))
    arguments = {
        "part": "*fp32", "part_lse": "*fp32", "sinks": "*fp32", "offsets": "*i32", "out": f"*{dtype}", "lse": "*fp32",
        "batch": "i32", "nodes": "i32", "o_node": "i32:16", "o_head": "i32:16",
    }  # fmt: skip
    kernel = "tree_attention.triton_kernel:combine"
    return Variant(f"tree_attention/{name}", kernel, arguments, constants, everyday=everyday)


def _shares(
    name: str, config: Config, everyday: tuple[str, ...], dtype: str = "bf16", kv: str = "", **special: object
) -> Variant:
    """The kernel on a fixed grid: what differs from the one that is cut into pieces."""
    plain = _attend("", dtype, config, (), kv)
    arguments = {**plain.arguments, **dict.fromkeys(("starts", "row_of", "firsts"), "*i32"), "blocks": "i32"}
    constants = {n: v for n, v in plain.constants.items() if n not in ("BLOCK_B", "PIECES", "PIECE_TILES")}
    constants |= special
    constants["PROGRAMS"] = programs_per_processor(config) * PROCESSORS
    kernel = "tree_attention.triton_shares:attend_shares"
    return Variant(
        f"tree_attention/{name}", kernel, arguments, constants, config.warps, config.stages, everyday,
        plain.architectures, most_registers=config.registers,
    )  # fmt: skip


def _join_shares(
    name: str, config: Config, everyday: tuple[str, ...], dtype: str = "bf16", **special: object
) -> Variant:
    rows, parts = combine_shares_tile(config.block_d)
    constants = {
        "HEADS": 32, "GROUP": 4, "WIDTH": 128, "BLOCK_D": config.block_d, "BLOCK_M": config.block_m, "BLOCK_R": rows,
        "BLOCK_P": parts, "PROGRAMS": programs_per_processor(config) * PROCESSORS, "SINKS": False, "LSE": False, **special,
    }  # fmt: skip
    arguments = {
        "part": "*fp32", "part_lse": "*fp32", "starts": "*i32", "row_of": "*i32", "offsets": "*i32", "sinks": "*fp32",
        "out": f"*{dtype}", "lse": "*fp32", **dict.fromkeys(("batch", "nodes", "blocks"), "i32"), "o_node": "i32:16",
        "o_head": "i32:16",
    }  # fmt: skip
    kernel = "tree_attention.triton_shares:join_shares"
    return Variant(f"tree_attention/{name}", kernel, arguments, constants, everyday=everyday)


def _plan(name: str, everyday: tuple[str, ...], **special: object) -> Variant:
    arguments = dict.fromkeys(("lengths", "offsets", "starts", "rows", "firsts"), "*i32")
    arguments |= dict.fromkeys(("window", "batch", "nodes", "blocks", "most", "steps"), "i32")
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "BLOCK_M": 16, "BLOCK_N": 64, "CAUSAL": False, "WINDOW": False, "PROGRAMS": 396,
        "PLACES": 512, "BLOCK": PLAN_BLOCK, **special,
    }  # fmt: skip
    return Variant(
        f"tree_attention/{name}", "tree_attention.triton_shares:plan_shares", arguments, constants, everyday=everyday
    )


_NOW = ("sm_90",)
# strides are no constants: a head-first cache runs the same code as a token-first one
VARIANTS = [
    *(_attend(f"bf16 rows {rows}", "bf16", choose_config(rows, 128, 2), ()) for rows in (32, 128)),
    _attend("bf16 rows 16", "bf16", choose_config(16, 128, 2), ()),
    # (instructions of sm_80 are those of the smaller GPUs, which every run compiles for too)
    _attend("bf16 rows 64", "bf16", choose_config(64, 128, 2), ("sm_90", "sm_100")),
    _attend("bf16 rows 16 page 64", "bf16", choose_config(16, 128, 2), (), PAGE=64),
    _attend("bf16 rows 16 page 1", "bf16", choose_config(16, 128, 2), (), PAGE=1),
    _attend("bf16 rows 64 width 64", "bf16", choose_config(64, 64, 2), (), WIDTH=64),
    _attend("bf16 rows 16 width 80", "bf16", choose_config(16, 80, 2), (), WIDTH=80),
    _attend("bf16 rows 16 width 96", "bf16", choose_config(16, 96, 2), (), WIDTH=96),
    _attend("bf16 rows 16 width 256", "bf16", choose_config(16, 256, 2), (), WIDTH=256),
    _attend("bf16 rows 32 width 256", "bf16", choose_config(32, 256, 2), (), WIDTH=256),
    _attend("bf16 rows 64 width 256", "bf16", choose_config(64, 256, 2), (), WIDTH=256),
    _attend("bf16 rows 128 width 64", "bf16", choose_config(128, 64, 2), (), WIDTH=64),
    _attend("bf16 prefill", "bf16", choose_config(128, 128, 2), (), CAUSAL=True, PIECES=1),
    _attend(
        "bf16 rows 32 window and softcap", "bf16", choose_config(32, 128, 2), (), WINDOW=True, SOFTCAP=True, LSE=True
    ),
    _attend("bf16 rows 64 one piece", "bf16", choose_config(64, 128, 2), (), PIECES=1, SINKS=True, LSE=True),
    _attend("bf16 fixed pieces", "bf16", choose_config(INVARIANT_ROWS, 128, 2), (), PIECE_TILES=16),
    _attend("fp16 rows 32", "fp16", choose_config(32, 128, 2), ()),
    _attend("fp32 rows 16", "fp32", choose_config(16, 128, 4), ()),
    _attend("fp32 rows 32 width 64", "fp32", choose_config(32, 64, 4), (), WIDTH=64),
    _attend("bf16 rows 16 fp8 cache", "bf16", choose_config(16, 128, 2, True), (), kv="fp8e4nv", SCALED=True),
    _attend("bf16 rows 64 fp8 cache", "bf16", choose_config(64, 128, 2, True), (), kv="fp8e4nv", SCALED=True),
    _attend("fp32 rows 32 width 256", "fp32", choose_config(32, 256, 4), (), WIDTH=256),
    _attend("bf16 rows 128 width 96", "bf16", choose_config(128, 96, 2), (), WIDTH=96),
    _attend(
        "bf16 rows 64 width 256 fp8 cache",
        "bf16",
        choose_config(64, 256, 2, True),
        (),
        "fp8e4nv",
        SCALED=True,
        WIDTH=256,
    ),
    _attend("bf16 rows 64 page 1", "bf16", choose_config(64, 128, 2), (), PAGE=1),
    _attend("bf16 rows 16 page 48", "bf16", choose_config(16, 128, 2), (), PAGE=48),
    _attend("bf16 rows 64 caches of other strides", "bf16", choose_config(64, 128, 2), (), ALIKE=False),
    _attend("fp16 rows 16", "fp16", choose_config(16, 128, 2), ()),
    _attend("bf16 rows 32 fp8 cache", "bf16", choose_config(32, 128, 2, True), (), kv="fp8e4nv", SCALED=True),
    _attend("bf16 rows 128 fp8 cache", "bf16", choose_config(128, 128, 2, True), (), kv="fp8e4nv", SCALED=True),
    _combine("join 8", 8, _NOW),
    *(_combine(f"join 8 {dtype}", 8, (), dtype) for dtype in ("fp16", "fp32")),
    _combine("join 32 sinks", 32, (), SINKS=True, LSE=True),
    _shares("bf16 shares rows 16", choose_config(16, 128, 2), _NOW),
    *(_shares(f"bf16 shares rows {rows}", choose_config(rows, 128, 2), ()) for rows in (32, 64, 128)),
    _shares("bf16 shares prefill", choose_config(128, 128, 2), (), CAUSAL=True),
    _shares(
        "bf16 shares rows 32 window", choose_config(32, 128, 2), (), WINDOW=True, SOFTCAP=True, SINKS=True, LSE=True
    ),
    _shares("bf16 shares rows 64 width 256", choose_config(64, 256, 2), (), WIDTH=256),
    _shares("bf16 shares rows 16 fp8 cache", choose_config(16, 128, 2, True), (), kv="fp8e4nv", SCALED=True),
    _join_shares("join shares rows 16", choose_config(16, 128, 2), _NOW),
    _join_shares("join shares rows 128 sinks", choose_config(128, 128, 2), (), SINKS=True, LSE=True),
    _plan("plan", _NOW),
    _plan("plan window", (), WINDOW=True, CAUSAL=True),
]


def _frugal(variant: Variant) -> Variant:
    """For GPUs with less shared memory. sm_86 has no float8_e4m3fn."""
    converts = "*fp8e4nv" in variant.arguments.values()
    return replace(variant, architectures=SMALLER[1:] if converts else SMALLER)


SMALLER = ("sm_86", "sm_89", "sm_120")
_SMALL = {rows: choose_config(rows, 128, 2, frugal=True) for rows in (16, 32, 64, 128)}
FRUGAL_VARIANTS = [
    *(_frugal(_attend(f"bf16 frugal rows {rows}", "bf16", small, ())) for rows, small in _SMALL.items()),
    *(_frugal(_shares(f"bf16 frugal shares rows {rows}", small, ())) for rows, small in _SMALL.items()),
    _frugal(_attend("bf16 frugal prefill", "bf16", _SMALL[128], (), CAUSAL=True, PIECES=1)),
    _frugal(_attend("bf16 frugal window", "bf16", _SMALL[32], (), WINDOW=True, SOFTCAP=True, LSE=True)),
    _frugal(_attend("bf16 frugal width 256", "bf16", choose_config(64, 256, 2, frugal=True), (), WIDTH=256)),
    _frugal(_attend("fp32 frugal rows 32", "fp32", choose_config(32, 128, 4, frugal=True), ())),
    _frugal(_attend("fp32 frugal width 256", "fp32", choose_config(32, 256, 4, frugal=True), (), WIDTH=256)),
    _frugal(
        _shares(
            "fp32 frugal shares width 256", choose_config(32, 256, 4, frugal=True), (), "fp32", WIDTH=256, CAUSAL=True
        )
    ),
    _frugal(
        _attend(
            "bf16 frugal fp8 cache", "bf16", choose_config(64, 128, 2, True, frugal=True), (), kv="fp8e4nv", SCALED=True
        )
    ),
]
"""Compiled to see that it fits: no ceilings are recorded for these."""
