"""Triton backend of replay_verify: the launches of its three parts, and the keys of every node's noise between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, path_specs, result_tensors, total_bytes
from ...overlay import Overlay
from ...random import BLOCK
from ...triton_shared.aot_config import Variant
from ..distribution_stats.launch import clear_stats, distribution_stats, unlisted_nodes
from ..distribution_stats.launch import scratch as stats_scratch
from ..exact_match_verify.launch import exact_match_verify
from ..exact_match_verify.launch import scratch as walk_scratch
from ..replay_sample.launch import replay_sample
from ..replay_sample.launch import scratch as choice_scratch
from .reference import check
from .triton_kernel import key_nodes

TILE = 64
"""Nodes of a row that are processed in parallel."""


def _scratch(
    tokens: Tensor, offsets: Tensor, first_child: Tensor, next_sibling: Tensor, score_only: Tensor | None,
    logits: Tensor,
    *args: object, max_depth: int, **kwargs: object,
) -> list[TensorSpec]:  # fmt: skip
    """Of the three parts. Per node: parent, seed, position, choice, whether on no path. Then nodes of the paths."""
    nodes, rows = tokens.shape[0], offsets.shape[0] - 1
    parts = (stats_scratch(logits, pivots=tokens), choice_scratch(logits), walk_scratch(tokens, offsets))
    types = (torch.int32, torch.int64, torch.int32, torch.int64)
    return [
        *(((total_bytes(part),), torch.uint8) for part in parts),
        *(((nodes,), dtype) for dtype in types),
        ((nodes + 1,), torch.bool),
        ((rows * (max_depth + 1),), torch.int64),
    ]


@declare_scratch(_scratch)
def replay_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    score_only: Tensor | None,
    logits: Tensor,
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    seeds: Tensor,
    root_positions: Tensor,
    *,
    max_depth: int,
    overlay: Overlay | None = None,
    out: Sequence[Tensor] | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Runs the operator. Statistics and choices of all nodes are computed in parallel."""
    op, links = "replay_verify", (tokens, offsets, first_child, next_sibling)
    check(*links, score_only, logits, sampling, seeds, root_positions, max_depth=max_depth)
    (nodes, vocab), rows = logits.shape, offsets.shape[0] - 1
    sizes = _scratch(*links, score_only, logits, max_depth=max_depth)
    parts, _ = carve_workspace(op, workspace, sizes, tokens.device)
    of_stats, of_choice, of_walk, parents, node_seeds, node_positions, choice, unlisted, index = parts
    single, statistics = torch.float32, [torch.float32] * 3 + [torch.int32]
    dists: list[TensorSpec] = [*(((nodes,), dtype) for dtype in statistics), ((nodes, -(-vocab // BLOCK)), single)]
    found = result_tensors(op, out, [*path_specs(rows, max_depth), *dists], tokens.device)
    inv_t, _, cut, tie_id, _ = stats = distribution_stats(
        logits, *sampling, masses=True, pivots=tokens[1:],  # the child of a chain's node, and of every root
        overlay=overlay, out=found[3:], workspace=of_stats,
    )  # fmt: skip
    if rows:
        trees = (part.contiguous() for part in (*links[1:], seeds, root_positions))
        key_nodes[(rows,)](*trees, parents, node_seeds, node_positions, rows, nodes, TILE, num_warps=1)
        keys = (inv_t, cut, tie_id, node_seeds, node_positions)
        replay_sample(logits, *keys, overlay=overlay, out=choice, workspace=of_choice)
    exact_match_verify(*links, choice, score_only, max_depth=max_depth, out=found[:3], workspace=of_walk)
    clear_stats(unlisted_nodes(found[0], unlisted, index), stats)
    return tuple(found)


VARIANTS = [
    Variant(
        "replay_verify/key_nodes", "replay_verify.triton_kernel:key_nodes",
        {
            "offsets_ptr": "*i32", "first_child_ptr": "*i32", "next_sibling_ptr": "*i32", "seeds_ptr": "*i64",
            "root_positions_ptr": "*i32", "parents_ptr": "*i32", "node_seeds_ptr": "*i64", "node_positions_ptr": "*i32",
            "num_rows": "i32", "num_nodes": "i32",
        },
        {"TILE": TILE}, 1,
    ),
]  # fmt: skip
