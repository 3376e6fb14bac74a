"""Trees of recurrent trained heads, the base of drafters `eagle`, `eagle3` and `mtp`.

Tests: tests/drafters/test_eagle.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec_fast.draft_runners.cuda_graph_heads import CudaGraphHeads
from specdec_fast.draft_runners.head_runner import HeadRunner
from specdec_fast.trees.expansion import TreeDrafter
from specdec_fast.trees.sibling_picking import DETERMINISTIC_HOWS
from specdec_fast.trees.static_shape import Shape, read_shape

_PATHS = (
    *("0", "1", "2", "3", "00", "01", "02", "10", "11", "20", "21", "30", "000", "001", "002", "010", "011", "020"),
    *("021", "100", "0000", "0001", "0002", "00000", "00001"),
)
"""The published tree of EAGLE-1 with 25 nodes (SafeAILab/EAGLE, `mc_sim_7b_63`), by ranks from the root."""
PUBLISHED = Shape((-1, *(_PATHS.index(path[:-1]) + 1 if path[:-1] else 0 for path in _PATHS)))


class HeadTrees(TreeDrafter):
    """Drafts trees with a head that runs once per level.

    `how="sampled"` samples siblings without replacement in static trees, and independently in chains. Dynamic trees
    pick the likeliest tokens then. A chain as shape makes chains, for rules that take only these.

    Args:
        model: A `PagedHead`, or an object with its methods.
        how: How siblings are picked: one of `specdec_fast.trees.sibling_picking.HOWS`, or a rule's `prefers`.
        num_draft_tokens: Default budget per row. None: all nodes of a static tree, 24 of a dynamic one.
        depth: Levels of a dynamic tree. 0: the static tree `shape`.
        width: Nodes that grow per level of a dynamic tree, and children considered for each of them.
        shape: Static tree: a list of parents, or a file of `specdec tune tree`. None: the published tree of EAGLE-1.

    Raises:
        ValueError: If an option is out of range or two options contradict each other.
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
            topology = PUBLISHED
        else:
            topology = read_shape(shape) if isinstance(shape, (str, Path)) else Shape(tuple(shape))
        if how == "sampled":
            how = "top_k" if depth else "iid" if topology.is_chain else "without_replacement"
        how = "top_k" if how == "greedy" else how
        rows = HeadRunner(model, self.name)
        super().__init__(rows, topology, depth=depth, width=width, num_draft_tokens=num_draft_tokens, how=how)
        self.model = model
        is_chain = not depth and topology.is_chain and how in (*DETERMINISTIC_HOWS, "iid")
        aux_hidden_states = tuple(dict.fromkeys(model.aux_hidden_states))
        partial = self.needs.dists and rows.token_ids is not None
        self.needs = replace(
            self.needs,
            aux_hidden_states=aux_hidden_states,
            topology="chain" if is_chain else "tree",
            partial_dists=partial,
        )

    def cuda_graph_proposals(self, max_rows: int) -> CudaGraphHeads | str:
        """Returns the proposals for CUDA-graph steps of an engine with `max_rows` rows, or why there are none."""
        if self.needs.dists:
            return f"sampled tokens carry distributions (how={' or '.join(DETERMINISTIC_HOWS)} has none)"
        if self.model.cache.max_rows < max_rows:
            return f"the head has room for {self.model.cache.max_rows} rows, the target for {max_rows}"
        return CudaGraphHeads(self, max_rows)
