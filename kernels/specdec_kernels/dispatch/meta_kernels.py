"""Fake kernels of the compiled operators, for tracing without data: torch.compile, torch.export, FakeTensorMode.

Every operator of torch.ops.specdec has one. A fake kernel takes the arguments of the schema by name, as attributes of
`a`, and returns empty tensors of the right shapes.
Tests: tests/kernels/test_torch_ops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..random import BLOCK

_INT, _LONG = torch.int32, torch.int64


def _statistics_dtype(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def _fake_nothing(a: Any) -> None:
    return None


def _fake_attention(a: Any) -> Tensor:
    return torch.empty(a.query.shape, dtype=a.query.dtype, device=a.query.device)


def _fake_attention_lse(a: Any) -> tuple[Tensor, Tensor]:
    return _fake_attention(a), a.query.new_empty(a.query.shape[:2], dtype=_statistics_dtype(a.query))


def _fake_stats(a: Any) -> tuple[Tensor, ...]:
    rows = a.logits.shape[0]
    inv_t, lse, cut = (a.logits.new_empty(rows, dtype=_statistics_dtype(a.logits)) for _ in range(3))
    return inv_t, lse, cut, a.logits.new_empty(rows, dtype=_INT)


def _fake_masses(a: Any) -> tuple[Tensor, ...]:
    rows, vocab = a.logits.shape
    return *_fake_stats(a), a.logits.new_empty((rows, (vocab + BLOCK - 1) // BLOCK), dtype=_statistics_dtype(a.logits))


def _fake_token_per_row(a: Any) -> Tensor:
    return a.logits.new_empty(a.logits.shape[0], dtype=_LONG)


def _fake_path(a: Any) -> tuple[Tensor, ...]:
    rows = a.offsets.shape[0] - 1
    path = a.tokens.new_empty((rows, a.max_depth + 1), dtype=_INT)
    return path, a.tokens.new_empty(rows, dtype=_INT), a.tokens.new_empty(rows, dtype=_LONG)


def _fake_path_and_dists(a: Any) -> tuple[Tensor, ...]:
    return *_fake_path(a), *_fake_masses(a)


def _fake_thresholds(a: Any) -> tuple[Tensor, Tensor]:
    nodes, draft = a.tokens.shape[0], getattr(a, "draft_logits", None)
    dtype = (
        _statistics_dtype(a.logits)
        if draft is None
        else torch.promote_types(_statistics_dtype(a.logits), _statistics_dtype(draft))
    )
    return a.logits.new_empty(nodes, dtype=dtype), a.logits.new_empty((nodes, a.logits.shape[1]), dtype=dtype)


def _fake_plan(a: Any) -> tuple[Tensor, ...]:
    words = torch.library.get_ctx().new_dynamic_size()  # words of the largest tree: they depend on data
    depth, row, first_child, next_sibling = (torch.empty_like(a.parents) for _ in range(4))
    return depth, row, a.parents.new_empty((a.parents.shape[0], words)), first_child, next_sibling


def _fake_slots(a: Any) -> tuple[Tensor, ...]:
    batch = a.rows.shape[0]
    table = a.page_table.new_empty((batch, a.page_table.shape[1]))
    nodes = (a.page_table.new_empty(a.nodes, dtype=_LONG) for _ in range(2))
    return table, a.lengths.new_empty(batch), *nodes


def _fake_expand(a: Any) -> tuple[Tensor, ...]:
    nodes = a.logits.shape[0]
    tokens = a.logits.new_empty((nodes, a.width), dtype=_LONG)
    scores = a.logits.new_empty((nodes, a.width), dtype=_statistics_dtype(a.logits))
    return tokens, scores, a.offsets.new_empty((a.offsets.shape[0] - 1, a.keep))


def _fake_grow(a: Any) -> tuple[Tensor, ...]:
    trees, most = a.offsets.shape[0] - 1, 1 + (a.keep if a.last else (a.level + 1) * min(a.width, a.keep))
    nodes = trees * most
    parents, depth, row, first_child, next_sibling = (a.offsets.new_empty(nodes) for _ in range(5))
    ancestors, counts = a.offsets.new_empty((nodes, (most + 31) // 32)), a.offsets.new_empty((2, trees))
    tokens = a.logits.new_empty(nodes, dtype=_LONG)
    return tokens, parents, counts, depth, row, ancestors, first_child, next_sibling


def _fake_match(a: Any) -> tuple[Tensor, Tensor]:
    rows = a.starts.shape[0]
    return a.tokens.new_empty((rows, a.num_tokens)), a.lengths.new_empty(rows)


def _fake_linear(a: Any) -> Tensor:
    return a.x.new_empty((*a.x.shape[:-1], a.weight.shape[0]))


def _fake_decoder(a: Any) -> Tensor:
    dtype = torch.bfloat16 if a.bfloat16 else torch.float32
    return a.table.new_empty(((a.tokens if a.wanted is None else a.wanted).shape[0], a.vocab_size), dtype=dtype)


def _fake_decoder_states(a: Any) -> tuple[Tensor, Tensor]:
    logits = _fake_decoder(a)
    return logits, logits.new_empty((a.states.shape[0], a.tokens.shape[0], a.hidden_size))


def _fake_chain(a: Any) -> Tensor:
    return a.tokens.new_empty((a.rows.shape[0], a.depth))


def _fake_chain_dists(a: Any) -> tuple[Tensor, ...]:
    kept, blocks = a.num_drafts, (a.vocab_size + BLOCK - 1) // BLOCK
    inv_t, lse, cut = (a.top_p.new_empty(kept) for _ in range(3))
    logits, mass = a.top_p.new_empty((kept, a.table_vocab)), a.top_p.new_empty((kept, blocks))
    return _fake_chain(a), logits, inv_t, lse, cut, a.top_k.new_empty(kept), mass


def _fake_delta(a: Any) -> tuple[Tensor, Tensor]:
    return a.value.new_empty(a.value.shape), a.value.new_empty(a.value.shape, dtype=torch.float32)


FAKES: dict[str, Callable[[Any], Any]] = {
    "kv_stage": _fake_nothing,
    "kv_commit": _fake_nothing,
    "kv_commit_table": _fake_nothing,
    "kv_commit_pages": _fake_nothing,
    "kv_slots": _fake_slots,
    "process_logits": _fake_nothing,
    "tree_attention": _fake_attention,
    "tree_attention_lse": _fake_attention_lse,
    "tree_attention_out": _fake_nothing,
    "tree_plan": _fake_plan,
    "tree_expand": _fake_expand,
    "tree_grow": _fake_grow,
    "distribution_stats": _fake_stats,
    "dist_masses": _fake_masses,
    "replay_sample": _fake_token_per_row,
    "draft_sample": _fake_token_per_row,
    "exact_match_verify": _fake_path,
    "replay_verify": _fake_path_and_dists,
    "rejection_verify": _fake_path,
    "rejection_verify_logits": _fake_path_and_dists,
    "rejection_thresholds": _fake_thresholds,
    "recursive_rejection_verify": _fake_path,
    "recursive_rejection_thresholds": _fake_thresholds,
    "traversal_verify": _fake_path,
    "typical_verify": _fake_path,
    "traversal_thresholds": _fake_thresholds,
    "ngram_match": _fake_match,
    "batch_invariant_linear": _fake_linear,
    "batch_invariant_linear_int8": _fake_linear,
    "fused_forward": _fake_decoder,
    "fused_forward_states": _fake_decoder_states,
    "draft_chain": _fake_chain,
    "draft_chain_dists": _fake_chain_dists,
    "tree_conv": lambda a: a.inputs.new_empty(a.inputs.shape),
    "tree_delta": _fake_delta,
    "tree_ssm": lambda a: a.value.new_empty(a.value.shape),
    "state_commit": _fake_nothing,
    "window_commit": _fake_nothing,
}


def _bind_by_name(operator: Any, fake: Callable[[Any], Any]) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    return lambda *args, **kwargs: fake(SimpleNamespace(**dict(zip(names, args)), **kwargs))


def register_fakes() -> None:
    """Registers the fake kernels of the operators in the loaded extension. Call it once per process."""
    for name, fake in FAKES.items():
        if hasattr(torch.ops.specdec, name):
            operator = getattr(torch.ops.specdec, name).default
            torch.library.register_fake(f"specdec::{name}", _bind_by_name(operator, fake))
