"""Launch of the Triton kv_stage."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2

from ...triton_shared.variant import ARCHITECTURES, Variant


def blocks(heads: int, width: int) -> tuple[int, int]:
    """(heads, numbers) of a program: up to 4,096 numbers."""
    block_d = next_power_of_2(width)
    return max(1, min(next_power_of_2(heads), 4096 // block_d)), block_d


def kv_stage(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """The operator in one launch. Slots are not checked: one beyond the cache is skipped."""
    from .triton_kernel import stage

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
    block_h, block_d = blocks(heads, width)
    stage[(slots.shape[0], -(-heads // block_h))](
        key, value, key_cache, value_cache, slots, pages * page_size,
        *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        HEADS=heads, WIDTH=width, PAGE=page_size, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


def why_not(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> str | None:
    if value_cache.shape != key_cache.shape:
        return "keys and values differ in width"
    return None


_STRIDES = ("k_node", "k_head", "v_node", "v_head", "kc_page", "kc_slot", "kc_head", "vc_page", "vc_slot", "vc_head")
_KINDS = (("bf16", "bf16"), ("fp32", "fp32"), ("fp8", "fp8e4nv"))
VARIANTS = [
    Variant(
        f"kv_stage/{name} 8 heads of 128",
        "kv_stage.triton_kernel:stage",
        {
            **dict.fromkeys(("key", "value", "key_cache", "value_cache"), f"*{kind}"),
            "slots": "*i64",
            "capacity": "i32",
            **dict.fromkeys(_STRIDES, "i32:16"),
        },
        {"HEADS": 8, "WIDTH": 128, "PAGE": 16, "BLOCK_H": 8, "BLOCK_D": 128},
        stages=1,
        everyday=("sm_90",) if name == "bf16" else (),
        architectures=ARCHITECTURES if name != "fp8" else ("sm_90", "sm_100"),  # sm_80 has no such type
    )
    for name, kind in _KINDS
]
