"""What a drafter proposes: a packed batch of token trees.

Owns the data type, and knows nothing of models, caches or rules. Tests: tests/core/test_draft.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core import draft_validation
from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.former_names import explain_arguments
from specdec_fast.core.proposal_kind import ProposalKind as ProposalKind
from specdec_fast.core.tree_lists import Tree, host_list, is_chain, pack_sources, pack_trees
from specdec_kernels import TreePlan, tree_plan


@dataclass(slots=True, eq=False)
class Draft:
    """The proposed token trees of B requests on one packed axis of M nodes. Node 0 of a request is its root.

    Treat a draft as immutable; `dataclasses.replace` makes another. It is not frozen, because every step makes some and
    freezing costs 3 us of each.

    Attributes:
        rows: Row of each request in the decode state, int32 [B].
        tokens: Ids of the target's vocabulary, int64 [M].
        parents: Parent of each node by its index in its tree, int32 [M]. The root has -1. Parents precede children.
        offsets: First node of each request, int32 [B + 1].
        proposal_kinds: `ProposalKind` of each node, int8 [M].
        dist_index: Row of `dists` from which a node's token was sampled, int32 [M]; -1 for deterministic nodes.
        row_of: Request of each node, 0 to B - 1, int64 [M].
        counts: Nodes of each request, root included: host integers.
        max_depth: Upper bound of the depth of any node: a host integer.
        is_chain: Every node follows the one before it.
        dists: Distributions of the sampled tokens, or None.
        score_only: Nodes that are scored and never accepted, bool [M], or None if there are none.
        plan: Depths, ancestors and links of the nodes if they are known, else None.
        row_ids: `rows` as host integers, or None if only the device has them.
    """

    rows: Tensor
    tokens: Tensor
    parents: Tensor
    offsets: Tensor
    proposal_kinds: Tensor
    dist_index: Tensor
    row_of: Tensor
    counts: tuple[int, ...]
    max_depth: int
    is_chain: bool = False
    dists: TokenDistributions | None = None
    score_only: Tensor | None = None
    plan: TreePlan | None = None
    row_ids: tuple[int, ...] | None = None

    def host_rows(self) -> tuple[int, ...]:
        """Returns `rows` as host integers."""
        return tuple(self.rows.tolist()) if self.row_ids is None else self.row_ids

    @property
    def chain_rows(self) -> tuple[int, ...] | None:
        """`rows` as host integers if all trees are chains, else None."""
        return self.host_rows() if self.is_chain else None

    def get_plan(self) -> TreePlan:
        """Returns depths, ancestors and links of the nodes: those that are known, or computed now."""
        if self.plan is not None:
            return self.plan
        return tree_plan(self.parents, self.offsets, max(self.counts, default=0))

    @property
    def num_rows(self) -> int:
        """B, the number of requests."""
        return self.rows.shape[0]

    @property
    def num_nodes(self) -> int:
        """M, the number of nodes, roots included."""
        return self.tokens.shape[0]

    @staticmethod
    def chains(
        rows: Sequence[int],
        chains: Sequence[Sequence[int]],
        *,
        dist_rows: Sequence[Sequence[int]] | None = None,
        dists: TokenDistributions | None = None,
        device: torch.device | str = "cpu",
    ) -> Draft:
        """Builds chains from host lists.

        Args:
            rows: Row of each request.
            chains: Root and draft tokens of each request.
            dist_rows: Row of `dists` from which each draft token was sampled, root not counted. None if all tokens are
                deterministic.
            dists: Distributions of the sampled tokens.
            device: Device of the draft.

        Returns:
            A draft of B chains.
        """
        counts, ids = tuple(map(len, chains)), tuple(rows)
        where = device if isinstance(device, torch.device) else torch.device(device)
        layout = chain_layout(ids, counts, where)
        if dist_rows is None:
            proposal_kinds, dist_index = layout.proposal_kinds, layout.dist_index
        else:
            source = [row for count, own in zip(counts, dist_rows) if count for row in (-1, *own)]
            dist_index = host_to_device(source, torch.int32, where)
            proposal_kinds = (dist_index >= 0).to(torch.int8)
        return Draft(
            rows=layout.rows,
            tokens=host_to_device(list(chain.from_iterable(chains)), torch.int64, where),
            parents=layout.parents,
            offsets=layout.offsets,
            proposal_kinds=proposal_kinds,
            dist_index=dist_index,
            row_of=layout.row_of,
            counts=counts,
            max_depth=max((*counts, 1)) - 1,
            is_chain=True,
            dists=dists,
            plan=layout.plan,
            row_ids=ids,
        )

    @staticmethod
    @explain_arguments(place="Draft.trees")
    def trees(
        rows: Sequence[int],
        trees: Sequence[Tree],
        *,
        kinds: Sequence[Sequence[int] | Tensor] | None = None,
        dist_rows: Sequence[Sequence[int] | Tensor] | None = None,
        dists: TokenDistributions | None = None,
        score_only: Sequence[bool] | None = None,
        device: torch.device | str = "cpu",
    ) -> Draft:
        """Builds trees from lists, or from vectors, which are read on the host.

        Args:
            rows: Row of each request.
            trees: Tokens and parents of each request, root first with parent -1.
            kinds: `ProposalKind` of each node, root not counted. None: `SAMPLED` for nodes with a distribution, else
                `DETERMINISTIC`.
            dist_rows: Row of `dists` from which each token was sampled, root not counted; -1 for deterministic nodes.
                None if all tokens are deterministic.
            dists: Distributions of the sampled tokens.
            score_only: Whether each packed node is scored and never accepted, roots included. None: none of them.
            device: Device of the draft.

        Returns:
            A draft of B trees. If all of them are chains without score-only nodes, `is_chain` is true.

        Raises:
            ValueError: If a parent does not precede its child, if numbers of nodes differ, or if a sampled token has no
                distribution.
        """
        listed = [(host_list(row_tokens), host_list(row_parents)) for row_tokens, row_parents in trees]
        chained = score_only is None and all(is_chain(*tree) for tree in listed)
        if chained and kinds is None and dist_rows is None:
            return Draft.chains(rows, [row_tokens for row_tokens, _ in listed], dists=dists, device=device)
        tokens, parents, counts, deepest = pack_trees(rows, listed)
        made = Draft.packed(
            rows,
            host_to_device(tokens, torch.int64, device),
            host_to_device(parents, torch.int32, device),
            counts,
            deepest,
        )
        if kinds is not None or dist_rows is not None:
            own_kinds, own_rows = pack_sources(rows, counts, kinds, dist_rows)
            made.proposal_kinds = host_to_device(own_kinds, torch.int8, device)
            made.dist_index = host_to_device(own_rows, torch.int32, device)
        made.is_chain, made.dists = chained, dists
        if score_only is not None:
            made.score_only = host_to_device(list(score_only), torch.bool, device)
        return made

    @staticmethod
    def packed(
        rows: Sequence[int],
        tokens: Tensor,
        parents: Tensor,
        counts: tuple[int, ...],
        max_depth: int,
        plan: TreePlan | None = None,
    ) -> Draft:
        """Wraps trees of deterministic tokens that are packed already.

        Args:
            rows: Row of each request.
            tokens: Token of each node, int64 [M or more].
            parents: Parent of each node by its index in its tree, int32 [M or more].
            counts: Nodes of each request. They add up to M.
            max_depth: Upper bound of the depth of any node.
            plan: Depths, ancestors and links of these nodes if they are known.

        Returns:
            A draft of the first M nodes.
        """
        layout, nodes = chain_layout(tuple(rows), counts, tokens.device), sum(counts)
        if nodes < tokens.shape[0]:
            tokens, parents, plan = tokens[:nodes], parents[:nodes], None
        return Draft(
            rows=layout.rows,
            tokens=tokens,
            parents=parents,
            offsets=layout.offsets,
            proposal_kinds=layout.proposal_kinds,
            dist_index=layout.dist_index,
            row_of=layout.row_of,
            counts=counts,
            max_depth=max_depth,
            plan=plan,
            row_ids=tuple(rows),
        )

    def select(self, places: Sequence[int]) -> tuple[Draft, Tensor]:
        """Selects requests by their places in the batch.

        Args:
            places: Places, 0 to B - 1, in the order of the result.

        Returns:
            The draft of these requests, and the nodes that it consists of, int64 [M'].
        """
        starts, rows = list(accumulate(self.counts, initial=0)), self.host_rows()
        kept = [node for place in places for node in range(starts[place], starts[place] + self.counts[place])]
        nodes = host_to_device(kept, torch.int64, self.tokens.device)
        counts, own = tuple(self.counts[place] for place in places), tuple(rows[place] for place in places)
        layout = chain_layout(own, counts, self.tokens.device)
        return (
            replace(
                self,
                rows=layout.rows,
                tokens=self.tokens[nodes],
                parents=self.parents[nodes],
                offsets=layout.offsets,
                proposal_kinds=self.proposal_kinds[nodes],
                dist_index=self.dist_index[nodes],
                row_of=layout.row_of,
                counts=counts,
                score_only=None if self.score_only is None else self.score_only[nodes],
                plan=None,
                row_ids=own,
            ),
            nodes,
        )

    def with_missing_rows(self, rows: Sequence[int], roots: Sequence[int]) -> Draft:
        """Returns a draft for exactly `rows`, where rows without proposals have their root alone.

        Args:
            rows: Rows of the result, in order.
            roots: Newest token of each of them.
        """
        bare = Draft.chains(rows, [[root] for root in roots], device=self.tokens.device)
        have = {row: place for place, row in enumerate(self.host_rows())}
        both: dict[str, Any] = {
            name: torch.cat([getattr(self, name), getattr(bare, name)])
            for name in ("rows", "tokens", "parents", "proposal_kinds", "dist_index", "row_of")
        }
        if self.score_only is not None:
            both["score_only"] = torch.cat([self.score_only, torch.zeros_like(bare.tokens, dtype=torch.bool)])
        offsets = torch.cat([self.offsets, bare.offsets[1:] + self.offsets[-1]])
        every = (*have, *rows)
        joined = replace(self, offsets=offsets, counts=self.counts + bare.counts, plan=None, row_ids=every, **both)
        return joined.select([have.get(row, len(have) + at) for at, row in enumerate(rows)])[0]

    def count_proposals(self, plan: TreePlan) -> tuple[list[int], Tensor]:
        """Counts the nodes that may be accepted: all but roots and score-only nodes.

        Args:
            plan: Depths, ancestors and links of the nodes.

        Returns:
            Number of such nodes per request; and whether each node has such a child, bool [M].
        """
        if self.score_only is None:
            return [count - 1 for count in self.counts], plan.first_child >= 0
        inner = (self.parents >= 0) & ~self.score_only
        zeros = torch.zeros(self.num_rows, dtype=torch.int32, device=self.rows.device)
        counted = zeros.index_add(0, self.row_of, inner.to(torch.int32)).tolist()
        has_child = torch.zeros_like(inner)
        has_child[(self.parents + self.offsets[self.row_of])[inner].long()] = True
        return counted, has_child

    def number_path(self, path: Tensor) -> Tensor:
        """Numbers accepted nodes among those of their request that may be accepted, from 1.

        Args:
            path: Accepted nodes on the packed axis, root first and padded with -1, int32 [B, D + 1].

        Returns:
            Numbers without the root's, integers [B, D]. Those of padding have no meaning.
        """
        if self.score_only is None:
            return path[:, 1:] - self.offsets[:-1, None]
        number = ((self.parents >= 0) & ~self.score_only).cumsum(0)
        return number[path[:, 1:].clamp(min=0).long()] - number[self.offsets[:-1].long()][:, None]

    def check_no_dropped_samples(self, rule: str) -> None:
        """Checks, for a rule that uses draft distributions, that every sampled token is verified.

        A draft can show this part of the contract only. The rest is the drafter's word. The number of children of a
        node, and which sampled tokens are verified, may depend on committed data and on earlier samples. They may not
        depend on the token itself or on later ones.

        Args:
            rule: Name of the rule, for the message.

        Raises:
            ValueError: If a sampled token is a score-only node.
        """
        draft_validation.check_no_dropped_samples(self, rule)

    def check(
        self, vocab_size: int | None = None, roots: Mapping[int, int] | None = None, *, wait: bool = True
    ) -> None:
        """Checks that the draft is well formed, as target, rule and decode state require.

        Args:
            vocab_size: V of the target, or None if it is unknown.
            roots: Newest token by row, for the rows that the draft is for, in order. None if they are unknown.
            wait: Check values on a GPU too, which waits for the device. Otherwise only shapes are checked there.

        Raises:
            ValueError: If a part has a wrong shape, dtype or value.
        """
        draft_validation.check_draft(self, vocab_size, roots, wait)
