"""Triton kernel of kv_stage: one program per node and block of heads writes its key and its value.

Shapes:
    key, value: [num_nodes, NUM_HEADS, HEAD_DIM]
    key_cache, value_cache: [pages, PAGE_SIZE, NUM_HEADS, HEAD_DIM], num_slots = pages * PAGE_SIZE
    slots: int64 [num_nodes]

Strides are in elements; the last axis is contiguous.
"""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel

VECTORIZED = (
    "key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr", "key_node_stride", "key_head_stride",
    "value_node_stride", "value_head_stride", "key_cache_page_stride", "key_cache_slot_stride", "key_cache_head_stride",
    "value_cache_page_stride", "value_cache_slot_stride", "value_cache_head_stride",
)  # fmt: skip
"""Arguments that are specialised, so that loads and stores are vectorized; see `triton_shared.jit.kernel`."""


@kernel(*VECTORIZED)
def stage_nodes(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slots_ptr, num_slots, key_node_stride, key_head_stride,
    value_node_stride, value_head_stride, key_cache_page_stride, key_cache_slot_stride, key_cache_head_stride,
    value_cache_page_stride, value_cache_slot_stride, value_cache_head_stride, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (num_nodes, blocks of heads). A negative slot is the trash. A slot beyond the cache is not written."""
    node = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    slot = tl.maximum(tl.load(slots_ptr + node), 0)
    mask = (head < tl.where(slot < num_slots, NUM_HEADS, 0))[:, None] & (dim < HEAD_DIM)[None, :]
    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    key_from = key_ptr + node * key_node_stride + head[:, None] * key_head_stride + dim[None, :]
    value_from = value_ptr + node * value_node_stride + head[:, None] * value_head_stride + dim[None, :]
    cache_head = head.to(tl.int64)[:, None]
    key_slot = page * key_cache_page_stride + offset * key_cache_slot_stride
    key_to = key_cache_ptr + key_slot + cache_head * key_cache_head_stride + dim[None, :]
    value_slot = page * value_cache_page_stride + offset * value_cache_slot_stride
    value_to = value_cache_ptr + value_slot + cache_head * value_cache_head_stride + dim[None, :]
    new_key = tl.load(key_from, mask=mask)
    new_value = tl.load(value_from, mask=mask)
    tl.store(key_to, new_key, mask=mask)
    tl.store(value_to, new_value, mask=mask)
