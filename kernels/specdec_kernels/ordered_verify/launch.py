"""Triton backend of ordered_verify and ordered_thresholds: the calls and their configurations."""

from __future__ import annotations

from ..machine_code import Variant
from ..proposals_launch import thresholds_by, verify_by, walk_variant, weigh_variants
from .reference import check

ordered_verify = verify_by("ordered_verify", False, check)
ordered_thresholds = thresholds_by("ordered_thresholds", False, check)

VARIANTS = [
    *weigh_variants("ordered_verify", "bf16", True, draft=True),
    *weigh_variants("ordered_verify", "fp32 mapped scouts", False, "fp32", draft=True, mapped=True, scouts=True),
    *weigh_variants("ordered_verify", "bf16 chosen", False, draft=False),
    Variant(
        "ordered_verify/plant", "ordered_verify.triton_kernel:plant",
        {"offsets": "*i32", "level": "*i32", "reach": "*fp64", "accept": "*fp32"}, warps=1,
    ),
    walk_variant("ordered_verify", 8, False),
]  # fmt: skip
