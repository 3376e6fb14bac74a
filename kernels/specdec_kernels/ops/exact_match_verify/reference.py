"""Plain PyTorch definition of exact_match_verify.

Tests: tests/kernels/test_exact_match_verify.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks


def check(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    node_choice: Tensor,
    score_only: Tensor | None = None,
    *,
    max_depth: int,
) -> None:
    """Raises ValueError for arguments that exact_match_verify cannot take."""
    op = "exact_match_verify"
    nodes = argument_checks.check_tensor(op, "tokens", tokens, torch.int64, "M").shape[0]
    argument_checks.check_offsets(op, offsets, nodes)
    argument_checks.check_tensor(op, "node_choice", node_choice, torch.int64, nodes)
    argument_checks.check_tensor(op, "first_child", first_child, torch.int32, nodes)
    argument_checks.check_tensor(op, "next_sibling", next_sibling, torch.int32, nodes)
    if score_only is not None:
        argument_checks.check_tensor(op, "score_only", score_only, torch.bool, nodes)
    argument_checks.check_max_depth(op, max_depth)
    if not argument_checks.can_read_values(tokens):
        return
    index = torch.arange(nodes, device=tokens.device)
    for name, links in (("first_child", first_child), ("next_sibling", next_sibling)):
        good = (links == -1) | ((links > index) & (links < nodes))
        argument_checks.check_values(
            op, name, good, links, "-1 or the packed index of a later node; use the links of tree_plan"
        )


def path_too_long(op: str, row: int, max_depth: int) -> str:
    """Returns the error message for a path that exceeds its capacity."""
    return (
        f"{op}: the path of row {row} is longer than max_depth = {max_depth}; expected a capacity of at least the "
        "largest depth; pass a larger max_depth"
    )


def exact_match_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    node_choice: Tensor,
    score_only: Tensor | None = None,
    *,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Follows the target's choices through draft trees: the longest path whose tokens are those choices.

    Shapes: M packed nodes of B rows.

    At every node the walk goes to the first child, in sibling order, whose token equals the node's choice. Greedy
    choices make this greedy verification. With replay_sample's choices the text equals plain decoding with that seed.
    Choices of any other exact sampler make it sample-and-match.

    Args:
        tokens: Packed nodes, int64 [M]; the first node of a row is its root.
        offsets: First node of each row, int32 [B + 1].
        first_child: First child of each node, int32 [M], from tree_plan.
        next_sibling: Next sibling of each node, int32 [M], from tree_plan.
        node_choice: The target's choice of the token after each node, int64 [M].
        score_only: Nodes that are never accepted, bool [M], or None.
        max_depth: Capacity of a path, the root not counted.

    Returns:
        path: Packed indices, int32 [B, max_depth + 1], root first, padded with -1.
        num_accepted: int32 [B], the root not counted.
        next_token: int64 [B], node_choice of the last node. A row without nodes has path -1, 0 and next_token -1.

    Raises:
        ValueError: If a shape or dtype is wrong, links do not point forward, or a path is longer than max_depth.

    Source:
        Miao et al., SpecInfer (2024), section 5; sampled choices: "naive sampling" there.
    """
    check(tokens, offsets, first_child, next_sibling, node_choice, score_only, max_depth=max_depth)
    bounds, token, choice = offsets.tolist(), tokens.tolist(), node_choice.tolist()
    child_of, sibling_of = first_child.tolist(), next_sibling.tolist()
    is_score_only = score_only.tolist() if score_only is not None else [False] * len(token)
    paths, accepted, next_tokens = [], [], []
    for row, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        path: list[int] = []
        node = start if end > start else -1
        while node >= 0:
            path.append(node)
            child = child_of[node]
            while child >= 0 and (is_score_only[child] or token[child] != choice[node]):
                child = sibling_of[child]
            node = child
        if len(path) > max_depth + 1:
            raise ValueError(path_too_long("exact_match_verify", row, max_depth))
        next_tokens.append(choice[path[-1]] if path else -1)
        accepted.append(max(len(path) - 1, 0))
        paths.append(path + [-1] * (max_depth + 1 - len(path)))
    device = tokens.device
    return (
        torch.tensor(paths, dtype=torch.int32, device=device).reshape(len(paths), max_depth + 1),
        torch.tensor(accepted, dtype=torch.int32, device=device),
        torch.tensor(next_tokens, dtype=torch.int64, device=device),
    )
