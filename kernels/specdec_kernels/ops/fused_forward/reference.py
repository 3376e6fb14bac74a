"""Plain PyTorch definition of fused_forward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ...dispatch import argument_checks
from ..kv_stage.reference import kv_stage
from ..tree_attention.reference import check_words, tree_attention
from .decoder_table import DecoderTable

_OP = "fused_forward"


def check(
    decoder: DecoderTable, tokens: Tensor, positions: Tensor, wanted: Tensor | None, slots: Tensor, page_table: Tensor,
    lengths: Tensor, offsets: Tensor, ancestors: Tensor | None = None, depth: Tensor | None = None,
) -> None:  # fmt: skip
    """Raises ValueError for arguments of `fused_forward` that do not fit."""
    if not isinstance(decoder, DecoderTable):
        raise ValueError(
            f"{_OP}: decoder is {type(decoder).__name__}; expected a DecoderTable; make one, once, of the weights"
        )
    nodes = argument_checks.check_tensor(_OP, "tokens", tokens, torch.int64, "M").shape[0]
    argument_checks.check_tensor(_OP, "positions", positions, torch.int64, nodes)
    argument_checks.check_tensor(_OP, "slots", slots, torch.int64, nodes)
    rows = argument_checks.check_tensor(_OP, "lengths", lengths, torch.int32, "B").shape[0]
    argument_checks.check_tensor(_OP, "page_table", page_table, torch.int32, rows, "P")
    argument_checks.check_tensor(_OP, "offsets", offsets, torch.int32, rows + 1)
    limits = [("tokens", tokens, 0, decoder.vocab_size), ("positions", positions, 0, decoder.rotary.shape[0])]
    limits.append(("slots", slots, -(2**63), decoder.keys[0].shape[:2].numel()))
    if wanted is not None:
        limits.append(("wanted", argument_checks.check_tensor(_OP, "wanted", wanted, torch.int64, "N"), 0, nodes))
    for name, values, least, limit in limits:
        if values.numel() and not (least <= int(values.min()) and int(values.max()) < limit):
            raise ValueError(
                f"{_OP}: {name} has values {int(values.min())}..{int(values.max())}; expected them below {limit}"
                + ("" if least else " and none below 0")
            )
    if ancestors is not None:
        argument_checks.check_tensor(_OP, "ancestors", ancestors, torch.int32, nodes, "W")
    if depth is not None:
        argument_checks.check_tensor(_OP, "depth", depth, torch.int32, nodes)
    argument_checks.check_offsets(_OP, offsets, nodes)
    check_words(ancestors, offsets)


def fused_forward(
    decoder: DecoderTable,
    tokens: Tensor,
    positions: Tensor,
    wanted: Tensor | None,
    slots: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    ancestors: Tensor | None = None,
    depth: Tensor | None = None,
) -> Tensor:
    """Computes logits of packed tree nodes: one forward pass of a Llama-like decoder over its paged cache.

    Each layer applies a root-mean-square norm, projects queries, keys and values, rotates positions (halves of a head
    against each other), stores keys and values, and adds the projected `tree_attention`. It then adds
    down(silu(gate) * up) of a second norm. A last norm and the head follow, for the wanted nodes only.

    Args:
        decoder: Weights and caches. Slots of the caches are written.
        tokens: Token of each node, int64 [M].
        positions: Position of each node, int64 [M], below the rows of the rotary table.
        wanted: Packed indices of the nodes whose logits are returned, int64 [N]; None for all.
        slots: Slot of each node, page * page_size + offset, int64 [M]. Nodes with a negative slot are not stored.
        page_table: Pages of each request, int32 [B, P].
        lengths: Committed tokens of each request, int32 [B].
        offsets: First node of each request, int32 [B + 1].
        ancestors: Ancestor words, int32 [M, W]; see `tree_attention`.
        depth: Depth of each node, int32 [M]; see `tree_attention`.

    Returns:
        Logits [N, V] of the decoder's dtype, computed in it. The C++ backend takes float32. It gives nodes of a request
        the same bits whatever requests are beside it, and a node whatever other nodes its request has, up to 64.

    Raises:
        ValueError: If arguments do not fit.

    Source:
        Touvron et al. 2023, section 2.2.
    """
    check(decoder, tokens, positions, wanted, slots, page_table, lengths, offsets, ancestors, depth)
    nodes, width = tokens.shape[0], decoder.keys[0].shape[3]
    stream, angles = decoder.embedding[tokens], decoder.rotary[positions][:, None]
    kept = slots >= 0
    for layer, keys, values in zip(decoder.layers, decoder.keys, decoder.values):
        normed = _norm(stream, layer.norm, decoder.eps)
        query, key, value = (
            linear(normed, each).view(nodes, -1, width) for each in (layer.query, layer.key, layer.value)
        )
        query, key = _rotate(query, angles), _rotate(key, angles)
        kv_stage(key[kept], value[kept], keys, values, slots[kept])
        attended = tree_attention(
            query, keys, values, page_table, lengths, offsets, ancestors, depth, scale=decoder.scale
        )
        assert isinstance(attended, Tensor)
        stream = stream + linear(attended.flatten(1), layer.out)
        normed = _norm(stream, layer.mlp_norm, decoder.eps)
        stream = stream + linear(silu(linear(normed, layer.gate)) * linear(normed, layer.up), layer.down)
    last = stream if wanted is None else stream[wanted]
    return linear(_norm(last, decoder.norm, decoder.eps), decoder.head)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * weight


def _rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotates heads [M, H, width] by angles [M, 1, width], cosines and then sines."""
    (low, high), (cosine, sine) = heads.chunk(2, 2), angles.chunk(2, 2)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], 2)
