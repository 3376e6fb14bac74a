"""Triton backend of typical_verify: launch configurations and the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, path_specs, result_tensors
from ...overlay import Overlay
from ...triton_shared.variant import Variant, size_type
from .._proposals.reference import Distribution
from ..draft_sample.launch import draw, draw_scratch, rest_of, rest_scratch
from .reference import check
from .triton_kernel import entropies, walk

PIECE = 8192
"""Tokens of whose distribution one program finds the entropy."""
WARPS = 8
TILE = 64
"""Nodes of a row that are looked at side by side."""


def _scratch(
    tokens: Tensor, offsets: Tensor, first_child: Tensor, next_sibling: Tensor, target: Distribution, *args: object,
    **kwargs: object,
) -> list[TensorSpec]:  # fmt: skip
    """Per node: entropies of the pieces, parent, mark; per row: last node, its refused child (none); the draw's."""
    (nodes, vocab), rows, integer = target[0].shape, offsets.shape[0] - 1, torch.int32
    own: list[TensorSpec] = [((nodes, -(-vocab // PIECE)), torch.float64), ((nodes,), integer), ((nodes,), integer)]
    return [*own, ((rows,), integer), ((rows,), integer), *rest_scratch(vocab, None), *draw_scratch(rows, vocab)]


@declare_scratch(_scratch)
def typical_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    target: Distribution,
    score_only: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    *,
    epsilon: float,
    delta: float,
    max_depth: int,
    overlay: Overlay | None = None,
    out: Sequence[Tensor] | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    tree = (tokens, offsets, first_child, next_sibling)
    check(*tree, target, score_only, seeds, root_positions, epsilon, delta, max_depth)
    sizes, rows = _scratch(*tree, target), offsets.shape[0] - 1
    parts, _ = carve_workspace("typical_verify", workspace, sizes, tokens.device)
    sums, parents, marks, last, firsts, *rest, part = parts
    path, accepted, following = result_tensors("typical_verify", out, path_specs(rows, max_depth), tokens.device)
    if rows:
        dists = rest_of(target, scratch=rest, overlay=overlay, op="typical_verify")
        dist, fold = dists.target, dists.kind[4]
        links = [each.contiguous() for each in tree]
        nodes, pieces = sums.shape
        if nodes:
            entropies[(nodes, pieces)](
                *dist, links[2], sums, pieces, PIECE, fold, dists.kind[5], num_warps=WARPS, enable_fp_fusion=False
            )
        walk[(rows,)](
            *dist, *links, links[0] if score_only is None else score_only.contiguous().view(torch.int8), sums, parents,
            marks,
            path, accepted, last, float(epsilon), float(delta), pieces, nodes, max_depth, TILE,
            score_only is not None, fold, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        keys = (seeds.contiguous(), root_positions.contiguous(), accepted)
        draw(dists, last, firsts.fill_(-1), *keys, out=following, part=part)
    return path, accepted, following


def _dist(dtype: str, unaligned: bool) -> dict[str, str]:
    return {
        "logits": f"*{dtype}", "inv_t": "*fp32", "lse": "*fp32", "cut": "*fp32", "tie_id": "*i32", "stride": "i32:16",
        "width": size_type(unaligned), "cells": "*i32", "room": "i32:16", "first_child": "*i32", "sums": "*fp64",
        "pieces": "i32",
    }  # fmt: skip


def _variants(
    dtype: str, everyday: tuple[str, ...], score_only: bool, fold: bool = False, unaligned: bool = False
) -> list[Variant]:
    kernel, over = "typical_verify.triton_kernel", " with an overlay" if fold else ""
    over += " unaligned vocabulary" if unaligned else ""
    name = f"{dtype}{' score_only' if score_only else ''}{over}"
    links = {
        "tokens": "*i64", "offsets": "*i32", "next_sibling": "*i32", "score_only": "*i8", "parents": "*i32",
        "marks": "*i32", "path": "*i32", "accepted": "*i32:1", "last": "*i32:1", "epsilon": "fp32", "delta": "fp32",
        "nodes": "i32", "depth": "i32",
    }  # fmt: skip
    constants = {"TILE": TILE, "SCORE_ONLY": score_only, "FOLD": fold}
    return [
        Variant(f"typical_verify/entropies {dtype}{over}", f"{kernel}:entropies", _dist(dtype, unaligned),
                {"TILE": PIECE, "FOLD": fold, "UNALIGNED": unaligned}, WARPS, everyday=everyday, fusion=False),
        Variant(f"typical_verify/walk {name}", f"{kernel}:walk", _dist(dtype, unaligned) | links, constants, 1,
                everyday=everyday, fusion=False),
    ]  # fmt: skip


VARIANTS = [
    *_variants("bf16", ("sm_90",), False),
    *_variants("fp16", (), False),
    *_variants("fp32", (), True),
    *_variants("bf16", (), False, fold=True),
    _variants("bf16", (), False, unaligned=True)[0],
]
