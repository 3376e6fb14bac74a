"""Simulation of many speculative steps from one pair of distributions, with production rules and keyed randomness.

Every node has the same target distribution p and the same draft distribution q, as in models without memory. A batch
of any size therefore needs only two rows of logits, which are expanded with row stride 0. The target's distribution of
a text is a product of p. Everything runs on the device of the two rows.
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
from specdec_kernels.unknown_names import unknown_name

CHAIN = (-1, 0, 1)
TREE = (-1, 0, 0, 1, 1)
"""Two siblings, and two children of the first one."""

MOST_REDRAWS = 200
"""Attempts to sample a sibling that differs from the earlier ones, before a filtered distribution is built."""
LARGE = 8192
"""Vocabulary size above which coupled drafts are smaller."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and proposals of the draft of every row.

    Attributes:
        parents: Parents of the nodes, root first.
        pick: How tokens are selected: "coupled" (the largest of q under replay noise), "sampled" (chains), "iid"
            (independent siblings), "without" (siblings without replacement), "hybrid" (one sampled, the others the
            likeliest) or "deterministic" (the likeliest).
    """

    parents: tuple[int, ...]
    pick: str

    @property
    def depth(self) -> list[int]:
        """Depth of every node."""
        found = [0]
        for parent in self.parents[1:]:
            found.append(found[parent] + 1)
        return found

    @property
    def siblings(self) -> dict[int, list[int]]:
        """Children of every inner node, in order."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents[1:], 1):
            found.setdefault(parent, []).append(node)
        return found

    @property
    def is_chain(self) -> bool:
        """Whether the parent of every node is the node before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))


def picks_for(rule: Rule) -> tuple[str, ...]:
    """Returns the proposals that can be used with a rule. The first is the most demanding one and the default."""
    if rule.prefers == "coupled":
        return ("coupled", "deterministic", "sampled", "hybrid", "iid", "without")
    return (
        ("hybrid", "deterministic", "sampled", "iid", "without") if takes_trees(rule) else ("sampled", "deterministic")
    )


def layout_for(rule: Rule, vocab: int = 1024, pick: str | None = None) -> Layout:
    """Returns a layout for a rule: a tree if the rule and the proposals support trees, otherwise a chain.

    Replay noise needs one random word per token and node, so drafts for large vocabularies have only one level.

    Args:
        rule: The rule.
        vocab: Number of tokens.
        pick: Proposals, one of `picks_for`. None selects the first of them.

    Returns:
        The layout.

    Raises:
        ValueError: If the rule does not support `pick`.
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
    """Expands one distribution to `rows` equal ones without copying its logits."""
    mass = None if dists.mass is None else dists.mass.expand(rows, -1).contiguous()
    inv_t, lse, cut, tie_id = (part.expand(rows).contiguous() for part in dists.stats)
    return TokenDistributions(dists.logits.expand(rows, -1), inv_t, lse, cut, tie_id, mass=mass)


def on_device(dists: TokenDistributions, device: torch.device | str) -> TokenDistributions:
    """Copies distributions to a device."""
    mass = None if dists.mass is None else dists.mass.to(device)
    inv_t, lse, cut, tie_id = (part.to(device) for part in dists.stats)
    return TokenDistributions(dists.logits.to(device), inv_t, lse, cut, tie_id, mass=mass)


class Simulator:
    """Runs steps of one rule on one pair of distributions.

    Args:
        rule: The rule.
        p: The target's distribution, one row.
        q: The draft's distribution, one row, on the same vocabulary and device.
        layout: Shape and proposals of the draft. None selects `layout_for(rule)`.

    Raises:
        ValueError: If q has fewer tokens than a node has children.
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
        """Returns q without `tokens`, not normalised. The masses of q are upper bounds of its masses."""
        logits = self.q.logits.clone()
        logits[:, tokens] = float("-inf")
        return TokenDistributions(logits, *self.q.stats, mass=self.q.mass)

    @property
    def deterministic_tokens(self) -> tuple[int, ...]:
        """Children of the root that are the same in every draft."""
        num_sampled = int(self.layout.pick != "deterministic")
        return () if self.top is None else tuple(self.top[: len(self.layout.siblings[0]) - num_sampled].tolist())

    def draft(self, seeds: Tensor, positions: Tensor) -> Draft:
        """Proposes one draft per row.

        Args:
            seeds: Seeds, int64 [n], on the device of the distributions.
            positions: Positions of the roots, int32 [n].

        Returns:
            The drafts.
        """
        rows, size, device = len(seeds), len(self.layout.parents), self.device
        tokens = torch.zeros(rows, size, dtype=torch.int64, device=device)
        kinds = torch.zeros(size, dtype=torch.int8, device=device)
        for group in self.layout.siblings.values():
            self._fill(tokens, kinds, group, seeds, positions)
        index = torch.arange(rows * size, device=device) // size
        dist_index = torch.where(kinds > 0, 0, -1).to(torch.int32)
        return Draft(
            rows=torch.arange(rows, dtype=torch.int32, device=device),
            tokens=tokens.flatten(),
            parents=torch.tensor(self.layout.parents, dtype=torch.int32, device=device).repeat(rows),
            offsets=torch.arange(rows + 1, dtype=torch.int32, device=device) * size,
            proposal_kinds=kinds.repeat(rows),
            dist_index=dist_index.repeat(rows),
            row_of=index,
            counts=(size,) * rows,
            max_depth=max(self.layout.depth),
            is_chain=self.layout.is_chain,
            dists=self.q if bool((kinds > 0).any()) else None,
        )

    def _fill(self, tokens: Tensor, kinds: Tensor, group: list[int], seeds: Tensor, positions: Tensor) -> None:
        """Selects the tokens of one group of siblings in every row, and sets their proposal kinds."""
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
            fixed = self.top[: len(group) - 1]
            dist = self._outside if len(group) - 1 == len(self.top) else self._without(fixed)
            tokens[:, group[0]] = self._draw(dist, seeds, positions, group[0])
            tokens[:, group[1:]] = fixed
            kinds[group[0]] = ProposalKind.SAMPLED_WITHOUT_DETERMINISTIC
            return
        for at, node in enumerate(group):
            tokens[:, node] = self._draw(self.q, seeds, positions, node)
            kinds[node] = (
                ProposalKind.SAMPLED_WITHOUT_EARLIER if pick == "without" and len(group) > 1 else ProposalKind.SAMPLED
            )
            if pick == "without":
                self._redraw(tokens, group[:at], node, seeds, positions)

    def _redraw(self, tokens: Tensor, earlier: list[int], node: int, seeds: Tensor, positions: Tensor) -> None:
        """Samples again while the token equals an earlier sibling's, which conditions q on the other tokens."""
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
        """Returns q without the tokens `taken` [n, k], one row each, for the few rows that keep colliding."""
        dists = shared(self.q, len(taken))
        return TokenDistributions(dists.logits.clone().scatter_(1, taken, float("-inf")), *dists.stats)

    @staticmethod
    def _draw(dist: TokenDistributions, seeds: Tensor, positions: Tensor, index: int) -> Tensor:
        """Samples one token per row, int64 [n], with the draws of number `index`."""
        many = shared(dist, len(seeds))
        at = torch.full((len(seeds),), index, dtype=torch.int32, device=seeds.device)
        return draft_sample(many.logits, *many.stats, seeds, positions, at, mass=many.mass)

    def _coupled(self, seeds: Tensor, positions: Tensor, count: int) -> Tensor:
        """Returns the `count` largest tokens of q under the target's noise, int64 [n, count]."""
        many = shared(self.q, len(seeds))
        first = replay_sample(many.logits, many.inv_t, many.cut, many.tie_id, seeds, positions)
        found = [first]
        for _ in range(count - 1):
            rest = self._rows_without(torch.stack(found, 1))
            found.append(replay_sample(rest.logits, rest.inv_t, rest.cut, rest.tie_id, seeds, positions))
        return torch.stack(found, 1)

    def step(self, seeds: Tensor, positions: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Runs one step per row.

        Args:
            seeds: Seeds, int64 [n].
            positions: Positions of the roots, int32 [n].

        Returns:
            Emitted tokens [n, depth + 1], padded with -1; numbers of accepted tokens [n]; whether the path ends at a
            leaf, bool [n].
        """
        seeds, positions = seeds.to(self.device), positions.to(self.device)
        draft = self.draft(seeds, positions)
        plan = tree_plan(draft.parents, draft.offsets, max_nodes=len(self.layout.parents))
        acceptance = self.rule(draft, plan, shared(self.p, draft.num_nodes), Rng(seeds, positions))
        path, count = acceptance.path.long(), acceptance.num_accepted.long()
        emitted = torch.where(path >= 0, draft.tokens[path.clamp(min=0)], -1)
        emitted = torch.cat([emitted[:, 1:], emitted.new_full((len(seeds), 1), -1)], 1)
        emitted.scatter_(1, count[:, None], acceptance.next_token[:, None])
        last = path.gather(1, count[:, None]).squeeze(1)
        complete = plan.first_child[last] < 0
        return emitted.cpu().numpy(), count.cpu().numpy(), complete.cpu().numpy()
