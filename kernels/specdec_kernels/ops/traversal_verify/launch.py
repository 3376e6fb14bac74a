"""Triton backend of traversal_verify and traversal_thresholds: the calls and their configurations."""

from __future__ import annotations

from .._proposals.launch import thresholds_by, verify_by, walk_variant, weigh_variants
from .reference import check

traversal_verify = verify_by("traversal_verify", True, check)
traversal_thresholds = thresholds_by("traversal_thresholds", True, check)

VARIANTS = [
    *weigh_variants("traversal_verify", "bf16", False, draft=True),
    *weigh_variants(
        "traversal_verify", "fp32 mapped score-only nodes", False, "fp32", draft=True, mapped=True, score_only=True
    ),
    *weigh_variants("traversal_verify", "fp16", False, "fp16", draft=True),
    *weigh_variants("traversal_verify", "bf16 chosen", False, draft=False),
    *weigh_variants("traversal_verify", "bf16 with an overlay", False, draft=True, fold=True),
    walk_variant("traversal_verify", False),
]
