"""Triton backend of ordered_verify and ordered_thresholds: the calls and their configurations."""

from __future__ import annotations

from torch import Tensor

from ..machine_code import Variant
from ..proposals import Law
from ..proposals_launch import Proposals, walk_variant, weigh_variants
from .reference import check


def ordered_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    drawn: Tensor,
    law_row: Tensor,
    target: Law,
    draft: Law | None,
    token_ids: Tensor | None,
    scouts: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    uniforms: Tensor | None = None,
    race: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    tree = (tokens, offsets, first_child, next_sibling, drawn, law_row, target, draft, token_ids, scouts)
    check(*tree, seeds, root_positions, uniforms, race, max_depth=max_depth)
    return Proposals(*tree, levels=False).verify(seeds, root_positions, uniforms, race, max_depth)


def ordered_thresholds(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    drawn: Tensor,
    law_row: Tensor,
    target: Law,
    draft: Law | None,
    token_ids: Tensor | None,
    scouts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    tree = (tokens, offsets, first_child, next_sibling, drawn, law_row, target, draft, token_ids, scouts)
    check(*tree)
    return Proposals(*tree, levels=False).thresholds()


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
