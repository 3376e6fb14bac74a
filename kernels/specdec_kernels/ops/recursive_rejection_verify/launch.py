"""Triton backend of recursive_rejection_verify and recursive_rejection_thresholds."""

from __future__ import annotations

from ...triton_shared.aot_config import Variant
from .._proposals.launch import NODES, reject_variants, thresholds_by, verify_by, walk_variant
from .reference import check

OP = "recursive_rejection_verify"
recursive_rejection_verify = verify_by(OP, False, check)
recursive_rejection_thresholds = thresholds_by("recursive_rejection_thresholds", False, check)

VARIANTS = [
    *reject_variants(OP, "bf16", True, draft=True),
    *reject_variants(OP, "fp32 mapped score-only nodes", False, "fp32", draft=True, mapped=True, score_only=True),
    *reject_variants(OP, "fp16", False, "fp16", draft=True),
    *reject_variants(OP, "bf16 deterministic", False, draft=False),
    *reject_variants(OP, "bf16 with an overlay", False, draft=True, overlay=True),
    *reject_variants(OP, "bf16 unaligned vocabulary", False, draft=True, unaligned=True),
    Variant(
        f"{OP}/prepare_trees", f"{OP}.triton_kernel:prepare_trees",
        {
            **dict.fromkeys(("offsets_ptr", "given_first_child_ptr", "given_next_sibling_ptr"), "*i32"),
            **dict.fromkeys(("given_dist_index_ptr", "first_child_ptr", "next_sibling_ptr", "dist_index_ptr"), "*i32"),
            **dict.fromkeys(("applied_ptr", "level_ptr", "parents_ptr"), "*i32"),
            "accept_ptr": "*fp32", "reach_ptr": "*fp64",
            **dict.fromkeys(("num_rows", "num_nodes", "num_dists"), "i32"),
        },
        {"TILE": NODES}, warps=2,
    ),
    walk_variant(OP, False),
]  # fmt: skip
