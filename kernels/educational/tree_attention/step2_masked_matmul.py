"""Step 2: one masked matrix product per request.

The loops over nodes, heads and keys become two matrix products. Keys that a node does not see get a score of -inf, so
the products also compute unused scores. The whole matrix of scores is in memory.

Shapes:
    N  nodes of one request          L  its keys: committed tokens and nodes
    query [N, Hkv, GROUP, D]         key, value [L, Hkv, D]        scores [Hkv, N, GROUP, L]

Run: python kernels/educational/tree_attention/step2_masked_matmul.py
Tests: tests/kernels/test_educational.py.
"""

from __future__ import annotations

import step1_loop
import torch
import worked_example
from torch import Tensor


# --8<-- [start:mask]
def tree_mask(ancestors: Tensor, length: int) -> Tensor:
    """Returns whether each node sees each key, bool [N, length + N], from ancestor words [N, W]."""
    count = ancestors.shape[0]
    node = torch.arange(count, device=ancestors.device)
    bits = (ancestors[:, node // 32] >> (node % 32)) & 1
    committed = torch.ones(count, length, dtype=torch.bool, device=ancestors.device)
    return torch.cat([committed, bits.bool()], dim=1)


# --8<-- [end:mask]


def gather(cache: Tensor, pages: Tensor, slots: Tensor) -> Tensor:
    """Copies slots of one request from its pages, [len(slots), Hkv, D]."""
    page_size = cache.shape[1]
    return cache[pages[slots // page_size].long(), slots % page_size]


# --8<-- [start:attend]
def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attends from the nodes of one request, [N, H, D]."""
    grouped = query.unflatten(1, (key.shape[1], -1))  # heads that share keys, side by side
    scores = torch.einsum("nkgd,lkd->kngl", grouped * scale, key)
    weights = scores.masked_fill(~mask[:, None, :], float("-inf")).softmax(dim=-1)
    return torch.einsum("kngl,lkd->nkgd", weights, value).flatten(1, 2)


# --8<-- [end:attend]


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
    """Arguments and result as in step 1."""
    out = torch.zeros_like(query)
    for request, length in enumerate(lengths.tolist()):
        first, last = offsets[request : request + 2].tolist()
        if first == last:
            continue
        slots = torch.arange(length + last - first, device=query.device)
        key, value = (gather(cache, page_table[request], slots) for cache in (key_cache, value_cache))
        mask = tree_mask(ancestors[first:last], length)
        out[first:last] = attend(query[first:last], key, value, mask, scale)
    return out


def main() -> None:
    """Prints the mask of the small example, then the difference to step 1."""
    batch = worked_example.small()
    print("mask: one line per node, 3 committed tokens, then nodes 0 .. 4")
    for node, line in enumerate(tree_mask(batch.ancestors, 3).int().tolist()):
        print(f"node {node}   {' '.join(map(str, line[:3]))}   {' '.join(map(str, line[3:]))}")
    seen = int(tree_mask(batch.ancestors, 3).sum())
    print(f"{seen} of {5 * 8} scores per head are visible")
    worked_example.report("step 1", step1_loop.tree_attention, tree_attention)


if __name__ == "__main__":
    main()
