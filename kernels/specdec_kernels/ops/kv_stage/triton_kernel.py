"""Triton kernel of kv_stage: one program per node and block of heads writes its key and its value."""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel

WIDE = (
    "key", "value", "key_cache", "value_cache", "k_node", "k_head", "v_node", "v_head", "kc_page", "kc_slot", "kc_head",
    "vc_page", "vc_slot", "vc_head",
)  # fmt: skip
"""Arguments that wide loads and stores specialise, for `jit_triton.kernel`."""


@kernel(*WIDE)
def stage(
    key, value, key_cache, value_cache, slots, capacity,
    k_node, k_head, v_node, v_head, kc_page, kc_slot, kc_head, vc_page, vc_slot, vc_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (nodes, blocks of heads). A negative slot is the trash; one beyond the cache is not written."""
    node = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    wide = tl.arange(0, BLOCK_D)
    slot = tl.maximum(tl.load(slots + node), 0)
    inside = (head < tl.where(slot < capacity, HEADS, 0))[:, None] & (wide < WIDTH)[None, :]
    page = slot // PAGE
    place = slot % PAGE
    k_from = key + node * k_node + head[:, None] * k_head + wide[None, :]
    v_from = value + node * v_node + head[:, None] * v_head + wide[None, :]
    k_to = key_cache + page * kc_page + place * kc_slot + head.to(tl.int64)[:, None] * kc_head + wide[None, :]
    v_to = value_cache + page * vc_page + place * vc_slot + head.to(tl.int64)[:, None] * vc_head + wide[None, :]
    new_key = tl.load(k_from, mask=inside)
    new_value = tl.load(v_from, mask=inside)
    tl.store(k_to, new_key, mask=inside)
    tl.store(v_to, new_value, mask=inside)
