"""C++ backend of tree_verify."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import expect
from .reference import check

_tree_verify = torch.ops.specdec.tree_verify.default


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
    try:
        return _tree_verify(tokens, offsets, first_child, next_sibling, node_choice, scouts, max_depth)
    except (RuntimeError, ValueError):
        check(tokens, offsets, first_child, next_sibling, node_choice, scouts, max_depth=max_depth)
        links = expect.contiguous(tokens, offsets, first_child, next_sibling, node_choice, scouts)
        return _tree_verify(*links, max_depth)  # raises again for a path longer than max_depth
