"""Drafters of sampled and of deterministic chains, the two kinds of proposals of rule `rejection`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_fast.core.distributions import concat_distributions
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Budget, Needs, Rng, StateView, TargetOutput
from specdec_kernels import draft_sample


class SampledChain:
    """Samples each token from logits_after(prefix), one level at a time and without a cache."""

    name = "sampled_chain"
    needs = Needs(topology="chain", dists=True)

    def __init__(self, logits_after: Callable[[Sequence[int]], Tensor], num_draft_tokens: int) -> None:
        self.logits_after, self.num_draft_tokens = logits_after, num_draft_tokens

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        pass

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        pass

    def release(self, rows: Sequence[int]) -> None:
        pass

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        texts = [list(view.tokens(row)) for row in rows]
        chains, dist_rows, parts, used = [[text[-1]] for text in texts], [[] for _ in rows], [], 0
        for level in range(max(budget.nodes, default=0)):
            active = [index for index, limit in enumerate(budget.nodes) if limit > level]
            dists = view.sampling([rows[index] for index in active]).distributions(
                torch.stack([self.logits_after(texts[index]) for index in active])
            )
            at = torch.full((len(active),), level, dtype=torch.int32)
            sampled = draft_sample(dists.logits, *dists.stats, rng.seeds[active], rng.positions[active], at)
            for index, token in zip(active, sampled.tolist(), strict=True):
                texts[index].append(token)
                chains[index].append(token)
                dist_rows[index].append(used)
                used += 1
            parts.append(dists)
        dists = concat_distributions(parts) if parts else None
        return Draft.chains(rows, chains, dist_rows=dist_rows, dists=dists)


class DeterministicChain(SampledChain):
    """Computes each token by a function of the prefix."""

    name = "deterministic_chain"
    needs = Needs(topology="chain")

    def __init__(self, choice_after: Callable[[Sequence[int]], int], num_draft_tokens: int) -> None:
        self.choice_after, self.num_draft_tokens = choice_after, num_draft_tokens

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        chains = []
        for row, limit in zip(rows, budget.nodes, strict=True):
            text = list(view.tokens(row))
            chain = [text[-1]]
            for _ in range(limit):
                chain.append(self.choice_after([*text, *chain[1:]]))
            chains.append(chain)
        return Draft.chains(rows, chains)
