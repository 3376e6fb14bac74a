"""Drafters that know the future text and propose it with a given probability, so that tokens are accepted."""

from __future__ import annotations

import random
from collections.abc import Sequence

from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Budget, Needs, Rng, StateView, TargetOutput


class _Noisy:
    """Knows whole texts (prompt and continuation); a proposed token is correct with probability alpha."""

    name = "noisy_oracle"

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        alpha: float,
        vocab: int,
        num_draft_tokens: int = 4,
        seed: int = 0,
    ) -> None:
        self.texts = [list(text) for text in texts]
        self.alpha, self.vocab, self.num_draft_tokens = alpha, vocab, num_draft_tokens
        self.random = random.Random(seed)
        self.known: dict[int, list[int] | None] = {}

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        for row in rows:
            self.known[row] = None

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        pass

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.known.pop(row, None)

    def truth(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Returns the known continuation."""
        text, length = self.known[row], len(tokens)
        if text is None or text[:length] != tokens:
            text = next((found for found in self.texts if found[:length] == tokens), [])
            self.known[row] = text
        return text[length:]

    def guess(self, following: Sequence[int], at: int) -> int:
        """Returns the token at depth `at` with probability alpha, otherwise a random token."""
        if at < len(following) and self.random.random() < self.alpha:
            return following[at]
        return self.random.randrange(self.vocab)


class NoisyChain(_Noisy):
    """Proposes chains."""

    needs = Needs(topology="chain", host_tokens=True)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        chains = []
        for row, limit in zip(rows, budget.nodes, strict=True):
            tokens = list(view.tokens(row))
            following = self.truth(row, tokens)
            chains.append([tokens[-1], *(self.guess(following, at) for at in range(limit))])
        return Draft.chains(rows, chains, device=view.device)


class PausingChain(NoisyChain):
    """Proposes chains in every second step, and nothing in the others."""

    steps = 0

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        self.steps += 1
        return super().propose(view, rows, Budget([limit * (self.steps % 2) for limit in budget.nodes]), rng)


class NoisyTree(_Noisy):
    """Proposes random trees with the true continuation among wrong, equal and optionally score-only siblings."""

    needs = Needs(topology="tree", host_tokens=True)
    score_only_rate = 0.0

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        trees, score_only = [], []
        for row, limit in zip(rows, budget.nodes, strict=True):
            tokens = list(view.tokens(row))
            following = self.truth(row, tokens)
            nodes, parents, depth, true = [tokens[-1]], [-1], [0], [True]
            for _ in range(limit):
                deepest = max((node for node in range(len(nodes)) if true[node]), key=lambda node: depth[node])
                parent = deepest if self.random.random() < 0.6 else self.random.randrange(len(nodes))
                at = depth[parent]
                token = self.guess(following, at) if true[parent] else self.random.randrange(self.vocab)
                nodes.append(token)
                parents.append(parent)
                depth.append(at + 1)
                true.append(true[parent] and at < len(following) and token == following[at])
            trees.append((nodes, parents))
            score_only.extend([False, *(self.random.random() < self.score_only_rate for _ in range(limit))])
        return Draft.trees(rows, trees, score_only=score_only if self.score_only_rate else None, device=view.device)
