"""The walk of sample-and-match verification on host lists, and random trees to walk on."""

from __future__ import annotations

import random
from collections.abc import Sequence

from specdec_fast.interfaces import Acceptance

Tree = tuple[list[int], list[int]]


def random_trees(source: random.Random, rows: int, vocab: int, largest: int = 14) -> tuple[list[Tree], list[bool]]:
    """Trees with few tokens, so that siblings share tokens and paths are accepted; some nodes are score-only nodes."""
    trees, score_only = [], []
    for _ in range(rows):
        nodes = source.randrange(1, largest)
        parents = [-1, *(source.randrange(node) for node in range(1, nodes))]
        trees.append(([source.randrange(vocab) for _ in range(nodes)], parents))
        score_only.extend([False, *(source.random() < 0.15 for _ in range(nodes - 1))])
    return trees, score_only


def walk(trees: Sequence[Tree], score_only: Sequence[bool], choices: Sequence[int], answer: Acceptance) -> None:
    """Assert that an answer is the walk from each root to the first child with the target's choice."""
    start = 0
    for row, (tokens, parents) in enumerate(trees):
        path, node = [0], 0
        while True:
            children = [
                child
                for child in range(len(tokens))
                if parents[child] == node and tokens[child] == choices[start + node] and not score_only[start + child]
            ]
            if not children:
                break
            node = children[0]
            path.append(node)
        got = [index - start for index in answer.path[row].tolist() if index >= 0]
        assert got == path, f"row {row}"
        assert int(answer.num_accepted[row]) == len(path) - 1
        assert int(answer.next_token[row]) == choices[start + node]
        start += len(tokens)
