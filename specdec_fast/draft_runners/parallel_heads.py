"""Drafting with heads that predict several positions from one hidden state: one product, one static tree.

The base of drafters `medusa` and `blockwise`. Tests: tests/drafters/test_medusa.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.device_transfer import current_stream_id, host_to_device, select_entries
from specdec_fast.core.draft import Draft
from specdec_fast.core.finite_logits import not_finite_message
from specdec_fast.core.proposal_kind import DETERMINISTIC_PICKS, check_pick
from specdec_fast.interfaces import (
    Acceptance,
    Budget,
    CudaGraphRows,
    CudaGraphTrees,
    Needs,
    Rng,
    StateView,
    TargetOutput,
)
from specdec_fast.sampling.sampling_tensors import SamplingTensors
from specdec_fast.targets.output_scaling import check_projection
from specdec_fast.trees.dynamic import host_reads_are_free
from specdec_fast.trees.static_shape import Shape
from specdec_kernels import TreePlan, tree_expand, tree_plan

AUX_HIDDEN_STATE = "final_norm"


class Heads(Protocol):
    """Heads for 2, 3, ... positions ahead.

    Called with states [N, hidden] and the target's projection, they return logits [heads, N, V].
    """

    hidden_size: int
    vocab_size: int
    num_heads: int

    @property
    def token_ids(self) -> Tensor | None:
        """Target ids of the columns of the logits, int64 [Vd]; None for all."""

    def __call__(self, states: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Returns the logits of all heads."""


@dataclass(frozen=True, slots=True)
class _TreeLayout:
    """The parts of a batch of trees that do not depend on its tokens."""

    parents: Tensor
    source: Tensor  # int64 [M]: index of each node's token among [depths, rows, ranks]; 0 for roots
    roots: Tensor  # int64 [B]: the roots' nodes
    depth: int
    plan: TreePlan


class ParallelHeadsDrafter:
    """Fills a static tree with the best tokens of each head. All nodes of a depth use the same head.

    The hidden state of the root is unknown when a draft is made, since the root is stored by the pass that verifies the
    draft. A step therefore starts from the state before the root, whose next token is the root: head k (from 0)
    predicts the token k + 1 positions behind the root. A prompt of one token has no such state, and drafts from its
    second step on.

    Args:
        target: The target to draft for.
        heads: The heads, on the target's device and in its dtype.
        shape: The tree. Nodes deeper than the last head, or beyond the vocabulary, are left out.
        num_draft_tokens: Default budget per row. None: all nodes.
        pick: "coupled" orders tokens by the replay noise of the target, "greedy" by the logits alone.

    Raises:
        ValueError: If an option is out of range, or if the heads need the target's projection and it has no usable one.
    """

    name = "ahead"
    needs = Needs(topology="tree", aux_hidden_states=(AUX_HIDDEN_STATE,))

    def __init__(
        self, target: Any, heads: Heads, shape: Shape, num_draft_tokens: int | None = None, pick: str = "coupled"
    ) -> None:
        check_pick(self.name, pick, DETERMINISTIC_PICKS)
        if num_draft_tokens is not None and num_draft_tokens < 1:
            raise ValueError(f"{self.name} num_draft_tokens: got {num_draft_tokens}; expected at least 1")
        check_projection(heads, target)
        self.heads, self.pick = heads, pick
        self._target = target
        self._project: Callable[[Tensor], Tensor] | None = getattr(target, "lm_head", None)
        known = heads.vocab_size if heads.token_ids is None else len(heads.token_ids)
        self._depth, self._rank, self._parents = _fit_shape(shape, heads.num_heads, min(known, target.vocab_size))
        self._vocab_size: int = target.vocab_size
        most = len(self._parents) - 1
        self.num_draft_tokens = min(most, num_draft_tokens or most)
        self._states: dict[int, tuple[int, Tensor]] = {}  # row -> (length of its text, hidden state before its root)
        self._checked: set[int] = set()  # rows whose logits have been found finite
        self._layout = lru_cache(maxsize=256)(self._build_layout)

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Keeps the hidden state before the root of every row."""
        self._checked.difference_update(rows)
        if prompt_output is None:
            return
        states, end = prompt_output.aux_hidden_states[AUX_HIDDEN_STATE], 0
        for row in rows:
            end += view.length(row) - 1
            if view.length(row) > 1:
                self._states[row] = (view.length(row), states[end - 1])

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        """Fills the first nodes of the tree for every row whose state is known."""
        counts, active = [], []
        for at, (row, limit) in enumerate(zip(rows, budget.nodes)):
            known = self._states.get(row)
            ready = limit > 0 and known is not None and known[0] == view.length(row)
            counts.append(1 + (min(limit, len(self._parents) - 1) if ready else 0))
            if ready:
                active.append(at)
        roots = [view.tokens(row)[-1] for row in rows]
        if not active:
            return Draft.chains(rows, [[root] for root in roots], device=view.device)
        states = torch.stack([self._states[rows[at]][1] for at in active])
        best = self.pick_tokens(
            states, view.sampling([rows[at] for at in active]), select_entries(rng.positions, active)
        )
        self._require_finite(best, [rows[at] for at in active], states.dtype)
        best = best.clamp(min=0)
        layout = self._layout(tuple(counts), best.shape[2], view.device, current_stream_id(view.device))
        tokens = best.flatten()[layout.source]
        tokens[layout.roots] = host_to_device(roots, torch.int64, view.device)
        shape = chain_layout(tuple(rows), tuple(counts), view.device)
        return Draft(
            rows=shape.rows,
            tokens=tokens,
            parents=layout.parents,
            offsets=shape.offsets,
            proposal_kinds=shape.proposal_kinds,
            dist_index=shape.dist_index,
            row_of=shape.row_of,
            counts=tuple(counts),
            max_depth=layout.depth,
            is_chain=self.needs.topology == "chain",
            plan=layout.plan,
            row_ids=tuple(rows),
        )

    def pick_tokens(self, states: Tensor, sampling: SamplingTensors, positions: Tensor) -> Tensor:
        """Picks the best tokens of each head.

        Args:
            states: Hidden states before the roots, [N, hidden].
            sampling: Sampling parameters of the N rows.
            positions: Positions of the roots, int32 [N].

        Returns:
            Tokens, best first, int64 [depths, N, ranks]. All ranks are -1 where the logits are NaN.
        """
        logits = self.heads(states, self._project)[: max(self._depth)]
        depths, count = logits.shape[0], len(states)
        ids = self.heads.token_ids
        if ids is not None:  # the noise uses the target's ids
            whole = logits.new_full((depths, count, self._vocab_size), float("-inf"))
            logits = whole.index_copy_(2, ids, logits)
        logits = logits[..., : self._vocab_size].reshape(depths * count, -1)
        inv_t, cut, tie = (value.repeat(depths) for value in sampling.unfiltered_stats(logits))
        noise: dict[str, Tensor] = {}
        if self.pick == "coupled" and not sampling.all_greedy:
            ahead = torch.arange(1, depths + 1, dtype=torch.int32, device=positions.device)[:, None]
            places = torch.where(sampling.temperature == 0, -1, positions + ahead)
            noise = {"seeds": sampling.seeds.repeat(depths), "positions": places.flatten().int()}
        bounds = torch.arange(2, dtype=torch.int32, device=logits.device) * (depths * count)
        nothing = torch.zeros_like(inv_t)
        width = max(self._rank) + 1
        tokens, _, _ = tree_expand(logits, inv_t, cut, tie, bounds, nothing, width=width, keep=1, **noise)
        return tokens.long().reshape(depths, count, width)

    def _require_finite(self, best: Tensor, rows: Sequence[int], dtype: torch.dtype) -> None:
        """Raises ValueError if a head's logits are not finite. A GPU is read at the first proposal of a row only."""
        if not host_reads_are_free(best.device) and self._checked.issuperset(rows):
            return
        if bool((best[:, :, 0] < 0).any()):
            raise ValueError(not_finite_message(self.name, dtype))
        self._checked.update(rows)

    def _build_layout(self, counts: tuple[int, ...], width: int, device: torch.device, stream: int) -> _TreeLayout:
        """Builds the layout of a batch with `counts` nodes per row."""
        active = sum(count > 1 for count in counts)
        parents: list[int] = []
        source: list[int] = []
        roots: list[int] = []
        seen = depth = 0
        for count in counts:
            roots.append(len(parents))
            parents += self._parents[:count]
            source.append(0)
            for node in range(1, count):
                source.append(((self._depth[node] - 1) * active + seen) * width + self._rank[node])
            depth = max(depth, max(self._depth[:count]))
            seen += count > 1
        with torch.inference_mode(False):
            above = host_to_device(parents, torch.int32, device)
            offsets = host_to_device([*roots, len(parents)], torch.int32, device)
            return _TreeLayout(
                above,
                host_to_device(source, torch.int64, device),
                host_to_device(roots, torch.int64, device),
                depth,
                tree_plan(above, offsets, max(counts, default=0)),
            )

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Keeps the hidden state of the last accepted node, the one before the next root."""
        last = acceptance.path.gather(1, acceptance.num_accepted[:, None].long()).squeeze(1).long()
        states = output.aux_hidden_states[AUX_HIDDEN_STATE][last]
        for at, row in enumerate(draft.host_rows()):
            self._states[row] = (view.length(row), states[at])

    def release(self, rows: Sequence[int]) -> None:
        """Removes the states of rows."""
        for row in rows:
            self._states.pop(row, None)
        self._checked.difference_update(rows)

    def cuda_graph_proposals(self, max_rows: int) -> CudaGraphParallelHeads:
        """Returns the proposals for CUDA-graph steps of an engine with `max_rows` rows."""
        return CudaGraphParallelHeads(self, max_rows)


class CudaGraphParallelHeads:
    """Static trees in CUDA-graph steps.

    The state before each row's root stays in a static tensor until the next step, with the length of its text. A row
    without a state does not draft in this step.

    Args:
        drafter: The drafter.
        max_rows: Rows of the engine.
    """

    aux_hidden_states = (AUX_HIDDEN_STATE,)

    def __init__(self, drafter: ParallelHeadsDrafter, max_rows: int) -> None:
        self._drafter, device = drafter, drafter._target.cache.device
        like = getattr(drafter._target, "dtype", torch.float32)
        self._states = torch.zeros(max_rows, drafter.heads.hidden_size, dtype=like, device=device)
        self._lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        parts = drafter._depth[1:], drafter._rank[1:], drafter._parents[1:]
        self._depth, self._rank, self._parents = torch.tensor(parts, dtype=torch.int32).to(device)

    def enter(self, view: StateView, rows: Sequence[int]) -> None:
        """Copies the states of rows into the static tensor."""
        for row in rows:
            self._lengths[row] = 0
            if row in self._drafter._states:
                self._lengths[row], self._states[row] = self._drafter._states[row]

    def reserve(self, row: int, length: int) -> bool:
        """Returns True: the heads have no cache."""
        return True

    def propose(self, batch: CudaGraphRows) -> CudaGraphTrees:
        """Fills the tree of every row; rows without a state have 0 nodes."""
        drafter, index = self._drafter, batch.rows.long()
        best = drafter.pick_tokens(self._states[index], batch.sampling, batch.lengths - 1)
        nodes = min(batch.num_draft_tokens, len(drafter._parents) - 1)
        tokens = best[self._depth[:nodes].long() - 1, :, self._rank[:nodes].long()].T.clamp(min=0)
        chain = drafter.needs.topology == "chain"
        parents = None if chain else self._parents[:nodes].expand(len(index), nodes)
        ready = (self._lengths[index] == batch.lengths) & (best[:, :, 0] >= 0).all(0)  # no draft from NaN
        counts = torch.where(ready, batch.drafts.clamp(max=nodes), 0)
        return CudaGraphTrees(tokens, parents, counts, max(drafter._depth[: nodes + 1]))

    def observe(self, batch: CudaGraphRows, acceptance: Acceptance, output: TargetOutput) -> None:
        """Keeps the hidden state of the last accepted node, the one before the next root."""
        path, index, accepted = acceptance.path, batch.rows.long(), acceptance.num_accepted
        last = path.gather(1, accepted[:, None].long()).squeeze(1).long()
        there = last >= 0
        states = output.aux_hidden_states[AUX_HIDDEN_STATE][last.clamp(min=0)].to(self._states.dtype)
        # the length first: if a step is interrupted in between, the length does not match and the state is ignored
        self._lengths[index] = torch.where(there, batch.lengths + accepted + 1, self._lengths[index])
        self._states[index] = torch.where(there[:, None], states, self._states[index])

    def leave(self, view: StateView, rows: Sequence[int]) -> None:
        """Returns the states of rows to the drafter."""
        for row in rows:  # after a failed step the length differs from the text's
            self._drafter._states[row] = int(self._lengths[row]), self._states[row].clone()


def _fit_shape(shape: Shape, depths: int, ranks: int) -> tuple[list[int], list[int], list[int]]:
    """Depths, ranks and parents of the nodes of a shape that heads with these depths and ranks can fill."""
    place, depth, rank, parents = {0: 0}, [0], [0], [-1]
    children = [0] * len(shape.parents)
    for node, parent in enumerate(shape.parents[1:], 1):
        children[parent] += 1
        at = place.get(parent)
        if at is not None and depth[at] < depths and children[parent] <= ranks:
            place[node] = len(parents)
            depth.append(depth[at] + 1)
            rank.append(children[parent] - 1)
            parents.append(at)
    return depth, rank, parents
