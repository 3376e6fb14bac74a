"""Proposals on packed trees: what each node's token was drawn from, for the references of the rules that look at q.

The children of a node are an ordered list of proposals. Each has a distribution, given everything that was decided
before it: a point mass if its token was chosen, else its draft distribution, restricted to the tokens that could
still be drawn. Score-only nodes are no proposals: they are skipped wherever children are listed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...random import ACCEPT, BLOCK, RECOVER, draw_from_weights, uniform, words
from ..distribution_stats.reference import dist_probs

DETERMINISTIC = 0
"""A point mass: any deterministic choice."""
SAMPLED = 1
"""Drawn from its distribution, independently of its siblings."""
SAMPLED_WITHOUT_EARLIER = 2
"""Drawn from its distribution restricted to tokens that no earlier sibling was drawn as, from the same distribution
row.
"""
SAMPLED_WITHOUT_DETERMINISTIC = 3
"""Drawn from its distribution restricted to tokens that are not those of chosen siblings, earlier or later."""

Distribution = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""(logits, inv_t, lse, cut, tie_id)"""


def dust(target: Distribution, draft: Distribution | None) -> float:
    """Mass below which what a drawn distribution leaves of a target distribution is rounding: a rejection there has
    no probability.
    """
    wide = target[1].dtype == torch.float64 and (draft is None or draft[1].dtype == torch.float64)
    return 2.0**-44 if wide else 2.0**-20


def check(
    op: str,
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    proposal_kinds: Tensor | None,
    dist_index: Tensor | None,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    score_only: Tensor | None = None,
    seeds: Tensor | None = None,
    root_positions: Tensor | None = None,
    uniforms: Tensor | None = None,
    race: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int | None = None,
) -> None:
    """Raises ValueError for a tree draft that `op` cannot take; without max_depth, randomness is not looked at. Without
    drawn and dist_index, distributions of the draft are none of the operator's business.
    """
    nodes = argument_checks.check_tensor(op, "tokens", tokens, torch.int64, "M").shape[0]
    argument_checks.check_offsets(op, offsets, nodes)
    argument_checks.check_tensor(op, "first_child", first_child, torch.int32, nodes)
    argument_checks.check_tensor(op, "next_sibling", next_sibling, torch.int32, nodes)
    if proposal_kinds is not None:
        argument_checks.check_tensor(op, "proposal_kinds", proposal_kinds, torch.int8, nodes)
        argument_checks.check_tensor(op, "dist_index", dist_index, torch.int32, nodes)
    vocab = argument_checks.check_dist(op, "target", target, nodes)[0].shape[1]
    dists = 0
    if draft is not None:
        dists, width = argument_checks.check_dist(op, "draft", draft, "R")[0].shape
        if token_ids is not None:
            argument_checks.check_tensor(op, "token_ids", token_ids, torch.int64, width)
        elif width > vocab:
            raise ValueError(
                f"{op}: draft distributions have {width} columns, target distributions {vocab}; expected at most as "
                f"many; slice off "
                "padding or pass token_ids"
            )
    if score_only is not None:
        argument_checks.check_tensor(op, "score_only", score_only, torch.bool, nodes)
    if max_depth is not None:
        batch = offsets.shape[0] - 1
        argument_checks.check_tensor(op, "seeds", seeds, torch.int64, batch)
        argument_checks.check_tensor(op, "root_positions", root_positions, torch.int32, batch)
        if uniforms is not None:
            argument_checks.check_tensor(op, "uniforms", uniforms, torch.float32, nodes)
        if race is not None:
            if not isinstance(race, (tuple, list)) or len(race) != 2:
                raise ValueError(f"{op}: race is {type(race).__name__}; expected (block noise, token noise)")
            argument_checks.check_tensor(
                op, "race block noise", race[0], torch.float32, batch, (vocab + BLOCK - 1) // BLOCK
            )
            argument_checks.check_tensor(op, "race token noise", race[1], torch.float32, batch, vocab)
        argument_checks.check_max_depth(op, max_depth)
    if argument_checks.can_read_values(tokens):
        tree = (tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index)
        _check_values(op, *tree, vocab, dists, token_ids if draft is not None else None, max_depth)


def _check_values(
    op: str,
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    proposal_kinds: Tensor | None,
    dist_index: Tensor | None,
    vocab: int,
    dists: int,
    token_ids: Tensor | None,
    max_depth: int | None,
) -> None:
    """The part of `check` that reads tensors; distributions: number of draft distributions, 0 for none."""
    index = torch.arange(len(tokens), device=tokens.device)
    row = torch.searchsorted(offsets.long(), index, right=True) - 1
    inside = index < offsets[-1]
    end = offsets.long()[(row + 1).clamp(max=len(offsets) - 1)]
    for name, links in (("first_child", first_child), ("next_sibling", next_sibling)):
        good = ~inside | (links == -1) | ((links > index) & (links < end))
        argument_checks.check_values(
            op, name, good, links, "-1 or the packed index of a later node of the row; use tree_plan's links"
        )
    led_to = torch.cat([first_child[inside], next_sibling[inside]]).long()
    links = torch.bincount(led_to[led_to >= 0], minlength=len(tokens))
    argument_checks.check_values(
        op, "first_child, next_sibling", links <= 1, links, "one link to a node; use tree_plan's links"
    )
    inner = inside & (index > offsets.long()[row.clamp(min=0)])
    argument_checks.check_values(
        op, "tokens", ~inner | ((tokens >= 0) & (tokens < vocab)), tokens, f"an id in [0, {vocab})"
    )
    if proposal_kinds is not None and dist_index is not None:
        argument_checks.check_values(
            op,
            "proposal_kinds",
            ~inner | ((proposal_kinds >= 0) & (proposal_kinds <= 3)),
            proposal_kinds,
            "a mark from 0 to 3",
        )
        from_dist = inner & (proposal_kinds != DETERMINISTIC)
        if dists == 0:
            argument_checks.check_values(
                op,
                "proposal_kinds",
                ~from_dist,
                proposal_kinds,
                "0 (chosen) everywhere when there are no draft distributions",
            )
        named = ~from_dist | ((dist_index >= 0) & (dist_index < dists))
        argument_checks.check_values(op, "dist_index", named, dist_index, f"a draft distribution in [0, {dists})")
    if token_ids is not None:
        argument_checks.check_values(
            op, "token_ids", (token_ids >= 0) & (token_ids < vocab), token_ids, f"in [0, {vocab})"
        )
    deepest = max(depths(offsets, first_child, next_sibling), default=0)
    if max_depth is not None and deepest > max_depth:
        raise ValueError(
            f"{op}: a row is {deepest} draft tokens deep; expected at most max_depth = {max_depth}; drawn tokens must "
            "all be verified, so pass a larger max_depth"
        )


def depths(offsets: Tensor, first_child: Tensor, next_sibling: Tensor) -> list[int]:
    """Depth of every node, on the host; 0 for tail nodes."""
    first, sibling, depth = first_child.tolist(), next_sibling.tolist(), [0] * len(first_child)
    for node in range(int(offsets[-1])):
        child = first[node]
        while child >= 0:
            depth[child] = depth[node] + 1
            child = sibling[child]
    return depth


class Tree:
    """A packed batch of trees on the host, its distributions as dense weights."""

    def __init__(
        self,
        tokens: Tensor,
        offsets: Tensor,
        first_child: Tensor,
        next_sibling: Tensor,
        proposal_kinds: Tensor,
        dist_index: Tensor,
        target: Distribution,
        draft: Distribution | None,
        token_ids: Tensor | None,
        score_only: Tensor | None,
    ) -> None:
        self.bounds: list[int] = offsets.tolist()
        self.token: list[int] = tokens.tolist()
        self.mark: list[int] = proposal_kinds.tolist()
        self.source: list[int] = dist_index.tolist()
        self.dists, self.token_ids = target, token_ids
        self.dtype = target[1].dtype if draft is None else torch.promote_types(target[1].dtype, draft[1].dtype)
        self.p = dist_probs(*target).to(self.dtype)
        self.q = None if draft is None else dist_probs(*draft).to(self.dtype)
        self.dust = dust(target, draft)
        first, sibling = first_child.tolist(), next_sibling.tolist()
        score_only_node = [False] * len(first) if score_only is None else score_only.tolist()
        self.parent = [-1] * len(first)
        self.children: list[list[int]] = [[] for _ in first]
        for node in range(self.bounds[-1]):
            child = first[node]
            while child >= 0:
                if not score_only_node[child]:
                    self.children[node].append(child)
                    self.parent[child] = node
                child = sibling[child]

    def target(self, node: int) -> Tensor:
        """Weights of the target's distribution after a node: [V]."""
        return self.p[node]

    def broken(self, node: int) -> bool:
        """Whether the target's distribution after a node has no weight at all."""
        return bool(self.dists[2][node].isnan())

    def proposal(self, parent: int, place: int) -> Tensor | None:
        """Weights of the distribution that child number `place` was drawn from, given what was decided before it: [V].

        None if its token has no weight there: it was not drawn from this distribution and is no proposal.
        """
        siblings = self.children[parent]
        node = siblings[place]
        token, mark = self.token[node], self.mark[node]
        weights = torch.zeros(self.dists[0].shape[1], dtype=self.dtype, device=self.dists[0].device)
        if mark == DETERMINISTIC:
            weights[token] = 1.0
            return weights
        assert self.q is not None
        row = self.source[node]
        q = self.q[row]
        if self.token_ids is None:
            weights[: len(q)] = q
        else:
            weights[self.token_ids] = q
        gone: list[int] = []
        if mark == SAMPLED_WITHOUT_EARLIER:
            same = (
                other for other in siblings[:place] if self.mark[other] != DETERMINISTIC and self.source[other] == row
            )
            gone = [self.token[other] for other in same]
        elif mark == SAMPLED_WITHOUT_DETERMINISTIC:
            gone = [self.token[other] for other in siblings if self.mark[other] == DETERMINISTIC]
        weights[gone] = 0.0
        if not float(weights[token]) > 0:
            return None
        return weights * (1.0 / mass(weights)) if gone else weights


def mass(weights: Tensor) -> float:
    """Total of weights [V], summed in float64."""
    return float(weights.sum(dtype=torch.float64))


def coins(tree: Tree, seeds: Tensor, root_positions: Tensor, nodes: int) -> list[float]:
    """The keyed coin of every node: index is the node's place within its row."""
    bounds = torch.tensor(tree.bounds, device=seeds.device)
    packed = torch.arange(nodes, device=seeds.device)
    row = (torch.searchsorted(bounds, packed, right=True) - 1).clamp(min=0, max=max(len(bounds) - 2, 0))
    if not len(seeds):
        return [1.0] * nodes
    found: list[float] = uniform(words(seeds[row], root_positions[row], packed - bounds[row], ACCEPT, 0)).tolist()
    return found


def answer(
    paths: list[list[int]],
    rest: list[Tensor],
    max_depth: int,
    seeds: Tensor,
    root_positions: Tensor,
    race: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(path, num_accepted, next_token) as the verify operators return them, from one path per row.

    rest: weights [V] of the next token, for every row that has a path, in order.
    """
    device = seeds.device
    padded = [path + [-1] * (max_depth + 1 - len(path)) for path in paths]
    accepted = torch.tensor([max(len(path) - 1, 0) for path in paths], dtype=torch.int32, device=device)
    following = torch.full((len(paths),), -1, dtype=torch.int64, device=device)
    if rest:
        rows = torch.tensor([row for row, path in enumerate(paths) if path], device=device)
        noise = None if race is None else (race[0][rows], race[1][rows])
        counter = (seeds[rows], root_positions[rows], accepted[rows])
        following[rows] = draw_from_weights(torch.stack(rest), *counter, RECOVER, noise)
    path = torch.tensor(padded, dtype=torch.int32, device=device).reshape(len(paths), max_depth + 1)
    return path, accepted, following
