"""Step 1: tree attention as a loop over nodes, heads and visible keys.

This is the definition. Every later step computes the same numbers with less memory traffic or more parallelism.

A request has `length` committed tokens, in slots 0 .. length - 1 of its pages. Its draft tree has `count` nodes; node i
is stored in slot length + i. A node attends to all committed tokens, to its ancestors and to itself.

Shapes:
    B  requests            M  nodes of all requests, packed
    H  query heads         Hkv  key/value heads; GROUP = H / Hkv query heads share one
    D  width of a head     W  ancestor words of a node: bit j of word j // 32 is node j of the request

    query [M, H, D]        key_cache, value_cache [pages, page_size, Hkv, D]
    page_table [B, P]      lengths [B]      offsets [B + 1]      ancestors [M, W]      out [M, H, D]

Run: python kernels/educational/tree_attention/step1_loop.py
Tests: tests/kernels/test_educational.py.
"""

from __future__ import annotations

import math

import torch
import worked_example
from torch import Tensor


# --8<-- [start:visible]
def visible_slots(ancestor_words: list[int], length: int, count: int) -> list[int]:
    """Returns the slots of the committed tokens, of the node's ancestors and of the node itself."""
    nodes = [j for j in range(count) if (ancestor_words[j // 32] >> (j % 32)) & 1]
    return [*range(length), *(length + j for j in nodes)]


# --8<-- [end:visible]


# --8<-- [start:softmax]
def softmax(scores: list[float]) -> list[float]:
    """Returns the softmax of all scores of a node, in three passes over O(keys) memory."""
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def attend(query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """Attends from a query [D] to the visible keys and values [D]."""
    weights = softmax([float(query @ key) * scale for key in keys])
    out = torch.zeros_like(query)
    for weight, value in zip(weights, values):
        out += weight * value
    return out


# --8<-- [end:softmax]


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
    """Attends from packed tree nodes to a paged cache.

    Args:
        query: Queries, [M, H, D].
        key_cache: Keys, [pages, page_size, Hkv, D], dtype of `query`. The keys of the nodes are already stored.
        value_cache: Values, [pages, page_size, Hkv, D], dtype of `query`.
        page_table: Pages of every request in order, int32 [B, P].
        lengths: Committed tokens of every request, int32 [B].
        offsets: First node of every request, int32 [B + 1].
        ancestors: Ancestor words of `specdec_kernels.tree_plan`, int32 [M, W]. A node is among its own ancestors.
        scale: Factor of the scores.

    Returns:
        Output, [M, H, D]; zeros for nodes after the last request.
    """
    page_size, kv_heads = key_cache.shape[1:3]
    group = query.shape[1] // kv_heads
    out = torch.zeros_like(query)
    for request, length in enumerate(lengths.tolist()):
        first, last = offsets[request : request + 2].tolist()
        for node in range(first, last):
            slots = visible_slots(ancestors[node].tolist(), length, last - first)
            places = [(int(page_table[request, slot // page_size]), slot % page_size) for slot in slots]
            for head in range(query.shape[1]):
                keys = [key_cache[page, offset, head // group] for page, offset in places]
                values = [value_cache[page, offset, head // group] for page, offset in places]
                out[node, head] = attend(query[node, head], keys, values, scale)
    return out


def main() -> None:
    """Prints the scores and weights of one node, then the difference to the reference operator."""
    batch = worked_example.small()
    length, count, node = 3, 5, 4
    slots = visible_slots(batch.ancestors[node].tolist(), length, count)
    seen = [f"node {slot - length}" if slot >= length else "committed" for slot in slots]
    key, value = (cache.flatten(0, 1)[:, 0] for cache in (batch.key_cache, batch.value_cache))
    where = [int(batch.page_table[0, slot // 4]) * 4 + slot % 4 for slot in slots]
    scores = [float(batch.query[node, 0] @ key[place]) * worked_example.scale_of(batch) for place in where]
    print(f"tree {worked_example.SMALL_TREE}, {length} committed tokens; node {node}, head 0:")
    print("slot   token       score  weight")
    for slot, what, score, weight in zip(slots, seen, scores, softmax(scores)):
        print(f"{slot:4}   {what:9}  {score:6.3f}  {weight:6.3f}")
    out = attend(batch.query[node, 0], [key[p] for p in where], [value[p] for p in where], 0.5)
    print("out   ", " ".join(f"{number:6.3f}" for number in out.tolist()))
    worked_example.report("the reference operator", reference, tree_attention)


def reference(*batch: Tensor, scale: float) -> Tensor:
    """Runs the reference operator with the signature of a step."""
    return worked_example.operator(worked_example.Batch(*batch))


if __name__ == "__main__":
    main()
