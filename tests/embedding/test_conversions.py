"""Conversions between layouts of drafts: round trips against slow oracles, and clear errors."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_fast.embedding import (
    chains_from_flat,
    choices_from_parents,
    flat_from_chains,
    links_from_parents,
    mask_from_parents,
    parent_first,
    parents_from_choices,
    parents_from_links,
    parents_from_mask,
    parents_from_paths,
    paths_from_parents,
)
from specdec_kernels import tree_plan

Parents = list[int]


@st.composite
def ordered_trees(draw: Any, most: int = 14) -> Parents:
    nodes = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))]


@st.composite
def shuffled_trees(draw: Any) -> Parents:
    """Trees whose root is node 0 and whose other nodes are in any order."""
    own = draw(ordered_trees())
    order = [0, *draw(st.permutations(range(1, len(own))))]
    place = {node: at for at, node in enumerate(order)}
    return [-1 if node == 0 else place[own[node]] for node in order]


def seen_by(parents: Parents, node: int) -> set[int]:
    return {node} | (set() if parents[node] < 0 else seen_by(parents, parents[node]))


def children(parents: Parents, node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


@given(shuffled_trees())
@settings(max_examples=150, deadline=None)
def test_links(parents: Parents) -> None:
    """The layout of SGLang, against a search for children."""
    node_index, first, following = (part.tolist() for part in links_from_parents(parents))
    assert node_index == list(range(len(parents)))
    for node in range(len(parents)):
        linked, at = [], first[node]
        while at >= 0:
            linked.append(at)
            at = following[at]
        assert linked == children(parents, node)
    assert parents_from_links(torch.tensor(first), torch.tensor(following)).tolist() == parents


@given(ordered_trees())
@settings(max_examples=50, deadline=None)
def test_links_are_those_of_the_engine_s_plan(parents: Parents) -> None:
    plan = tree_plan(torch.tensor(parents, dtype=torch.int32), torch.tensor([0, len(parents)], dtype=torch.int32))
    _, first, following = links_from_parents(parents)
    assert torch.equal(first, plan.first_child.long()) and torch.equal(following, plan.next_sibling.long())


@given(shuffled_trees())
@settings(max_examples=150, deadline=None)
def test_masks(parents: Parents) -> None:
    mask = mask_from_parents(parents)
    assert [set(row.nonzero().flatten().tolist()) for row in mask] == [
        seen_by(parents, node) for node in range(len(parents))
    ]
    assert parents_from_mask(mask).tolist() == parents


@given(shuffled_trees())
@settings(max_examples=150, deadline=None)
def test_paths(parents: Parents) -> None:
    """The paths of EAGLE and Medusa, against the ancestors of every leaf."""
    paths = paths_from_parents(parents)
    leaves = [node for node in range(len(parents)) if not children(parents, node)]
    assert len(paths) == len(leaves) and paths.shape[1] == max(len(seen_by(parents, leaf)) for leaf in leaves)
    for leaf, path in zip(leaves, paths.tolist()):
        kept = [node for node in path if node >= 0]
        assert path == kept + [-1] * (len(path) - len(kept))
        assert kept[0] == 0 and kept[-1] == leaf and set(kept) == seen_by(parents, leaf)
    assert parents_from_paths(paths).tolist() == parents
    assert parents_from_paths([[node for node in path if node >= 0] for path in paths.tolist()]).tolist() == parents


@given(ordered_trees(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_choices(parents: Parents, source: Any) -> None:
    ranks = [0] * len(parents)
    for node in range(len(parents)):
        below = children(parents, node)
        for child, rank in zip(below, source.sample(range(20), len(below))):
            ranks[child] = rank
    choices = choices_from_parents(parents, ranks)
    assert [len(choice) for choice in choices] == [len(seen_by(parents, node)) - 1 for node in range(1, len(parents))]
    source.shuffle(choices)
    found, found_ranks, order = parents_from_choices(choices)
    assert [choices[place] for place in order] == choices_from_parents(found, found_ranks)
    assert sorted(choices) == sorted(choices_from_parents(parents, ranks)) and found_ranks[0] == 0
    assert all(parent < node for node, parent in enumerate(found))
    depths = [len(choices[place]) for place in order]
    assert depths == sorted(depths)  # Medusa's order
    again, again_ranks, _ = parents_from_choices(choices_from_parents(parents))
    assert choices_from_parents(again, again_ranks) == choices_from_parents(again)


@given(shuffled_trees())
@settings(max_examples=150, deadline=None)
def test_parent_first(parents: Parents) -> None:
    ordered, order = parent_first(parents)
    assert all(parent < node for node, parent in enumerate(ordered)) and sorted(order) == list(range(len(parents)))
    for node, parent in enumerate(ordered):
        assert (-1 if parent < 0 else order[parent]) == parents[order[node]]
    for a, b in combinations(range(len(order)), 2):
        assert ordered[a] != ordered[b] or order[a] < order[b]  # siblings keep their order
    if all(parent < node for node, parent in enumerate(parents)):
        assert (ordered, order) == (parents, list(range(len(parents))))


@given(st.lists(shuffled_trees(), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_batches_of_a_fixed_size(trees: list[Parents]) -> None:
    """Shorter trees leave nodes at the end unused, and every tree is as it is alone."""
    width = max(map(len, trees))
    batch = torch.tensor([tree + [-1] * (width - len(tree)) for tree in trees])
    links, mask = links_from_parents(batch, unused=True), mask_from_parents(batch, unused=True)
    assert links.node_index.tolist() == torch.arange(len(trees) * width).view(-1, width).tolist()
    assert torch.equal(parents_from_links(links.next_token, links.next_sibling, unused=True), batch)
    assert torch.equal(parents_from_mask(mask, unused=True), batch)
    for own, first, following, seen in zip(trees, links.next_token, links.next_sibling, mask):
        nodes, alone = len(own), links_from_parents(own)
        assert torch.equal(first[:nodes], alone.next_token) and torch.equal(following[:nodes], alone.next_sibling)
        assert torch.equal(seen[:nodes, :nodes], mask_from_parents(own))
    ordered, order = parent_first(batch[0])
    assert len(order) == len(trees[0]) == len(ordered)


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=6), st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_flat_chains(chains: list[list[int]], extra: int) -> None:
    width = max(map(len, chains), default=0)
    padded = torch.tensor([chain + [-1] * (width - len(chain)) for chain in chains]).view(len(chains), width)
    flat, ends = flat_from_chains(padded)
    assert flat.tolist() == [token for chain in chains for token in chain]
    assert ends.tolist() == [sum(map(len, chains[: row + 1])) for row in range(len(chains))]
    assert flat.dtype == ends.dtype == torch.int32
    assert torch.equal(flat_from_chains(padded, [len(chain) for chain in chains])[0], flat)
    tokens, lengths = chains_from_flat(flat, ends)
    assert torch.equal(tokens.long(), padded) and lengths.tolist() == [len(chain) for chain in chains]
    wide, _ = chains_from_flat(flat, ends, width + extra)
    assert wide.shape == (len(chains), width + extra) and torch.equal(wide[:, :width], tokens)
    assert wide[:, width:].eq(-1).all()


BAD_PARENTS = [
    ([0, 0], "node 0: got parent 0; expected -1, since node 0 is the root"),
    ([-1, 2, 1], "got a cycle of parents, .* -> .* -> .*; expected a path to node 0"),
    ([-1, 1], "node 1: got a cycle of parents, 1 -> 1"),
    ([-1, 0, -1], "node 2: got an orphan, a node without a parent.*pass unused=True"),
    ([-1, 7], "node 1: got parent 7; expected a node from 0 to 1, or -1"),
    ([], r"expected integers \[n\] or \[B, n\] with a root in front"),
]


@pytest.mark.parametrize(("parents", "words"), BAD_PARENTS)
@pytest.mark.parametrize("convert", [links_from_parents, mask_from_parents, paths_from_parents, choices_from_parents])
def test_parents_that_are_no_tree(convert: Any, parents: Parents, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert(parents)
    if "orphan" not in words:
        with pytest.raises(ValueError, match=words):
            parent_first(parents)


def test_a_bad_tree_of_a_batch_is_named() -> None:
    with pytest.raises(ValueError, match="tree 1, node 2: got an orphan"):
        links_from_parents(torch.tensor([[-1, 0, 1], [-1, 0, -1]]))
    for one_tree in (paths_from_parents, parent_first, choices_from_parents):
        with pytest.raises(ValueError, match="expected one tree"):
            one_tree(torch.tensor([[-1, 0]]))  # type: ignore[operator]


BAD_LINKS = [
    ([1, -1, -1], [-1, -1, -1], "node 2: got an orphan"),
    ([1, 0, -1], [-1, 2, -1], "node 0: got parent 1"),
    ([1, 2, 1], [-1, -1, -1], "node 1: got two links to it"),
    ([1, -1, 3, -1], [-1, -1, -1, 2], "got a cycle|got an orphan"),
    ([4, -1, -1], [-1, -1, -1], "links: got 4; expected -1, or a node from 0 to 2"),
    ([1, -1], [-1, -1, -1], "expected equal shapes"),
]


@pytest.mark.parametrize(("first", "following", "words"), BAD_LINKS)
def test_links_that_are_no_tree(first: list[int], following: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parents_from_links(torch.tensor(first), torch.tensor(following))


def test_masks_that_are_no_tree() -> None:
    mask = mask_from_parents([-1, 0, 1])
    for row, column, words in ((1, 1, "node 1: got that it does not see node 1"), (2, 0, "does not see node 0")):
        wrong = mask.clone()
        wrong[row, column] = False
        with pytest.raises(ValueError, match=words):
            parents_from_mask(wrong)
    seeing = mask.clone()
    seeing[0, 2] = True
    with pytest.raises(ValueError, match=r"mask: node|cycle|root"):
        parents_from_mask(seeing)
    with pytest.raises(ValueError, match="node 1: got an orphan"):
        parents_from_mask(torch.eye(2, dtype=torch.bool))
    for wrong_kind in (mask.float(), mask[:2], torch.ones(3, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"compare an additive mask with 0 \(mask == 0\)"):
            parents_from_mask(wrong_kind)


BAD_PATHS: list[tuple[list[list[int]], str]] = [
    ([[1, 2]], "path 0: got .*; expected node 0, the root, in front"),
    ([[0, -1, 2]], "then other nodes, then -1 only"),
    ([[0, 1, 2], [0, 2]], "node 2: got parents 1 and 0; expected one parent"),
    ([[0, 1, 2, 1]], "node 1: got parents 0 and 2"),
    ([[0, 2]], "node 1: got an orphan"),
    ([[0, 1, 0]], "got node 0; expected nodes from 1"),
    ([], "expected at least one"),
]


@pytest.mark.parametrize(("paths", "words"), BAD_PATHS)
def test_paths_that_are_no_tree(paths: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parents_from_paths(paths)


def test_choices_that_are_no_tree() -> None:
    for choices, words in (
        ([(0,), (1, 0)], r"got \(1, 0\) without its parent \(1,\)"),
        ([(0,), (0,)], r"got \(0,\) twice"),
        ([()], "expected a tuple of ranks >= 0"),
        ([(-1,)], "expected a tuple of ranks >= 0"),
    ):
        with pytest.raises(ValueError, match=words):
            parents_from_choices(choices)
    with pytest.raises(ValueError, match="ranks: got 1; expected 2"):
        choices_from_parents([-1, 0], [0])


def test_flat_chains_that_do_not_fit() -> None:
    flat = torch.tensor([1, 2, 3])
    for ends, words in (([2, 1], "never decrease"), ([0, 2], "end at 3"), ([0, 3, 3, 4], "end at 3")):
        with pytest.raises(ValueError, match=words):
            chains_from_flat(flat, torch.tensor(ends))
    with pytest.raises(ValueError, match="width: got 1 and a chain of 2 tokens"):
        chains_from_flat(flat, torch.tensor([2, 3]), 1)
    with pytest.raises(ValueError, match=r"expected \[B, K\]"):
        flat_from_chains(flat)
    with pytest.raises(ValueError, match="expected 1 numbers from 0 to 3"):
        flat_from_chains(flat[None], [4])


def test_a_medusa_tree_of_the_paper() -> None:
    parents, ranks, order = parents_from_choices([(0,), (0, 0), (1,), (0, 1)])
    assert (parents, ranks, order) == ([-1, 0, 0, 1, 1], [0, 0, 1, 0, 1], [0, 2, 1, 3])
    assert paths_from_parents(parents).tolist() == [[0, 2, -1], [0, 1, 3], [0, 1, 4]]
    assert links_from_parents(parents).next_token.tolist() == [1, 3, -1, -1, -1]
    assert links_from_parents(parents).next_sibling.tolist() == [-1, 2, -1, 4, -1]
