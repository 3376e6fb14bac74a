"""Triton backend of recursive_rejection_verify and recursive_rejection_thresholds: the calls and their
configurations.
"""

from __future__ import annotations

from ...triton_shared.variant import Variant
from .._proposals.launch import NODES, thresholds_by, verify_by, walk_variant, weigh_variants
from .reference import check

recursive_rejection_verify = verify_by("recursive_rejection_verify", False, check)
recursive_rejection_thresholds = thresholds_by("recursive_rejection_thresholds", False, check)

VARIANTS = [
    *weigh_variants("recursive_rejection_verify", "bf16", True, draft=True),
    *weigh_variants("recursive_rejection_verify", "fp32 mapped score-only nodes", False, "fp32", draft=True,
        mapped=True, score_only=True),
    *weigh_variants("recursive_rejection_verify", "fp16", False, "fp16", draft=True),
    *weigh_variants("recursive_rejection_verify", "bf16 chosen", False, draft=False),
    *weigh_variants("recursive_rejection_verify", "bf16 with an overlay", False, draft=True, fold=True),
    *weigh_variants("recursive_rejection_verify", "bf16 unaligned vocabulary", False, draft=True, unaligned=True),
    Variant(
        "recursive_rejection_verify/prepare", "recursive_rejection_verify.triton_kernel:prepare",
        {
            **dict.fromkeys(("offsets", "first_child", "next_sibling", "dist_index", "first", "sibling"), "*i32"),
            **dict.fromkeys(("source", "applied", "level", "parents"), "*i32"), "accept": "*fp32", "reach": "*fp64",
            **dict.fromkeys(("rows", "nodes", "dists"), "i32"),
        },
        {"TILE": NODES}, warps=2,
    ),
    walk_variant("recursive_rejection_verify", False),
]  # fmt: skip
