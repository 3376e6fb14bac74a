"""Triton backend of ordered_verify and ordered_thresholds: the calls and their configurations."""

from __future__ import annotations

from ..machine_code import Variant
from ..proposals_launch import NODES, thresholds_by, verify_by, walk_variant, weigh_variants
from .reference import check

ordered_verify = verify_by("ordered_verify", False, check)
ordered_thresholds = thresholds_by("ordered_thresholds", False, check)

VARIANTS = [
    *weigh_variants("ordered_verify", "bf16", True, draft=True),
    *weigh_variants("ordered_verify", "fp32 mapped scouts", False, "fp32", draft=True, mapped=True, scouts=True),
    *weigh_variants("ordered_verify", "fp16", False, "fp16", draft=True),
    *weigh_variants("ordered_verify", "bf16 chosen", False, draft=False),
    *weigh_variants("ordered_verify", "bf16 with an overlay", False, draft=True, fold=True),
    *weigh_variants("ordered_verify", "bf16 ragged", False, draft=True, uneven=True),
    Variant(
        "ordered_verify/prepare", "ordered_verify.triton_kernel:prepare",
        {
            **dict.fromkeys(("offsets", "first_child", "next_sibling", "law_row", "first", "sibling"), "*i32"),
            **dict.fromkeys(("source", "applied", "level", "parents"), "*i32"), "accept": "*fp32", "reach": "*fp64",
            **dict.fromkeys(("rows", "nodes", "laws"), "i32"),
        },
        {"TILE": NODES}, warps=2,
    ),
    walk_variant("ordered_verify", False),
]  # fmt: skip
