"""Step 4: the first Triton kernel, one program per block of nodes and query head.

A program loads BLOCK_M queries of one request and one head, walks over the request's keys in tiles of BLOCK_N, and
keeps the running numbers of step 3 in registers. It translates slots to pages itself, and tests ancestor bits where
step 2 looked up a mask. Programs share nothing, so all of them run at the same time.

Shapes:
    B  requests            M  nodes of all requests, packed      P  pages of a request
    H  query heads         Hkv  key/value heads                  GROUP = H / Hkv
    D  width of a head     W  ancestor words of a node           tiles are BLOCK_M x BLOCK_N x BLOCK_D

    query, out [M, H, D]   key_cache, value_cache [pages, PAGE_SIZE, Hkv, D]   page_table int32 [B, P]
    lengths int32 [B]      offsets int32 [B + 1]                               ancestors int32 [M, W]

Run: python kernels/educational/tree_attention/step4_triton.py (without a GPU in Triton's interpreter)
Tests: tests/interpreter/test_educational.py, tests/kernels/test_educational.py.
"""

from __future__ import annotations

import step3_online_softmax
import torch
import triton
import triton.language as tl
import worked_example
from torch import Tensor

BLOCK_M = 16
"""Nodes of a program. Matrix instructions need at least 16."""
BLOCK_N = 64
"""Keys of a tile."""


# --8<-- [start:visible]
@triton.jit
def is_visible(ancestors_ptr, node, in_block, key_node, count, words_per_node):
    """Returns whether nodes see keys, [BLOCK_M, BLOCK_N]. key_node is negative for committed keys."""
    is_node = (key_node >= 0) & (key_node < count)
    word_index = node[:, None] * words_per_node + (key_node // 32)[None, :]
    mask = in_block[:, None] & is_node[None, :]
    words = tl.load(ancestors_ptr + word_index, mask=mask, other=0)
    bits = (words >> (key_node & 31)[None, :]) & 1
    return (key_node < 0)[None, :] | (bits != 0)


# --8<-- [end:visible]


@triton.jit
def load_rows(row_ptrs, exists, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads rows of WIDTH numbers as a tile [rows, BLOCK_D], with zeros for missing rows and beyond WIDTH."""
    dim = tl.arange(0, BLOCK_D)
    return tl.load(row_ptrs[:, None] + dim[None, :], mask=exists[:, None] & (dim < WIDTH)[None, :], other=0.0)


@triton.jit
def attend_slots(
    queries, node, in_block, key_ptr, value_ptr, table_ptr, ancestors_ptr, length, count, first_slot, last_slot,
    scale, k_page_stride, k_slot_stride, v_page_stride, v_slot_stride, words_per_node,
    PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Returns the running numbers of queries [BLOCK_M, BLOCK_D] over slots first_slot .. last_slot - 1 of a request."""
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # --8<-- [start:loop]
    for start in range(first_slot, last_slot, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        exists = slot < last_slot
        page = tl.load(table_ptr + slot // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        offset = slot % PAGE_SIZE
        key_ptrs = key_ptr + page * k_page_stride + offset * k_slot_stride
        value_ptrs = value_ptr + page * v_page_stride + offset * v_slot_stride
        keys = load_rows(key_ptrs, exists, WIDTH, BLOCK_D)
        values = load_rows(value_ptrs, exists, WIDTH, BLOCK_D)

        # "ieee": by default float32 is rounded to TF32, which keeps 10 bits of a fraction
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        key_node = slot - length
        visible = is_visible(ancestors_ptr, node, in_block, key_node, count, words_per_node)
        scores = tl.where(visible & exists[None, :], scores, float("-inf"))

        highest = tl.maximum(running_max, tl.max(scores, axis=1))
        base = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf is not a number
        shrink = tl.exp(running_max - base)
        weights = tl.exp(scores - base[:, None])
        running_max = highest
        running_sum = running_sum * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    # --8<-- [end:loop]
    return acc, running_max, running_sum


# --8<-- [start:kernel]
@triton.jit
def tree_attention_kernel(
    query_ptr, key_ptr, value_ptr, table_ptr, lengths_ptr, offsets_ptr, ancestors_ptr, out_ptr, scale,
    q_node_stride, q_head_stride, k_page_stride, k_slot_stride, k_head_stride, v_page_stride, v_slot_stride,
    v_head_stride, table_stride, o_node_stride, o_head_stride, words_per_node,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of the request with most nodes, H, B)."""
    head, request = tl.program_id(1), tl.program_id(2)
    first = tl.load(offsets_ptr + request)
    count = tl.load(offsets_ptr + request + 1) - first
    if tl.program_id(0) * BLOCK_M >= count:
        return
    length = tl.load(lengths_ptr + request)
    index = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_block = index < count
    node = first + index
    query_ptrs = query_ptr + node.to(tl.int64) * q_node_stride + head * q_head_stride
    queries = load_rows(query_ptrs, in_block, WIDTH, BLOCK_D)
    kv_head = (head // GROUP).to(tl.int64)
    acc, _, running_sum = attend_slots(
        queries, node, in_block, key_ptr + kv_head * k_head_stride, value_ptr + kv_head * v_head_stride,
        table_ptr + request.to(tl.int64) * table_stride, ancestors_ptr, length, count, 0, length + count,
        scale, k_page_stride, k_slot_stride, v_page_stride, v_slot_stride, words_per_node,
        PAGE_SIZE, WIDTH, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    mean = acc / running_sum[:, None]
    dim = tl.arange(0, BLOCK_D)
    out_ptrs = out_ptr + (node.to(tl.int64) * o_node_stride + head * o_head_stride)[:, None] + dim[None, :]
    tl.store(out_ptrs, mean.to(out_ptr.dtype.element_ty), mask=in_block[:, None] & (dim < WIDTH)[None, :])


# --8<-- [end:kernel]


def blocks_of(offsets: Tensor, block_m: int = BLOCK_M) -> int:
    """Returns the blocks of the largest request. The host waits for the device, unlike in the shipped kernel."""
    return triton.cdiv(int(offsets.diff().max()), block_m)


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    ancestors: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Arguments and result as in step 1; float32, bfloat16 or float16, computed in float32."""
    _, heads, width = query.shape
    page_size, kv_heads = key_cache.shape[1:3]
    out = torch.zeros_like(query)
    tree_attention_kernel[(blocks_of(offsets), heads, len(lengths))](
        query, key_cache, value_cache, page_table, lengths, offsets, ancestors, out, scale,
        *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], page_table.stride(0),
        *out.stride()[:2], ancestors.shape[1],
        GROUP=heads // kv_heads, PAGE_SIZE=page_size, WIDTH=width,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(width)),
    )  # fmt: skip
    return out


def main() -> None:
    """Prints the grid of the ragged batch, then the difference to step 3."""
    worked_example.interpret_without_gpu()
    batch = worked_example.ragged()
    grid = blocks_of(batch.offsets), batch.query.shape[1], len(batch.lengths)
    print("grid of the ragged batch: {} blocks x {} heads x {} requests".format(*grid))
    print("request  nodes  blocks  keys  tiles of each program")
    for request, (length, count) in enumerate(zip(batch.lengths.tolist(), batch.offsets.diff().tolist())):
        blocks = triton.cdiv(count, BLOCK_M)
        tiles = triton.cdiv(length + count, BLOCK_N) if count else 0
        print(f"{request:7}  {count:5}  {blocks:6}  {length + count:4}  {tiles:5}")
    worked_example.report("step 3", step3_online_softmax.tree_attention, tree_attention, worked_example.triton_device())


if __name__ == "__main__":
    main()
