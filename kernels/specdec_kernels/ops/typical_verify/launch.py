"""Triton backend of typical_verify: launch configurations and the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, path_specs, result_tensors
from ...overlay import Overlay
from ...triton_shared.aot_config import Variant, size_type
from .._proposals.verify_arguments import DraftTrees
from ..draft_sample.launch import draw_scratch, residual_arguments, residual_scratch, sample_residuals
from .reference import bind, check
from .triton_kernel import compute_entropies, walk_typical

PIECE = 8192
"""Tokens whose entropy one program sums."""
WARPS = 8
TILE = 64
"""Nodes of a row that are processed in parallel."""


def _tree_scratch(trees: DraftTrees) -> list[TensorSpec]:
    """Returns the scratch per node (entropies of pieces, parent, mark), per row (two nodes), and of the sample."""
    (nodes, vocab_size), rows, integer = trees.target[0].shape, trees.offsets.shape[0] - 1, torch.int32
    own: list[TensorSpec] = [
        ((nodes, -(-vocab_size // PIECE)), torch.float64),
        ((nodes,), integer),
        ((nodes,), integer),
    ]
    own += [((rows,), integer), ((rows,), integer)]
    return [*own, *residual_scratch(vocab_size, None), *draw_scratch(rows, vocab_size)]


def _scratch(*args: Any, **named: Any) -> list[TensorSpec]:
    for name in ("epsilon", "delta", "max_depth"):
        named.pop(name, None)
    return _tree_scratch(bind(*args, **named)[0])


@declare_scratch(_scratch)
def typical_verify(
    *args: Any,
    epsilon: float,
    delta: float,
    max_depth: int,
    overlay: Overlay | None = None,
    out: Sequence[Tensor] | None = None,
    workspace: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the operator. Parameters are those of `bind`."""
    trees, randomness = bind(*args, **named)
    check(trees, randomness, epsilon, delta, max_depth)
    rows, device = trees.offsets.shape[0] - 1, trees.tokens.device
    parts, _ = carve_workspace("typical_verify", workspace, _tree_scratch(trees), device)
    entropy, parents, marks, last, no_rejection, *residual_parts, block_masses = parts
    path, num_accepted, next_token = result_tensors("typical_verify", out, path_specs(rows, max_depth), device)
    if rows:
        residual = residual_arguments(trees.target, scratch=residual_parts, overlay=overlay, op="typical_verify")
        target, flags = residual.target, residual.flags
        tokens, offsets = trees.tokens.contiguous(), trees.offsets.contiguous()
        first_child, next_sibling = trees.first_child.contiguous(), trees.next_sibling.contiguous()
        score_only = tokens if trees.score_only is None else trees.score_only.contiguous().view(torch.int8)
        nodes, pieces = entropy.shape
        if nodes:
            compute_entropies[(nodes, pieces)](
                *target, first_child, entropy, pieces, PIECE, flags.has_overlay, flags.unaligned, num_warps=WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
        walk_typical[(rows,)](
            *target, tokens, offsets, first_child, next_sibling, score_only, entropy, parents, marks, path,
            num_accepted, last, float(epsilon), float(delta), pieces, nodes, max_depth, TILE,
            trees.score_only is not None, flags.has_overlay, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        keys = (randomness.seeds.contiguous(), randomness.root_positions.contiguous(), num_accepted)
        sample_residuals(
            residual, last, no_rejection.fill_(-1), *keys, out=next_token, block_masses=block_masses
        )  # fmt: skip
    return path, num_accepted, next_token


def _distribution_types(dtype: str, unaligned: bool) -> dict[str, str]:
    return {
        "logits_ptr": f"*{dtype}", "inv_t_ptr": "*fp32", "lse_ptr": "*fp32", "cut_ptr": "*fp32", "tie_id_ptr": "*i32",
        "logits_stride": "i32:16", "num_columns": size_type(unaligned), "overlay_ptr": "*i32",
        "overlay_stride": "i32:16", "first_child_ptr": "*i32", "entropy_ptr": "*fp64", "num_pieces": "i32",
    }  # fmt: skip


def _variants(
    dtype: str, everyday: tuple[str, ...], score_only: bool, overlay: bool = False, unaligned: bool = False
) -> list[Variant]:
    kernel, special = "typical_verify.triton_kernel", " with an overlay" if overlay else ""
    special += " unaligned vocabulary" if unaligned else ""
    name = f"{dtype}{' score-only nodes' if score_only else ''}{special}"
    links = {
        "tokens_ptr": "*i64", "offsets_ptr": "*i32", "next_sibling_ptr": "*i32", "score_only_ptr": "*i8",
        "parents_ptr": "*i32", "marks_ptr": "*i32", "path_ptr": "*i32", "num_accepted_ptr": "*i32:1",
        "last_node_ptr": "*i32:1", "epsilon": "fp32", "delta": "fp32", "num_nodes": "i32", "max_depth": "i32",
    }  # fmt: skip
    distribution = _distribution_types(dtype, unaligned)
    return [
        Variant(f"typical_verify/compute_entropies {dtype}{special}", f"{kernel}:compute_entropies", distribution,
                {"TILE": PIECE, "HAS_OVERLAY": overlay, "UNALIGNED": unaligned}, WARPS, everyday=everyday,
                fusion=False),
        Variant(f"typical_verify/walk_typical {name}", f"{kernel}:walk_typical", distribution | links,
                {"TILE": TILE, "HAS_SCORE_ONLY": score_only, "HAS_OVERLAY": overlay}, 1, everyday=everyday,
                fusion=False),
    ]  # fmt: skip


VARIANTS = [
    *_variants("bf16", ("sm_90",), False),
    *_variants("fp16", (), False),
    *_variants("fp32", (), True),
    *_variants("bf16", (), False, overlay=True),
    _variants("bf16", (), False, unaligned=True)[0],
]
