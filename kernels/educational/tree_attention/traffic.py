"""Cost of every step: bytes, FLOPs and programs, computed from shapes. Nothing here is measured.

tests/kernels/test_educational.py and tests/interpreter/test_educational.py count the same numbers while the steps run.

Symbols:
    L  committed tokens        n  nodes        K = L + n  keys        v  keys that nodes see, summed over nodes
    H  query heads             Hkv  key/value heads                   D  width of a head
    e  bytes of a number of queries and caches

Run: python kernels/educational/tree_attention/traffic.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from step4_triton import BLOCK_M, BLOCK_N
from step5_split_k import choose_pieces
from worked_example import binary_tree


@dataclass(frozen=True)
class Request:
    """Shapes of one request and one layer; heads and widths are those of the whole batch."""

    parents: list[int]
    length: int
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    itemsize: int = 2

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.parents)

    @property
    def keys(self) -> int:
        """Number of keys: committed tokens and nodes."""
        return self.length + self.nodes

    @property
    def visible(self) -> int:
        """Number of visible keys, summed over the nodes."""
        depth: list[int] = []
        for parent in self.parents:
            depth.append(depth[parent] + 1 if depth else 0)
        return self.nodes * self.length + sum(depth) + self.nodes


@dataclass(frozen=True)
class Cost:
    """Cost of one layer.

    Attributes:
        step: Name of the step.
        cache_bytes: Bytes of keys and values loaded from the cache.
        scratch_bytes: Bytes of intermediate results written to memory and read again.
        flops: FLOPs of both matrix products with padding.
        programs: Number of parallel programs; 0 if PyTorch decides.
        tiles: Tiles of the longest program; 0 if there are none.
    """

    step: str
    cache_bytes: int
    scratch_bytes: int
    flops: int
    programs: int = 0
    tiles: int = 0


def ceil(amount: int, size: int) -> int:
    """Returns the number of blocks of `size` that hold `amount`."""
    return -(-amount // size)


def pair_bytes(batch: Sequence[Request]) -> int:
    """Returns the bytes of one key and one value of one head."""
    return 2 * batch[0].width * batch[0].itemsize


def tile_flops(block_m: int, block_n: int, width: int) -> int:
    """Returns the FLOPs of both matrix products of a tile, with the width padded to a power of two."""
    return 4 * block_m * block_n * max(16, 1 << (width - 1).bit_length())


# --8<-- [start:pytorch]
def loop(batch: Sequence[Request]) -> Cost:
    """Computes the cost of step 1: every visible pair of node and key loads a key and a value per query head."""
    pairs = sum(r.heads * r.visible for r in batch)
    return Cost("1 loop", pair_bytes(batch) * pairs, 0, 4 * batch[0].width * pairs)


def masked_matmul(batch: Sequence[Request]) -> Cost:
    """Computes the cost of step 2. Keys and values are copied once.

    Scores take six passes: the first product writes them, mask and softmax read and write them, and the second product
    reads them.

    Returns:
        The cost.
    """
    cache = pair_bytes(batch) * sum(r.kv_heads * r.keys for r in batch)
    scores = sum(r.heads * r.nodes * r.keys for r in batch)
    copies = 2 * cache
    return Cost("2 masked matmul", cache, copies + 6 * batch[0].itemsize * scores, 4 * batch[0].width * scores)


def online_softmax(batch: Sequence[Request]) -> Cost:
    """Computes the cost of step 3: keys and values are loaded once, and tile results fit in caches or registers."""
    return replace(masked_matmul(batch), step="3 online softmax", scratch_bytes=0)


# --8<-- [end:pytorch]


# --8<-- [start:triton]
def triton_kernel(batch: Sequence[Request]) -> Cost:
    """Computes the cost of step 4: every block of nodes and query head loads all keys of its request, with padding."""
    blocks = [(ceil(r.nodes, BLOCK_M) * r.heads, r) for r in batch]
    cache = pair_bytes(batch) * sum(count * r.keys for count, r in blocks)
    tiles = sum(count * ceil(r.keys, BLOCK_N) for count, r in blocks)
    longest = max(ceil(r.keys, BLOCK_N) for r in batch)
    flops = tiles * tile_flops(BLOCK_M, BLOCK_N, batch[0].width)
    return Cost("4 Triton", cache, 0, flops, sum(count for count, _ in blocks), longest)


def split_k(batch: Sequence[Request], pieces: int | None = None) -> Cost:
    """Computes the cost of step 5: the loads of step 4, and float32 means and log-sums of all pieces."""
    whole = triton_kernel(batch)
    if pieces is None:
        grid = max(ceil(r.nodes, BLOCK_M) for r in batch) * batch[0].heads * len(batch)
        pieces = choose_pieces(grid, max(r.keys for r in batch))
    scratch = 2 * 4 * pieces * sum(r.nodes * r.heads * (r.width + 1) for r in batch)
    programs, longest = whole.programs * pieces, ceil(whole.tiles, pieces)
    return replace(whole, step="5 split-K", scratch_bytes=scratch, programs=programs, tiles=longest)


# --8<-- [end:triton]


@dataclass(frozen=True)
class Block:
    """Rows of the shipped kernel, which are nodes times the query heads that share a key/value head."""

    rows: int
    slots: int
    tiles: int


def packed(batch: Sequence[Request]) -> tuple[Any, list[Block]]:
    """Splits a batch into the blocks of the shipped kernel. A block ends at its last visible key.

    Returns:
        The configuration of the kernel, and the blocks.
    """
    from specdec_kernels.ops.tree_attention import config

    group = batch[0].heads // batch[0].kv_heads
    mean = ceil(sum(r.nodes for r in batch), len(batch))
    chosen = config.choose_config(mean * group, batch[0].width, batch[0].itemsize)
    blocks = []
    for r in batch:
        for start in range(0, r.nodes * group, chosen.block_m):
            end = min(start + chosen.block_m, r.nodes * group)
            tiles = ceil(r.length + (end - 1) // group + 1, chosen.block_n)
            blocks.append(Block(end - start, min(tiles * chosen.block_n, r.keys), tiles))
    return chosen, blocks


def _shipped(step: str, batch: Sequence[Request], scratch: int, programs: int, longest: int) -> Cost:
    config, blocks = packed(batch)
    kv_heads, width = batch[0].kv_heads, batch[0].width
    cache = pair_bytes(batch) * kv_heads * sum(block.slots for block in blocks)
    flops = kv_heads * sum(block.tiles for block in blocks) * tile_flops(config.block_m, config.block_n, width)
    return Cost(step, cache, scratch, flops, programs, longest)


def shipped_pieces(batch: Sequence[Request]) -> Cost:
    """Computes the cost of the shipped kernel without a plan: split-K over packed rows."""
    from specdec_kernels.ops.tree_attention import config as configs
    from specdec_kernels.ops.tree_attention import plan

    config, blocks = packed(batch)
    first, nodes = batch[0], sum(r.nodes for r in batch)
    grid = plan.count_blocks(nodes, len(batch), first.heads // first.kv_heads, config.block_m) * first.kv_heads
    pieces = configs.choose_pieces(grid, max(r.keys for r in batch), config)
    scratch = 0
    for block in blocks if pieces > 1 else ():
        filled = ceil(block.tiles, ceil(block.tiles, pieces))  # other pieces write the log of their sum, but no mean
        scratch += 2 * 4 * first.kv_heads * block.rows * (pieces + filled * first.width)
    longest = max(ceil(block.tiles, pieces) for block in blocks)
    return _shipped("shipped, pieces", batch, scratch, len(blocks) * first.kv_heads * pieces, longest)


def shipped_plan(batch: Sequence[Request]) -> Cost:
    """Computes the cost of the shipped kernel with a plan: a fixed grid with equal shares of the tiles of all blocks.

    Scratch holds the parts with visible keys; other parts write no mean.

    Returns:
        The cost.
    """
    from specdec_kernels.ops.tree_attention import config as configs
    from specdec_kernels.ops.tree_attention import plan

    config, blocks = packed(batch)
    first = batch[0]
    programs = configs.programs_per_processor(config) * configs.PROCESSORS
    share = plan.tiles_per_share(sum(block.tiles for block in blocks), first.kv_heads, programs)
    rows, begin = 0, 0
    for block in blocks:
        for _ in range(first.kv_heads):  # parts of a block and head: shares that hold some of its tiles
            parts = (begin + block.tiles - 1) // share - begin // share + 1
            rows += block.rows * parts if parts > 1 else 0
            begin += block.tiles
    scratch = 2 * 4 * rows * (first.width + 1)
    return _shipped("shipped, plan", batch, scratch, min(programs, ceil(begin, share)), min(share, begin))


LADDER = (loop, masked_matmul, online_softmax, triton_kernel, split_k, shipped_pieces, shipped_plan)


def table(batch: Sequence[Request]) -> str:
    """Returns the Markdown table of all steps."""
    lines = ["| step | cache read, MB | scratch, MB | MFLOP | programs | tiles of the longest program |"]
    lines += ["|---|--:|--:|--:|--:|--:|"]
    for cost in (step(batch) for step in LADDER):
        cells = [f"{each / 1e6:,.0f}" for each in (cost.cache_bytes, cost.scratch_bytes, cost.flops)]
        cells += [f"{each:,}" if each else "-" for each in (cost.programs, cost.tiles)]
        lines.append(f"| {cost.step} | {' | '.join(cells)} |")
    return "\n".join(lines)


CHAIN = [*range(-1, 7)]
EXAMPLES = {
    "One request, a chain of 8 nodes behind 4,096 tokens": [Request(CHAIN, 4096)],
    "One request, a binary tree of 63 nodes behind 4,096 tokens": [Request(binary_tree(63), 4096)],
    "Eight requests with chains of 8 nodes, one behind 16,384 tokens and seven behind 512": [
        Request(CHAIN, length) for length in (16384, *(512,) * 7)
    ],
}


def main() -> None:
    """Prints the cost tables of all examples."""
    for title, batch in EXAMPLES.items():
        print(f"{title}:\n\n{table(batch)}\n")


if __name__ == "__main__":
    main()
