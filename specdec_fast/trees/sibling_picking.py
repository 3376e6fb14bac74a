"""Picking the children of tree nodes, by one of the ways in `HOWS`. Tests: tests/drafters/test_draft_tree.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_fast.core.chain_layout import ChainLayout, chain_layout
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import ProposalKind
from specdec_fast.sampling.sampling_tensors import SamplingTensors
from specdec_fast.trees.static_layout import EMPTY
from specdec_kernels import draft_sample, tree_expand

HOWS = ("coupled", "hybrid", "iid", "top_k", "without_replacement")
DETERMINISTIC_HOWS = ("coupled", "top_k")


@dataclass(slots=True)
class ParentNodes:
    """Nodes that get children, in packed order, and their distributions.

    Attributes:
        shape: Layout of the nodes by tree.
        logits: The source's logits, [nodes, columns].
        columns: Target ids of the columns, int64 [columns]; None if they are equal.
        sampling: Sampling parameters per node.
        noisy: Children are picked under the replay noise in some row.
        filtered: Some row has top-k, top-p or min-p.
        greedy: Some row may be at temperature 0.
        roots: Positions of the trees' roots.
        depth: Depth of the nodes.
    """

    shape: ChainLayout
    logits: Tensor
    columns: Tensor | None
    sampling: SamplingTensors
    noisy: bool
    filtered: bool
    greedy: bool
    roots: Tensor
    depth: int

    def pick_stats(self, dists: TokenDistributions | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(1/T, cut, tie) that children are picked by."""
        return pick_stats(self.logits, self.sampling, self.filtered, dists)

    def positions(self, depth: int) -> Tensor:
        """Positions of nodes at a depth of the same trees, per node."""
        return (self.roots + depth)[self.shape.row_of]


def pick_stats(
    logits: Tensor, sampling: SamplingTensors, filtered: bool, dists: TokenDistributions | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the statistics that children are picked by. At temperature 0 these are those of temperature 1.

    Args:
        logits: Logits [N, V].
        sampling: Sampling parameters per node.
        filtered: Some row has top-k, top-p or min-p.
        dists: Distributions of these logits, if they are known already.

    Returns:
        Inverse temperature, cut and tie, [N] each.
    """
    inv_t, cut, tie = sampling.unfiltered_stats(logits)
    if filtered:
        dists = sampling.distributions(logits) if dists is None else dists
        greedy = dists.inv_t == 0
        cut, tie = torch.where(greedy, cut, dists.cut), torch.where(greedy, tie, dists.tie_id)
    return inv_t, cut, tie


def pick_best(level: ParentNodes, dists: TokenDistributions | None, width: int) -> Tensor:
    """The `width` best children of every node, int64 [nodes, width], EMPTY behind the last."""
    count, device = level.logits.shape[0], level.logits.device
    dist, noise = level.pick_stats(dists), {}
    if level.noisy:
        places = level.positions(level.depth + 1)
        if level.filtered:  # otherwise no row is at temperature 0
            places = torch.where(level.sampling.temperature == 0, -1, places)
        noise = {"seeds": level.sampling.seeds, "positions": places}
    bounds = chain_layout((0,), (count,), device).offsets
    most = min(width, level.logits.shape[1])
    found = tree_expand(level.logits, *dist, bounds, torch.zeros_like(dist[0]), width=most, keep=1, **noise)[0]
    return found if most == width else pad(found, (0, width - most), value=EMPTY)


def sample_children(
    level: ParentNodes, dists: TokenDistributions, children: Tensor, widest: int, first_draw: Tensor, how: str
) -> tuple[Tensor, Tensor]:
    """Samples the children of every node.

    Args:
        level: The nodes, with their logits.
        dists: Their distributions.
        children: Number of children of each node, [nodes].
        widest: Most children of a node.
        first_draw: Number of the first draw of each node.
        how: One of `HOWS` that samples.

    Returns:
        Tokens and proposal kinds [nodes, widest], in the order of their tests. EMPTY behind the last child: if a draw
        finds no token, no later one does.
    """
    (nodes, columns), hybrid = dists.logits.shape, how == "hybrid"
    greedy, roots = dists.inv_t == 0, level.positions(0)
    logits = dists.logits.new_empty(nodes, columns + 1)  # the last column absorbs unused writes
    logits[:, :columns] = dists.logits
    left = logits[:, :columns]
    tops = children.new_full((nodes, widest), EMPTY, dtype=torch.int64)
    if hybrid or level.greedy:
        wanted = torch.where(greedy, children, children - 1 if hybrid else 0)
        rank = torch.arange(widest, device=children.device)
        tops = torch.where(rank < wanted[:, None], pick_best(level, dists, widest), EMPTY)
        logits.scatter_(1, torch.where(tops == EMPTY, columns, tops), float("-inf"))
    mark = {"hybrid": ProposalKind.SAMPLED_WITHOUT_DETERMINISTIC, "iid": ProposalKind.SAMPLED}.get(
        how, ProposalKind.SAMPLED_WITHOUT_EARLIER
    )
    sound, draws = ~greedy & ~torch.isnan(dists.lse), []
    for number in range(1 if hybrid else widest):
        token = draft_sample(left, *dists.stats, level.sampling.seeds, roots, first_draw + number)
        here = left.gather(1, token[:, None]).squeeze(1).to(dists.cut.dtype)
        kept = (here > dists.cut) | ((here == dists.cut) & (token <= dists.tie_id))
        draws.append(torch.where(sound & kept & (here > float("-inf")) & (children > number), token, EMPTY))
        if mark == ProposalKind.SAMPLED_WITHOUT_EARLIER:
            logits.scatter_(1, torch.where(draws[-1] == EMPTY, columns, draws[-1])[:, None], float("-inf"))
    tokens = torch.stack(draws, 1)
    if hybrid:
        tokens = torch.where(tokens == EMPTY, tops, torch.cat([tokens, tops[:, :-1]], 1))
        marked = (draws[0] != EMPTY)[:, None] & (torch.arange(widest, device=tokens.device) == 0)
    else:
        tokens, marked = torch.where(greedy[:, None], tops, tokens), ~greedy[:, None].expand_as(tokens)
    return tokens, torch.where(marked, int(mark), int(ProposalKind.DETERMINISTIC))
