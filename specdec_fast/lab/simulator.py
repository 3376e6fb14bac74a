"""Many texts from one pair of distributions: the production rule, operators and keyed randomness, in large batches.

Every node has the same target distribution p and every draft distribution is the same q (a model without memory), so
a batch of any size needs two rows of logits: they are shared by a row stride of zero. The target's distribution of a
text is then a product of p. Everything happens on the device that the two rows are on.
Tests: tests/lab/test_draw_counts.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft, ProposalKind
from specdec_fast.core.former_names import RENAMED_PICKS
from specdec_fast.interfaces import Rng, Rule
from specdec_fast.lab.exact_distributions import takes_trees
from specdec_kernels import draft_sample, replay_sample, tree_plan
from specdec_kernels.names import unknown_name

CHAIN = (-1, 0, 1)
TREE = (-1, 0, 0, 1, 1)
"""Two siblings, two children under the first of them."""

MOST_REDRAWS = 200
LARGE = 8192


@dataclass(frozen=True, slots=True)
class Layout:
    """What is drafted in every row. parents: of the nodes, root first; pick: how tokens are picked.

    pick: "coupled" (replay noise; chains, or the k largest of q under the noise), "sampled" (chain),
    "without" (siblings
    without replacement), "hybrid" (one drawn, the others the likeliest), "iid" (independent siblings),
    "deterministic" (the
    likeliest, nothing drawn).
    """

    parents: tuple[int, ...]
    pick: str

    @property
    def depth(self) -> list[int]:
        found = [0]
        for parent in self.parents[1:]:
            found.append(found[parent] + 1)
        return found

    @property
    def siblings(self) -> dict[int, list[int]]:
        """Children of every node that has some, in order."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents[1:], 1):
            found.setdefault(parent, []).append(node)
        return found

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))


def picks_for(rule: Rule) -> tuple[str, ...]:
    """Ways to pick tokens for a rule; the first shows it at work: on trees if it takes them and tests drawn tokens."""
    if rule.prefers == "coupled":
        return ("coupled", "deterministic", "sampled", "hybrid", "iid", "without")
    return (
        ("hybrid", "deterministic", "sampled", "iid", "without") if takes_trees(rule) else ("sampled", "deterministic")
    )


def layout_for(rule: Rule, vocab: int = 1024, pick: str | None = None) -> Layout:
    """A layout for a rule: a tree where siblings are picked and the rule takes trees, else a chain.

    Replay noise costs a word for every token of every node, so over a large vocabulary there is one level of them.
    Raises ValueError for a way to pick that is none of `picks_for`.
    """
    known = picks_for(rule)
    if pick not in (None, *known):
        raise ValueError(unknown_name(f"pick for rule {rule.name}", pick, known, renamed=RENAMED_PICKS))
    found = pick or known[0]
    tree = found not in ("coupled", "sampled") and takes_trees(rule)
    if rule.prefers == "coupled" and vocab > LARGE:
        return Layout(TREE[:3] if tree else CHAIN[:2], found)
    return Layout(TREE if tree else CHAIN, found)


def shared(dists: TokenDistributions, rows: int) -> TokenDistributions:
    """One distribution as `rows` equal distributions, without copies of its logits."""
    mass = None if dists.mass is None else dists.mass.expand(rows, -1).contiguous()
    inv_t, lse, cut, tie_id = (part.expand(rows).contiguous() for part in dists.stats)
    return TokenDistributions(dists.logits.expand(rows, -1), inv_t, lse, cut, tie_id, mass=mass)


def on_device(dists: TokenDistributions, device: torch.device | str) -> TokenDistributions:
    """The same distributions there."""
    mass = None if dists.mass is None else dists.mass.to(device)
    inv_t, lse, cut, tie_id = (part.to(device) for part in dists.stats)
    return TokenDistributions(dists.logits.to(device), inv_t, lse, cut, tie_id, mass=mass)


class Simulator:
    """Steps of one rule on one pair of distributions (p, q: `TokenDistributions` of one row each, over the same
    vocabulary and device).
    """

    def __init__(self, rule: Rule, p: TokenDistributions, q: TokenDistributions, layout: Layout | None = None) -> None:
        self.rule, self.p, self.q = rule, p, q
        self.layout = layout or layout_for(rule)
        self.vocab, self.device = p.logits.shape[1], p.logits.device
        widest = max((len(nodes) for nodes in self.layout.siblings.values()), default=0)
        weights = q.probs()[0]
        support = int((weights > 0).sum())
        if self.layout.pick in ("without", "hybrid", "deterministic") and support < widest:
            raise ValueError(
                f"draft distribution: got {support} tokens; expected at least {widest}, one for each sibling"
            )
        most = {"hybrid": max(widest - 1, 0), "deterministic": widest}.get(self.layout.pick)
        self.top = None if most is None else torch.topk(weights, most).indices
        self._outside = self._without(self.top) if self.top is not None else q

    def _without(self, tokens: Tensor) -> TokenDistributions:
        """q restricted to tokens outside of `tokens`: its weights need no sum to be 1. The masses of q bound them."""
        logits = self.q.logits.clone()
        logits[:, tokens] = float("-inf")
        return TokenDistributions(logits, *self.q.stats, mass=self.q.mass)

    @property
    def deterministic_tokens(self) -> tuple[int, ...]:
        """Tokens that are chosen, whatever is drawn, as children of the root."""
        drawn = self.layout.pick != "deterministic"
        return () if self.top is None else tuple(self.top[: len(self.layout.siblings[0]) - drawn].tolist())

    def draft(self, seeds: Tensor, positions: Tensor) -> Draft:
        """One draft per row. seeds int64 [n], positions int32 [n] of the roots, on the distributions' device."""
        rows, size, device = len(seeds), len(self.layout.parents), self.device
        tokens = torch.zeros(rows, size, dtype=torch.int64, device=device)
        drawn = torch.zeros(size, dtype=torch.int8, device=device)
        for group in self.layout.siblings.values():
            self._fill(tokens, drawn, group, seeds, positions)
        index = torch.arange(rows * size, device=device) // size
        dist_index = torch.where(drawn > 0, 0, -1).to(torch.int32)
        return Draft(
            rows=torch.arange(rows, dtype=torch.int32, device=device),
            tokens=tokens.flatten(),
            parents=torch.tensor(self.layout.parents, dtype=torch.int32, device=device).repeat(rows),
            offsets=torch.arange(rows + 1, dtype=torch.int32, device=device) * size,
            proposal_kinds=drawn.repeat(rows),
            dist_index=dist_index.repeat(rows),
            row_of=index,
            counts=(size,) * rows,
            max_depth=max(self.layout.depth),
            is_chain=self.layout.is_chain,
            dists=self.q if bool((drawn > 0).any()) else None,
        )

    def _fill(self, tokens: Tensor, drawn: Tensor, group: list[int], seeds: Tensor, positions: Tensor) -> None:
        """Pick the tokens of one group of siblings, in every row."""
        pick, depth = self.layout.pick, self.layout.depth[group[0]]
        if pick == "coupled":
            tokens[:, group] = self._coupled(seeds, positions + depth, len(group))
            return
        if pick == "deterministic":
            assert self.top is not None
            tokens[:, group] = self.top[: len(group)]
            return
        if pick == "hybrid" and len(group) > 1:
            assert self.top is not None
            chosen = self.top[: len(group) - 1]
            dist = self._outside if len(group) - 1 == len(self.top) else self._without(chosen)
            tokens[:, group[0]] = self._draw(dist, seeds, positions, group[0])
            tokens[:, group[1:]] = chosen
            drawn[group[0]] = ProposalKind.SAMPLED_WITHOUT_DETERMINISTIC
            return
        for at, node in enumerate(group):
            tokens[:, node] = self._draw(self.q, seeds, positions, node)
            drawn[node] = (
                ProposalKind.SAMPLED_WITHOUT_EARLIER if pick == "without" and len(group) > 1 else ProposalKind.SAMPLED
            )
            if pick == "without":
                self._redraw(tokens, group[:at], node, seeds, positions)

    def _redraw(self, tokens: Tensor, earlier: list[int], node: int, seeds: Tensor, positions: Tensor) -> None:
        """Draw again until the token is none of its earlier siblings': then it has their distribution without them."""
        for attempt in range(1, MOST_REDRAWS + 1):
            same = (tokens[:, earlier] == tokens[:, node, None]).any(1).nonzero().flatten()
            if not len(same):
                return
            number = node + attempt * len(self.layout.parents)
            tokens[same, node] = self._draw(self.q, seeds[same], positions[same], number)
        rest = self._rows_without(tokens[same][:, earlier])
        number = node + (MOST_REDRAWS + 1) * len(self.layout.parents)
        index = torch.full((len(same),), number, dtype=torch.int32, device=self.device)
        tokens[same, node] = draft_sample(rest.logits, *rest.stats, seeds[same], positions[same], index)

    def _rows_without(self, taken: Tensor) -> TokenDistributions:
        """q without the tokens `taken` [n, k] of each row, as rows of their own: for the few that keep colliding."""
        dists = shared(self.q, len(taken))
        return TokenDistributions(dists.logits.clone().scatter_(1, taken, float("-inf")), *dists.stats)

    @staticmethod
    def _draw(dist: TokenDistributions, seeds: Tensor, positions: Tensor, index: int) -> Tensor:
        many = shared(dist, len(seeds))
        at = torch.full((len(seeds),), index, dtype=torch.int32, device=seeds.device)
        return draft_sample(many.logits, *many.stats, seeds, positions, at, mass=many.mass)

    def _coupled(self, seeds: Tensor, positions: Tensor, count: int) -> Tensor:
        """The `count` largest of q under the target's own noise, int64 [n, count]."""
        many = shared(self.q, len(seeds))
        first = replay_sample(many.logits, many.inv_t, many.cut, many.tie_id, seeds, positions)
        found = [first]
        for _ in range(count - 1):
            rest = self._rows_without(torch.stack(found, 1))
            found.append(replay_sample(rest.logits, rest.inv_t, rest.cut, rest.tie_id, seeds, positions))
        return torch.stack(found, 1)

    def step(self, seeds: Tensor, positions: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(emitted tokens [n, depth + 1] padded with -1, accepted [n], complete bool [n]: the path ended at a leaf)."""
        seeds, positions = seeds.to(self.device), positions.to(self.device)
        draft = self.draft(seeds, positions)
        plan = tree_plan(draft.parents, draft.offsets, max_nodes=len(self.layout.parents))
        answer = self.rule(draft, plan, shared(self.p, draft.num_nodes), Rng(seeds, positions))
        path, count = answer.path.long(), answer.num_accepted.long()
        emitted = torch.where(path >= 0, draft.tokens[path.clamp(min=0)], -1)
        emitted = torch.cat([emitted[:, 1:], emitted.new_full((len(seeds), 1), -1)], 1)
        emitted.scatter_(1, count[:, None], answer.next_token[:, None])
        last = path.gather(1, count[:, None]).squeeze(1)
        complete = plan.first_child[last] < 0
        return emitted.cpu().numpy(), count.cpu().numpy(), complete.cpu().numpy()
