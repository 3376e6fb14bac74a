"""Ragged batches of packed trees over a paged cache, for the tests of the cache operators."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """The shape of a batch; its numbers come from `seed`."""

    counts: list[int]
    lengths: list[int]
    page_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    dtype: torch.dtype = torch.float32
    head_first: bool = False
    tail: int = 0
    deep: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    shape: Shape
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor
    lengths: Tensor
    offsets: Tensor
    ancestors: Tensor
    depth: Tensor
    parents: list[list[int]]

    @property
    def cache(self) -> tuple[Tensor, ...]:
        return self.query, self.key_cache, self.value_cache, self.page_table, self.lengths, self.offsets


def words(ancestors: list[list[int]], nodes: int, width: int) -> Tensor:
    """Returns ancestor sets (packed order) as int32 words [nodes, width]."""
    bits = torch.zeros(nodes, width, dtype=torch.int64)
    for node, members in enumerate(ancestors):
        for j in members:
            bits[node, j >> 5] |= 1 << (j & 31)
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)


def build(shape: Shape) -> Batch:
    """Returns the batch: random values, random trees, pages in random order and page 0 unused."""
    g = torch.Generator().manual_seed(shape.seed)
    pairs = zip(shape.lengths, shape.counts, strict=True)
    per_row = max([(n + c + shape.page_size - 1) // shape.page_size for n, c in pairs] + [1])
    rows, nodes = len(shape.counts), sum(shape.counts) + shape.tail
    pages = rows * per_row + 1
    table = (torch.randperm(pages - 1, generator=g) + 1).view(rows, per_row).to(torch.int32)
    parents: list[list[int]] = []
    ancestors: list[list[int]] = []
    for count in shape.counts:
        mine: list[list[int]] = []
        own = []
        for i in range(count):
            low = max(0, i - 2) if shape.deep else 0
            parent = int(torch.randint(low, i, (1,), generator=g)) if i else -1
            own.append(parent)
            mine.append([*(mine[parent] if i else []), i])
        parents.append(own)
        ancestors.extend(mine)
    depth = torch.tensor([len(a) - 1 for a in ancestors] + [0] * shape.tail, dtype=torch.int32)

    def cache() -> Tensor:
        size = (pages, shape.kv_heads, shape.page_size, shape.width)
        if shape.head_first:
            return torch.randn(size, generator=g).to(shape.dtype).transpose(1, 2)
        return torch.randn(pages, shape.page_size, *size[1::2], generator=g).to(shape.dtype)

    return Batch(
        shape,
        torch.randn(nodes, shape.heads, shape.width, generator=g).to(shape.dtype),
        cache(),
        cache(),
        table,
        torch.tensor(shape.lengths, dtype=torch.int32),
        torch.tensor([0, *accumulate(shape.counts)], dtype=torch.int32),
        words(ancestors, nodes, max([(c + 31) // 32 for c in shape.counts] + [1])),
        depth,
        parents,
    )


@st.composite
def shapes(draw: st.DrawFn, most_nodes: int = 40, most_length: int = 150) -> Shape:
    """Draws ragged batches: rows without nodes, tail nodes, any page size, head ratios, widths, both cache layouts."""
    rows = draw(st.integers(1, 3))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Shape(
        counts=[draw(st.sampled_from([0, 1, 2, 7, 33, most_nodes])) for _ in range(rows)],
        lengths=[draw(st.integers(0, most_length)) for _ in range(rows)],
        page_size=draw(st.sampled_from([1, 3, 16, 256])),
        heads=kv_heads * draw(st.sampled_from([1, 2, 5])),
        kv_heads=kv_heads,
        width=draw(st.sampled_from([32, 40, 64, 128])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])),
        head_first=draw(st.booleans()),
        tail=draw(st.sampled_from([0, 3])),
        deep=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )
