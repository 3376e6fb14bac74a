"""C++ backend of tree_attention (csrc/attention): no temporary tensors, nothing but the call."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_arguments, check_numbers
from .plan import AttentionPlan

_attention = torch.ops.specdec.tree_attention.default
_attention_lse = torch.ops.specdec.tree_attention_lse.default
_attention_out = torch.ops.specdec.tree_attention_out.default


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    ancestors: Tensor | None = None,
    depth: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    workspace: Tensor | None = None,
    batch_invariant: bool = False,
    plan: AttentionPlan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Calls the C++ operator, also inside torch.compile, where tensors may be on a GPU.

    Args as in the reference.

    Returns:
        The output, and with `return_lse` also the log-sum-exp.

    Raises:
        ValueError: If an argument is wrong, or if a graph passes an option that its schema lacks.
        RuntimeError: If the operator fails on valid arguments.
    """
    if softcap or window:
        check_numbers(softcap, window)
    if key_scale is not None or value_scale is not None or (batch_invariant and not query.is_cpu):
        raise ValueError(  # only torch.compile passes these, or tensors on a GPU
            "tree_attention: got key_scale, value_scale or batch_invariant inside of torch.compile; expected a call "
            "without them; leave tree_attention out of the graph with torch.compiler.disable"
        )
    rest = (page_table, lengths, offsets, ancestors, depth, scale, softcap, window, sinks)
    try:
        if out is None:
            attend = _attention_lse if return_lse else _attention
            return attend(query, key_cache, value_cache, *rest)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.empty(query.shape[:2], dtype=wide, device=query.device) if return_lse else None
        _attention_out(query, key_cache, value_cache, *rest, out, lse)
    except (RuntimeError, ValueError):
        tensors = (query, key_cache, value_cache, page_table, lengths, offsets, ancestors, depth)
        check_arguments(
            *tensors, softcap=softcap, window=window, sinks=sinks, out=out
        )  # raises with a message that says what to do
        raise
    return out if lse is None else (out, lse)
