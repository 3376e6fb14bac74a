"""What drafters with a recurrent trained head have in common: how their trees are asked for.

Tests: tests/drafters/test_eagle.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec_fast.draft_runners.cuda_graph_heads import CudaGraphHeads
from specdec_fast.draft_runners.head_runner import HeadRunner
from specdec_fast.trees.expansion import CHOOSING, TreeDrafter
from specdec_fast.trees.topology import Shape, read_shape

_PATHS = (
    *("0", "1", "2", "3", "00", "01", "02", "10", "11", "20", "21", "30", "000", "001", "002", "010", "011", "020"),
    *("021", "100", "0000", "0001", "0002", "00000", "00001"),
)
"""Ranks from the root on: the tree of EAGLE-1 as published (SafeAILab/EAGLE, `mc_sim_7b_63`), 25 nodes."""
PUBLISHED = Shape((-1, *(_PATHS.index(path[:-1]) + 1 if path[:-1] else 0 for path in _PATHS)))


class HeadTrees(TreeDrafter):
    """Trees by a head that is run once per level: `model` is a `PagedHead` or has its verbs.

    depth: levels of a dynamic tree (EAGLE-2), 0 for a static one of `shape` (default: `PUBLISHED`); how: one of
    `growing.HOWS`, or a rule's `prefers`: "sampled" draws siblings without replacement in static trees and takes the
    likeliest in dynamic ones, whose tokens are chosen. A shape that is a chain makes chains, for rules that take only
    these.
    """

    draws = True

    def __init__(
        self,
        model: Any,
        *,
        how: str,
        num_draft_tokens: int | None,
        depth: int,
        width: int,
        shape: str | Path | Sequence[int] | None,
    ) -> None:
        if depth and shape is not None:
            raise ValueError(f"{self.name} depth: got {depth} with a shape; expected depth=0, or no shape")
        if shape is None:
            wanted = PUBLISHED
        else:
            wanted = read_shape(shape) if isinstance(shape, (str, Path)) else Shape(tuple(shape))
        if how == "sampled":
            how = "top_k" if depth else "iid" if wanted.is_chain else "without_replacement"
        how = "top_k" if how == "greedy" else how
        rows = HeadRunner(model, self.name)
        super().__init__(rows, wanted, depth=depth, width=width, num_draft_tokens=num_draft_tokens, how=how)
        self.model = model
        chains = not depth and wanted.is_chain and how in (*CHOOSING, "iid")
        aux_hidden_states = tuple(dict.fromkeys(model.aux_hidden_states))
        partial = self.needs.dists and rows.token_ids is not None
        self.needs = replace(
            self.needs,
            aux_hidden_states=aux_hidden_states,
            topology="chain" if chains else "tree",
            partial_dists=partial,
        )

    def cuda_graph_proposals(self, max_rows: int) -> CudaGraphHeads | str:
        """Its proposals for captured steps over an engine of max_rows rows, or why there are none."""
        if self.needs.dists:
            return f"tokens that are drawn carry distributions (how={' or '.join(CHOOSING)} has none)"
        if self.model.cache.max_rows < max_rows:
            return f"the head has room for {self.model.cache.max_rows} rows, the target for {max_rows}"
        return CudaGraphHeads(self, max_rows)
