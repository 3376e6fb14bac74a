"""Plain PyTorch definition of fused_forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from ...dispatch import argument_checks
from ..batch_invariant_linear_int8.reference import batch_invariant_linear_int8
from ..kv_stage.reference import kv_stage
from ..tree_attention.reference import check_words, tree_attention
from .decoder_table import DecoderNumbers, DecoderTable

_OP = "fused_forward"


def check(
    decoder: DecoderTable, tokens: Tensor, positions: Tensor, wanted: Tensor | None, slots: Tensor, page_table: Tensor,
    lengths: Tensor, offsets: Tensor, ancestors: Tensor | None = None, depth: Tensor | None = None,
    states: Sequence[int] | None = None,
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
    limits = [("tokens", tokens, 0, decoder.vocab_size), ("positions", positions, 0, decoder.positions)]
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
    last = len(decoder.layers) + 1
    if states is not None and not all(isinstance(state, int) and 0 <= state <= last for state in states):
        raise ValueError(f"{_OP}: states are {list(states)}; expected integers from 0 to {last}, the final norm's")
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
    states: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes logits of packed tree nodes: one forward pass of a Llama-like decoder over its paged cache.

    Each layer applies a root-mean-square norm, projects queries, keys and values, rotates positions (halves of a head
    against each other), stores keys and values, and adds the projected `tree_attention`. It then adds
    down(activation(gate) * up) of a second norm. A last norm and the head follow, for the wanted nodes only.

    Biases, norms of query and key heads, norms of what is added, windows, several rotary tables, soft caps and a scale
    of the embeddings are optional (`DecoderLayer`, `DecoderNumbers`). Matrices may be int8 with scales.

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
        states: Hidden states to return. With L layers, i < L is the state that enters layer i, L the one behind the
            last layer, and L + 1 that one after the final norm.

    Returns:
        Logits [N, V] of the decoder's dtype, computed in it. The C++ backend takes float32 and bfloat16. It gives nodes
        of a request the same bits whatever requests are beside it, and a node whatever other nodes its request has,
        except for trees of more than 64 nodes. In bfloat16 it adds in float32 and rounds where a model of that type
        does. With `states`, a pair: the same logits, and the hidden states [S, M, hidden] of all nodes.

    Raises:
        ValueError: If arguments do not fit.

    Source:
        Touvron et al. 2023, section 2.2; Gemma Team 2025, section 2, for the norms, windows and rotary tables.
    """
    check(decoder, tokens, positions, wanted, slots, page_table, lengths, offsets, ancestors, depth, states)
    nodes, width, numbers = tokens.shape[0], decoder.keys[0].shape[3], decoder.numbers
    stream, angles = decoder.embedding[tokens], decoder.rotary[:, positions][:, :, None]
    if numbers.embedding_scale != 1:
        stream = stream * numbers.embedding_scale
    kept = slots >= 0
    entering = []
    for layer, keys, values in zip(decoder.layers, decoder.keys, decoder.values):
        entering.append(stream)
        normed = _norm(stream, layer.norm, numbers)
        query = _multiply(normed, layer.query, layer.query_scale, layer.query_bias).view(nodes, -1, width)
        key = _multiply(normed, layer.key, layer.key_scale, layer.key_bias).view(nodes, -1, width)
        value = _multiply(normed, layer.value, layer.value_scale, layer.value_bias).view(nodes, -1, width)
        query = _rotate(_norm(query, layer.query_norm, numbers), angles[layer.rotary])
        key = _rotate(_norm(key, layer.key_norm, numbers), angles[layer.rotary])
        kv_stage(key[kept], value[kept], keys, values, slots[kept])
        trees = page_table, lengths, offsets, ancestors, depth
        options = {"scale": numbers.scale, "softcap": numbers.softcap, "window": layer.window}
        attended = tree_attention(query, keys, values, *trees, **options)  # type: ignore[arg-type]
        assert isinstance(attended, Tensor)
        mixed = _multiply(attended.flatten(1), layer.out, layer.out_scale, layer.out_bias)
        stream = stream + _norm(mixed, layer.post_norm, numbers)
        normed = _norm(stream, layer.mlp_norm, numbers)
        gated = _activate(_multiply(normed, layer.gate, layer.gate_scale), numbers)
        gated = gated * _multiply(normed, layer.up, layer.up_scale)
        stream = stream + _norm(_multiply(gated, layer.down, layer.down_scale), layer.mlp_post_norm, numbers)
    final = _norm(stream, decoder.norm, numbers)
    logits = _multiply(final if wanted is None else final[wanted], decoder.head, decoder.head_scale)
    cap = numbers.logits_softcap
    logits = cap * torch.tanh(logits / cap) if cap else logits
    if states is None:
        return logits
    every = [*entering, stream, final]
    return logits, torch.stack([every[state] for state in states]) if states else stream.new_empty(0, *stream.shape)


def _multiply(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None = None) -> Tensor:
    return linear(x, weight, bias) if scale is None else batch_invariant_linear_int8(x, weight, scale, bias)


def _norm(x: Tensor, weight: Tensor | None, numbers: DecoderNumbers) -> Tensor:
    if weight is None:
        return x
    weight = weight + numbers.norm_offset if numbers.norm_offset else weight
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + numbers.eps) * weight


def _activate(x: Tensor, numbers: DecoderNumbers) -> Tensor:
    return silu(x) if numbers.activation == "silu" else gelu(x, approximate="tanh")


def _rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotates heads [M, H, width] by angles [M, 1, width], cosines and then sines."""
    (low, high), (cosine, sine) = heads.chunk(2, 2), angles.chunk(2, 2)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], 2)
