"""Acceptance rates of a recurrent head's first, second, ... choice by depth: EAGLE, EAGLE-3 and MTP.

Rates are measured over texts that the target generates, as in specdec_fast/tune/draft_tree_acceptance.py. A head's
logits at a depth follow from its own features of the depths before, so every depth is measured separately.
Tests: tests/tune/test_recurrent_head_acceptance.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.heads.unroll import unroll
from specdec_fast.interfaces import Target
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.tune.draft_tree_acceptance import ranks_among, write_texts


@torch.inference_mode()
def measure_recurrent(
    target: Target,
    model: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    how: str = "coupled",
    width: int = 8,
    depth: int = 8,
    eos_token_ids: Sequence[int] = (),
) -> tuple[list[list[float]], int]:
    """Measures acceptance rates by depth and rank on texts of the target. Any token of a text may be the root.

    Args:
        target: The target, without rows.
        model: A `PagedHead` over the target.
        prompts: Prompts as token ids.
        params: Temperature, length and first seed.
        how: Order of children: "coupled" or "top_k".
        width: Number of ranks.
        depth: Deepest level.
        eos_token_ids: Token ids that end a text.

    Returns:
        Rates by depth and rank, and the number of tokens they were measured on.

    Raises:
        ValueError: If no prompt leads to a text.
    """
    walks: list[list[int]] = []
    tokens = 0
    for handle in write_texts(target, prompts, params, eos_token_ids):
        if handle.error is None and len(handle.prompt) + len(handle.tokens) > 2:
            walks += walks_of(target, model, handle.prompt, handle.tokens, handle.params, how, width, depth)
            tokens += len(handle.tokens)
    if not walks:
        raise ValueError("tune tree: got no text to measure on; expected prompts that fit the target")
    return rates_of_walks(walks, width, depth), tokens


def walks_of(
    target: Any,
    model: Any,
    prompt: Sequence[int],
    written: Sequence[int],
    params: SamplingParams,
    how: str,
    width: int,
    depth: int,
) -> list[list[int]]:
    """Returns for every root of a text the ranks by depth of the tokens behind it, as far as the text goes."""
    text = [*prompt, *written]
    start = max(len(prompt) - 2, 0)  # the place of the first root
    target.cache.reserve(0, len(text))
    try:
        shape = chain_layout((0,), (len(text) - 1,), model.device)
        fed = torch.tensor(text, dtype=torch.int64).to(model.device)
        aux_hidden_states = target.extend(
            shape.rows, fed[:-1], shape.offsets, logits=False, aux_hidden_states=model.aux_hidden_states
        ).aux_hidden_states
    finally:
        target.cache.release([0])
    with _own_attention(model.head):
        levels = unroll(model.head, model.embed(fed[1:])[None], model.features(aux_hidden_states)[None], depth)
    walks: list[list[int]] = [[] for _ in range(len(text) - 2 - start)]
    for level, hidden in enumerate(levels):
        behind = text[start + 2 + level :]  # the token behind each place
        if not behind:
            break
        logits = _spread(model, model.logits(hidden[0, start : start + len(behind)]))
        positions = torch.arange(start + 2 + level, len(text)).to(model.device)
        for walk, rank in zip(walks, ranks_among(logits, positions, behind, params, how, width)):
            walk.append(rank)
    return walks


def rates_of_walks(walks: Sequence[Sequence[int]], width: int, depth: int) -> list[list[float]]:
    """Returns rates by depth and rank, up to the first depth that no walk reaches."""
    found = []
    for level in range(depth):
        there = [walk[level] for walk in walks if len(walk) > level and min(walk[:level], default=0) >= 0]
        if not there:
            break
        found.append([there.count(rank) / len(there) for rank in range(width)])
    return found


def _spread(model: Any, logits: Tensor) -> Tensor:
    """Returns logits [N, V] by the ids of the target."""
    if model.token_ids is None:
        return logits[:, : model.vocab_size]
    whole = logits.new_full((logits.shape[0], model.vocab_size), float("-inf"))
    return whole.index_copy_(1, model.token_ids, logits)


@contextmanager
def _own_attention(head: Any) -> Iterator[None]:
    """Makes a head attend without a paged cache while entered."""
    before = head.config._attn_implementation
    head.config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        head.config._attn_implementation = before
