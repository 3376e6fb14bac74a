"""Sample calls of the operators for distributions, drafting and verification; see `agreement.SAMPLES`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ops.distribution_stats import distribution_stats
from ..ops.process_logits import ALWAYS, Additions, NodePaths, Penalties, TokenMasks
from ..ops.tree_grow import Growth
from .samples_attention import (
    DTYPES,
    Call,
    Sample,
    Sizes,
    int32,
    make_plan,
    offsets,
    parents,
    random,
    size_of,
    to_default_device,
)


def logits(sizes: Sizes) -> Tensor:
    """Returns the logits of all nodes, [rows * nodes, vocab]."""
    return random(sizes, sizes.rows * sizes.nodes, sizes.vocab, scale=2.0)


def settings(count: int, top_p: float = 1.0) -> tuple[Tensor, ...]:
    """Returns temperature, top-k, top-p and min-p of `count` rows."""
    return torch.ones(count), int32([0] * count), torch.full((count,), top_p), torch.zeros(count)


def dist(matrix: Tensor, top_p: float = 1.0) -> tuple[Tensor, ...]:
    """Returns logits and their statistics, the five parts of a distribution."""
    return (matrix, *distribution_stats(matrix, *settings(len(matrix), top_p)))


def seeds(count: int) -> tuple[Tensor, Tensor]:
    """Returns request seeds int64 [count] and positions int32 [count]."""
    return torch.arange(count) + 11, torch.arange(count, dtype=torch.int32) + 5


def statistics(sizes: Sizes) -> Call:
    """Statistics of the logits of all nodes."""
    matrix = logits(sizes)
    return Call((matrix, *settings(len(matrix), sizes.top_p)), bytes=size_of(matrix))


def replay(sizes: Sizes) -> Call:
    """One replay sample per node."""
    matrix, inv_t, _, cut, tie = dist(logits(sizes))
    return Call((matrix, inv_t, cut, tie, *seeds(len(matrix))), bytes=size_of(matrix))


def draw(sizes: Sizes) -> Call:
    """One draft sample per node."""
    target = dist(logits(sizes))
    return Call((*target, *seeds(len(target[0])), torch.arange(len(target[0])).int()), bytes=size_of(target[0]))


def likely_tokens(sizes: Sizes, matrix: Tensor) -> Tensor:
    """Returns a token for every node: the most likely one after the preceding node of the batch, int64 [M]."""
    return matrix.float().argmax(1).roll(1)


def chain(sizes: Sizes) -> Call:
    """Chains sampled from a draft distribution near the target's."""
    matrix = logits(sizes)
    count = len(matrix)
    source = (torch.arange(count) - 1).clamp(min=0).int()
    arguments = (likely_tokens(sizes, matrix), offsets(sizes), torch.ones(count, dtype=torch.int8), source)
    sides = dist(matrix, sizes.top_p), dist(draft_logits(sizes, matrix))
    last = 2 * size_of(matrix) // sizes.nodes  # both distributions at the end of each chain
    return Call((*arguments, *sides, None, *seeds(sizes.rows)), {"max_depth": sizes.nodes - 1}, bytes=last)


def draft_logits(sizes: Sizes, matrix: Tensor) -> Tensor:
    """Returns logits near the target's, so that the target often accepts."""
    return (matrix.float() + 0.3 * random(sizes, *matrix.shape).float().flip(0)).to(matrix.dtype)


def tree(sizes: Sizes, kinds: tuple[int, int] | None = None) -> Call:
    """Binary trees of deterministic proposals, or of proposals of two kinds with draft distributions."""
    matrix, plan = logits(sizes), make_plan(sizes)
    count = len(matrix)
    guess = matrix if kinds is None else draft_logits(sizes, matrix)
    first = guess.float().topk(2, 1).indices
    tokens = torch.zeros(count, dtype=torch.int64)
    for node, parent in enumerate(parents(sizes).tolist()):
        if parent >= 0:
            tokens[node] = first[node - node % sizes.nodes + parent, (node % sizes.nodes + 1) % 2]
    proposal_kinds, source, draft = torch.zeros(count, dtype=torch.int8), torch.zeros(count, dtype=torch.int32), None
    if kinds is not None:
        proposal_kinds = torch.tensor(kinds, dtype=torch.int8)[(torch.arange(count) % sizes.nodes + 1) % 2]
        source, draft = (
            (parents(sizes).clamp(min=0) + offsets(sizes)[:-1].repeat_interleave(sizes.nodes)),
            dist(guess),
        )
    links = offsets(sizes), plan.first_child, plan.next_sibling
    head = (tokens, *links, proposal_kinds, source, dist(matrix), draft, None, None)
    return Call((*head, *seeds(sizes.rows)), {"max_depth": sizes.nodes}, bytes=size_of(matrix))


def thresholds(call: Call, count: int) -> Call:
    """The call of the operator that shows a rule's thresholds: the first `count` arguments, without randomness."""
    return Call(call.arguments[:count], bytes=call.bytes)


def chain_logits(sizes: Sizes) -> Call:
    """The chain sample with the target's logits in place of its distributions."""
    call = chain(sizes)
    *nodes, target, draft, ids, own, roots = call.arguments
    arguments = (*nodes, target[0], settings(len(target[0]), sizes.top_p), draft, ids, own, roots)
    return replace(call, arguments=arguments, bytes=size_of(target[0]) + call.bytes // 2)


def replay_walk(sizes: Sizes) -> Call:
    """Replay verification of binary trees."""
    tokens, bounds, child, sibling, _, _, target, *_ = tree(sizes).arguments
    dists = settings(len(target[0]), sizes.top_p)
    arguments = (tokens, bounds, child, sibling, None, target[0], dists, *seeds(sizes.rows))
    return Call(arguments, {"max_depth": sizes.nodes}, bytes=size_of(target[0]))


def typical(sizes: Sizes) -> Call:
    """Typical acceptance of binary trees."""
    tokens, bounds, child, sibling, _, _, target, _, _, score_only, *keys = tree(sizes).arguments
    options = {"epsilon": 0.09, "delta": 0.3, "max_depth": sizes.nodes}
    return Call((tokens, bounds, child, sibling, target, score_only, *keys), options, bytes=size_of(target[0]))


def expand(sizes: Sizes) -> Call:
    """Children of all nodes, and the best of each tree."""
    matrix, inv_t, _, cut, tie = dist(logits(sizes))
    scores = torch.linspace(-3, 0, len(matrix), dtype=inv_t.dtype)
    return Call((matrix, inv_t, cut, tie, offsets(sizes), scores), {"width": 4, "keep": 8}, bytes=size_of(matrix))


def grow(sizes: Sizes) -> Call:
    """The first and last level of trees: the children of each root, and the best of them."""
    matrix, inv_t, _, cut, tie = dist(random(sizes, sizes.rows, sizes.vocab, scale=2.0))
    growth = Growth.room(int32([8] * sizes.rows), 8, 1, inv_t.dtype)
    growth.tokens[:, 0] = 1
    call = (matrix, inv_t, cut, tie, int32(range(sizes.rows + 1)), growth)
    written = growth.tokens, growth.scores, growth.parents, growth.nodes
    return Call(call, {"level": 0, "width": 4, "last": True}, written, bytes=size_of(matrix))


def match(sizes: Sizes) -> Call:
    """Token histories with a period of 17 and one changed token."""
    length = sizes.length + sizes.nodes
    tokens = (torch.arange(sizes.rows * length) % 17) ** 2 % 23
    tokens[length // 2] = 99
    starts = torch.arange(sizes.rows) * length
    return Call((tokens, starts, int32([length] * sizes.rows), 4, 1, 8), bytes=size_of(tokens))


def walk(sizes: Sizes) -> Call:
    """Exact-match verification of binary trees."""
    plan, count = make_plan(sizes), sizes.rows * sizes.nodes
    tokens = torch.arange(count) % 3
    arguments = (tokens, offsets(sizes), plan.first_child, plan.next_sibling, torch.arange(count) % 2 + 1)
    return Call(arguments, {"max_depth": sizes.nodes}, bytes=size_of(*arguments))


def process(sizes: Sizes) -> Call:
    """Penalties, bias and masks for every node on its own path."""
    matrix = logits(sizes)
    rows, history = sizes.rows, 20
    generator = torch.Generator().manual_seed(1)
    on_cpu: dict[str, Any] = {"generator": generator, "device": "cpu"}
    histories = torch.stack([torch.randperm(sizes.vocab, **on_cpu)[:history] for _ in range(rows)]).int()
    ids = to_default_device(histories)
    tokens = to_default_device(torch.randint(sizes.vocab, (len(matrix),), **on_cpu))
    paths = NodePaths(tokens, parents(sizes), offsets(sizes), int32([history] * rows))
    factors = torch.tensor([[1.2, 0.1, 0.2]] * rows)
    own = torch.arange(rows).int()
    penalties = Penalties(factors, own, ids, torch.ones_like(ids), int32([history] * rows))
    additions = Additions(
        own.new_tensor(range(rows + 1)), ids[:, 0].contiguous(), torch.ones(rows), own + ALWAYS - rows
    )
    words = torch.randint(-(2**31), 2**31, (rows, -(-sizes.vocab // 32)), **on_cpu).int()
    masks = TokenMasks(to_default_device(words), torch.arange(rows).repeat_interleave(sizes.nodes).int())
    return Call((matrix, paths, penalties, additions, None, masks), {}, (matrix,), bytes=2 * size_of(matrix))


def overlay(sizes: Sizes) -> Call:
    """The same logits processors as an overlay, which reads the logits of few tokens."""
    call = process(sizes)
    matrix, words = call.arguments[0], -(-sizes.vocab // 32)
    return replace(call, writes=(), bytes=len(matrix) * words * 16)


_LOGITS = ("rows", "nodes", "vocab", "dtype")
_CHAIN = (*_LOGITS, "top_p")
_GPU = tuple(Sizes(rows=b, nodes=6, vocab=128_256) for b in (1, 8, 64))
_HALF = replace(_GPU[1], dtype=torch.bfloat16)
_CUT = replace(_HALF, top_p=0.95)
VERIFY_SAMPLES: dict[str, Sample] = {
    "distribution_stats": Sample(statistics, _CHAIN, (*_GPU, _HALF, _CUT)),
    "replay_sample": Sample(replay, _LOGITS, _GPU),
    "draft_sample": Sample(draw, _LOGITS, _GPU),
    "rejection_verify": Sample(chain, _CHAIN, (*_GPU, _HALF)),
    "rejection_thresholds": Sample(lambda sizes: thresholds(chain(sizes), 7), _CHAIN),
    "recursive_rejection_thresholds": Sample(lambda sizes: thresholds(tree(sizes), 9), _LOGITS),
    "traversal_thresholds": Sample(lambda sizes: thresholds(tree(sizes), 9), _LOGITS),
    "recursive_rejection_verify": Sample(tree, _LOGITS, (*_GPU, _HALF)),
    "traversal_verify": Sample(tree, _LOGITS, (*_GPU, _HALF)),
    "exact_match_verify": Sample(walk, ("rows", "nodes"), (Sizes(rows=64, nodes=32),)),
    "rejection_verify_logits": Sample(chain_logits, _CHAIN, (*_GPU, _HALF, _CUT)),
    "replay_verify": Sample(replay_walk, _CHAIN, (*_GPU, _HALF, _CUT)),
    "typical_verify": Sample(typical, _LOGITS, (*_GPU, _HALF)),
    "tree_expand": Sample(expand, _LOGITS, _GPU),
    "tree_grow": Sample(grow, ("rows", "vocab", "dtype"), tuple(replace(each, nodes=8) for each in _GPU)),
    "ngram_match": Sample(match, ("rows", "nodes", "length"), (Sizes(rows=64, length=32768),)),
    "process_logits": Sample(process, _LOGITS, _GPU),
    "process_logits_overlay": Sample(overlay, _LOGITS, _GPU, DTYPES[:3]),
}
