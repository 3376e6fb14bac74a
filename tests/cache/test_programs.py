"""Random programs of a paged cache against lists of lists; hypothesis finds and shrinks failing programs."""

from __future__ import annotations

import random

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles.ledger import Ledger, cache, random_path, random_tree

ROWS = st.integers(0, 4)


class CachePrograms(RuleBasedStateMachine):
    """Reserve, stage and commit, roll back, fork and release in any order, with a pool that runs dry."""

    @initialize(page_size=st.sampled_from([1, 2, 4, 16, 256]), pages=st.integers(8, 40))
    def start(self, page_size: int, pages: int) -> None:
        self.ledger = Ledger(cache(page_size=page_size, num_pages=pages, max_length=48))

    @rule(
        rows=st.lists(ROWS, min_size=1, max_size=5, unique=True),
        seed=st.integers(0, 2**20),
        tail=st.integers(0, 2),
    )
    def step(self, rows: list[int], seed: int, tail: int) -> None:
        source, trees = random.Random(seed), {}
        for row in rows:
            held = self.ledger.rows.setdefault(row, [])
            tree = random_tree(source, source.randrange(9))
            free = self.ledger.cache.pages.num_free
            if len(held) + len(tree) > 48:
                continue
            if self.ledger.cache.reserve(row, len(held) + len(tree)):
                trees[row] = tree
            else:
                assert self.ledger.cache.pages.num_free == free
        if trees:
            self.ledger.step(trees, {row: random_path(source, tree) for row, tree in trees.items()}, tail=tail)

    @rule(row=ROWS, part=st.floats(0, 1))
    def rollback(self, row: int, part: float) -> None:
        held = self.ledger.rows.get(row, [])
        floor = self.ledger.floor.get(row, 0)
        length = floor + int(part * (len(held) - floor))
        if row in self.ledger.rows:
            self.ledger.cache.rollback(
                torch.tensor([row], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
            )
            self.ledger.rows[row] = held[:length]

    @rule(source=ROWS, row=ROWS, part=st.floats(0, 1))
    def fork(self, source: int, row: int, part: float) -> None:
        held = self.ledger.rows.get(source)
        if held is None or row in self.ledger.rows:
            return
        length = int(part * len(held))
        if self.ledger.cache.fork(source, row, length):
            self.ledger.rows[row] = held[:length]
            shared = length - length % self.ledger.cache.page_size
            self.ledger.floor[row] = max(shared, self.ledger.floor.get(row, 0))
            self.ledger.floor[source] = max(shared, self.ledger.floor.get(source, 0))

    @precondition(lambda self: self.ledger.rows)
    @rule(pick=st.integers(0, 4))
    def release(self, pick: int) -> None:
        self.ledger.release(sorted(self.ledger.rows)[pick % len(self.ledger.rows)])

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.check()

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.cache.release(range(5))
            assert self.ledger.cache.pages.num_used == 0


TestCachePrograms = CachePrograms.TestCase
TestCachePrograms.settings = settings(max_examples=25, stateful_step_count=20, deadline=None, derandomize=True)
