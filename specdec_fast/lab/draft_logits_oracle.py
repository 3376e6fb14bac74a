"""Logits of a drafter after a text, from plain forward passes without the project's cache and attention.

Tests: tests/lab/test_draft_logits_oracle.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_fast.lab import DRAFTERS

PlainDraft = Callable[[Sequence[int]], Tensor]
"""Logits float32 [V] of the token after a text, over the target's vocabulary."""


@torch.inference_mode()
def plain_output(target: Any, tokens: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Runs a model over a whole text with its own eager attention and without a cache.

    Args:
        target: A Hugging Face target.
        tokens: The text, n tokens.

    Returns:
        Logits float32 [V] after the text, and hidden states [n, hidden] before each layer and after the final norm.
    """
    model = target.model
    previous = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([list(tokens)], device=target.device)
        output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    finally:
        model.set_attn_implementation(previous)
    return output.logits[0, -1, : target.vocab_size].float().cpu(), tuple(each[0] for each in output.hidden_states)


def plain_draft(engine: Any) -> PlainDraft:
    """Returns the plain computation of an engine's drafter.

    Supported are draft models, heads that run level by level (EAGLE), and heads that look ahead (Medusa, blockwise).

    Args:
        engine: An engine with a drafter.

    Returns:
        A function from a text to logits. For trained heads it raises ValueError if the text has only one token.

    Raises:
        ValueError: If the drafter has no distribution of its own.
    """
    drafter, target = engine.drafter, engine.target
    model: Any = getattr(drafter, "model", None)
    if hasattr(model, "model"):
        return lambda tokens: _scatter_to_vocab(plain_output(model, tokens)[0], None, target.vocab_size)
    if hasattr(model, "head"):
        head = copy.deepcopy(model.head)
        head.config._attn_implementation = "sdpa"
        return lambda tokens: _first_level(head, target, tokens)
    if hasattr(drafter, "heads"):
        return lambda tokens: _first_head(drafter.heads, target, tokens)
    raise ValueError(
        f"lab: got drafter {getattr(drafter, 'name', 'none')}, which has no distribution of its own to draw from; "
        f"expected one "
        f"of {', '.join(DRAFTERS)}, or recorded draws (--recorded)"
    )


@torch.inference_mode()
def _first_level(head: Any, target: Any, tokens: Sequence[int]) -> Tensor:
    """Logits of the first level. Position i uses the hidden states of token i and the embedding of token i + 1."""
    states = _before_newest(target, tokens)
    aux_hidden_states = [
        states[-1 if aux_hidden_state == "final_norm" else int(aux_hidden_state.partition(":")[2])]
        for aux_hidden_state in head.aux_hidden_states
    ]
    features = head.fuse(aux_hidden_states)[None]
    ids = torch.tensor(list(tokens[1:]), device=target.device)
    own = getattr(head, "embed_tokens", None)
    embedded = (target.embed(ids) if own is None else own(ids))[None]
    count = len(ids)
    mask = torch.ones(1, 1, count, count, dtype=torch.bool, device=target.device).tril()
    hidden = head(embedded, features, torch.arange(count, device=target.device)[None], attention_mask=mask)
    return _scatter_to_vocab(head.read(hidden[0, -1:], target.lm_head)[0], head.token_ids, target.vocab_size)


@torch.inference_mode()
def _first_head(heads: Any, target: Any, tokens: Sequence[int]) -> Tensor:
    """Logits of the first head, from the hidden state before the newest token."""
    state = _before_newest(target, tokens)[-1][-1:]
    return _scatter_to_vocab(heads(state, target.lm_head)[0, 0], heads.token_ids, target.vocab_size)


def _before_newest(target: Any, tokens: Sequence[int]) -> tuple[Tensor, ...]:
    """Hidden states [n - 1, hidden] of all tokens except the newest one, whose state heads do not have."""
    if len(tokens) < 2:
        raise ValueError(
            f"lab: got a text of {len(tokens)} token; expected at least 2: heads use the state of the token before"
        )
    return tuple(each[:-1] for each in plain_output(target, tokens)[1])


def _scatter_to_vocab(logits: Tensor, ids: Tensor | None, vocab: int) -> Tensor:
    """Scatters logits of a reduced vocabulary to the whole one, with -inf for the other tokens."""
    logits = logits.float().cpu()
    whole = torch.full((max(vocab, len(logits)),), float("-inf"))
    if ids is None:
        whole[: len(logits)] = logits
    else:
        whole[ids.cpu()] = logits
    return whole[:vocab]
