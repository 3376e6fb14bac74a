"""Plain PyTorch definition of tree_attention: one request after the other, one softmax over all visible keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .checks import check_arguments
from .plan import AttentionPlan


def visible_nodes(ancestors: Tensor, count: int) -> Tensor:
    """Unpacks ancestor words int32 [n, W] into booleans [n, count]."""
    index = torch.arange(count, device=ancestors.device)
    return ((ancestors[:, index >> 5] >> (index & 31)) & 1).bool()


def check_pages(key_cache: Tensor, page_table: Tensor, lengths: Tensor, offsets: Tensor) -> None:
    """Raises ValueError for requests that need more slots than they have, and for pages that do not exist."""
    pages, page_size = key_cache.shape[:2]
    bounds, room = offsets.tolist(), page_table.shape[1] * page_size
    for row, length in enumerate(lengths.tolist()):
        if bounds[row + 1] == bounds[row]:
            continue
        needed = length + bounds[row + 1] - bounds[row]
        if needed > room:
            raise ValueError(
                f"tree_attention: row {row} needs {needed} slots, expected at most {room} (pages of the table x page "
                "size); grow page_table"
            )
        used = page_table[row, : -(-needed // page_size)]
        if bool(((used < 0) | (used >= pages)).any()):
            raise ValueError(f"tree_attention: row {row} of page_table names pages outside 0..{pages - 1}")


def check_words(ancestors: Tensor | None, offsets: Tensor) -> None:
    """Raises ValueError if there are fewer ancestor words than the nodes of a request need."""
    most = int(offsets.diff().max()) if offsets.shape[0] > 1 else 0
    if ancestors is not None and most > 32 * ancestors.shape[1]:
        raise ValueError(
            f"tree_attention: ancestors has {ancestors.shape[1]} words a node, expected {-(-most // 32)} or more for a "
            f"row of {most} nodes"
        )


def check_data(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor, lengths: Tensor, offsets: Tensor,
    ancestors: Tensor | None = None, *args: Tensor | None, **kwargs: object,
) -> None:  # fmt: skip
    """Raises ValueError for data that the reference refuses."""
    argument_checks.check_offsets("tree_attention", offsets, query.shape[0])
    check_words(ancestors, offsets)
    check_pages(key_cache, page_table, lengths, offsets)


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
    """Computes attention of packed tree nodes over a paged cache that already holds their own keys and values.

    Node i of request b is stored in slot lengths[b] + i. A node sees all committed slots, its ancestors and itself. A
    head-first cache is passed as a transposed view, a contiguous cache [B, slots, Hkv, D] with the page table
    arange(B)[:, None].

    Args:
        query: Queries, [M, H, D], any float dtype. Head and node axes may be strided.
        key_cache: Keys, [pages, page_size, Hkv, D] of query's dtype or float8_e4m3fn; H is a multiple of Hkv and the
            last axis contiguous.
        value_cache: Values, like `key_cache`.
        page_table: Pages of each request in order, int32 [B, P].
        lengths: Committed tokens of each request, int32 [B].
        offsets: First node of each request, int32 [B + 1]. Empty requests are allowed. Nodes from offsets[B] on get
            zeros, and an lse of -inf.
        ancestors: Ancestor words, int32 [M, W]. Bit j of word j >> 5 is set if node j of the request is an ancestor of
            the node or the node itself. None means causal: node i sees nodes 0..i (prefill).
        depth: Depth of each node, int32 [M]; needed with ancestors and a window, ignored otherwise.
        scale: Factor of the scores.
        softcap: Scores become softcap * tanh(score / softcap); 0 turns it off.
        window: A key is visible if query position - key position < window; 0 turns it off. Slot s < lengths[b] has
            position s; node i has lengths[b] + depth[i], or lengths[b] + i if causal.
        sinks: Logits that take part in the softmax without a value, [H].
        return_lse: Whether to return the log of the softmax denominator, sinks included.
        out: Memory of the result, [M, H, D].
        key_scale: Factors of the cached keys, float32 [Hkv]; both scales or neither.
        value_scale: Factors of the cached values, float32 [Hkv].
        workspace: Scratch, uint8 [`tree_attention.workspace_size(...)`]. With `out` too, backends allocate nothing.
        batch_invariant: Whether GPU kernels add keys in an order that depends on their slots alone, so that the bits of
            a node do not depend on the rest of the batch. The C++ kernel always does so, except for trees of more than
            64 nodes.
        plan: Result of `plan_for` for this pass, with the same lengths and offsets. GPU kernels then run on a fixed
            grid whose programs read equal shares of all keys. Ignored with `batch_invariant`.

    Returns:
        [M, H, D] of query's dtype, computed in float32 (float64 for float64). With `return_lse` also lse, float32
        (float64) [M, H].

    Raises:
        ValueError: If shapes, dtypes or pages do not fit.
    """
    tensors = (query, key_cache, value_cache, page_table, lengths, offsets, ancestors, depth)
    check_arguments(
        *tensors, softcap=softcap, window=window, sinks=sinks, out=out, key_scale=key_scale, value_scale=value_scale
    )
    argument_checks.check_offsets("tree_attention", offsets, query.shape[0])
    nodes, heads, _ = query.shape
    page_size, kv_heads = key_cache.shape[1:3]
    check_words(ancestors, offsets)
    check_pages(key_cache, page_table, lengths, offsets)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    result = query.new_zeros(query.shape) if out is None else out.zero_()
    lse = torch.full((nodes, heads), -torch.inf, dtype=wide, device=query.device)
    keys_by_slot, values_by_slot = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    bounds, committed = offsets.tolist(), lengths.tolist()
    for row, length in enumerate(committed):
        first, last = bounds[row], bounds[row + 1]
        count = last - first
        if count == 0:
            continue
        position = torch.arange(length + count, device=query.device)
        slots = page_table[row].long()[position // page_size] * page_size + position % page_size
        key = keys_by_slot[slots].to(wide).repeat_interleave(heads // kv_heads, dim=1)  # [L, H, D]
        value = values_by_slot[slots].to(wide).repeat_interleave(heads // kv_heads, dim=1)
        if key_scale is not None and value_scale is not None:
            key = key * key_scale.to(wide).repeat_interleave(heads // kv_heads)[:, None]
            value = value * value_scale.to(wide).repeat_interleave(heads // kv_heads)[:, None]
        scores = torch.einsum("nhd,lhd->hnl", query[first:last].to(wide), key) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)

        visible = torch.ones(count, length + count, dtype=torch.bool, device=query.device)
        node_position = position[length:]
        if ancestors is None:
            visible[:, length:] = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()
        else:
            visible[:, length:] = visible_nodes(ancestors[first:last], count)
            if depth is not None:
                node_position = length + depth[first:last]
        if window:
            key_position = torch.cat([position[:length], node_position])
            visible &= node_position[:, None] - key_position[None, :] < window
        scores = scores.masked_fill(~visible, -torch.inf)

        joined = scores
        if sinks is not None:
            joined = torch.cat([scores, sinks.to(wide)[:, None, None].expand(-1, count, 1)], dim=2)
        row_lse = torch.logsumexp(joined, dim=2)
        unseen = (row_lse == -torch.inf)[:, :, None]  # no visible key: zeros
        weights = torch.where(unseen, 0.0, torch.exp(scores - row_lse[:, :, None]))
        result[first:last] = torch.einsum("hnl,lhd->nhd", weights, value).to(query.dtype)
        lse[first:last] = row_lse.T
    return (result, lse) if return_lse else result
