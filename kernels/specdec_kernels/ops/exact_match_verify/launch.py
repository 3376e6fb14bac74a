"""Triton backend of exact_match_verify: the launch configuration and the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, path_specs, result_tensors
from ...triton_shared.variant import Variant
from .reference import check, too_deep
from .triton_kernel import follow


def scratch(tokens: Tensor, offsets: Tensor, *args: object, **kwargs: object) -> list[TensorSpec]:
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
    check(tokens, offsets, first_child, next_sibling, node_choice, score_only, max_depth=max_depth)
    rows = offsets.shape[0] - 1
    (stopped,), _ = carve_workspace("exact_match_verify", workspace, scratch(tokens, offsets), tokens.device)
    path, accepted, following = result_tensors("exact_match_verify", out, path_specs(rows, max_depth), tokens.device)
    if rows:
        links = [part.contiguous() for part in (tokens, offsets, first_child, next_sibling, node_choice)]
        marks = links[0] if score_only is None else score_only.contiguous().view(torch.int8)
        follow[(rows,)](
            *links, marks, path, accepted, following, stopped, tokens.shape[0], max_depth, score_only is not None,
            num_warps=1,
        )  # fmt: skip
        if argument_checks.can_read_values(tokens) and bool(stopped.any()):  # elsewhere the path just ends there
            raise too_deep("exact_match_verify", int(stopped.nonzero()[0, 0]), max_depth)
    return path, accepted, following


def _follow(score_only: bool, everyday: bool) -> Variant:
    arguments = {
        "tokens": "*i64", "offsets": "*i32", "first_child": "*i32", "next_sibling": "*i32", "choice": "*i64",
        "score_only": "*i8", "path": "*i32", "accepted": "*i32:1", "following": "*i64", "stopped": "*i32:1",
        "nodes": "i32", "depth": "i32",
    }  # fmt: skip
    return Variant(
        f"exact_match_verify/follow{' score_only' if score_only else ''}", "exact_match_verify.triton_kernel:follow",
        arguments, {"SCORE_ONLY": score_only}, 1, everyday=("sm_90",) if everyday else (),
    )  # fmt: skip


VARIANTS = [_follow(False, True), _follow(True, False)]
