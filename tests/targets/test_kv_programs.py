"""Random programs of a target's cache (prefill, trees, rollback, fork, release) against a fresh forward pass."""

from __future__ import annotations

import random

import pytest
import torch
from oracles import models
from oracles.kv_recompute import holds
from oracles.ledger import random_path, random_tree

from specdec_fast.core.draft import Draft
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_kernels import tree_plan


class Program:
    """A target, and the tokens that its rows must hold."""

    def __init__(self, target: HuggingFaceTarget, seed: int) -> None:
        self.target, self.random = target, random.Random(seed)
        self.rows: dict[int, list[int]] = {}
        self.floor: dict[int, int] = {}  # pages below are shared

    def some(self) -> list[int]:
        held = list(self.rows)
        return self.random.sample(held, self.random.randrange(1, len(held) + 1)) if held else []

    def tokens(self, most: int) -> list[int]:
        return [self.random.randrange(96) for _ in range(self.random.randrange(1, most))]

    def join(self) -> None:
        free = [row for row in range(4) if row not in self.rows]
        if free:
            self.rows[free[0]] = []
            self.extend([free[0]], 40)

    def extend(self, rows: list[int], most: int = 8) -> None:
        fed = {row: self.tokens(most) for row in rows}
        offsets = [0]
        for row, tokens in fed.items():
            offsets.append(offsets[-1] + len(tokens))
            assert self.target.cache.reserve(row, len(self.rows[row]) + len(tokens))
            self.rows[row].extend(tokens)
        self.target.extend(
            torch.tensor(rows, dtype=torch.int32),
            torch.tensor([token for tokens in fed.values() for token in tokens]),
            torch.tensor(offsets, dtype=torch.int32),
            logits=False,
        )

    def tree(self, rows: list[int]) -> None:
        trees, paths = [], []
        for row in rows:
            parents = random_tree(self.random, self.random.randrange(1, 9))
            trees.append(([self.random.randrange(96) for _ in parents], parents))
            paths.append(random_path(self.random, parents))
            assert self.target.cache.reserve(row, len(self.rows[row]) + len(parents))
        draft = Draft.trees(rows, trees)
        _, slots = self.target.score(draft, tree_plan(draft.parents, draft.offsets))
        packed = torch.full((len(rows), max(map(len, paths))), -1, dtype=torch.int32)
        for at, (row, (tokens, _), path) in enumerate(zip(rows, trees, paths, strict=True)):
            packed[at, : len(path)] = torch.tensor(path) + int(draft.offsets[at])
            self.rows[row].extend(tokens[node] for node in path)
        accepted = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32)
        self.target.cache.commit(draft.rows, slots, packed, accepted)

    def rollback(self, row: int) -> None:
        length = self.random.randrange(self.floor.get(row, 0), len(self.rows[row]) + 1)
        self.target.cache.rollback(torch.tensor([row], dtype=torch.int32), torch.tensor([length], dtype=torch.int32))
        del self.rows[row][length:]

    def fork(self, row: int) -> None:
        free = [other for other in range(4) if other not in self.rows]
        if free:
            length = self.random.randrange(len(self.rows[row]) + 1)
            assert self.target.cache.fork(row, free[0], length)
            self.rows[free[0]] = self.rows[row][:length]
            shared = length - length % self.target.cache.page_size
            for one in (row, free[0]):
                self.floor[one] = max(shared, self.floor.get(one, 0))

    def release(self, row: int) -> None:
        self.target.cache.release([row])
        del self.rows[row]
        self.floor.pop(row, None)

    def step(self) -> int:
        """Takes one random action, and returns the row that it changed most."""
        if len(self.rows) < 2:
            self.join()
        row = self.random.choice(list(self.rows))
        if len(self.rows[row]) > 130:
            self.release(row)
        else:
            action = self.random.choices(
                ["join", "extend", "tree", "rollback", "fork", "release"], [1, 2, 6, 2, 2, 0.5]
            )[0]
            short = [one for one in self.some() if len(self.rows[one]) < 130] or [row]
            {
                "join": self.join,
                "extend": lambda: self.extend(short),
                "tree": lambda: self.tree(short),
                "rollback": lambda: self.rollback(row),
                "fork": lambda: self.fork(row),
                "release": lambda: self.release(row),
            }[action]()
        return row


@pytest.mark.parametrize(
    ("family", "page_size", "whole"),
    [("llama", 1, False), ("llama", 7, None), ("gemma2", 16, False), ("gpt2", 256, False), ("mistral", 5, False)],
)
def test_random_programs_store_the_same_as_a_fresh_pass(family: str, page_size: int, whole: bool | None) -> None:
    pages = 4 * -(-160 // page_size) + 9
    target = HuggingFaceTarget(
        models.own(family), max_length=160, max_rows=4, page_size=page_size, num_pages=pages, fused_forward=whole
    )
    program = Program(target, seed=page_size)
    for _ in range(50):
        program.step()
        for row, tokens in program.rows.items():
            holds(target, row, tokens, models.untouched(family))
    for row in list(program.rows):
        program.release(row)
    assert target.cache.pages.num_used == 0
