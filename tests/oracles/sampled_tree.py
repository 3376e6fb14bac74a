"""A drafter of trees of one fixed shape, with a proposal kind for each node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions, concat_distributions
from specdec_fast.core.draft import Draft, ProposalKind
from specdec_fast.interfaces import Acceptance, Budget, Needs, Rng, StateView, TargetOutput
from specdec_kernels.random import DRAFT, sample_from_weights


class SampledTree:
    """Proposes trees of one shape. Rows with a smaller budget get no draft.

    Deterministic tokens are the likeliest of the draft, in order.

    Args:
        logits_after: Logits [V] after a text.
        shape: (parent, proposal kind) of nodes 1, 2, ...
    """

    name = "sampled_tree"

    def __init__(
        self, logits_after: Callable[[Sequence[int]], Tensor], shape: Sequence[tuple[int, ProposalKind]]
    ) -> None:
        self.logits_after, self.shape, self.num_draft_tokens = logits_after, list(shape), len(shape)
        self.is_chain = all(parent == at for at, (parent, _) in enumerate(shape))
        self.needs = Needs(topology="chain" if self.is_chain else "tree", dists=True)

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        pass

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        pass

    def release(self, rows: Sequence[int]) -> None:
        pass

    def kept(self, weights: Tensor) -> Tensor:
        """Marks rows that keep their drafts, bool [rows], from the tokens' probabilities [rows, nodes] under q."""
        return torch.ones(len(weights), dtype=torch.bool)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        at = [index for index, limit in enumerate(budget.nodes) if limit >= len(self.shape)]
        texts = [[list(view.tokens(rows[index])) for index in at]]
        dists: dict[int, TokenDistributions] = {}
        likelihood = []
        for node, (parent, _) in enumerate(self.shape, 1):
            if parent not in dists and at:
                logits = torch.stack([self.logits_after(text) for text in texts[parent]])
                dists[parent] = view.sampling([rows[index] for index in at]).distributions(logits)
            tokens = self._tokens(node, dists[parent], texts, rng, torch.tensor(at)) if at else torch.zeros(0).long()
            if at:
                likelihood.append(dists[parent].probs().gather(1, tokens[:, None])[:, 0])
            texts.append(
                [[*text, token] for text, token in zip(texts[parent], tokens.tolist(), strict=True)]  # in row order
            )
        kept = dict(zip(at, self.kept(torch.stack(likelihood, 1)).tolist(), strict=True)) if likelihood else {}
        where = {index: place for place, index in enumerate(at) if kept.get(index)}
        return self._packed(view, rows, where, texts, dists)

    def _tokens(
        self, node: int, dists: TokenDistributions, texts: list[list[list[int]]], rng: Rng, at: Tensor
    ) -> Tensor:
        parent, mark = self.shape[node - 1]
        siblings = [other for other, (of, _) in enumerate(self.shape, 1) if of == parent]
        deterministic = [other for other in siblings if self.shape[other - 1][1] == ProposalKind.DETERMINISTIC]
        order = dists.logits.argsort(dim=1, descending=True, stable=True)
        if mark == ProposalKind.DETERMINISTIC:
            return order[:, deterministic.index(node)]
        weights = dists.probs()
        left = weights.clone()
        if mark == ProposalKind.SAMPLED_WITHOUT_DETERMINISTIC:
            left.scatter_(1, order[:, : len(deterministic)], 0.0)
        elif mark == ProposalKind.SAMPLED_WITHOUT_EARLIER:
            for other in siblings:
                if other < node and other not in deterministic:
                    left.scatter_(1, torch.tensor([text[-1] for text in texts[other]])[:, None], 0.0)
        left = torch.where(left.sum(1, keepdim=True) > 0, left, weights)  # the rule detects that q was not conditioned
        return sample_from_weights(left, rng.seeds[at], rng.positions[at], torch.full_like(at, node), DRAFT)

    def _packed(
        self,
        view: StateView,
        rows: Sequence[int],
        where: dict[int, int],
        texts: list[list[list[int]]],
        dists: dict[int, TokenDistributions],
    ) -> Draft:
        """Packs the draft. `where` is the index among the drafted rows of every row that has a draft."""
        order = list(dists)
        drafted = len(texts[0])
        tokens: list[int] = []
        parents: list[int] = []
        marks: list[int] = []
        sources: list[int] = []
        offsets = [0]
        for index, row in enumerate(rows):
            tokens.append(view.tokens(row)[-1])
            parents.append(-1)
            marks.append(0)
            sources.append(-1)
            for node, (parent, mark) in enumerate(self.shape, 1):
                if index in where:
                    tokens.append(texts[node][where[index]][-1])
                    parents.append(parent)
                    marks.append(int(mark))
                    sampled = mark != ProposalKind.DETERMINISTIC
                    sources.append(order.index(parent) * drafted + where[index] if sampled else -1)
            offsets.append(len(tokens))
        counts = tuple(stop - start for start, stop in zip(offsets, offsets[1:], strict=False))
        depth = max((len(level[0]) - len(texts[0][0]) for level in texts if level), default=0)
        return Draft(
            rows=torch.tensor(rows, dtype=torch.int32),
            tokens=torch.tensor(tokens),
            parents=torch.tensor(parents, dtype=torch.int32),
            offsets=torch.tensor(offsets, dtype=torch.int32),
            proposal_kinds=torch.tensor(marks, dtype=torch.int8),
            dist_index=torch.tensor(sources, dtype=torch.int32),
            row_of=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts)),
            counts=counts,
            max_depth=depth,
            is_chain=self.is_chain,
            dists=concat_distributions(list(dists.values())) if dists else None,
        )
