"""Triton kernel of exact_match_verify: one program follows one row's choices. Links of a row stay in the nearest cache.

Shapes: M = num_nodes packed nodes of B rows.
    tokens_ptr int64 [M], offsets_ptr int32 [B + 1], first_child_ptr and next_sibling_ptr int32 [M]
    node_choice_ptr int64 [M], score_only_ptr int8 [M] (read if HAS_SCORE_ONLY)
    path_ptr int32 [B, max_depth + 1], num_accepted_ptr int32 [B], next_token_ptr int64 [B], too_deep_ptr int32 [B]
"""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel
from ...triton_shared.tree_links import follow_link, pad_path, row_bounds


@kernel()
def follow_choices(
    tokens_ptr, offsets_ptr, first_child_ptr, next_sibling_ptr, node_choice_ptr, score_only_ptr, path_ptr,
    num_accepted_ptr, next_token_ptr, too_deep_ptr, num_nodes, max_depth, HAS_SCORE_ONLY: tl.constexpr,
):  # fmt: skip
    """Grid (B): path, number accepted and next token of one row, and whether the path exceeds `max_depth`."""
    row = tl.program_id(0)
    path_ptr += row.to(tl.int64) * (max_depth + 1)
    node, end = row_bounds(offsets_ptr, row, num_nodes)
    node = tl.where(node < end, node, -1)
    length = tl.zeros((), tl.int32)
    token = tl.full((), -1, tl.int64)
    while (node >= 0) & (length <= max_depth):
        tl.store(path_ptr + length, node)
        length += 1
        token = tl.load(node_choice_ptr + node)
        child = follow_link(first_child_ptr, node, end, node >= 0)
        node = node * 0 - 1
        while (child >= 0) & (node < 0):
            matches = tl.load(tokens_ptr + child) == token
            if HAS_SCORE_ONLY:
                matches = matches & (tl.load(score_only_ptr + child) == 0)
            node = tl.where(matches, child, -1)
            child = follow_link(next_sibling_ptr, child, end, child >= 0)
    pad_path(path_ptr, length, max_depth)
    tl.store(num_accepted_ptr + row, tl.maximum(length - 1, 0))
    tl.store(next_token_ptr + row, token)
    tl.store(too_deep_ptr + row, (node >= 0).to(tl.int32))
