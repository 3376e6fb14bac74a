"""Tree topologies: the optimum against the paper's dynamic program and all trees; files; budgets."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import pytest

from specdec_fast.trees.static_shape import Shape, best_shape, expected_tokens, read_shape, shape_of_widths, write_shape


def optimum(rates: Sequence[Sequence[float]], nodes: int) -> float:
    """Sequoia's recursion with rates by depth: the largest expected number of tokens of a tree of this size."""

    @lru_cache(None)
    def tree(size: int, depth: int) -> float:  # a tree of `size` nodes with its root at `depth`
        return 1 + children(size - 1, depth, 0) if size else 0.0

    @lru_cache(None)
    def children(size: int, depth: int, rank: int) -> float:
        if not size or depth >= len(rates) or rank >= len(rates[depth]):
            return 0.0
        with_it = (
            rates[depth][rank] * tree(own, depth + 1) + children(size - own, depth, rank + 1)
            for own in range(1, size + 1)
        )
        return max(0.0, *with_it)

    return max(tree(size, 0) for size in range(1, nodes + 2))


def all_shapes(nodes: int) -> Iterator[Shape]:
    def grow(parents: list[int]) -> Iterator[list[int]]:
        if len(parents) == nodes + 1:
            yield parents
            return
        for parent in range(len(parents)):
            yield from grow([*parents, parent])

    for parents in grow([-1]):
        yield Shape(tuple(parents))


def some_rates(seed: int, depths: int, ranks: int) -> list[list[float]]:
    source = random.Random(seed)
    rows = []
    for _ in range(depths):
        row = [source.random() for _ in range(ranks)]
        rows.append(sorted((value / sum(row) for value in row), reverse=True))
    return rows


def test_the_best_shape_is_the_optimum_of_the_recursion() -> None:
    for seed in range(12):
        rates = some_rates(seed, 1 + seed % 4, 1 + seed % 5)
        for nodes in (1, 2, 5, 11, 17):
            assert abs(expected_tokens(best_shape(rates, nodes), rates) - optimum(rates, nodes)) < 1e-9


def test_no_shape_expects_more_tokens() -> None:
    for seed in range(4):
        rates = some_rates(seed, 4, 3)
        best = best_shape(rates, 5)
        assert expected_tokens(best, rates) >= max(expected_tokens(other, rates) for other in all_shapes(5)) - 1e-12


def test_every_first_part_of_the_best_shape_is_best_too() -> None:
    rates = some_rates(7, 5, 4)
    whole = best_shape(rates, 20)
    for nodes in range(1, 21):
        part = Shape(whole.parents[: nodes + 1])
        assert abs(expected_tokens(part, rates) - optimum(rates, nodes)) < 1e-9


def test_rates_that_rise_with_the_rank_are_noise() -> None:
    assert best_shape([[0.5, 0.6, 0.1]], 2) == best_shape([[0.5, 0.5, 0.1]], 2) == Shape((-1, 0, 0))


def test_widths_by_level_and_cuts_by_budget() -> None:
    shape = shape_of_widths((3, 2, 1))
    assert shape.parents == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9) and shape.num_nodes == 15
    assert shape.children(4)[:5] == ((1, 2, 3), (4,), (), (), ())
    assert expected_tokens(shape, [[0.5, 0.2, 0.1]]) == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("parents", "message"),
    [((-1,), "got 1 nodes"), ((0, 0), "node 0 has parent 0"), ((-1, 1), "node 1 has parent 1"), ((-1, -1), "node 1")],
)
def test_lists_that_are_not_trees(parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"tree shape: {message}"):
        Shape(parents)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "shape.json"
    write_shape(path, Shape((-1, 0, 1)), {"tokens": 2.5})
    assert read_shape(path) == Shape((-1, 0, 1))
    for text in ("", "[]", '{"format": "other", "parents": [-1, 0]}', '{"parents": 3}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"shape.json: not a file of format .* make one with `specdec tune tree`"):
            read_shape(path)
    path.write_text('{"format": "specdec tree shape 1", "parents": [-1, 5]}')
    with pytest.raises(ValueError, match=r"shape.json: tree shape: node 1 has parent 5"):
        read_shape(path)
    with pytest.raises(ValueError, match=r"missing.json: No such file"):
        read_shape(tmp_path / "missing.json")
    for rates, nodes in (([], 3), ([[]], 3), ([[0.5]], 0)):
        with pytest.raises(ValueError, match="best shape: got"):
            best_shape(rates, nodes)
    with pytest.raises(ValueError, match="rate outside"):
        best_shape([[1.2]], 3)
