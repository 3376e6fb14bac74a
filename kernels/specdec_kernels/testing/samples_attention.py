"""Sample calls of the attention and cache operators; `agreement.SAMPLES` has those of all operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..ops.fused_forward import DecoderLayer, DecoderNumbers, DecoderTable
from ..ops.fused_forward.decoder_table import MATRICES
from ..ops.kv_commit import CacheTable
from ..ops.tree_attention import plan_for
from ..ops.tree_plan import TreePlan, tree_plan


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        arguments: Positional arguments.
        options: Keyword arguments.
        writes: Tensors among the arguments that the operator writes to.
        bytes: Bytes that the call must read and write at least.
        products: Multiplications in its matrix products.
        increments: Index of the argument that the call adds to, or None.
    """

    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    writes: tuple[Tensor, ...] = ()
    bytes: int = 0
    products: int = 0
    increments: int | None = None

    def repeatable(self, op: Callable[..., Any]) -> Callable[[], Any]:
        """Returns a function that runs the call. It restores the incremented argument, so it can run repeatedly."""
        run = partial(op, *self.arguments, **self.options)
        if self.increments is None:
            return run
        incremented: Tensor = self.arguments[self.increments]
        before = incremented.clone()

        def run_and_restore() -> Any:
            result = run()
            incremented.copy_(before)
            return result

        return run_and_restore


@dataclass(frozen=True)
class Sizes:
    """Sizes of a sample. Each operator depends on some of them.

    Attributes:
        rows: Requests.
        nodes: Nodes of each request.
        length: Committed tokens of each request, a multiple of `page` or not.
        heads: Query heads.
        kv_heads: Key/value heads.
        width: Width of a head.
        page: Slots of a page.
        layers: Layers of the cache.
        vocab: Columns of the logits.
        dtype: Data type of logits, queries and caches.
        top_p: Top-p of the distributions.
    """

    rows: int = 2
    nodes: int = 8
    length: int = 100
    heads: int = 8
    kv_heads: int = 2
    width: int = 64
    page: int = 16
    layers: int = 2
    vocab: int = 3000
    dtype: torch.dtype = torch.float32
    top_p: float = 1.0


BOUNDS = {
    "rows": (1, 4096), "nodes": (1, 4096), "length": (0, 2**20), "heads": (1, 256), "kv_heads": (1, 256),
    "width": (1, 1024), "page": (1, 2**16), "layers": (1, 256), "vocab": (32, 2**20),
}  # fmt: skip
"""Smallest and largest value of each size that the command line accepts."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def size_of(*tensors: Tensor) -> int:
    """Returns the bytes of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def estimate_bytes(names: Sequence[str], sizes: Sizes) -> int:
    """Returns roughly the peak bytes of making a sample that depends on the named sizes."""
    count, size = sizes.rows * (sizes.nodes if "nodes" in names else 1), sizes.dtype.itemsize
    total = count * (64 + 4 * -(-sizes.nodes // 32))
    if "vocab" in names:
        total += count * sizes.vocab * (3 * size + 16)
    if "length" in names:
        total += 16 * sizes.rows * (sizes.length + sizes.nodes)
    if "width" in names:
        per_row = -(-(sizes.length + sizes.nodes) // sizes.page) * sizes.page if "length" in names else 0
        layers = sizes.layers if "layers" in names else 1
        total += (sizes.rows * per_row + sizes.page + count) * sizes.kv_heads * sizes.width * size * 2 * layers
        inputs = sizes.heads * sizes.width if "heads" in names else 0
        total += (3 * count * inputs + (inputs**2 if "kv_heads" not in names else 0)) * size
    return total


def random(sizes: Sizes, *shape: int, scale: float = 1.0) -> Tensor:
    """Returns normal random numbers of `sizes.dtype`.

    They are sampled on the CPU, so they do not depend on the device. Large tensors repeat two million numbers, because
    more would take long. The repetition runs on the default device.

    Args:
        sizes: Gives the data type.
        shape: Shape of the tensor.
        scale: Standard deviation.

    Returns:
        The tensor, on the default device.
    """
    generator, count = torch.Generator().manual_seed(sum(shape)), prod(shape)
    numbers = (torch.randn(min(count, 2**21), generator=generator, device="cpu") * scale).to(sizes.dtype)
    return to_default_device(numbers).repeat(-(-count // 2**21))[:count].view(shape)


def to_default_device(tensor: Tensor) -> Tensor:
    """Returns the tensor on the default device (`with torch.device(...)`)."""
    return tensor.to(torch.get_default_device())


def int32(values: Any) -> Tensor:
    """Returns values as an int32 tensor."""
    return torch.as_tensor(values, dtype=torch.int32)


def offsets(sizes: Sizes) -> Tensor:
    """Returns the first node of each request, int32 [rows + 1]."""
    return torch.arange(sizes.rows + 1, dtype=torch.int32) * sizes.nodes


def parents(sizes: Sizes) -> Tensor:
    """Returns the parents of binary trees, int32 [rows * nodes]."""
    return int32([-1, *((node - 1) // 2 for node in range(1, sizes.nodes))] * sizes.rows)


def make_plan(sizes: Sizes) -> TreePlan:
    """Returns the `TreePlan` of the binary trees."""
    return tree_plan(parents(sizes), offsets(sizes))


def pages(sizes: Sizes) -> Tensor:
    """Returns a page table [rows, P] of pages in random order; page 0 stays free."""
    per_row = -(-(sizes.length + sizes.nodes) // sizes.page)
    order = torch.randperm(sizes.rows * per_row, generator=torch.Generator().manual_seed(0), device="cpu") + 1
    return to_default_device(order.view(sizes.rows, per_row).int())


def caches(sizes: Sizes, count: int) -> list[Tensor]:
    """Returns `count` paged caches with different numbers."""
    table = pages(sizes)
    shape = (table.numel() + 1, sizes.page, sizes.kv_heads, sizes.width)
    return [random(sizes, *shape) + each for each in range(count)]


def attention(sizes: Sizes) -> Call:
    """Attention of binary trees over a paged cache."""
    plan, (keys, values) = make_plan(sizes), caches(sizes, 2)
    query = random(sizes, sizes.rows * sizes.nodes, sizes.heads, sizes.width)
    lengths = int32([sizes.length] * sizes.rows)
    seen = sizes.rows * (sizes.length + sizes.nodes)
    return Call(
        (query, keys, values, pages(sizes), lengths, offsets(sizes), plan.ancestors, plan.depth),
        {"scale": sizes.width**-0.5},
        bytes=2 * size_of(query) + 2 * seen * sizes.kv_heads * sizes.width * query.element_size(),
        products=2 * query.numel() * (sizes.length + sizes.nodes),
    )


def attention_with_plan(sizes: Sizes) -> Call:
    """Attention as targets call it: with a plan if the selected backend uses one."""
    call = attention(sizes)
    query, keys, _, table, lengths, bounds, ancestors, _ = call.arguments
    plan = plan_for(query, keys, table, lengths, bounds, ancestors)
    return call if plan is None else replace(call, options=call.options | {"plan": plan})


def decoder_table(sizes: Sizes) -> tuple[DecoderTable, int]:
    """Returns a decoder with hidden width heads * width and twice that inner width, and its number of weights."""
    hidden, shared = sizes.heads * sizes.width, sizes.kv_heads * sizes.width

    def matrix(rows: int, inputs: int) -> Tensor:
        return random(sizes, inputs, rows, scale=inputs**-0.5).t()

    def norm() -> Tensor:
        return 1 + random(sizes, hidden, scale=0.1)

    def layer() -> DecoderLayer:
        heads = matrix(hidden, hidden), matrix(shared, hidden), matrix(shared, hidden), matrix(hidden, hidden)
        gated = matrix(2 * hidden, hidden), matrix(2 * hidden, hidden), matrix(hidden, 2 * hidden)
        return DecoderLayer(norm(), *heads, norm(), *gated)

    angles = torch.arange(sizes.length + sizes.nodes)[:, None] / 50.0 ** torch.arange(sizes.width // 2)
    rotary = torch.cat([angles.cos(), angles.sin()], 1).to(sizes.dtype)
    stored, weights = caches(sizes, 2 * sizes.layers), [layer() for _ in range(sizes.layers)]
    embedding, head = random(sizes, sizes.vocab, hidden), random(sizes, sizes.vocab, hidden, scale=hidden**-0.5)
    numbers = DecoderNumbers(eps=1e-5, scale=sizes.width**-0.5)
    made = DecoderTable(embedding, weights, norm(), head, rotary, stored[::2], stored[1::2], numbers)
    return made, sum(getattr(each, name).numel() for each in weights for name in MATRICES) + head.numel()


def decoder(sizes: Sizes) -> Call:
    """A forward pass of trees through a decoder."""
    (made, weights), table, plan = decoder_table(sizes), pages(sizes), make_plan(sizes)
    tokens = torch.arange(sizes.rows * sizes.nodes) * 7 % sizes.vocab
    place = sizes.length + torch.arange(sizes.nodes).repeat(sizes.rows)
    slots = table.long().repeat_interleave(sizes.nodes, 0).gather(1, place[:, None] // sizes.page)[:, 0]
    where = slots * sizes.page + place % sizes.page, table, int32([sizes.length] * sizes.rows), offsets(sizes)
    seen = sizes.layers * sizes.rows * (sizes.length + sizes.nodes) * sizes.kv_heads * sizes.width
    return Call(
        (made, tokens, sizes.length + plan.depth.long(), None, *where, plan.ancestors, plan.depth),
        {},
        (*made.keys, *made.values),
        bytes=(weights + 2 * seen) * sizes.dtype.itemsize,
        products=len(tokens) * weights,
    )


def drafting(sizes: Sizes) -> Call:
    """Draft chains of `nodes` tokens after the root of each row."""
    (made, weights), each = decoder_table(sizes), torch.ones(sizes.rows)
    tokens, rows = torch.arange(sizes.rows) * 7 % sizes.vocab, torch.arange(sizes.rows)
    lengths = int32([sizes.length] * sizes.rows)
    where = torch.arange(sizes.rows + 1).int(), [sizes.nodes] * sizes.rows, rows.int(), pages(sizes), lengths
    sampling = each, int32([0] * sizes.rows), each, 0 * each, rows + 11, lengths.clone()
    seen = sizes.layers * sizes.rows * (sizes.length + sizes.nodes) * sizes.kv_heads * sizes.width
    return Call(
        (made, tokens, *where, *sampling, sizes.vocab),
        {},
        (*made.keys, *made.values, lengths),
        bytes=sizes.nodes * (weights + 2 * seen) * sizes.dtype.itemsize,
        products=sizes.nodes * sizes.rows * weights,
        increments=6,
    )


def split_work(sizes: Sizes) -> Call:
    """The work split of one attention pass."""
    lengths, group = int32([sizes.length] * sizes.rows), sizes.heads // sizes.kv_heads
    numbers = {"kv_heads": sizes.kv_heads, "group": group, "block_m": 16, "block_n": 64, "programs": 264}
    return Call((lengths, offsets(sizes), sizes.rows * sizes.nodes), numbers, bytes=size_of(lengths) * 4)


def plan(sizes: Sizes) -> Call:
    """The `TreePlan` of binary trees."""
    at = parents(sizes), offsets(sizes)
    return Call(at, bytes=size_of(*at) * 5)


def plan_in_bounds(sizes: Sizes) -> Call:
    """The plan as engines compute it: with the nodes of the largest row, which the host knows."""
    return replace(plan(sizes), options={"max_nodes": sizes.nodes})


def slots(sizes: Sizes) -> Call:
    """The cache slots of all nodes."""
    table, lengths = pages(sizes), int32([sizes.length] * sizes.rows)
    nodes = sizes.rows * sizes.nodes
    where = torch.arange(sizes.rows).int(), offsets(sizes), make_plan(sizes).depth
    return Call((table, lengths, *where, nodes, sizes.page), bytes=2 * size_of(table) + 16 * nodes)


def stage(sizes: Sizes) -> Call:
    """Keys and values of all nodes, staged in a cache."""
    nodes = sizes.rows * sizes.nodes
    entries = [random(sizes, nodes, sizes.kv_heads, sizes.width) for _ in range(2)]
    stored = caches(sizes, 2)
    where = torch.arange(nodes) + sizes.page
    return Call((*entries, *stored, where), {}, tuple(stored), bytes=2 * size_of(*entries))


def accepted_paths(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Returns path and num_accepted that lead to the last node of every row."""
    walk = [sizes.nodes - 1]
    while walk[0] > 0:
        walk.insert(0, (walk[0] - 1) // 2)
    path = int32([[row * sizes.nodes + node for node in walk] for row in range(sizes.rows)])
    return path, int32([len(walk) - 1] * sizes.rows)


def commit_to(sizes: Sizes, stored: list[Tensor], scratch: list[Tensor] | None = None) -> Call:
    """Commits accepted nodes to all caches, from `scratch` if given. In place, only nodes at other slots move."""
    path, count = accepted_paths(sizes)
    lengths, rows = int32([sizes.length] * sizes.rows), torch.arange(sizes.rows).int()
    own, tables = lengths.clone(), [CacheTable(stored)]
    if scratch is not None:
        tables.append(CacheTable.packed(scratch))
    places = torch.arange(path.shape[1])
    moved = path.numel() if scratch else int((path - offsets(sizes)[:-1, None] != places).sum())
    return Call(
        (*tables, pages(sizes), lengths, path, offsets(sizes), count, rows, own),
        {},
        (*stored, own),
        bytes=2 * moved * sum(size_of(each[0, 0]) for each in stored),
    )


def commit(sizes: Sizes) -> Call:
    """Commit in place, in all layers."""
    return commit_to(sizes, caches(sizes, 2 * sizes.layers))


def commit_scratch(sizes: Sizes) -> Call:
    """Commit from a scratch cache, in all layers."""
    shape = (sizes.rows * sizes.nodes, sizes.kv_heads, sizes.width)
    scratch = [random(sizes, *shape) + each for each in range(2 * sizes.layers)]
    return commit_to(sizes, caches(sizes, 2 * sizes.layers), scratch)


def commit_pages(sizes: Sizes) -> Call:
    """Commit of page ids, with pages of one slot."""
    table = pages(replace(sizes, page=1))
    _, _, *others = commit_to(sizes, caches(sizes, 1)).arguments
    own_table = table.clone()
    writes = (others[-1], own_table)
    return Call((table, *others, own_table), {}, writes, bytes=8 * sizes.rows * sizes.nodes)


@dataclass(frozen=True)
class Sample:
    """A sample of an operator.

    Attributes:
        make: Makes the call for given sizes.
        names: Names of the sizes that the call depends on.
        gpu: Large sizes for benchmarks on a GPU.
        dtypes: Data types that the operator supports.
        timed: Makes the call for timing, if an engine passes more arguments than `make`. None: `make`.
    """

    make: Callable[[Sizes], Call]
    names: tuple[str, ...]
    gpu: tuple[Sizes, ...] = ()
    dtypes: tuple[torch.dtype, ...] = DTYPES
    timed: Callable[[Sizes], Call] | None = None


_CACHE = ("rows", "nodes", "length", "kv_heads", "width", "page", "dtype")
_LLAMA: dict[str, Any] = {"heads": 32, "kv_heads": 8, "width": 128, "dtype": torch.bfloat16}
CACHE_SAMPLES: dict[str, Sample] = {
    "tree_attention": Sample(
        attention,
        ("heads", *_CACHE),
        tuple(Sizes(rows=b, nodes=n, length=length, **_LLAMA) for b, n, length in
              [(1, 8, 2048), (1, 8, 8192), (1, 8, 32768), (1, 64, 8192), (8, 8, 8192), (64, 8, 8192), (64, 32, 8192)]),
        timed=attention_with_plan,
    ),
    "fused_forward": Sample(decoder, ("heads", "layers", "vocab", *_CACHE)),
    "draft_chain": Sample(drafting, ("heads", "layers", "vocab", *_CACHE)),
    "attention_plan": Sample(split_work, ("rows", "nodes", "length", "heads", "kv_heads"), (Sizes(rows=64),)),
    "kv_commit": Sample(commit, ("layers", *_CACHE), tuple(Sizes(rows=b, layers=32, **_LLAMA) for b in (1, 8, 64))),
    "kv_commit_scratch": Sample(
        commit_scratch, ("layers", *_CACHE), tuple(Sizes(rows=b, layers=32, **_LLAMA) for b in (1, 64))
    ),
    "kv_commit_pages": Sample(commit_pages, ("rows", "nodes", "length"), (Sizes(rows=64, nodes=32),)),
    "kv_stage": Sample(stage, _CACHE, tuple(Sizes(rows=b, **_LLAMA) for b in (1, 64))),
    "kv_slots": Sample(slots, ("rows", "nodes", "length", "page"), (Sizes(rows=64),)),
    "tree_plan": Sample(
        plan, ("rows", "nodes"), (Sizes(rows=1, nodes=64), Sizes(rows=64, nodes=32)), timed=plan_in_bounds
    ),
}  # fmt: skip
