"""Small calls of every operator with a Triton launch, which reach all kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specdec_kernels import Forced, Growth, distribution_stats
from specdec_kernels.testing.agreement import make_sample
from specdec_kernels.testing.samples_attention import Call, Sizes, int32

SIZES = Sizes(rows=3, nodes=4, length=20, heads=2, kv_heads=1, width=16, vocab=130)


def drafted(name: str, **options: Any) -> Call:
    """A verify operator whose tokens were sampled from distributions over part of the vocabulary."""
    call = make_sample(name, SIZES)
    place = next(at for at, each in enumerate(call.arguments) if isinstance(each, tuple))
    nodes = len(call.arguments[0])
    one = torch.ones(2)
    level = torch.randn(2, 40)
    dist = (level, *distribution_stats(level, one, one.int() * 0, one, one * 0))
    arguments = list(call.arguments)
    arguments[place - 2 : place] = torch.arange(nodes).to(torch.int8) % 4, torch.arange(nodes).int() % 2
    arguments[place + 1 : place + 3] = dist, torch.arange(40) * 3
    return replace(call, arguments=tuple(arguments), options=call.options | options)


def processed() -> Call:
    """All four kinds of logits processors."""
    call = make_sample("process_logits", SIZES)
    entries = Forced(int32([0, 1, 2, 3]), int32([21, 21, 22]), int32([3, 4, 5]))
    return replace(call, arguments=(*call.arguments[:4], entries, call.arguments[5]))


def windowed(sizes: Sizes = SIZES) -> Call:
    call = make_sample("tree_attention", sizes)
    return replace(call, options=call.options | {"window": 9})


def grown() -> Call:
    """The second level of trees with any first level."""
    call = make_sample("tree_grow", SIZES)
    growth = Growth.room(int32([8] * SIZES.rows), 8, 2)
    for part, value in ((growth.tokens, 1), (growth.scores, -1.0), (growth.parents, 0), (growth.nodes, 1)):
        part.fill_(value)
    keys = {"seeds": torch.arange(SIZES.rows), "positions": int32([5] * SIZES.rows)}
    return replace(call, arguments=(*call.arguments[:5], growth), options={"level": 1, "width": 4, **keys})


def scanned() -> Call:
    """The recurrence of Mamba-1, which runs node after node."""
    call = make_sample("tree_ssm", SIZES)
    query, key, value, _, state, *where = call.arguments
    decay = -torch.rand(state.shape[1:])
    return replace(call, arguments=(query, key, value, torch.rand(value.shape), state, *where, decay))


def convolved() -> Call:
    """The convolution of a prompt."""
    call = make_sample("tree_conv", SIZES)
    return replace(call, arguments=(*call.arguments[:7], None), options=call.options | {"advance": True})


NUMBERS = {"distribution_stats", "draft_sample", "replay_sample"}
"""Operators whose integers are numbers and no places."""
PARTS = {"rejection_verify_logits", "recursive_rejection_thresholds", "traversal_thresholds"}
"""Operators made of what others launch."""
PLAIN = (
    "tree_attention", "attention_plan", "kv_stage", "kv_slots", "kv_commit", "kv_commit_scratch", "kv_commit_pages",
    "tree_plan", "tree_expand", "tree_grow", "exact_match_verify", "replay_verify", "typical_verify", "ngram_match",
    "process_logits_overlay", "tree_conv", "tree_delta", "tree_ssm", "state_commit", "window_commit",
)  # fmt: skip
CASES: dict[str, Callable[[], Call]] = {
    **{name: partial(make_sample, name, SIZES) for name in PLAIN},
    "rejection_verify": partial(drafted, "rejection_verify"),
    "rejection_verify by the block rule": partial(drafted, "rejection_verify", rule="block"),
    "rejection_thresholds": partial(drafted, "rejection_thresholds"),
    "recursive_rejection_verify": partial(drafted, "recursive_rejection_verify"),
    "traversal_verify": partial(drafted, "traversal_verify"),
    "process_logits": processed,
    "tree_attention with a window": windowed,
    "tree_grow on the second level": grown,
    "tree_ssm with gates of elements": scanned,
    "tree_conv that advances": convolved,
}
