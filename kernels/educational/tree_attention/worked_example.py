"""Example batches of all steps, and the report that every step prints.

Tests: tests/kernels/test_educational.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import specdec_kernels


class Batch(NamedTuple):
    """Arguments of tree attention, in the order of every step and of the operator."""

    query: Tensor  # [M, H, D]
    key_cache: Tensor  # [pages, page_size, Hkv, D]
    value_cache: Tensor  # [pages, page_size, Hkv, D]
    page_table: Tensor  # [B, pages of a request], int32
    lengths: Tensor  # [B], int32
    offsets: Tensor  # [B + 1], int32
    ancestors: Tensor  # [M, W], int32


def fill(*shape: int, dtype: torch.dtype, step: int) -> Tensor:
    """Returns numbers between -1.4 and 1.4, which do not depend on the machine or the version of torch."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * step % 23 - 11) / 8).reshape(shape).to(dtype)


def pack(
    trees: list[list[int]],
    lengths: list[int],
    *,
    heads: int,
    kv_heads: int,
    width: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    tail: int = 0,
) -> Batch:
    """Packs one tree per request, over a paged cache whose pages are out of order.

    Args:
        trees: Parents of the nodes of every request, -1 for the root. A request without nodes has an empty list.
        lengths: Committed tokens of every request.
        heads: Query heads.
        kv_heads: Key/value heads, which divide `heads`.
        width: Width of a head.
        page_size: Slots of a page.
        dtype: Data type of queries and caches.
        tail: Nodes after the last request, which belong to none. CUDA-graph steps have such nodes.

    Returns:
        The batch. As after the operator `kv_stage`, the cache holds keys and values of the nodes.
    """
    counts = [len(tree) for tree in trees]
    nodes, columns = sum(counts) + tail, -(-max(map(sum, zip(lengths, counts))) // page_size)
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    parents = torch.tensor([parent for tree in trees for parent in tree] + [-1] * tail, dtype=torch.int32)
    pages = len(trees) * columns
    return Batch(
        query=fill(nodes, heads, width, dtype=dtype, step=5),
        key_cache=fill(pages, page_size, kv_heads, width, dtype=dtype, step=9),
        value_cache=fill(pages, page_size, kv_heads, width, dtype=dtype, step=3),
        page_table=torch.arange(pages, dtype=torch.int32).flip(0).view(len(trees), columns),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        offsets=offsets,
        ancestors=specdec_kernels.tree_plan(parents, offsets).ancestors,
    )


SMALL_TREE = [-1, 0, 0, 1, 1]
r"""The tree of the printed example: node 4 is a child of node 1, which is a child of the root.

        0
       / \
      1   2
     / \
    3   4
"""


def small() -> Batch:
    """One request with 3 committed tokens and 5 nodes: small enough to check by hand."""
    return pack([SMALL_TREE], [3], heads=2, kv_heads=1, width=4, page_size=4)


def binary_tree(nodes: int) -> list[int]:
    """Returns the parents of a complete binary tree in level order."""
    return [(node + 1) // 2 - 1 for node in range(nodes)]


def ragged() -> Batch:
    """Three requests: a chain, a request without nodes, and a tree whose ancestor sets need two words."""
    chain = list(range(-1, 6))
    return pack([chain, [], binary_tree(40)], [37, 9, 130], heads=4, kv_heads=2, width=16, page_size=16)


def to(batch: Batch, device: str) -> Batch:
    """Returns the batch on a device."""
    return Batch(*(each.to(device) for each in batch))


def scale_of(batch: Batch) -> float:
    """Returns the factor of the scores."""
    return float(batch.query.shape[-1] ** -0.5)


def operator(batch: Batch) -> Tensor:
    """Runs the reference operator of specdec_kernels."""
    with specdec_kernels.use_backend(tree_attention="reference"):
        result: Tensor = specdec_kernels.tree_attention(*batch, scale=scale_of(batch))
    return result


def report(name: str, before: Callable[..., Tensor], after: Callable[..., Tensor], device: str = "cpu") -> None:
    """Prints the largest difference between two steps, on both batches."""
    for title, batch in (("small", small()), ("ragged", ragged())):
        scale, inputs = scale_of(batch), to(batch, device)
        difference = (before(*inputs, scale=scale) - after(*inputs, scale=scale)).abs().max()
        print(f"max difference to {name}, {title} batch: {float(difference):.0e}")


def interpret_without_gpu() -> None:
    """Restarts this program in Triton's interpreter if there is no GPU. Triton reads the variable once per process."""
    if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"TRITON_INTERPRET": "1"})


def triton_device() -> str:
    """Returns the device of the Triton steps: a GPU, or the CPU in the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
