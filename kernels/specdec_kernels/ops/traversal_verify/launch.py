"""Triton backend of traversal_verify and traversal_thresholds."""

from __future__ import annotations

from .._proposals.launch import reject_variants, thresholds_by, verify_by, walk_variant
from .reference import check

OP = "traversal_verify"
traversal_verify = verify_by(OP, True, check)
traversal_thresholds = thresholds_by("traversal_thresholds", True, check)

VARIANTS = [
    *reject_variants(OP, "bf16", False, draft=True),
    *reject_variants(OP, "fp32 mapped score-only nodes", False, "fp32", draft=True, mapped=True, score_only=True),
    *reject_variants(OP, "fp16", False, "fp16", draft=True),
    *reject_variants(OP, "bf16 deterministic", False, draft=False),
    *reject_variants(OP, "bf16 with an overlay", False, draft=True, overlay=True),
    walk_variant(OP, False),
]
