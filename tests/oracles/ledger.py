"""The expected contents of a paged cache as lists: every row lists the numbers written for its committed tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from specdec_fast.cache import PagedCache
from specdec_fast.cache.shapes import LayerShape
from specdec_kernels import TreePlan, kv_stage, tree_plan

LAYERS = (LayerShape(2, 3, 2), LayerShape(1, 4, 4))


def cache(**shape: int) -> PagedCache:
    settings = {"num_pages": 40, "page_size": 4, "max_rows": 5, "max_length": 64} | shape
    return PagedCache(LAYERS, dtype=torch.float32, **settings)


@dataclass
class Ledger:
    """Drives a cache and records its contents. Every staged node writes its own number into all layers."""

    cache: PagedCache
    rows: dict[int, list[int]] = field(default_factory=dict)
    floor: dict[int, int] = field(
        default_factory=dict
    )  # tokens that a row shares with another, which must not be rolled back
    written: int = 0

    def step(
        self, trees: dict[int, list[int]], paths: dict[int, list[int]], tail: int = 0, chain: bool = False
    ) -> None:
        """Stages trees (parents by row), writes them, and commits a path of each (node indices, root first)."""
        rows = list(trees)
        parents = [parent for row in rows for parent in trees[row]]
        offsets = [0]
        for row in rows:
            offsets.append(offsets[-1] + len(trees[row]))
        nodes = len(parents) + tail
        bounds = torch.tensor(offsets, dtype=torch.int32)
        plan: TreePlan | None = None
        if not chain:
            plan = tree_plan(torch.tensor(parents + [-1] * tail, dtype=torch.int32), bounds)
        index = torch.tensor(rows, dtype=torch.int32)
        slots = self.cache.stage(index, bounds, nodes, plan)
        self.check_slots(rows, trees, slots, tail, chain)
        numbers = list(range(self.written + 1, self.written + 1 + nodes))
        self.written += nodes
        for layer, shape in enumerate(LAYERS):
            value = torch.tensor(numbers, dtype=torch.float32)[:, None, None] + 0.25 * layer
            kv_stage(
                value.repeat(1, shape.num_kv_heads, shape.key_dim),
                -value.repeat(1, shape.num_kv_heads, shape.value_dim),
                self.cache.keys[layer],
                self.cache.values[layer],
                slots.slots,
            )
        width = max((len(path) for path in paths.values()), default=1) + 1
        packed = torch.full((len(rows), width), -1, dtype=torch.int32)
        for at, row in enumerate(rows):
            for place, node in enumerate(paths[row]):
                packed[at, place] = offsets[at] + node
                self.rows[row].append(numbers[offsets[at] + node])
        accepted = torch.tensor([max(len(paths[row]) - 1, 0) for row in rows], dtype=torch.int32)
        self.cache.commit(index, slots, packed, accepted)

    def check_slots(self, rows: list[int], trees: dict[int, list[int]], slots, tail: int, chain: bool) -> None:
        """Checks that nodes follow committed tokens, positions count from there, and tail nodes go to the trash."""
        place = 0
        for row in rows:
            length, depth = len(self.rows[row]), []
            for node, parent in enumerate(trees[row]):
                depth.append(0 if parent < 0 else depth[parent] + 1)
                page = int(self.cache.page_table[row, (length + node) // self.cache.page_size])
                assert page > 0, "a staged node lies on the trash page"
                want = page * self.cache.page_size + (length + node) % self.cache.page_size
                assert int(slots.slots[place]) == want
                assert int(slots.positions[place]) == length + (node if chain else depth[node])
                place += 1
        assert slots.slots[place:].tolist() == [-1] * tail and slots.positions[place:].tolist() == [0] * tail

    def release(self, row: int) -> None:
        self.cache.release([row])
        del self.rows[row]
        self.floor.pop(row, None)

    def check(self) -> None:
        """Compares the whole cache with the ledger."""
        for row in range(self.cache.max_rows):
            want = torch.tensor(self.rows.get(row, []), dtype=torch.float32)
            assert int(self.cache.lengths[row]) == len(want), f"row {row}"
            for layer in range(len(LAYERS)):
                keys, values = self.cache.read(row, layer)
                assert torch.equal(keys, (want + 0.25 * layer)[:, None, None].expand_as(keys)), f"row {row}"
                assert torch.equal(values, -(want + 0.25 * layer)[:, None, None].expand_as(values)), f"row {row}"
        pages = self.cache.pages
        assert pages.num_used + pages.num_free == pages.num_pages - 1
        assert pages.num_used == len({page for owned in self.cache._owned for page in owned})


def random_tree(source: random.Random, nodes: int) -> list[int]:
    """Returns parents of a random tree, root first."""
    return [-1, *(source.randrange(node) for node in range(1, nodes))] if nodes else []


def random_path(source: random.Random, parents: list[int]) -> list[int]:
    """Returns a random path from the root towards a leaf; empty for a row without nodes."""
    if not parents:
        return []
    path = [0]
    while source.random() < 0.8:
        children = [node for node, parent in enumerate(parents) if parent == path[-1]]
        if not children:
            break
        path.append(source.choice(children))
    return path
