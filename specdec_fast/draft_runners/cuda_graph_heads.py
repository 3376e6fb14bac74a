"""Trees of a recurrent trained head in CUDA-graph steps: static ones, and dynamic ones (EAGLE-2).

The trees are those of `TreeDrafter` over `HeadRunner`, but no shape and no number of passes depends on data. Every row
has a window of true features on the device: those of the token before its root, and of the tokens of the last step. A
step stores the new places from these features, then grows its trees behind them.
Tests: tests/draft_runners/test_cuda_graph_heads.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_fast.core.cuda_graph_packing import build_packed_draft, pack_nodes
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, CudaGraphRows, CudaGraphTrees, StateView, TargetOutput
from specdec_fast.sampling.sampling_tensors import SamplingTensors
from specdec_fast.trees.dynamic import Frontier, grow
from specdec_fast.trees.expansion import TreeDrafter
from specdec_fast.trees.sibling_picking import pick_stats
from specdec_fast.trees.static_shape import Shape
from specdec_kernels import Growth, tree_expand, tree_plan


@dataclass(frozen=True, slots=True)
class _Level:
    """One level of a static tree.

    Attributes:
        nodes: Its nodes, in order.
        ranks: Rank of each node among its siblings.
        slots: Index of each node's parent in `parents`.
        on_device: Nodes, slots and ranks, int64 [3, nodes].
        parents: Parents of the nodes, by first child, int64.
    """

    nodes: list[int]
    ranks: list[int]
    slots: list[int]
    on_device: Tensor
    parents: Tensor

    def count_until(self, last: int) -> tuple[int, int, int]:
        """Counts this level's nodes up to node `last`, their parents, and the most children of one parent."""
        count = bisect_right(self.nodes, last)
        return count, 1 + max(self.slots[:count], default=-1), 1 + max(self.ranks[:count], default=-1)


def _levels(shape: Shape, device: torch.device) -> list[_Level]:
    """The levels of a static tree."""
    depth, rank, children = [0], [0], [0] * len(shape.parents)
    for parent in shape.parents[1:]:
        depth.append(depth[parent] + 1)
        rank.append(children[parent])
        children[parent] += 1
    found = []
    for level in range(1, max(depth) + 1):
        nodes = [node for node, own in enumerate(depth) if own == level]
        parents = list(dict.fromkeys(shape.parents[node] for node in nodes))
        slots, ranks = [parents.index(shape.parents[node]) for node in nodes], [rank[node] for node in nodes]
        on_device = torch.tensor([nodes, slots, ranks], dtype=torch.int64).to(device)
        found.append(_Level(nodes, ranks, slots, on_device, torch.tensor(parents, dtype=torch.int64).to(device)))
    return found


class CudaGraphHeads:
    """Proposals of a `TreeDrafter` over a `HeadRunner` in CUDA-graph steps.

    The device keeps two numbers per row. `known` is the length of the text whose features are complete, 0 for none.
    `first` is the position of the window's first token. The head's cache has all places up to the window, from true
    features. A row that could not draft for lack of pages loses its features. Its request does not draft again.

    Args:
        drafter: The drafter.
        max_rows: Rows of the engine.
    """

    def __init__(self, drafter: TreeDrafter, max_rows: int) -> None:
        self._drafter, self._source = drafter, drafter.source
        source: Any = drafter.source
        self._model: Any = source.model
        self.aux_hidden_states = drafter.needs.aux_hidden_states
        device = source.device
        self._levels = [] if drafter.depth else _levels(drafter.shape, device)
        self._parents = torch.tensor(drafter.shape.parents, dtype=torch.int32).to(device)
        self._window = self._model.zero_features(max_rows, (drafter.depth or len(self._levels)) + 2)
        self._known, self._first = torch.zeros(2, max_rows, dtype=torch.int32, device=device)

    # -- between steps ------------------------------------------------------------------------------------------------

    def enter(self, view: StateView, rows: Sequence[int]) -> None:
        """Stores missing places of rows, and copies their last features into the window."""
        source: Any = self._source
        lengths = {row: view.length(row) for row in rows}
        ready = [row for row, length in lengths.items() if source.reserve(row, length, length)]
        if ready:
            source.catch_up(ready, [view.tokens(row) for row in ready])
        for row, length in lengths.items():
            self._known[row] = length if row in ready or length == 1 else 0
            self._first[row], features = length - 2, source.share_features(row)
            if row in ready:
                self._window[row, 0] = features[-1]

    def reserve(self, row: int, length: int) -> bool:
        """Reserves pages of the head, also for all levels of a dynamic tree."""
        cache, growing = self._model.cache, max(self._drafter.depth - 1, 0) * self._drafter.width
        return length <= cache.max_length and cache.reserve(row, min(length + growing, cache.max_length))

    def leave(self, view: StateView, rows: Sequence[int]) -> None:
        """Returns the window's features of rows to the `HeadRunner`."""
        source: Any = self._source
        for row in rows:
            length, first = view.length(row), int(self._first[row])
            features, start = self._window[row, :0], 0
            if (
                1 < length <= int(self._known[row]) and first <= length - 2
            ):  # `_known` may exceed the text after a failed step
                start = max(min(int(self._model.cache.lengths[row]), length - 2), first)
                features = self._window[row, start - first : length - 1 - first].clone()
            source.return_features(row, features, start)

    # -- in a step ----------------------------------------------------------------------------------------------------

    def propose(self, batch: CudaGraphRows) -> CudaGraphTrees:
        """Stores new places and grows the trees; a row without complete features has 0 nodes."""
        drafter, index, lengths = self._drafter, batch.rows.long(), batch.lengths
        nodes = min(batch.num_draft_tokens, drafter._max_nodes)
        limits = batch.drafts.clamp(max=nodes)
        holds = lengths + limits.clamp(min=(drafter.depth - 1) * drafter.width)
        ready = (self._known[index] == lengths) & (lengths > 1) & (holds <= self._model.cache.max_length)
        limits = torch.where(ready, limits, 0)
        before_root, hidden = self._store_new_places(batch, limits > 0)
        if drafter.depth:
            return self._grow_dynamic(batch, limits, nodes, before_root, hidden)
        return self._fill_static(batch, limits, nodes, before_root, hidden)

    def observe(self, batch: CudaGraphRows, acceptance: Acceptance, output: TargetOutput) -> None:
        """Moves the window on, so that it begins with the token before this step's root."""
        path, index, lengths = acceptance.path, batch.rows.long(), batch.lengths
        at = path.clamp(min=0).flatten().long()
        new = self._model.features({name: output.aux_hidden_states[name][at] for name in self.aux_hidden_states})
        old, stored = self._window[index], self._model.cache.lengths[index]
        sound = (path[:, 0] >= 0) & (self._known[index] == lengths) & (stored >= lengths - 2)
        new = new.to(old.dtype).unflatten(0, path.shape)
        moved = torch.cat([self._before_root(index, lengths)[:, None], new, old[:, path.shape[1] + 1 :]], 1)
        self._known[index] = torch.where(sound, 0, self._known[index])  # until the window is written
        self._window[index] = torch.where(sound[:, None, None], moved, old)
        self._first[index] = torch.where(sound, lengths - 2, self._first[index])
        self._known[index] = torch.where(sound, lengths + acceptance.num_accepted + 1, self._known[index])

    def _before_root(self, index: Tensor, lengths: Tensor) -> Tensor:
        """Features [B, hidden] of the tokens before the roots."""
        at = (lengths - 2 - self._first[index]).clamp(0, self._window.shape[1] - 1)
        return self._window[index, at.long()]

    def _store_new_places(self, batch: CudaGraphRows, growing: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new places from true features, and the root's place again. The cache then ends before the root.

        Args:
            batch: The rows.
            growing: Rows that draft in this step, bool [B].

        Returns:
            The features before the roots and the predicted features of the roots, [B, hidden] each.
        """
        cache, index, wide = self._model.cache, batch.rows.long(), self._window.shape[1]
        stored = cache.lengths[index]
        start = torch.where(growing, torch.minimum(stored, batch.lengths - 2), stored)
        cache.rollback(batch.rows, start)
        packing = pack_nodes(torch.where(growing, (batch.lengths - 1 - start).clamp(max=wide), 0), wide)
        row, at = index[packing.row_of], start[packing.row_of] + packing.place
        tokens = batch.tokens[row, (at + 1).clamp(0, batch.tokens.shape[1] - 1).long()]
        features = self._window[row, (at - self._first[row]).clamp(0, wide - 1).long()]
        known = torch.where(packing.inside, tokens, 0)
        hidden = self._model.extend(batch.rows, known, features, packing.offsets)
        cache.rollback(batch.rows, torch.where(growing, batch.lengths - 2, stored))
        return self._before_root(index, batch.lengths), hidden[packing.last]

    def _score(self, draft: Draft, before_root: Tensor, hidden: Tensor, starts: Tensor) -> Tensor:
        """Runs one pass over packed trees.

        Args:
            draft: The trees.
            before_root: Features before the roots, [B, hidden].
            hidden: Predicted features of the last pass.
            starts: First node of each row in the last pass, int64 [B].

        Returns:
            Predicted features [M, hidden].
        """
        above = hidden[(starts[draft.row_of] + draft.parents).clamp(0, hidden.shape[0] - 1).long()]
        features = torch.where((draft.parents < 0)[:, None], before_root[draft.row_of], above)
        found: Tensor = self._model.score(draft, features)
        return found

    def _compute_logits(
        self, hidden: Tensor, sampling: SamplingTensors
    ) -> tuple[Tensor, list[Tensor], SamplingTensors]:
        """Computes the logits after N nodes per row.

        Args:
            hidden: Predicted features [B * N, hidden].
            sampling: Sampling parameters of the B rows.

        Returns:
            Logits [B * N, V], (1/T, cut, tie) for picking children, and the sampling parameters of each node.
        """
        logits = self._model.logits(hidden)
        if self._model.token_ids is not None:  # the noise uses the target's ids
            whole = logits.new_full((logits.shape[0], self._model.vocab_size), float("-inf"))
            logits = whole.index_copy_(1, self._model.token_ids, logits)
        each = logits.shape[0] // sampling.seeds.shape[0]
        row_of = torch.arange(logits.shape[0], device=logits.device) // each
        nodes = sampling.gather(row_of)
        filtered = sampling.any_filter and not sampling.all_greedy
        return logits, list(pick_stats(logits, nodes, filtered)), nodes

    def _noise_keys(self, sampling: SamplingTensors, positions: Tensor) -> dict[str, Tensor]:
        """Keys of the replay noise at int32 positions of these rows or nodes; empty without noise."""
        if self._drafter.how != "coupled" or sampling.all_greedy:
            return {}
        return {"seeds": sampling.seeds, "positions": torch.where(sampling.temperature == 0, -1, positions)}

    def _fill_static(
        self, batch: CudaGraphRows, limits: Tensor, nodes: int, before_root: Tensor, hidden: Tensor
    ) -> CudaGraphTrees:
        """A static tree's first `nodes`, level by level, without nodes for which the distribution has no token."""
        rows, deepest = batch.rows.shape[0], 0
        tokens = torch.full((rows, 1 + nodes), -1, dtype=torch.int64, device=limits.device)
        tokens[:, 0] = batch.tokens[batch.rows.long(), (batch.lengths - 1).clamp(min=0).long()]
        starts, size = torch.arange(rows, device=limits.device), 1
        for depth, level in enumerate(self._levels):
            count, parents, width = level.count_until(nodes)
            if not count:
                break
            if depth:
                packing = pack_nodes(torch.where(limits > 0, (limits + 1).clamp(max=size), 0), size)
                place = packing.place.clamp(max=size - 1).long()
                links = torch.where(packing.inside, self._parents[place], -1)
                chain = self._drafter.shape.is_chain
                plan = None if chain else tree_plan(links, packing.offsets, size)
                staged = tokens[packing.row_of, place].clamp(min=0)
                draft = build_packed_draft(batch.rows, packing, staged, links, depth=size, is_chain=chain, plan=plan)
                hidden, starts = self._score(draft, before_root, hidden, starts), packing.offsets[:-1].long()
            grown = (starts[:, None] + level.parents[:parents]).clamp(max=hidden.shape[0] - 1).flatten()
            logits, dist, sampling = self._compute_logits(hidden[grown], batch.sampling)
            roots = (batch.lengths - 1)[:, None].expand(rows, parents).flatten()
            noise = {} if batch.sampling.all_greedy else self._noise_keys(sampling, roots + (depth + 1))
            bounds = torch.arange(2, dtype=torch.int32, device=logits.device) * logits.shape[0]
            width = min(width, logits.shape[1])
            found = tree_expand(logits, *dist, bounds, torch.zeros_like(dist[0]), width=width, keep=1, **noise)[0]
            node, slot, rank = level.on_device[:, :count]
            found = pad(found.reshape(rows, parents, width), (0, 1), value=-1)[:, slot, rank.clamp(max=width)]
            tokens[:, node] = torch.where(tokens[:, level.parents[slot]] >= 0, found, -1)
            size, deepest = max(size, level.nodes[count - 1] + 1), depth + 1
        place = torch.arange(1 + nodes, dtype=torch.int32, device=limits.device)
        there = (tokens >= 0) & (place <= limits[:, None])
        counts, order = there[:, 1:].sum(1, dtype=torch.int32), (~there).int().argsort(dim=1, stable=True)[:, 1:]
        renamed = (there.cumsum(1, dtype=torch.int32) - 1)[:, self._parents[: 1 + nodes].clamp(min=0).long()]
        above = None if self._drafter.shape.is_chain else renamed.gather(1, order)
        return CudaGraphTrees(tokens.gather(1, order).clamp(min=0), above, counts, deepest)

    def _grow_dynamic(
        self, batch: CudaGraphRows, limits: Tensor, nodes: int, before_root: Tensor, hidden: Tensor
    ) -> CudaGraphTrees:
        """Dynamic trees of at most `nodes`. Every level reserves space for all nodes that may grow."""
        drafter, depth = self._drafter, min(self._drafter.depth, nodes)
        starts = torch.arange(limits.shape[0], device=limits.device)
        forward = _Forward(self, batch, limits, nodes, before_root, hidden, starts)
        noise = self._noise_keys(batch.sampling, batch.lengths - 1)
        bounds = torch.arange(limits.shape[0] + 1, dtype=torch.int32, device=limits.device)
        frontier = Frontier(0, (1,) * limits.shape[0], bounds, forward.starts, limits > 0)
        width, sharpness = drafter.width, drafter.sharpness
        trees = grow(forward, batch.rows, frontier, depth=depth, width=width, sharpness=sharpness, noise=noise)
        at = pack_nodes(trees.counts[0], trees.tokens.shape[0] // limits.shape[0]).nodes_by_row(1, 1 + nodes)
        return CudaGraphTrees(trees.tokens[at], trees.parents[at], (trees.counts[0] - 1).clamp(min=0), depth)


@dataclass(slots=True)
class _Forward:
    """Passes of a head over growing trees.

    Attributes:
        heads: The proposals.
        batch: The rows.
        limits: Largest number of draft nodes of each row, int32 [B].
        nodes: Largest number of draft nodes of any row.
        before_root: Features before the roots, [B, hidden].
        hidden: Predicted features of the last pass, [M, hidden].
        starts: First node of each row in the last pass, int64 [B].
    """

    heads: CudaGraphHeads
    batch: CudaGraphRows
    limits: Tensor
    nodes: int
    before_root: Tensor
    hidden: Tensor
    starts: Tensor

    def dists(self, frontier: Frontier) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns logits and (1/T, cut, tie) after the frontier's nodes."""
        logits, (inv_t, cut, tie), _ = self.heads._compute_logits(self.hidden[frontier.places], self.batch.sampling)
        return logits, inv_t, cut, tie

    def score(self, draft: Draft) -> None:
        """Runs one pass over the trees so far."""
        self.hidden = self.heads._score(draft, self.before_root, self.hidden, self.starts)
        self.starts = draft.offsets[:-1].long()

    def allocate(self, dtype: torch.dtype) -> Growth:
        """Returns empty trees with their roots."""
        batch, roots = self.batch, (self.batch.lengths - 1).clamp(min=0).long()
        growth = Growth.room(self.limits, self.nodes, min(self.heads._drafter.depth, self.nodes), dtype)
        growth.tokens[:, 0] = batch.tokens[batch.rows.long(), roots]
        return growth
