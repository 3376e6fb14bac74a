"""Triton backend of exact_match_verify: the launch configuration and the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, path_specs, result_tensors
from ...triton_shared.aot_config import Variant
from .reference import check, path_too_long
from .triton_kernel import follow_choices


def scratch(tokens: Tensor, offsets: Tensor, *args: object, **kwargs: object) -> list[TensorSpec]:
    """Per row: whether its path is too deep."""
    return [((offsets.shape[0] - 1,), torch.int32)]


@declare_scratch(scratch)
def exact_match_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    node_choice: Tensor,
    score_only: Tensor | None = None,
    *,
    max_depth: int,
    out: Sequence[Tensor] | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the operator in one launch."""
    check(tokens, offsets, first_child, next_sibling, node_choice, score_only, max_depth=max_depth)
    rows = offsets.shape[0] - 1
    (is_too_deep,), _ = carve_workspace("exact_match_verify", workspace, scratch(tokens, offsets), tokens.device)
    specs = path_specs(rows, max_depth)
    path, num_accepted, next_token = result_tensors("exact_match_verify", out, specs, tokens.device)
    if rows:
        links = [part.contiguous() for part in (tokens, offsets, first_child, next_sibling, node_choice)]
        score_only_bytes = links[0] if score_only is None else score_only.contiguous().view(torch.int8)
        follow_choices[(rows,)](
            *links, score_only_bytes, path, num_accepted, next_token, is_too_deep, tokens.shape[0], max_depth,
            score_only is not None, num_warps=1,
        )  # fmt: skip
        if argument_checks.can_read_values(tokens) and bool(is_too_deep.any()):  # on a GPU the path just ends there
            row = int(is_too_deep.nonzero()[0, 0])
            raise ValueError(path_too_long("exact_match_verify", row, max_depth))
    return path, num_accepted, next_token


def _variant(score_only: bool, everyday: bool) -> Variant:
    arguments = {
        "tokens_ptr": "*i64", "offsets_ptr": "*i32", "first_child_ptr": "*i32", "next_sibling_ptr": "*i32",
        "node_choice_ptr": "*i64", "score_only_ptr": "*i8", "path_ptr": "*i32", "num_accepted_ptr": "*i32:1",
        "next_token_ptr": "*i64", "too_deep_ptr": "*i32:1", "num_nodes": "i32", "max_depth": "i32",
    }  # fmt: skip
    return Variant(
        f"exact_match_verify/follow_choices{' score-only nodes' if score_only else ''}",
        "exact_match_verify.triton_kernel:follow_choices", arguments, {"HAS_SCORE_ONLY": score_only}, 1,
        everyday=("sm_90",) if everyday else (),
    )  # fmt: skip


VARIANTS = [_variant(False, True), _variant(True, False)]
