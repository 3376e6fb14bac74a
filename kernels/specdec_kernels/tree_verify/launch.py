"""Triton backend of tree_verify: the launch configuration and the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import expect
from ..machine_code import Variant
from ..workspace import Spec, carve, needs, path_specs, results
from .reference import check, too_deep
from .triton_kernel import follow


def scratch(tokens: Tensor, offsets: Tensor, *args: object, **kwargs: object) -> list[Spec]:
    return [((offsets.shape[0] - 1,), torch.int32)]


@needs(scratch)
def tree_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    node_choice: Tensor,
    scouts: Tensor | None = None,
    *,
    max_depth: int,
    out: Sequence[Tensor] | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    check(tokens, offsets, first_child, next_sibling, node_choice, scouts, max_depth=max_depth)
    rows = offsets.shape[0] - 1
    (stopped,), _ = carve("tree_verify", workspace, scratch(tokens, offsets), tokens.device)
    path, accepted, following = results("tree_verify", out, path_specs(rows, max_depth), tokens.device)
    if rows:
        links = [part.contiguous() for part in (tokens, offsets, first_child, next_sibling, node_choice)]
        marks = links[0] if scouts is None else scouts.contiguous().view(torch.int8)
        follow[(rows,)](
            *links, marks, path, accepted, following, stopped, tokens.shape[0], max_depth, scouts is not None,
            num_warps=1,
        )  # fmt: skip
        if expect.readable(tokens) and bool(stopped.any()):  # elsewhere the path just ends there
            raise too_deep("tree_verify", int(stopped.nonzero()[0, 0]), max_depth)
    return path, accepted, following


def _follow(scouts: bool, everyday: bool) -> Variant:
    arguments = {
        "tokens": "*i64", "offsets": "*i32", "first_child": "*i32", "next_sibling": "*i32", "choice": "*i64",
        "scouts": "*i8", "path": "*i32", "accepted": "*i32:1", "following": "*i64", "stopped": "*i32:1",
        "nodes": "i32", "depth": "i32",
    }  # fmt: skip
    return Variant(
        f"tree_verify/follow{' scouts' if scouts else ''}", "tree_verify.triton_kernel:follow",
        arguments, {"SCOUTS": scouts}, 1, everyday=("sm_90",) if everyday else (),
    )  # fmt: skip


VARIANTS = [_follow(False, True), _follow(True, False)]
