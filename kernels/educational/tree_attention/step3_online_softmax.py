"""Step 3: online softmax over tiles of keys.

The matrix of scores never exists. A tile of keys is loaded, scored and added to three running numbers per node and
head: the highest score so far (m), the sum of exp(score - m), and the sum of exp(score - m) * value. If a tile has a
higher score, both sums are first scaled by exp(old m - new m).

Shapes:
    N  nodes of one request        T  keys of a tile
    running_max, running_sum [Hkv, N, GROUP]        acc [Hkv, N, GROUP, D]

Run: python kernels/educational/tree_attention/step3_online_softmax.py
Tests: tests/kernels/test_educational.py.
Source: Milakov and Gimelshein 2018, algorithm 3; Dao et al. 2022 (FlashAttention), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import step2_masked_matmul
import torch
import worked_example
from step2_masked_matmul import gather, tree_mask
from torch import Tensor

BLOCK_N = 64
"""Keys of a tile."""


class Running(NamedTuple):
    """Running numbers over the keys so far."""

    running_max: Tensor
    running_sum: Tensor
    acc: Tensor


# --8<-- [start:update]
def update(state: Running, scores: Tensor, value: Tensor) -> Running:
    """Adds a tile: scores [Hkv, N, GROUP, T], -inf where not visible; value [T, Hkv, D]."""
    highest = torch.maximum(state.running_max, scores.amax(dim=-1))  # every node sees slot 0
    shrink = torch.exp(state.running_max - highest)
    weights = torch.exp(scores - highest[..., None])
    added = torch.einsum("kngt,tkd->kngd", weights, value)
    return Running(
        running_max=highest,
        running_sum=state.running_sum * shrink + weights.sum(dim=-1),
        acc=state.acc * shrink[..., None] + added,
    )


# --8<-- [end:update]


def tiles(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, pages: Tensor, mask: Tensor, scale: float, block_n: int
) -> Iterator[Running]:
    """Yields the running numbers after every tile of one request. query [N, H, D], pages [P], mask [N, L]."""
    grouped = query.unflatten(1, (key_cache.shape[2], -1)) * scale
    shape = (grouped.shape[1], grouped.shape[0], grouped.shape[2])
    state = Running(
        query.new_full(shape, float("-inf")), query.new_zeros(shape), query.new_zeros(*shape, query.shape[2])
    )
    for start in range(0, mask.shape[1], block_n):
        slots = torch.arange(start, min(start + block_n, mask.shape[1]), device=query.device)
        key, value = (gather(cache, pages, slots) for cache in (key_cache, value_cache))
        scores = torch.einsum("nkgd,tkd->kngt", grouped, key)
        state = update(state, scores.masked_fill(~mask[:, None, slots], float("-inf")), value)
        yield state


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
    block_n: int = BLOCK_N,
) -> Tensor:
    """Arguments and result as in step 1; block_n: keys of a tile."""
    out = torch.zeros_like(query)
    for request, length in enumerate(lengths.tolist()):
        first, last = offsets[request : request + 2].tolist()
        if first == last:
            continue
        mask = tree_mask(ancestors[first:last], length)
        *_, state = tiles(query[first:last], key_cache, value_cache, page_table[request], mask, scale, block_n)
        mean = state.acc / state.running_sum[..., None]
        out[first:last] = mean.transpose(0, 1).flatten(1, 2)
    return out


def main() -> None:
    """Prints the running numbers of one node after each tile, then the difference to step 2."""
    batch = worked_example.small()
    mask = tree_mask(batch.ancestors, 3)
    scale = worked_example.scale_of(batch)
    print("node 4, head 0, tiles of 2 keys:")
    print("slots  running max  running sum  acc / running sum")
    states = tiles(batch.query, batch.key_cache, batch.value_cache, batch.page_table[0], mask, scale, 2)
    for tile, state in enumerate(states):
        highest, total, acc = (part[0, 4, 0] for part in state)
        mean = " ".join(f"{number:6.3f}" for number in (acc / total).tolist())
        print(f"{2 * tile}, {2 * tile + 1}   {float(highest):11.3f}  {float(total):11.3f}  {mean}")
    worked_example.report("step 2", step2_masked_matmul.tree_attention, tree_attention)


if __name__ == "__main__":
    main()
