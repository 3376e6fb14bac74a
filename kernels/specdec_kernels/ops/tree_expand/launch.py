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
"""Logits of one program of `pieces`. The program searches them once per child."""
WARPS = 8
MAX_RANKS = 16384
"""Ranks of all pieces of a row that one program of `join` holds."""
BLOCK = 512
"""Child scores that `keep_best` reads at a time."""


def _pieces(vocab: int) -> int:
    return -(-vocab // TILE)


def why_not(logits: Tensor, width: int) -> str | None:
    """Returns why the kernels cannot serve a call, or None."""
    if logits.dtype == torch.float64:
        return "float64 logits; this kernel computes in float32"
    if _pieces(logits.shape[-1]) * width > MAX_RANKS:
        return f"{width} children out of {logits.shape[-1]} tokens; expected at most {MAX_RANKS} per {TILE} tokens"
    return None


def scratch(logits: Tensor, *args: Any, width: int, **kwargs: Any) -> list[TensorSpec]:
    """Returns the specs of ranks, peaks and sums of all pieces."""
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
    """Runs the operator in three launches, whatever the shapes."""
    from .triton_kernel import join, keep_best, pieces

    check(logits, inv_t, cut, tie_id, offsets, scores, width, keep, sharpness, seeds, positions)
    (nodes, vocab), trees, device = logits.shape, offsets.shape[0] - 1, logits.device
    shapes: list[TensorSpec] = [
        ((nodes, width), torch.int64),
        ((nodes, width), torch.float32),
        ((trees, keep), torch.int32),
    ]
    tokens, child_scores, best = results = result_tensors("tree_expand", out, shapes, device)
    count = _pieces(vocab)
    partials, _ = carve_workspace("tree_expand", workspace, scratch(logits, width=width), device)
    inputs = [each.contiguous() for each in (inv_t, cut, tie_id, scores)]
    keys = inputs[2], inputs[2]  # not read without noise
    if seeds is not None and positions is not None:
        keys = seeds.contiguous(), positions.contiguous()
    if nodes:
        pieces[(nodes, count)](
            logits, *inputs, *keys, *partials, vocab, logits.stride(0), width, float(sharpness), TILE=TILE,
            NOISE=seeds is not None, UNALIGNED=unaligned_vocab(vocab, logits.stride(0)), num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
        join[(nodes,)](
            *inputs, *partials, tokens, child_scores, count, width, float(sharpness), PIECES=next_power_of_2(count),
            RANKS=lanes_for(count * width, 512), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    if trees:
        keep_best[(trees,)](offsets.contiguous(), child_scores, best, nodes, width, keep, BLOCK=BLOCK, num_warps=4)
    return tuple(results)


def _variant(dtype: str, noise: bool, everyday: tuple[str, ...], unaligned: bool = False) -> Variant:
    arguments: dict[str, Any] = {
        "logits_ptr": f"*{dtype}", "inv_t_ptr": "*fp32", "cut_ptr": "*fp32", "tie_id_ptr": "*i32",
        "scores_ptr": "*fp32", "seeds_ptr": "*i64", "positions_ptr": "*i32", "ranks_ptr": "*i64", "peaks_ptr": "*fp32",
        "sums_ptr": "*fp32", "vocab_size": size_type(unaligned), "logits_stride": "i32:16", "width": "i32",
        "sharpness": "fp32",
    }  # fmt: skip
    name = f"tree_expand/pieces {dtype}{' noise' if noise else ''}{' unaligned vocabulary' if unaligned else ''}"
    kernel = "tree_expand.triton_kernel:pieces"
    constants = {"TILE": TILE, "NOISE": noise, "UNALIGNED": unaligned}
    return Variant(name, kernel, arguments, constants, WARPS, everyday=everyday, fusion=False)


_JOIN_FLOATS = "inv_t_ptr", "cut_ptr", "scores_ptr", "peaks_ptr", "sums_ptr", "child_scores_ptr"
VARIANTS = [
    _variant("bf16", True, ("sm_90",)),
    _variant("fp16", False, ()),
    _variant("fp32", True, ()),
    *(_variant(dtype, True, (), True) for dtype in ("bf16", "fp32")),
    Variant(
        "tree_expand/join 8 of 38 pieces", "tree_expand.triton_kernel:join",
        {
            **dict.fromkeys(_JOIN_FLOATS, "*fp32"), "tie_id_ptr": "*i32", "ranks_ptr": "*i64", "tokens_ptr": "*i64",
            "num_pieces": "i32", "width": "i32", "sharpness": "fp32",
        },
        {"PIECES": 64, "RANKS": 512}, fusion=False,
    ),
    Variant(
        "tree_expand/keep", "tree_expand.triton_kernel:keep_best",
        {
            "offsets_ptr": "*i32", "child_scores_ptr": "*fp32", "best_ptr": "*i32", "num_nodes": "i32", "width": "i32",
            "keep": "i32",
        },
        {"BLOCK": BLOCK},
    ),
]  # fmt: skip
