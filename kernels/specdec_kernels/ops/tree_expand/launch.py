"""Triton backend of tree_expand: launch configurations and the call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, result_tensors
from ...triton_shared.aot_config import Variant, size_type
from ...triton_shared.jit import lanes_for, unaligned_vocab
from .reference import check

TILE = 4096
"""Logits of a program of `pieces`, which looks for the best of them as often as children are wanted."""
WARPS = 8
MOST_PLACES = 16384
"""Ranks of all pieces of a row that the joining program holds."""
BLOCK = 512


def _pieces(vocab: int) -> int:
    return -(-vocab // TILE)


def why_not(logits: Tensor, width: int) -> str | None:
    """Reasons of shapes and dtypes that the kernels do not serve."""
    if logits.dtype == torch.float64:
        return "float64 logits; this kernel computes in float32"
    if _pieces(logits.shape[-1]) * width > MOST_PLACES:
        return f"{width} children out of {logits.shape[-1]} tokens; served are {MOST_PLACES} per {TILE} tokens"
    return None


def scratch(logits: Tensor, *args: Any, width: int, **kwargs: Any) -> list[TensorSpec]:
    nodes, vocab = logits.shape
    count = _pieces(vocab)
    return [((nodes, count, width), torch.int64), ((nodes, count), torch.float32), ((nodes, count), torch.float32)]


@declare_scratch(scratch)
def tree_expand(
    logits: Tensor,
    inv_t: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    offsets: Tensor,
    scores: Tensor,
    *,
    width: int,
    keep: int,
    sharpness: float = 1.0,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The operator in three launches, whatever the shapes."""
    from .triton_kernel import join, keep_best, pieces

    check(logits, inv_t, cut, tie_id, offsets, scores, width, keep, sharpness, seeds, positions)
    (nodes, vocab), trees, device = logits.shape, offsets.shape[0] - 1, logits.device
    shapes: list[TensorSpec] = [
        ((nodes, width), torch.int64),
        ((nodes, width), torch.float32),
        ((trees, keep), torch.int32),
    ]
    tokens, found, best = answer = result_tensors("tree_expand", out, shapes, device)
    count = _pieces(vocab)
    parts, _ = carve_workspace("tree_expand", workspace, scratch(logits, width=width), device)
    dist = [part.contiguous() for part in (inv_t, cut, tie_id, scores)]
    keys = (dist[2], dist[2]) if seeds is None or positions is None else (seeds.contiguous(), positions.contiguous())
    if nodes:
        pieces[(nodes, count)](
            logits, *dist, *keys, *parts, vocab, logits.stride(0), width, float(sharpness), TILE=TILE,
            NOISE=seeds is not None, UNALIGNED=unaligned_vocab(vocab, logits.stride(0)), num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
        join[(nodes,)](
            *dist, *parts, tokens, found, count, width, float(sharpness), PIECES=next_power_of_2(count),
            PLACES=lanes_for(count * width, 512), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    if trees:
        keep_best[(trees,)](offsets.contiguous(), found, best, nodes, width, keep, BLOCK=BLOCK, num_warps=4)
    return tuple(answer)


def _variants(dtype: str, noise: bool, everyday: tuple[str, ...], unaligned: bool = False) -> Variant:
    arguments: dict[str, Any] = {
        "logits": f"*{dtype}", "inv_t": "*fp32", "cut": "*fp32", "tie_id": "*i32", "scores": "*fp32", "seeds": "*i64",
        "positions": "*i32", "ranks": "*i64", "peaks": "*fp32", "sums": "*fp32", "vocab": size_type(unaligned),
        "stride": "i32:16", "width": "i32", "sharpness": "fp32",
    }  # fmt: skip
    name = f"tree_expand/pieces {dtype}{' noise' if noise else ''}{' unaligned vocabulary' if unaligned else ''}"
    kernel = "tree_expand.triton_kernel:pieces"
    constants = {"TILE": TILE, "NOISE": noise, "UNALIGNED": unaligned}
    return Variant(name, kernel, arguments, constants, WARPS, everyday=everyday, fusion=False)


VARIANTS = [
    _variants("bf16", True, ("sm_90",)),
    _variants("fp16", False, ()),
    _variants("fp32", True, ()),
    *(_variants(dtype, True, (), True) for dtype in ("bf16", "fp32")),
    Variant(
        "tree_expand/join 8 of 38 pieces", "tree_expand.triton_kernel:join",
        {
            **dict.fromkeys(("inv_t", "cut", "scores", "peaks", "sums", "found"), "*fp32"), "tie_id": "*i32",
            "ranks": "*i64", "tokens": "*i64", "count": "i32", "width": "i32", "sharpness": "fp32",
        },
        {"PIECES": 64, "PLACES": 512}, fusion=False,
    ),
    Variant(
        "tree_expand/keep", "tree_expand.triton_kernel:keep_best",
        {"offsets": "*i32", "scores": "*fp32", "best": "*i32", "nodes": "i32", "width": "i32", "keep": "i32"},
        {"BLOCK": BLOCK},
    ),
]  # fmt: skip
