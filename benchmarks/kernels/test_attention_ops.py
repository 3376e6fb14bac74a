"""Attention and cache operators beside torch's own: `pytest benchmarks/kernels/test_attention_ops.py`.

The peer of tree_attention is scaled_dot_product_attention over keys and values that already lie side by
side, which leaves out the gathering of pages that it would need.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdec_kernels import CacheTable, kv_commit, kv_commit_pages, kv_commit_scratch, kv_stage, tree_attention

PAGE = 16
DTYPES = [torch.float32, torch.bfloat16]
# (nodes, committed tokens, heads, key/value heads, width)
DECODE = [
    (1, 300, 4, 2, 64),
    (8, 300, 4, 2, 64),
    (8, 300, 32, 8, 128),
    (32, 1000, 8, 2, 128),
    (1, 4000, 8, 2, 128),
]
PREFILL = [(300, 0, 4, 2, 64), (1000, 0, 4, 2, 64), (1000, 0, 8, 8, 128)]


def name(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")


def paged(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    nodes, length, heads, kv_heads, width = shape
    pages = (length + nodes + PAGE - 1) // PAGE
    table = (torch.randperm(pages) + 1).view(1, -1).int()
    caches = [torch.randn(pages + 1, PAGE, kv_heads, width).to(dtype) for _ in range(2)]
    query = torch.randn(nodes, heads, width).to(dtype)
    return (query, *caches, table, torch.tensor([length]).int(), torch.tensor([0, nodes]).int())


def chain(nodes: int) -> Tensor:
    """Ancestor words of a chain."""
    bits = torch.tensor(
        [[(1 << max(0, min(i + 1 - 32 * w, 32))) - 1 for w in range((nodes + 31) // 32)] for i in range(nodes)]
    )
    return torch.where(bits >= 2**31, bits - 2**32, bits).int()


def measure(benchmark: Any, call: Callable[[], Any]) -> None:
    """Processor time of rounds of about two milliseconds: other programs on the machine hardly show."""
    call()
    begin = time.process_time()
    call()
    iterations = max(1, min(50, int(2e-3 / (time.process_time() - begin + 1e-9))))
    benchmark._timer = time.process_time
    benchmark.pedantic(call, rounds=25, iterations=iterations, warmup_rounds=1)


@pytest.mark.benchmark(group="decode")
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", DECODE, ids=name)
@pytest.mark.parametrize("peer", ["tree_attention", "sdpa"])
def test_decode(benchmark: Any, peer: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    nodes, length, heads, kv_heads, width = shape
    inputs = paged(shape, dtype)
    if peer == "tree_attention":
        ancestors = chain(nodes)
        measure(benchmark, lambda: tree_attention(*inputs, ancestors, scale=width**-0.5))
        return
    query = inputs[0].transpose(0, 1)[None]
    key, value = (torch.randn(1, kv_heads, length + nodes, width).to(dtype) for _ in range(2))
    mask = torch.ones(nodes, length + nodes, dtype=torch.bool).tril(length)
    gqa = heads != kv_heads
    measure(benchmark, lambda: scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=gqa))


@pytest.mark.benchmark(group="prefill")
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", PREFILL, ids=name)
@pytest.mark.parametrize("peer", ["tree_attention", "sdpa"])
def test_prefill(benchmark: Any, peer: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    nodes, _, heads, kv_heads, width = shape
    inputs = paged(shape, dtype)
    if peer == "tree_attention":
        measure(benchmark, lambda: tree_attention(*inputs, scale=width**-0.5))
        return
    query = inputs[0].transpose(0, 1)[None].contiguous()
    key, value = (torch.randn(1, kv_heads, nodes, width).to(dtype) for _ in range(2))
    gqa = heads != kv_heads
    measure(benchmark, lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa))


@pytest.mark.benchmark(group="cache")
@pytest.mark.parametrize("how", ["list", "table", "scratch", "pages", "index_put"])
def test_kv_commit(benchmark: Any, how: str) -> None:
    """Twelve layers, four of eight nodes kept; the peer is one indexed assignment per cache."""
    _, key_cache, _, table, lengths, offsets = paged((8, 300, 4, 2, 64), torch.float32)
    caches = [torch.randn_like(key_cache) for _ in range(24)]
    path, accepted = torch.tensor([[0, 2, 5, 7, -1]]).int(), torch.tensor([3]).int()
    if how == "index_put":
        at = torch.tensor([302, 305, 307]), torch.tensor([301, 302, 303])
        source, target = ((table[0].long()[p // PAGE], p % PAGE) for p in at)

        def peer() -> None:
            for cache in caches:
                cache[target] = cache[source]

        measure(benchmark, peer)
        return
    trees = (table, lengths, path, offsets, accepted)
    if how == "scratch":
        tables = CacheTable(caches), CacheTable.packed([torch.randn(8, 2, 64) for _ in caches])
        measure(benchmark, lambda: kv_commit_scratch(*tables, *trees))
        return
    if how == "pages":  # of one slot each
        ids = torch.arange(400, dtype=torch.int32)[None]
        own, rows = (ids.clone(), lengths.clone()), torch.zeros(1, dtype=torch.int32)
        measure(benchmark, lambda: kv_commit_pages(ids, *trees[1:], rows, own[1], own[0]))
        return
    given = CacheTable(caches) if how == "table" else caches
    measure(benchmark, lambda: kv_commit(given, *trees))


@pytest.mark.benchmark(group="cache")
@pytest.mark.parametrize("how", ["kv_stage", "index_put"])
def test_kv_stage(benchmark: Any, how: str) -> None:
    _, key_cache, value_cache, table, *_ = paged((8, 300, 4, 2, 64), torch.float32)
    key, value = torch.randn(8, 2, 64), torch.randn(8, 2, 64)
    at = torch.arange(300, 308)
    pages, rest = table[0].long()[at // PAGE], at % PAGE
    if how == "kv_stage":
        slots = pages * PAGE + rest
        measure(benchmark, lambda: kv_stage(key, value, key_cache, value_cache, slots))
        return

    def peer() -> None:
        key_cache[pages, rest] = key
        value_cache[pages, rest] = value

    measure(benchmark, peer)
