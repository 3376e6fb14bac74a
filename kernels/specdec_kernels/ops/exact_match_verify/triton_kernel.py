"""Triton kernel of exact_match_verify: one program follows one row's choices; links of a row stay in the nearest
cache.
"""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel
from ...triton_shared.tree_links import follow_link, pad_path, row_bounds


@kernel()
def follow(
    tokens, offsets, first_child, next_sibling, choice, score_only, path, accepted, following, stopped, nodes,
    depth, SCORE_ONLY: tl.constexpr,
):  # fmt: skip
    """Path, number accepted and next token of one row; stopped: whether the path would be longer than `depth`."""
    row = tl.program_id(0)
    out = path + row.to(tl.int64) * (depth + 1)
    node, end = row_bounds(offsets, row, nodes)
    node = tl.where(node < end, node, -1)
    length = tl.zeros((), tl.int32)
    token = tl.full((), -1, tl.int64)
    while (node >= 0) & (length <= depth):
        tl.store(out + length, node)
        length += 1
        token = tl.load(choice + node)
        child = follow_link(first_child, node, end, node >= 0)
        node = node * 0 - 1
        while (child >= 0) & (node < 0):
            fits = tl.load(tokens + child) == token
            if SCORE_ONLY:
                fits = fits & (tl.load(score_only + child) == 0)
            node = tl.where(fits, child, -1)
            child = follow_link(next_sibling, child, end, child >= 0)
    pad_path(out, length, depth)
    tl.store(accepted + row, tl.maximum(length - 1, 0))
    tl.store(following + row, token)
    tl.store(stopped + row, (node >= 0).to(tl.int32))
