"""Triton backend of tree_verify: the launch configuration and the call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..machine_code import Variant
from .reference import check, too_deep
from .triton_kernel import follow


def tree_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    node_choice: Tensor,
    scouts: Tensor | None = None,
    *,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    check(tokens, offsets, first_child, next_sibling, node_choice, scouts, max_depth=max_depth)
    rows = offsets.shape[0] - 1
    table = torch.empty(rows * (max_depth + 3), dtype=torch.int32, device=tokens.device)
    path, accepted, stopped = table.split([rows * (max_depth + 1), rows, rows])
    following = torch.empty(rows, dtype=torch.int64, device=tokens.device)
    if rows:
        links = [part.contiguous() for part in (tokens, offsets, first_child, next_sibling, node_choice)]
        marks = links[0] if scouts is None else scouts.contiguous().view(torch.int8)
        follow[(rows,)](
            *links, marks, path, accepted, following, stopped, max_depth, 1 << max_depth.bit_length(),
            scouts is not None, num_warps=1,
        )  # fmt: skip
        if tokens.is_cpu and bool(stopped.any()):  # elsewhere the path just ends there: asking would synchronise
            raise too_deep("tree_verify", int(stopped.nonzero()[0, 0]), max_depth)
    return path.view(rows, max_depth + 1), accepted, following


def _follow(steps: int, scouts: bool, everyday: bool) -> Variant:
    arguments = {
        "tokens": "*i64", "offsets": "*i32", "first_child": "*i32", "next_sibling": "*i32", "choice": "*i64",
        "scouts": "*i8", "path": "*i32", "accepted": "*i32:1", "following": "*i64", "stopped": "*i32:1",
        "depth": "i32",
    }  # fmt: skip
    return Variant(
        f"tree_verify/follow {steps} steps{' scouts' if scouts else ''}", "tree_verify.triton_kernel:follow",
        arguments, {"STEPS": steps, "SCOUTS": scouts}, 1, everyday=("sm_90",) if everyday else (),
    )  # fmt: skip


VARIANTS = [_follow(8, False, True), _follow(64, True, False)]
