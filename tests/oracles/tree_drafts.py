"""Draft trees of the rational oracle as drafts of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oracles.rational_models import dists_of
from oracles.tree_rules import DETERMINISTIC, DraftedTree
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft


def packed(trees: Sequence[DraftedTree], dtype: torch.dtype = torch.float64) -> tuple[Draft, TokenDistributions]:
    """Returns the trees as rows of one batch, and the target's distributions after every node."""
    counts = tuple(len(tree.nodes) for tree in trees)
    tokens, parents, kinds, dist_index, score_only, target_rows, draft_rows = [], [], [], [], [], [], []
    names: dict[tuple[int, object], int] = {}
    depth = 0
    for tree in trees:
        for at, node in enumerate(tree.nodes):
            tokens.append(node.token)
            parents.append(node.parent)
            kinds.append(node.mark)
            score_only.append(node.score_only_node)
            target_rows.append(tree.p_after(tree.text(at)))
            depth = max(depth, len(tree.text(at)))
            if at == 0 or node.mark == DETERMINISTIC:
                dist_index.append(-1)
                continue
            name = (node.source, tree.text(node.parent))
            if name not in names:
                names[name] = len(draft_rows)
                draft_rows.append(tree.q_after[node.source](tree.text(node.parent)))
            dist_index.append(names[name])
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    draft = Draft(
        rows=torch.arange(len(trees), dtype=torch.int32),
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents, dtype=torch.int32),
        offsets=torch.tensor(offsets, dtype=torch.int32),
        proposal_kinds=torch.tensor(kinds, dtype=torch.int8),
        dist_index=torch.tensor(dist_index, dtype=torch.int32),
        row_of=torch.repeat_interleave(torch.arange(len(trees)), torch.tensor(counts)),
        counts=counts,
        max_depth=depth,
        is_chain=all(node.parent == at - 1 for tree in trees for at, node in enumerate(tree.nodes)),
        dists=dists_of(draft_rows, dtype) if draft_rows else None,
        score_only=torch.tensor(score_only) if any(score_only) else None,
    )
    return draft, dists_of(target_rows, dtype)
