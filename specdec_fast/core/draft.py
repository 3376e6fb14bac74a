"""What a drafter proposes: a packed batch of token trees.

Owns the data type and its checks. Knows nothing of models, caches or rules. Tests: tests/core/test_draft.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.chain_layout import ChainLayout, chain_layout
from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.distributions import TokenDistributions
from specdec_kernels import TreePlan, tree_plan
from specdec_kernels.dispatch import argument_checks


class ProposalKind(IntEnum):
    """How a node's token was picked, given its parent's context (the verification rule needs to know)."""

    DETERMINISTIC = 0  # a point mass: any deterministic choice; nothing is claimed about a distribution
    SAMPLED = 1  # drawn from its distribution row, independently of its siblings
    SAMPLED_WITHOUT_EARLIER = (
        2  # drawn from its distribution row without tokens that earlier siblings drew from the same row
    )
    SAMPLED_WITHOUT_DETERMINISTIC = (
        3  # drawn from its distribution row restricted to tokens outside the chosen siblings
    )


@dataclass(slots=True, eq=False)
class Draft:
    """A batch of B token trees on one packed axis of M nodes; node 0 of each row is the root. Nobody writes to one
    (`replace` makes another); it is not frozen because every step makes some, and freezing takes 3 us of each.

    rows: int32 [B] row ids in the decode state; tokens: int64 [M] target-vocabulary ids; parents: int32 [M] index
    within the row, -1 for the root, parents before children; offsets: int32 [B+1]; drawn: int8 [M] (`ProposalKind`);
    dist_index: int32 [M] row of `dists` a drawn node came from, -1 otherwise; score_only: bool [M] nodes that
    are scored but never accepted; row_of: int64 [M] batch row of each node; plan: the links of its trees where they
    are known already (chains repeat few shapes), else None. `counts` (nodes per row), `max_depth` (a bound on
    the depth of any node) and `row_ids` (the rows, None if they are on the device only) are host integers, so that
    nobody has to ask the device.
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
        """Its rows as host integers."""
        return tuple(self.rows.tolist()) if self.row_ids is None else self.row_ids

    @property
    def chain_rows(self) -> tuple[int, ...] | None:
        """Its rows as host integers if all of them are chains, else None."""
        return self.host_rows() if self.is_chain else None

    def get_plan(self) -> TreePlan:
        """The links of its trees: those that are known, or made now for rows of that many nodes."""
        if self.plan is not None:
            return self.plan
        return tree_plan(self.parents, self.offsets, max(self.counts, default=0))

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    @property
    def num_nodes(self) -> int:
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
        """Chains from host lists: `chains[b]` is the root followed by the draft tokens of row b.

        `dist_rows[b][i]` is the distribution row the i-th draft token (root not counted) was drawn from; None: all
        chosen.
        """
        counts, ids = tuple(map(len, chains)), tuple(rows)
        where = device if isinstance(device, torch.device) else torch.device(device)
        shape = chain_layout(ids, counts, where)
        if dist_rows is None:
            proposal_kinds, dist_index = shape.proposal_kinds, shape.dist_index
        else:
            source = [row for count, own in zip(counts, dist_rows) if count for row in (-1, *own)]
            dist_index = host_to_device(source, torch.int32, where)
            proposal_kinds = (dist_index >= 0).to(torch.int8)
        return Draft(
            rows=shape.rows,
            tokens=host_to_device(list(chain.from_iterable(chains)), torch.int64, where),
            parents=shape.parents,
            offsets=shape.offsets,
            proposal_kinds=proposal_kinds,
            dist_index=dist_index,
            row_of=shape.row_of,
            counts=counts,
            max_depth=max((*counts, 1)) - 1,
            is_chain=True,
            dists=dists,
            plan=shape.plan,
            row_ids=ids,
        )

    @staticmethod
    def trees(
        rows: Sequence[int],
        trees: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        score_only: Sequence[bool] | None = None,
        device: torch.device | str = "cpu",
    ) -> Draft:
        """Trees of chosen tokens from host lists: `trees[b] = (tokens, parents)`, root first with parent -1.

        Raises ValueError when a parent does not come before its child.
        """
        offsets, depth_bound = [0], 0
        tokens: list[int] = []
        parents: list[int] = []
        for index, (row_tokens, row_parents) in enumerate(trees):
            if len(row_tokens) != len(row_parents):
                raise ValueError(
                    f"tree of row {rows[index]}: got {len(row_tokens)} tokens and {len(row_parents)} parents; "
                    "expected one parent per token"
                )
            depths: list[int] = []
            for node, parent in enumerate(row_parents):
                if 0 <= parent < node:
                    depths.append(depths[parent] + 1)
                elif node == 0 and parent == -1:
                    depths.append(0)
                else:
                    raise ValueError(
                        f"tree of row {rows[index]}, node {node}: got parent {parent}; expected -1 for node 0 and an "
                        "earlier node otherwise; order the nodes so that parents precede their children"
                    )
            depth_bound = max(depth_bound, max(depths, default=0))
            tokens.extend(row_tokens)
            parents.extend(row_parents)
            offsets.append(len(tokens))
        counts = tuple(b - a for a, b in zip(offsets, offsets[1:]))
        made = Draft.packed(
            rows,
            host_to_device(tokens, torch.int64, device),
            host_to_device(parents, torch.int32, device),
            counts,
            depth_bound,
        )
        if score_only is None:
            return made
        return replace(made, score_only=host_to_device(list(score_only), torch.bool, device))

    @staticmethod
    def packed(
        rows: Sequence[int],
        tokens: Tensor,
        parents: Tensor,
        counts: tuple[int, ...],
        max_depth: int,
        plan: TreePlan | None = None,
    ) -> Draft:
        """Trees of chosen tokens that are packed already: tokens int64, parents int32 [M or more], nodes per row."""
        shape, nodes = chain_layout(tuple(rows), counts, tokens.device), sum(counts)
        if nodes < tokens.shape[0]:
            tokens, parents, plan = tokens[:nodes], parents[:nodes], None
        return Draft(
            rows=shape.rows,
            tokens=tokens,
            parents=parents,
            offsets=shape.offsets,
            proposal_kinds=shape.proposal_kinds,
            dist_index=shape.dist_index,
            row_of=shape.row_of,
            counts=counts,
            max_depth=max_depth,
            plan=plan,
            row_ids=tuple(rows),
        )

    def select(self, places: Sequence[int]) -> tuple[Draft, Tensor]:
        """The draft of some of its rows, by their places in the batch; and which nodes these are, int64 [M']."""
        starts, rows = list(accumulate(self.counts, initial=0)), self.host_rows()
        kept = [node for place in places for node in range(starts[place], starts[place] + self.counts[place])]
        nodes = host_to_device(kept, torch.int64, self.tokens.device)
        counts, own = tuple(self.counts[place] for place in places), tuple(rows[place] for place in places)
        shape = chain_layout(own, counts, self.tokens.device)
        return (
            replace(
                self,
                rows=shape.rows,
                tokens=self.tokens[nodes],
                parents=self.parents[nodes],
                offsets=shape.offsets,
                proposal_kinds=self.proposal_kinds[nodes],
                dist_index=self.dist_index[nodes],
                row_of=shape.row_of,
                counts=counts,
                score_only=None if self.score_only is None else self.score_only[nodes],
                plan=None,
                row_ids=own,
            ),
            nodes,
        )

    def with_missing_rows(self, rows: Sequence[int], roots: Sequence[int]) -> Draft:
        """The draft for all of `rows`: those that it lacks get a root and nothing else. roots: newest tokens."""
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

    def count_proposals(self, plan: TreePlan) -> tuple[list[int], list[int], Tensor]:
        """What may be accepted: nodes per row and the depth of the deepest, root and score-only nodes not counted;
        and bool [M], whether a node has a child that may be.
        """
        if self.score_only is None:
            counts = [count - 1 for count in self.counts]
            if self.is_chain:
                return counts, counts, plan.first_child >= 0
            depths = torch.zeros(self.num_rows, dtype=torch.int32, device=self.rows.device)
            return counts, depths.scatter_reduce(0, self.row_of, plan.depth, "amax").tolist(), plan.first_child >= 0
        inner = (self.parents >= 0) & ~self.score_only
        nobody = torch.zeros(self.num_rows, dtype=torch.int32, device=self.rows.device)
        counted = nobody.index_add(0, self.row_of, inner.to(torch.int32)).tolist()
        depths = nobody.scatter_reduce(0, self.row_of, torch.where(inner, plan.depth, 0), "amax")
        goes_on = torch.zeros_like(inner)
        goes_on[(self.parents + self.offsets[self.row_of])[inner].long()] = True
        return counted, depths.tolist(), goes_on

    def check_no_dropped_samples(self, rule: str) -> None:
        """Raise ValueError where a drawn token is a score-only node, so that `rule`, which uses the draft's
        distributions, would drop it.

        This is the part of the contract that a draft can show. The rest is the drafter's word: how many children a
        node gets, and whether a drawn token is verified, may depend on committed data and on tokens drawn before it,
        never on the token itself or on later ones.
        """
        if self.score_only is not None and bool(
            (self.score_only & (self.proposal_kinds != ProposalKind.DETERMINISTIC)).any()
        ):
            node = int((self.score_only & (self.proposal_kinds != ProposalKind.DETERMINISTIC)).nonzero()[0, 0])
            raise ValueError(
                f"rule {rule}: got node {node}, a drawn token that is a score-only node; expected every drawn token "
                f"to be "
                "verified (dropping one changes the distribution); mark it chosen and give its siblings no "
                "distribution, or use replay"
            )

    def check(
        self, vocab_size: int | None = None, roots: Mapping[int, int] | None = None, *, wait: bool = True
    ) -> None:
        """Raise ValueError unless the draft is well formed: what target, rule and state rely on.

        roots: the row ids that it is for, in order, and their newest tokens, where these are known; wait: look at
        values on a GPU too, which waits for them.
        """
        rows = self.host_rows() if roots is None else tuple(roots)
        if self.row_ids is not None and self.row_ids != rows:
            raise ValueError(f"draft: got rows {list(self.row_ids)}; expected {list(rows)}")
        if type(self.counts) is not tuple or len(self.counts) != len(rows) or min(self.counts, default=0) < 0:
            raise ValueError(f"draft: got counts {self.counts} of rows {rows}; expected a tuple, of each 0 or more")
        shape = chain_layout(rows, self.counts, self.tokens.device)
        looks, nodes = wait or self.tokens.is_cpu, shape.row_of.shape[0]
        argument_checks.check_tensor("draft", "tokens", self.tokens, torch.int64, nodes)
        if self._is_usual(shape):  # most chains carry what is remembered
            if looks:
                self._check_tokens(vocab_size, roots)
            return
        for name in ("rows", "offsets", "row_of", "parents", "proposal_kinds", "dist_index"):
            got, usual = getattr(self, name), getattr(shape, name)
            if got is not usual:
                argument_checks.check_tensor("draft", name, got, usual.dtype, *usual.shape)
                if looks and name in ("rows", "offsets", "row_of") and not torch.equal(got, usual):
                    raise ValueError(f"draft: got {name} {got.tolist()}; expected {usual.tolist()} as by its counts")
        if self.score_only is not None:
            argument_checks.check_tensor("draft", "score_only", self.score_only, torch.bool, nodes)
        if self.dists is not None:
            self.dists.check(vocab_size, wait=looks)
        if looks:
            self._check_tokens(vocab_size, roots)
            self._check_parents(shape)
            if self.proposal_kinds is not shape.proposal_kinds:
                self._check_marks()

    def _is_usual(self, shape: ChainLayout) -> bool:
        """Whether it is a batch of chosen chains of which all but the tokens is as its counts say."""
        return (
            self.is_chain
            and self.dists is None
            and self.score_only is None
            and self.rows is shape.rows
            and self.parents is shape.parents
            and self.offsets is shape.offsets
            and self.proposal_kinds is shape.proposal_kinds
            and self.dist_index is shape.dist_index
            and self.row_of is shape.row_of
            and self.plan is shape.plan
            and self.max_depth >= max(self.counts, default=1) - 1
        )

    def _check_tokens(self, vocab_size: int | None, roots: Mapping[int, int] | None) -> None:
        tokens = self.tokens.tolist()
        if vocab_size is not None and tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            node = next(node for node, token in enumerate(tokens) if not 0 <= token < vocab_size)
            raise ValueError(f"draft: node {node}: got token {tokens[node]}; expected 0..{vocab_size - 1}")
        start, first = 0, () if roots is None else tuple(roots.values())
        for count, root in zip(self.counts, first):
            if count and tokens[start] != root:
                raise ValueError(f"draft: got tokens {tokens}; expected rows to begin with {list(first)}")
            start += count

    def _check_parents(self, shape: ChainLayout) -> None:
        """shape: of its counts, with the parents that it has if every node follows the one before it."""
        deepest = max(self.counts, default=1) - 1
        if self.parents is not shape.parents and not torch.equal(self.parents, shape.parents):
            parents, deepest = iter(self.parents.tolist()), 0
            for row, count in enumerate(self.counts):
                depths: list[int] = []
                for node, parent in zip(range(count), parents):
                    if not 0 <= parent < node and (node, parent) != (0, -1):
                        raise ValueError(
                            f"draft: row {row}, node {node}: got parent {parent}; expected -1 for the root and an "
                            "earlier node of the row otherwise"
                        )
                    depths.append(depths[parent] + 1 if node else 0)
                deepest = max(deepest, *depths, 0)
            if self.is_chain:
                raise ValueError("draft: got a tree; expected is_chain=False, or every node behind the one before it")
        if deepest > self.max_depth:
            raise ValueError(f"draft: got max_depth {self.max_depth} and a node at depth {deepest}; expected a bound")
        plan = self.plan
        if plan is not None and not (self.is_chain and plan is shape.plan):
            links = tree_plan(self.parents, self.offsets, max(self.counts, default=0))
            words = links.ancestors.shape[1]  # a plan for larger rows has more of them, all 0
            narrow = replace(plan, ancestors=plan.ancestors[:, :words])
            same = all(torch.equal(getattr(narrow, part.name), getattr(links, part.name)) for part in fields(links))
            if not same or bool(plan.ancestors[:, words:].any()):
                raise ValueError("draft: got a plan that is not that of its parents; expected tree_plan's, or None")

    def _check_marks(self) -> None:
        available = 0 if self.dists is None else self.dists.logits.shape[0]
        for node, (how, source) in enumerate(zip(self.proposal_kinds.tolist(), self.dist_index.tolist())):
            if not ProposalKind.DETERMINISTIC <= how <= ProposalKind.SAMPLED_WITHOUT_DETERMINISTIC:
                raise ValueError(
                    f"draft: node {node}: got proposal kind {how}; expected one of {[int(d) for d in ProposalKind]}"
                )
            if how and not 0 <= source < available:
                raise ValueError(
                    f"draft: node {node}: got distribution row {source}; expected one of the draft's {available} "
                    f"distributions"
                )
