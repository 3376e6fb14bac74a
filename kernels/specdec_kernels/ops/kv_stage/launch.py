"""Triton backend of kv_stage: argument checks, the launch and its variants."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2

from ...triton_shared.aot_config import ARCHITECTURES, Variant


def head_tile(heads: int, width: int) -> tuple[int, int]:
    """Returns (heads, head width) of the tile of a program, at most 4,096 elements."""
    block_d = next_power_of_2(width)
    return max(1, min(next_power_of_2(heads), 4096 // block_d)), block_d


def kv_stage(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Runs the operator in one launch. Slots are not checked; one beyond the cache is skipped."""
    from .triton_kernel import stage_nodes

    if key_cache.ndim != 4 or slots.ndim != 1:
        raise ValueError(
            f"kv_stage: key_cache is {list(key_cache.shape)} and slots {list(slots.shape)}, expected [pages, "
            "page_size, heads, width] and [M]"
        )
    pages, page_size, heads, width = key_cache.shape
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if new.dtype != cache.dtype or new.shape[1:] != cache.shape[2:] or new.shape[0] != slots.shape[0]:
            raise ValueError(
                f"kv_stage: {name} is {new.dtype} {list(new.shape)}, expected {cache.dtype} "
                f"{[slots.shape[0], *cache.shape[2:]]} (one entry per slot, heads and width of its cache)"
            )
        if width > 1 and (cache.stride(3) != 1 or (new.numel() and new.stride(2) != 1)):
            raise ValueError(
                f"kv_stage: the last axis of {name} or its cache is strided, expected contiguous; call .contiguous()"
            )
    if value_cache.shape != key_cache.shape or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(
            f"kv_stage: value_cache is {list(value_cache.shape)} and slots {slots.dtype}; expected "
            f"{list(key_cache.shape)} like key_cache, and contiguous int64"
        )
    if slots.shape[0] == 0:
        return
    block_h, block_d = head_tile(heads, width)
    stage_nodes[(slots.shape[0], -(-heads // block_h))](
        key, value, key_cache, value_cache, slots, pages * page_size,
        *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        NUM_HEADS=heads, HEAD_DIM=width, PAGE_SIZE=page_size, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


def why_not(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> str | None:
    """Returns why the kernel cannot serve a call, or None."""
    if value_cache.shape != key_cache.shape:
        return "keys and values differ in width"
    return None


_STRIDES = [
    *(f"{name}_{axis}_stride" for name in ("key", "value") for axis in ("node", "head")),
    *(f"{name}_cache_{axis}_stride" for name in ("key", "value") for axis in ("page", "slot", "head")),
]
_KINDS = (("bf16", "bf16"), ("fp32", "fp32"), ("fp8", "fp8e4nv"))
VARIANTS = [
    Variant(
        f"kv_stage/{name} 8 heads of 128",
        "kv_stage.triton_kernel:stage_nodes",
        {
            **dict.fromkeys(("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr"), f"*{kind}"),
            "slots_ptr": "*i64",
            "num_slots": "i32",
            **dict.fromkeys(_STRIDES, "i32:16"),
        },
        {"NUM_HEADS": 8, "HEAD_DIM": 128, "PAGE_SIZE": 16, "BLOCK_H": 8, "BLOCK_D": 128},
        stages=1,
        everyday=("sm_90",) if name == "bf16" else (),
        architectures=ARCHITECTURES if name != "fp8" else ("sm_90", "sm_100"),  # sm_80 has no such type
    )
    for name, kind in _KINDS
]
