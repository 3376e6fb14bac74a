"""Acceptance rates of a draft model's first, second, ... choice by depth, from which the best static tree follows.

Rates are measured over texts that the target generates. The paper measures by rank. Here they are by depth too, since
deep nodes are reached where the text is easy to predict. Source: Chen et al. 2024 (Sequoia), section 3.
Tests: tests/tune/test_draft_tree_acceptance.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.engine.engine import Engine
from specdec_fast.engine.request import Handle
from specdec_fast.interfaces import Target
from specdec_fast.sampling.params import SamplingParams
from specdec_kernels import tree_expand
from specdec_kernels.unknown_names import unknown_name

ORDERS = ("coupled", "top_k")


@torch.inference_mode()
def ranks_of(
    draft: Any,
    prompt: Sequence[int],
    text: Sequence[int],
    params: SamplingParams,
    how: str,
    width: int,
    vocab_size: int,
) -> list[int]:
    """Ranks every token of a text among the draft's best tokens at its position.

    Args:
        draft: The draft model, a target of its own without rows.
        prompt: The prompt.
        text: The tokens behind it, N of them.
        params: Temperature and seed of the text.
        how: "coupled" orders tokens by the replay noise of the request, "top_k" by their probability. At temperature 0
            there is no noise.
        width: Number of best tokens.
        vocab_size: Vocabulary of the target.

    Returns:
        N ranks from 0; -1 for a token that is not among the best.

    Raises:
        ValueError: If the draft's cache has too few free pages.
    """
    tokens = [*prompt, *text]
    if not draft.cache.reserve(0, len(tokens)):
        raise ValueError(
            f"tune tree: a text of {len(tokens)} tokens has no room in the draft's cache ({draft.cache.pages.num_free} "
            f"free pages of {draft.cache.page_size} tokens); raise num_pages, or lower max_new_tokens"
        )
    try:
        shape = chain_layout((0,), (len(tokens) - 1,), draft.device)
        wanted = torch.arange(len(prompt) - 1, len(tokens) - 1, device=draft.device)
        fed = torch.tensor([token if token < draft.vocab_size else 0 for token in tokens[:-1]], dtype=torch.int64)
        logits = draft.extend(shape.rows, fed.to(draft.device), shape.offsets, logits=wanted).logits
    finally:
        draft.cache.release([0])
    assert logits is not None
    return ranks_among(logits[:, : min(vocab_size, logits.shape[1])], wanted + 1, text, params, how, width)


def ranks_among(
    logits: torch.Tensor, positions: torch.Tensor, tokens: Sequence[int], params: SamplingParams, how: str, width: int
) -> list[int]:
    """Ranks tokens among the best tokens of their rows of logits.

    Args:
        logits: [N, V].
        positions: Absolute positions of the tokens, int64 [N].
        tokens: N tokens.
        params: Temperature and seed of the text.
        how: Order of tokens, as in `ranks_of`.
        width: Number of best tokens.

    Returns:
        N ranks from 0; -1 for a token that is not among the best.
    """
    count, wide = logits.shape[0], torch.float64 if logits.dtype == torch.float64 else torch.float32
    inv_t = torch.full((count,), 1.0 / (params.temperature or 1.0), dtype=wide, device=logits.device)
    noise: dict[str, torch.Tensor] = {}
    if how == "coupled" and params.temperature:
        assert params.seed is not None
        noise = {"seeds": torch.full_like(positions, params.seed), "positions": positions.int()}
    best, _, _ = tree_expand(
        logits,
        inv_t,
        torch.full_like(inv_t, -torch.inf),
        torch.full_like(positions, logits.shape[1] - 1).int(),
        torch.tensor([0, count], dtype=torch.int32).to(logits.device),
        torch.zeros_like(inv_t),
        width=min(width, logits.shape[1]),
        keep=1,
        **noise,
    )
    return [own.index(token) if token in own else -1 for own, token in zip(best.tolist(), tokens)]


def rates_of(ranks: Sequence[Sequence[int]], width: int, depth: int) -> list[list[float]]:
    """Computes acceptance rates by depth and rank. Any token of a text may be the root.

    Args:
        ranks: For each text, the ranks of its tokens.
        width: Number of ranks.
        depth: Deepest level.

    Returns:
        Rate of rank r at depth d as [d][r], of all paths that reach depth d. It ends at the first depth that none
        reaches.
    """
    found = []
    for level in range(depth):
        reached, hits = 0, [0] * width
        for own in ranks:
            for end in range(level, len(own)):
                if all(rank >= 0 for rank in own[end - level : end]):
                    reached += 1
                    if own[end] >= 0:
                        hits[own[end]] += 1
        if not reached:
            break
        found.append([hit / reached for hit in hits])
    return found


def write_texts(
    target: Target, prompts: Sequence[Sequence[int]], params: SamplingParams, eos_token_ids: Sequence[int]
) -> list[Handle]:
    """Lets the target write the texts to measure on.

    Args:
        target: The target, without rows.
        prompts: Prompts as token ids.
        params: Temperature, length and first seed. Filters and logits processors are ignored.
        eos_token_ids: Token ids that end a text.

    Returns:
        The finished requests. Those that failed have an error.
    """
    first = params.with_seed().seed or 0
    own = [
        SamplingParams(temperature=params.temperature, seed=first + at, max_new_tokens=params.max_new_tokens)
        for at in range(len(prompts))
    ]
    return Engine(target, eos_token_ids=eos_token_ids).generate(prompts, own)


def measure(
    target: Target,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    how: str = "coupled",
    width: int = 8,
    depth: int = 8,
    eos_token_ids: Sequence[int] = (),
) -> tuple[list[list[float]], int]:
    """Measures acceptance rates by depth and rank on texts of the target.

    Args:
        target: The target, without rows.
        draft: The draft model, a target of its own.
        prompts: Prompts as token ids.
        params: Temperature, length and first seed. Filters and logits processors are ignored.
        how: Order of children, as in `ranks_of`.
        width: Number of ranks.
        depth: Deepest level.
        eos_token_ids: Token ids that end a text.

    Returns:
        Rates by depth and rank, and the number of tokens they were measured on.

    Raises:
        ValueError: If the order is unknown, or if no prompt leads to a text.
    """
    if how not in ORDERS:
        raise ValueError(unknown_name("tune tree how", how, ORDERS))
    ranks = [
        ranks_of(draft, handle.prompt, handle.tokens, handle.params, how, width, target.vocab_size)
        for handle in write_texts(target, prompts, params, eos_token_ids)
        if handle.tokens and len(handle.prompt) + len(handle.tokens) <= draft.max_length
    ]
    if not ranks:
        raise ValueError("tune tree: got no text to measure on; expected prompts that fit both models")
    return rates_of(ranks, width, depth), sum(map(len, ranks))
