"""Suffix structures, compiled and in Python, against a search through plain text and against each other."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from specdec_fast.retrieval import suffix_index, suffix_index_python
from specdec_kernels import FallbackWarning
from specdec_kernels.random import replay_noise

try:
    from specdec_kernels import _suffix as compiled
except ImportError:
    compiled = None  # type: ignore[assignment]
MODULES = [
    pytest.param(compiled, id="compiled", marks=pytest.mark.skipif(compiled is None, reason="no suffix extension")),
    pytest.param(suffix_index_python, id="python"),
]
both = pytest.mark.parametrize("module", MODULES)


def occurrences(texts: list[list[int]], string: list[int]) -> int:
    size = len(string)
    return sum(text[at : at + size] == string for text in texts for at in range(len(text) - size + 1))


def check_growth(
    grown: Any, texts: list[list[int]], string: list[int], depth: int, nodes: int, floor: float, absolute: bool = False
) -> None:
    """Checks that the tree holds the likeliest paths by the counts of `texts`, in order."""
    tokens, parents, expected, match = grown
    assert match == len(string) and len(tokens) == len(parents) <= nodes
    vocab = {token for text in texts for token in text}
    base = occurrences(texts, string)

    def share(path: list[int]) -> float:
        if absolute:
            return occurrences(texts, string + path) / base
        value = 1.0
        for at in range(len(path)):
            counts = {token: occurrences(texts, string + path[:at] + [token]) for token in vocab}
            value *= counts[path[at]] / max(sum(counts.values()), 1)
        return value

    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent], token])
    shares = [share(path) for path in paths[1:]]
    assert len({tuple(path) for path in paths}) == len(paths), "no path twice"
    assert all(len(path) <= depth for path in paths) and all(value >= floor - 1e-12 for value in shares)
    assert all(b <= a + 1e-12 for a, b in zip(shares, shares[1:]))
    assert expected == pytest.approx(sum(shares))
    left = [
        share([*path, token]) for path in paths if len(path) < depth for token in vocab if [*path, token] not in paths
    ]
    if len(tokens) < nodes:
        assert all(value < floor or value == 0 for value in left)
    elif shares:
        assert all(value <= shares[-1] + 1e-12 for value in left), "a likelier path was left out"


@both
@pytest.mark.parametrize("seed", range(8))
def test_the_automaton_of_a_growing_text(module: Any, seed: int) -> None:
    source = random.Random(seed)
    vocab = source.choice([1, 2, 3, 6])
    text: list[int] = []
    automaton = module.Automaton()
    for _ in range(25):
        more = [source.randrange(vocab) for _ in range(source.randrange(4))]
        automaton.extend(more)
        text += more
        assert len(automaton) == len(text) and automaton.states <= max(2 * len(text), 2)
        longest = max((n for n in range(len(text)) if occurrences([text], text[len(text) - n :]) > 1), default=0)
        assert automaton.match() == longest
        for _ in range(5):
            string = [source.randrange(vocab) for _ in range(source.randrange(1, 5))]
            assert automaton.count(string) == occurrences([text], string)
        nodes, factor = source.randrange(1, 8), source.choice([0.5, 1.0, 2.0])
        grown = automaton.grow(nodes, 1, factor, 0.1)
        if longest:
            depth = min(nodes, max(1, int(factor * longest)))
            check_growth(grown, [text], text[len(text) - longest :], depth, nodes, 0.1)
        assert automaton.grow(nodes, longest + 1, factor, 0.1)[:2] == ([], [])


@both
@pytest.mark.parametrize("factor", [0.0, 1e19, 1e300, float("inf")])
def test_any_factor_has_a_depth(module: Any, factor: float) -> None:
    """A product beyond all integers means the whole budget."""
    automaton = module.Automaton()
    automaton.extend([1, 2, 3, 4, 5, 1, 2])
    assert automaton.grow(2, 1, factor, 0.1)[0] == ([3, 4] if factor else [3])


@both
@pytest.mark.parametrize("before", [(), (2000,)])
def test_the_newest_continuations_of_a_hub_count(module: Any, before: tuple[int, ...]) -> None:
    """A token with 1,000 continuations, of which 128 are read. An old one that was seen again is among them.

    Args:
        before: Tokens before it, so that its state is a copy of another one.
    """
    automaton = module.Automaton()
    automaton.extend([token for at in range(1, 1001) for token in (*before, 0, at)] + [*before, 0, 7, 5000, 0])
    tokens, parents, _, match = automaton.grow(500, 1, 1.0, 0.0)
    assert match == 1 and parents == [0] * 128 and sorted(tokens) == [7, *range(874, 1001)]


@both
def test_continuations_that_recur_after_longer_contexts_count_as_new(module: Any) -> None:
    """1 follows 0 in two of three places, always after 2, and 200 others once each in between."""
    automaton = module.Automaton()
    automaton.extend([2, 0, 1, 3] * 100)
    for at in range(200):
        automaton.extend([1000 + at, 0, 2000 + at, 2, 0, 1, 3])
    automaton.extend([5000, 0])
    tokens, parents, _, match = automaton.grow(500, 1, 1.0, 0.0)
    assert match == 1 and parents == [0] * 128 and tokens[0] == 1


@both
def test_counts_of_a_periodic_text_are_lower_bounds(module: Any) -> None:
    """Suffix links are followed up to a limit: counts of long contexts are exact, others are lower bounds."""
    automaton = module.Automaton()
    automaton.extend([5] * 300)
    assert automaton.match() == 299 and automaton.count([5] * 290) == 11
    assert 0 < automaton.count([5]) <= 300
    assert automaton.grow(3, 1, 1.0, 0.1) == ([5], [0], 1.0, 299), (
        "behind the longest match nothing is known but one token"
    )


@both
@pytest.mark.parametrize("seed", range(8))
def test_the_tree_while_texts_are_added_and_removed(module: Any, seed: int) -> None:
    source = random.Random(seed)
    vocab, depth = source.choice([1, 2, 3, 8]), source.randrange(2, 8)
    tree, texts = module.CountedTree(depth), {}
    for _ in range(40):
        if texts and source.random() < 0.4:
            gone = source.choice(list(texts))
            assert tree.remove(gone) and not tree.remove(gone)
            del texts[gone]
        else:
            text = [source.randrange(vocab) for _ in range(source.randrange(14))]
            texts[tree.add(text)] = text
        held = list(texts.values())
        assert len(tree) == sum(map(len, held))
        for _ in range(5):
            string = [source.randrange(vocab) for _ in range(source.randrange(1, depth + 1))]
            assert tree.count(string) == occurrences(held, string)
        context = [source.randrange(vocab) for _ in range(source.randrange(9))]
        most, nodes = source.randrange(1, 9), source.randrange(1, 8)
        reach = min(most, len(context), depth - 1)
        match = next(n for n in range(reach, -1, -1) if n == 0 or occurrences(held, context[len(context) - n :]))
        grown = tree.grow(context, most, nodes, 1, 2.0, 0.1)
        assert grown[3] == match
        if match:
            below = min(nodes, max(1, 2 * match), depth - match)
            check_growth(grown, held, context[len(context) - match :], below, nodes, 0.1)
    for gone in texts:
        tree.remove(gone)
    assert len(tree) == 0 and tree.count([0]) == 0 and tree.grow([0], 4, 4, 1, 1.0, 0.0)[0] == []


def sorted_suffixes(stream: list[int]) -> list[int]:
    return sorted(range(len(stream)), key=lambda at: stream[at:])


def some_stream(source: random.Random, vocab: int) -> tuple[list[int], list[list[int]]]:
    """Returns documents, each followed by a separator (the vocabulary's size)."""
    documents = [[source.randrange(vocab) for _ in range(source.randrange(12))] for _ in range(source.randrange(1, 9))]
    return [token for document in documents for token in [*document, vocab]], documents


@both
@pytest.mark.parametrize("seed", range(12))
def test_arrays_of_documents(module: Any, seed: int) -> None:
    """Ranges and counts equal a search through the documents; no match crosses a separator."""
    source = random.Random(seed)
    vocab = source.choice([1, 2, 4])
    arrays, documents = [], []
    for width, index in ((np.uint16, np.uint32), (np.uint32, np.int64)):
        stream, own = some_stream(source, vocab)
        documents += own
        arrays.append(module.Array(np.array(stream, width), np.array(sorted_suffixes(stream), index), vocab))
        for _ in range(6):
            string = [source.randrange(vocab) for _ in range(source.randrange(1, 5))]
            low, high = arrays[-1].range(string)
            assert high - low == occurrences(own, string)
    for _ in range(12):
        context = [source.randrange(vocab) for _ in range(source.randrange(10))]
        nodes, most, fewest = source.randrange(1, 9), source.randrange(2, 7), source.randrange(1, 3)
        sizes = range(min(most, len(context)), fewest - 1, -1)
        match = next((n for n in sizes if occurrences(documents, context[len(context) - n :])), 0)
        grown = module.look_up(arrays, context, most, 5, 5000, nodes, fewest, 0.0)
        if match == 0:
            assert grown == ([], [], 0.0, 0)
        else:
            tail = context[len(context) - match :]
            check_growth(grown, documents, tail, min(5, nodes), nodes, 0.0, absolute=True)


@both
@pytest.mark.parametrize("beyond", [5, 6])
def test_ids_from_the_separator_on_are_not_found(module: Any, beyond: int) -> None:
    """Such ids mark ends of documents, and no look-up crosses them."""
    stream = [1, 2, 5, 2, 3, 5]
    array = module.Array(np.array(stream, np.uint16), np.array(sorted_suffixes(stream), np.uint32), 5)
    for string in ([beyond], [2, beyond]):
        low, high = array.range(string)
        assert low == high
        assert module.look_up([array], string, 16, 4, 100, 8, 1, 0.0) == ([], [], 0.0, 0)


@both
def test_ties_go_to_the_earlier_parent_and_the_lower_token(module: Any) -> None:
    stream = [1, 5, 9, 1, 3, 9, 1, 4, 9]
    array = module.Array(np.array(stream, np.uint16), np.array(sorted_suffixes(stream), np.uint32), 9)
    assert module.look_up([array], [1], 1, 1, 100, 3, 1, 0.0) == ([3, 4, 5], [0, 0, 0], 1.0, 1)
    assert module.look_up([array, array], [1], 1, 1, 100, 2, 1, 0.0)[0] == [3, 4]


@both
def test_a_large_range_is_sampled_evenly(module: Any) -> None:
    """2 follows in 900 of 1,000 places, and in nine tenths of 20 samples."""
    stream = ([1, 2] * 900 + [1, 3] * 100) + [4]
    array = module.Array(np.array(stream, np.uint16), np.array(sorted_suffixes(stream), np.uint32), 4)
    tokens, _, expected, match = module.look_up([array], [1], 4, 1, 20, 8, 1, 0.0)
    assert (tokens, match) == ([2, 3], 1) and expected == pytest.approx(1.0)
    one = module.look_up([array], [1], 4, 1, 20, 1, 1, 0.0)
    assert one[0] == [2] and one[2] == pytest.approx(0.9)


@both
def test_bad_arguments(module: Any) -> None:
    for made in (module.Automaton(), module.CountedTree(4)):
        for token in (-1, 2**31):
            with pytest.raises(ValueError, match=f"suffix: got token {token}; expected 0 to"):
                (made.extend if hasattr(made, "extend") else made.add)([1, token])
    with pytest.raises(ValueError, match="suffix array: "):
        module.Array(np.zeros(3, np.uint16), np.zeros(2, np.uint32), 4)
    damaged = module.Array(np.zeros(3, np.uint16), np.array([0, 1, 77], np.uint32), 4)
    with pytest.raises(IndexError, match="suffix array"):
        damaged.range([3])


@pytest.mark.skipif(compiled is None, reason="suffix extension not built")
@pytest.mark.parametrize("seed", range(6))
def test_both_agree_to_the_last_bit(seed: int) -> None:
    source = random.Random(seed)
    vocab = source.choice([2, 5, 30])
    pairs = [(module.Automaton(), module.CountedTree(9)) for module in (compiled, suffix_index_python)]
    for _ in range(30):
        text = [source.randrange(vocab) for _ in range(source.randrange(20))]
        arguments = (source.randrange(1, 30), source.randrange(1, 4), source.choice([0.5, 1.7, 4.0]), 0.05)
        results = []
        for automaton, tree in pairs:
            automaton.extend(text)
            tree.add(text)
            results.append((automaton.grow(*arguments), tree.grow(text[::-1], 6, *arguments)))
        assert results[0] == results[1]


@pytest.mark.skipif(compiled is None, reason="suffix extension not built")
@pytest.mark.parametrize("seed", range(3))
def test_both_read_the_same_continuations_of_a_hub(seed: int) -> None:
    """The texts lead through copies of states with many edges, and edges that are seen again."""
    source = random.Random(seed)
    pair, cut = (compiled.Automaton(), suffix_index_python.Automaton()), 0
    for _ in range(40):
        text = [token for _ in range(20) for token in (source.choice([0, 0, 1]), source.randrange(2, 302))] + [0]
        results = []
        for automaton in pair:
            automaton.extend(text)
            results.append(automaton.grow(400, 1, 0.5, 0.0))
        assert results[0] == results[1]
        cut += len(results[0][0]) == 128
    assert cut > 3


@pytest.mark.skipif(compiled is None, reason="suffix extension not built")
@pytest.mark.parametrize("seed", range(6))
def test_both_use_the_same_gumbel_noise(seed: int) -> None:
    """Trees under noise, from counts and from recorded distributions: the same nodes, and equal expectations up to
    rounding.
    """
    source = random.Random(seed)
    vocab, noise = source.choice([2, 5, 30]), (source.randrange(2**62), source.randrange(5000))
    text = [source.randrange(vocab) for _ in range(200)]
    stream = [*text, vocab]
    dists = np.log(np.random.default_rng(seed).dirichlet([0.5] * vocab, vocab)).astype(np.float32)
    order = np.argsort(-dists, axis=1)[:, : vocab // 2 + 1]
    results = []
    for module in (compiled, suffix_index_python):
        automaton, tree, noted = module.Automaton(), module.CountedTree(9), module.Successors()
        automaton.extend(text)
        tree.add(text)
        array = module.Array(np.array(stream, np.uint16), np.array(sorted_suffixes(stream), np.uint32), vocab)
        noted.learn(np.arange(vocab), order, np.take_along_axis(dists, order, 1))
        assert len(noted) == vocab and noted.after(vocab + 1) == []
        grown = [
            automaton.grow(20, 1, 4.0, 0.01, noise),
            tree.grow(text[:-1], 6, 20, 1, 4.0, 0.01, noise),
            module.look_up([array], text[-4:-2], 4, 5, 100, 20, 1, 0.01, noise),
            noted.grow(text[0], 5, 20, 0.01, 1.0, 0, 1.0, 0.0, noise),
            noted.grow(text[0], 5, 20, 0.01, 1.4, 3, 0.8, 0.05, noise),
            noted.grow(text[0], 5, 20, 0.0, 0.7, 0, 1.0, 0.0),
        ]
        results.append(grown)
    for one, other in zip(*results, strict=True):
        assert one[:2] == other[:2] and one[3] == other[3] and one[2] == pytest.approx(other[2])
    assert any(len(grown[0]) > 1 for grown in results[0])


@both
@pytest.mark.parametrize("top", [-0.05, -2.0])
def test_successors_at_a_low_temperature_are_the_likeliest(module: Any, top: float) -> None:
    """At T = 0.001, exp(log-probability / T) is 0 for all tokens, and the likeliest one still gets all probability."""
    noted = module.Successors()
    values = np.array([[top, -3.5]] * 3, np.float32)
    noted.learn(np.arange(3), np.array([[1, 2], [2, 0], [0, 1]]), values)
    tokens, parents, expected, _ = noted.grow(0, 3, 3, 0.05, 1000.0, 0, 1.0, 0.0)
    assert (tokens, parents) == ([1, 2, 0], [0, 1, 2]) and expected == pytest.approx(3)


@both
def test_the_gumbel_max_uses_the_replay_noise(module: Any) -> None:
    """After 1 came 2 three times and 3 once. Under noise the first is the one with the larger log(count) + noise, and
    its probability falls with the weight of unseen tokens.
    """
    tree = module.CountedTree(9)
    for text in ([1, 2], [1, 2], [1, 2], [1, 3]):
        tree.add(text)
    firsts = set()
    for seed in range(40):
        noise = replay_noise(torch.tensor([seed]), torch.tensor([8], dtype=torch.int32), 4)[0].double()
        weights = torch.tensor([3.0, 1.0]).double() * noise[2:].exp()
        won = weights / weights.sum() * torch.exp(-2 / weights)  # two distinct tokens after a match of one token
        tokens, parents, expected, _ = tree.grow([1], 4, 4, 1, 1.0, 0.0, (seed, 7))
        assert tokens == [2 + at for at in won.argsort(descending=True).tolist()] and parents == [0, 0]
        assert expected == pytest.approx(float(won.sum()), rel=1e-5)
        firsts.add(tokens[0])
    assert firsts == {2, 3}


def test_without_the_extension_python_serves_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> Any:
        if name.startswith("specdec_kernels"):
            raise ModuleNotFoundError(name)
        return suffix_index_python

    monkeypatch.setattr(suffix_index, "import_module", gone)
    suffix_index.structures.cache_clear()
    try:
        with pytest.warns(FallbackWarning, match=r"_suffix is not built; build it with"):
            assert suffix_index.structures() is suffix_index_python
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert suffix_index.structures() is suffix_index_python
    finally:
        suffix_index.structures.cache_clear()
