"""Requests with all kinds of logits processors on ragged trees, and the logits of every node by the definitions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import ALWAYS, Additions, Forced, NodePaths, Penalties, TokenMasks


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Request:
    """One request, for the definitions."""

    prompt: list[int]
    generated: list[int]
    tokens: list[int]
    parents: list[int]
    factors: tuple[float, float, float]
    bias: dict[int, float]
    banned: dict[int, int]
    forced: dict[int, int]

    @property
    def root(self) -> int:
        return len(self.prompt) + len(self.generated) - 1

    def path(self, node: int) -> list[int]:
        found = []
        while self.parents[node] >= 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]


@st.composite
def requests(draw: st.DrawFn, vocab: int) -> Request:
    token = st.integers(0, vocab + 1)  # a few beyond the vocabulary, as for a draft with a smaller one
    prompt = draw(st.lists(token, min_size=1, max_size=6))
    size = draw(st.sampled_from([0, 1, 2, 5, 9]))
    number = st.sampled_from([-1.5, -0.25, 0.0, 0.3, 1.0, 2.0])
    return Request(
        prompt,
        draw(st.lists(token, max_size=6)),
        [draw(token) for _ in range(size)],
        [-1 if node == 0 else draw(st.integers(max(0, node - 3), node - 1)) for node in range(size)],
        (draw(st.sampled_from([1.0, 0.5, 1.3, 2.0])), draw(number), draw(number)),
        draw(st.dictionaries(token, number, max_size=3)),
        draw(st.dictionaries(token, st.sampled_from([0, 5, 9, ALWAYS]), max_size=3)),
        draw(st.dictionaries(st.integers(0, 14), token, max_size=2)),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[Request], int, list[list[bool]] | None, list[int] | None]:
    """(vocabulary, requests, tail nodes, allowed tokens of every mask, rows of logits or None for all nodes)."""
    vocab = draw(st.sampled_from([1, 3, 31, 32, 33, 70]))
    many = draw(st.lists(requests(vocab), max_size=3))
    masks = draw(st.none() | st.lists(st.lists(st.booleans(), min_size=vocab, max_size=vocab), min_size=1, max_size=3))
    tail = draw(st.integers(0, 2))
    nodes = sum(len(request.tokens) for request in many) + tail
    picked = st.lists(st.integers(0, nodes - 1), max_size=4) if nodes else st.just([])
    return vocab, many, tail, masks, draw(st.none() | picked)


def words_of(masks: list[list[bool]]) -> Tensor:
    width = -(-len(masks[0]) // 32)
    bits = [
        [sum(1 << bit for bit, ok in enumerate(mask[32 * w : 32 * w + 32]) if ok) for w in range(width)]
        for mask in masks
    ]
    return int32([[word - 2**32 if word >= 2**31 else word for word in row] for row in bits])


def arguments(many: list[Request], tail: int, nodes: list[int] | None) -> dict[str, Any]:
    """Returns the operator's arguments except logits and masks; table rows are in reverse order after an unused one."""
    size = len(many)
    paths = NodePaths(
        torch.tensor([t for r in many for t in r.tokens] + [7] * tail, dtype=torch.int64),
        int32([p for r in many for p in r.parents] + [99] * tail),
        int32([0, *accumulate(len(r.tokens) for r in many)]),
        int32([r.root for r in many]),
        None if nodes is None else int32(nodes),
    )
    ids, counts, sizes = torch.full((size + 1, 16), -5, dtype=torch.int32), torch.zeros(size + 1, 16), [0] * (size + 1)
    for index, request in enumerate(many):
        seen = Counter(request.generated)
        distinct = list(dict.fromkeys([*request.prompt, *request.generated]))
        row = size - index
        ids[row, : len(distinct)] = int32(distinct)
        counts[row, : len(distinct)] = torch.tensor([float(seen[token]) for token in distinct])
        sizes[row] = len(distinct)
    added = [
        [*((t, b, ALWAYS) for t, b in r.bias.items()), *((t, -math.inf, until) for t, until in r.banned.items())]
        for r in many
    ]
    flat = [entry for entries in added for entry in entries]
    forced = [entry for r in many for entry in r.forced.items()]
    return {
        "paths": paths,
        "penalties": Penalties(
            torch.tensor([r.factors for r in many], dtype=torch.float32).reshape(-1, 3),
            int32([size - index for index in range(size)]),
            ids,
            counts.to(torch.int32),
            int32(sizes),
        ),
        "additions": Additions(
            int32([0, *accumulate(map(len, added))]),
            int32([e[0] for e in flat]),
            torch.tensor([e[1] for e in flat], dtype=torch.float32),
            int32([e[2] for e in flat]),
        ),
        "forced": Forced(
            int32([0, *accumulate(len(r.forced) for r in many)]),
            int32([e[0] for e in forced]),
            int32([e[1] for e in forced]),
        ),
    }


def defined(row: Tensor, request: Request, node: int, allowed: list[bool] | None) -> Tensor:
    """Returns one row of logits processed by the definitions, from the whole text of the node, one scalar at a time."""
    wide = torch.float64 if row.dtype == torch.float64 else torch.float32
    path = request.path(node)
    text, new = [*request.prompt, *request.generated, *path], [*request.generated, *path]
    repetition, presence, frequency = (torch.tensor(f, dtype=torch.float32).to(wide) for f in request.factors)
    result = row.clone()
    for token in range(len(row)):
        level = row[token].to(wide)
        if token in text:
            level = level * repetition if level < 0 else level / repetition
            level = level - frequency * new.count(token)
            if token in new:
                level = level - presence
            level = level.to(row.dtype).to(wide)
        position = len(text)
        if token in request.bias:
            level = level + torch.tensor(request.bias[token], dtype=torch.float32).to(wide)
        forbidden = token in request.banned and position < request.banned[token]
        forbidden |= position in request.forced and token != request.forced[position]
        forbidden |= allowed is not None and not allowed[token]
        result[token] = (level - math.inf if forbidden else level).to(row.dtype)
    return result


def check_nodes(process: Callable[..., Tensor], dtype: torch.dtype, batch: Any, seed: int) -> None:
    """Checks `process` against the definitions on every row of logits; padding must not change."""
    vocab, many, tail, masks, nodes = batch
    source = torch.Generator().manual_seed(seed)
    owners = [(request, node) for request in many for node in range(len(request.tokens))] + [(None, 0)] * tail
    follows = list(range(len(owners))) if nodes is None else nodes
    padded = (torch.randn(len(follows), vocab + 5, generator=source, dtype=torch.float64) * 3).to(dtype)
    if len(follows) and vocab > 2:
        padded[0, :2] = torch.tensor([math.nan, -math.inf])
    before = padded.clone()
    given_masks, index = None, [-1] * len(follows)
    if masks is not None:
        index = [at % (len(masks) + 1) - 1 for at in range(len(follows))]
        given_masks = TokenMasks(words_of(masks), int32(index))
    process(padded[:, :vocab], masks=given_masks, **arguments(many, tail, nodes))
    assert torch.equal(padded[:, vocab:], before[:, vocab:]), "padding was written"
    for at, follow in enumerate(follows):
        request, node = owners[follow]
        want = before[at, :vocab]
        if request is not None:
            allowed = masks[index[at]] if masks is not None and index[at] >= 0 else None
            want = defined(want, request, node, allowed)
        assert torch.equal(padded[at, :vocab].nan_to_num(nan=12345.0), want.nan_to_num(nan=12345.0)), (at, node)
