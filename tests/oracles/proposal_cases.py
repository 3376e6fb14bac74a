"""Ragged batches of draft trees for the operators on ordered proposals, and decoding with them step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import distribution_stats, draft_sample, tree_plan
from specdec_kernels.random import gumbel

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF = float("inf")
Verify = Callable[..., tuple[Tensor, Tensor, Tensor]]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dist(logits: Tensor, t: float = 1.0) -> tuple[Tensor, ...]:
    """Returns a distribution of logits at one temperature, as the operators take it."""
    rows = len(logits)
    zero = torch.zeros(rows, dtype=torch.int32)
    return (logits, *distribution_stats(logits, torch.full((rows,), t), zero, torch.ones(rows), torch.zeros(rows)))


@st.composite
def proposals(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES) -> dict[str, Any]:
    """Draws ragged rows, all proposal kinds, several draft distributions in one node, four dtypes for each side, mapped
    draft vocabularies.
    """
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def pick(choices: list[float], count: int) -> Tensor:
        return torch.tensor(choices)[torch.randint(0, len(choices), (count,), generator=g)]

    counts = draw(st.lists(st.sampled_from([0, 1, 2, 4, 7]), max_size=4))
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    nodes = offsets[-1] + draw(st.integers(0, 2))
    vocab = draw(st.sampled_from([2, 3, 9, 33, 1000, 1024, 1025, 3000]))
    width = draw(st.sampled_from([vocab, vocab, max(1, vocab // 2)]))
    dists = draw(st.integers(1, 3))
    mapped = draw(st.sampled_from(["same", "sorted", "shuffled"]))
    token_ids = None
    if mapped != "same":
        token_ids = torch.randperm(vocab, generator=g)[:width]
        token_ids = token_ids.sort().values if mapped == "sorted" else token_ids

    def sampled(rows: int, columns: int, finite: bool) -> tuple[Tensor, ...]:
        level = torch.randn(rows, columns + 2, generator=g) * draw(st.sampled_from([0.0, 1.0, 5.0]))
        if draw(st.booleans()):
            level[torch.rand(level.shape, generator=g) < 0.5] = -INF
        if rows and not finite and draw(st.sampled_from([False, False, True])):
            level[int(torch.randint(0, rows, (1,), generator=g))] = float("nan")
        level = level.to(draw(st.sampled_from(dtypes)))[:, :columns]
        cuts = pick([0, 0, 5], rows).int(), pick([1, 1, 0.8], rows), pick([0, 0, 0.1], rows)
        return level, *distribution_stats(level, pick([0, 0.5, 1, 1], rows), *cuts)

    target, draft = sampled(nodes, vocab, False), sampled(dists, width, draw(st.booleans()))
    parents = torch.full((nodes,), -1, dtype=torch.int32)
    for start, stop in zip(offsets, offsets[1:], strict=False):
        for node in range(start + 1, stop):
            parents[node] = int(torch.randint(0, node - start, (1,), generator=g))
    marks = torch.randint(0, 4, (nodes,), generator=g, dtype=torch.int8)
    dist_index = torch.randint(0, dists, (nodes,), generator=g, dtype=torch.int32)
    zero = torch.zeros(nodes, dtype=torch.int32)
    rows = tuple(part[dist_index.long()] for part in draft)
    tokens = draft_sample(*rows, torch.arange(nodes), zero, zero)
    tokens = tokens if token_ids is None else token_ids[tokens]
    free = (marks == 0) | (torch.rand(nodes, generator=g) < 0.1)
    tokens = torch.where(free, torch.randint(0, vocab, (nodes,), generator=g), tokens)
    if draw(st.sampled_from([False, False, True])):
        draft, token_ids, marks = None, None, marks * 0  # type: ignore[assignment]
    plan = tree_plan(parents, int32(offsets))
    noise = [gumbel(torch.randint(0, 2**32, (len(counts), size), generator=g)) for size in (-(-vocab // 1024), vocab)]
    return {
        "tokens": tokens,
        "offsets": int32(offsets),
        "first_child": plan.first_child,
        "next_sibling": plan.next_sibling,
        "proposal_kinds": marks,
        "dist_index": torch.where(marks == 0, -1, dist_index).int(),
        "target": target,
        "draft": draft,
        "token_ids": token_ids,
        "score_only": torch.rand(nodes, generator=g) < 0.2 if draw(st.booleans()) else None,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (len(counts),), generator=g),
        "root_positions": torch.randint(0, 2**31 - 1, (len(counts),), generator=g, dtype=torch.int32),
        "uniforms": torch.rand(nodes, generator=g) if draw(st.booleans()) else None,
        "gumbel_noise": None if draw(st.booleans()) else tuple(noise),
    }


def fixed(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the thresholds."""
    return {
        key: case[key]
        for key in case
        if key not in ("seeds", "root_positions", "uniforms", "gumbel_noise", "max_depth")
    }


def error_of(case: dict[str, Any]) -> float:
    """Returns the rounding error of one weight; one float32 side rounds as float32."""
    return max(torch.finfo(part[1].dtype).eps for part in (case["target"], case["draft"]) if part is not None)


GOOD: dict[str, Any] = {
    "tokens": torch.tensor([0, 1, 2, 3]),
    "offsets": int32([0, 4]),
    "first_child": int32([1, 3, -1, -1]),
    "next_sibling": int32([-1, 2, -1, -1]),
    "proposal_kinds": torch.tensor([0, 1, 0, 0], dtype=torch.int8),
    "dist_index": int32([-1, 0, -1, -1]),
    "target": dist(torch.zeros(4, 4)),
    "draft": dist(torch.zeros(1, 4)),
    "token_ids": None,
    "score_only": None,
    "seeds": torch.tensor([1]),
    "root_positions": int32([5]),
    "max_depth": 2,
}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tokens": torch.tensor([0, 4, 2, 1])}, r"tokens\[1\] is 4.*\[0, 4\)"),
    ({"tokens": torch.tensor([0, -1, 2, 1])}, r"tokens\[1\] is -1"),
    ({"dist_index": int32([-1, 1, -1, -1])}, r"dist_index\[1\] is 1"),
    ({"draft": None}, r"proposal_kinds\[1\] is 1.*no draft distributions"),
    ({"proposal_kinds": torch.tensor([0, 4, 0, 0], dtype=torch.int8)}, r"proposal_kinds\[1\] is 4; expected a kind"),
    ({"max_depth": 1}, r"2 draft tokens deep.*larger max_depth"),
    ({"first_child": int32([0, -1, -1, -1])}, r"first_child\[0\] is 0.*later node"),
    ({"next_sibling": int32([-1, 4, -1, -1])}, r"next_sibling\[1\] is 4.*later node"),
    ({"offsets": int32([0, 5])}, "offsets"),
    ({"target": dist(torch.zeros(3, 4))}, "target logits has 3 rows"),
    ({"target": torch.zeros(4, 4)}, "distribution_stats"),
    ({"draft": dist(torch.zeros(1, 5))}, "5 columns"),
    ({"token_ids": torch.tensor([0, 1, 2, 4])}, r"token_ids\[3\] is 4"),
    ({"score_only": torch.zeros(3, dtype=torch.bool)}, r"score_only.*shape"),
    ({"seeds": int32([1])}, r"seeds.*torch.int64"),
    ({"uniforms": torch.zeros(2)}, r"uniforms.*shape"),
    ({"gumbel_noise": (torch.zeros(1, 1), torch.zeros(1, 3))}, r"gumbel_noise of tokens.*shape"),
]


def decode(verify: Verify, p: Tensor, q: Tensor, requests: int, wanted: int, uniforms_of: Any = None) -> Tensor:
    """Returns the first tokens [requests, wanted] of many requests with trees of four draft tokens, as in an engine.

    The root has two children: a token sampled without the draft's best one, and that best one. The former has two
    children, sampled without replacement. p, q: [V, V] logits after each last token; texts begin with token 0.
    uniforms_of: called with (seeds, positions of the roots [requests], nodes per tree) for uniforms [requests, nodes]
    in place of the keyed ones.
    """
    seeds = torch.arange(requests) * 7919 + 3
    text = torch.zeros(requests, wanted + 4, dtype=torch.int64)
    size, row = torch.ones(requests, dtype=torch.int64), torch.arange(requests)
    parents = torch.tensor([-1, 0, 0, 1, 1], dtype=torch.int32).repeat(requests)
    offsets = torch.arange(0, requests * 5 + 1, 5, dtype=torch.int32)
    plan = tree_plan(parents, offsets)
    marks = torch.tensor([0, 3, 0, 1, 2], dtype=torch.int8).repeat(requests)
    q_dist, best = dist(q), q.argmax(1)

    def sampled(before: Tensor, without: Tensor | None, place: int, position: Tensor) -> Tensor:
        logits = q[before].clone()
        if without is not None:
            logits[row, without] = -INF
        return draft_sample(*dist(logits), seeds, position, torch.full((requests,), place, dtype=torch.int32))

    while bool((size <= wanted).any()):
        position = (size - 1).int()
        root = text[row, size - 1]
        best_one = best[root]
        first = sampled(root, best_one, 1, position)
        third = sampled(first, None, 3, position)
        nodes = torch.stack([root, first, best_one, third, sampled(first, third, 4, position)], 1)
        sources = torch.stack([root, root, root, first, first], 1).int()
        uniforms = None if uniforms_of is None else uniforms_of(seeds, position, 5).flatten()
        path, accepted, emitted = verify(
            nodes.flatten(), offsets, plan.first_child, plan.next_sibling, marks, sources.flatten(),
            dist(p[nodes.flatten()]), q_dist, None, None, seeds, position, uniforms, max_depth=2,
        )  # fmt: skip
        live = size <= wanted
        for depth in (1, 2):
            take = live & (depth <= accepted)
            text[row[take], size[take] + depth - 1] = nodes.flatten()[path[take, depth].long()]
        text[row[live], (size + accepted)[live]] = emitted[live]
        size = torch.where(live, size + accepted + 1, size)
    return text[:, 1 : wanted + 1]


def text_chances(p: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (count, exact probability) of all texts of this many tokens after token 0."""
    vocab, wanted = len(p), tokens.shape[1]
    every = torch.arange(vocab**wanted)
    code, chance, before = torch.zeros(len(tokens), dtype=torch.int64), torch.ones(len(every)).double(), every * 0
    probability = p.double().softmax(1)
    for place in range(wanted):
        code = code * vocab + tokens[:, place]
        digit = every // vocab ** (wanted - 1 - place) % vocab
        chance *= probability[before, digit]
        before = digit
    return torch.bincount(code, minlength=len(every)), chance
