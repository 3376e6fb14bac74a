"""Token recycling: trees from the likeliest successors that the target last showed (Luo et al. 2024, section 3).

Needs no model. For every token, the likeliest next tokens of the newest node that held it are noted with their
log-probabilities, in prompts and on refused branches too. From these a tree grows best-first. Where the rule replays,
each place of it is a race of the noted distribution under the very noise that the target will use there (Kool et al.
2019), the chance that a token which is not noted wins counted in: a sampled text is drafted as well as a greedy one.
Tests: tests/drafters/test_recycling.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.draft import Draft
from specdec_fast.core.names import RENAMED_PICKS
from specdec_fast.interfaces import Acceptance, Budget, DrafterParts, Needs, Rng, StateView, TargetOutput
from specdec_fast.retrieval.suffix_index import structures
from specdec_kernels import tree_expand
from specdec_kernels.names import unknown_name

PICKS = ("coupled", "greedy")
_AUX_HIDDEN_STATE = "final_norm"
_ROWS = 256  # of a prompt whose logits are computed at once
_CERTAIN = 1.5  # at temperature 0 the first choice comes true more often than its probability says


class RecyclingDrafter:
    """Up to `num_draft_tokens` nodes, at most `depth` deep, from the last seen `top_k` successors of each token.

    num_draft_tokens: of requests that ask for no other number; min_probability: of a path; pick: "greedy" (by the
    noted distributions alone; also what "sampled" means here) or "coupled" (under the noise of `replay`); shared: one
    table for all requests, kept when they end; otherwise each request learns for itself.

    With `shared`, what one request was given is drafted for another: also what the target showed under the edited
    logits of requests with bans or grammars (in half formats the edits are made in a copy). A rule that replays is
    exact whatever is drafted. Under the others uniforms are then keyed by the request too (`Needs.cross_request`), so a
    text is no function of its seed; that is why `from_parts` shares by default only under rules that replay and greedy
    ones.
    """

    name = "recycling"
    needs = Needs(topology="tree", prompt_aux_hidden_states=(_AUX_HIDDEN_STATE,), host_tokens=True, logits=True)

    def __init__(
        self,
        num_draft_tokens: int = 12,
        top_k: int = 128,
        depth: int = 6,
        min_probability: float = 0.05,
        pick: str = "greedy",
        shared: bool = False,
    ) -> None:
        if num_draft_tokens < 1 or depth < 1 or top_k < 1:
            raise ValueError(
                f"recycling num_draft_tokens, depth, top_k: got {num_draft_tokens}, {depth}, {top_k}; "
                "expected at least 1"
            )
        if not 0 <= min_probability <= 1:
            raise ValueError(f"recycling min_probability: got {min_probability}; expected 0 to 1")
        pick = "greedy" if pick == "sampled" else pick
        if pick not in PICKS:
            raise ValueError(unknown_name("recycling pick", pick, PICKS, renamed=RENAMED_PICKS))
        self.num_draft_tokens = num_draft_tokens
        self._top, self._depth, self._least = top_k, depth, float(min_probability)
        self.pick, self.shared = pick, shared
        self.needs = replace(self.needs, prompt_aux_hidden_states=(), cross_request=shared)
        self._lm_head: Callable[[Tensor], Tensor] | None = None
        self._make = structures().Successors
        self._common = self._make()
        self._own: dict[int, Any] = {}

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Defaults where it is made for a rule."""
        return {"pick": prefers, "shared": prefers in ("coupled", "greedy")}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> RecyclingDrafter:
        """One that picks as the rule prefers, learns from prompts, and shares by default where that is exact."""
        made = cls(**{**cls.by_rule(parts.prefers), **options})
        if hasattr(parts.target, "lm_head"):
            made.read_prompts(parts.target.lm_head)
        return made

    def read_prompts(self, lm_head: Callable[[Tensor], Tensor]) -> None:
        """Note what the target shows behind the tokens of prompts, too; before the engine is made. lm_head: of the
        target, from hidden states [N, hidden] as tapped at "final_norm" to logits [N, V].
        """
        self._lm_head, self.needs = lm_head, replace(self.needs, prompt_aux_hidden_states=(_AUX_HIDDEN_STATE,))

    def successors(self, row: int) -> Any:
        """What a row reads: the likeliest next tokens by token (`Successors` of
        specdec_fast/retrieval/suffix_index.py).
        """
        return self._common if self.shared else self._own.setdefault(row, self._make())

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        if self._lm_head is None or prompt_output is None or _AUX_HIDDEN_STATE not in prompt_output.aux_hidden_states:
            return
        hidden, start = prompt_output.aux_hidden_states[_AUX_HIDDEN_STATE], 0
        for row in rows:
            prompt = view.tokens(row)[:-1]
            newest = list({token: start + at for at, token in enumerate(prompt)}.items())
            start += len(prompt)
            for first in range(0, len(newest), _ROWS):
                tokens, places = zip(*newest[first : first + _ROWS])
                top = _likeliest(self._lm_head(hidden[list(places)]), self._top)
                self.successors(row).learn(np.array(tokens), *top)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        sampling = view.sampling(rows)
        dists = zip(*(each.tolist() for each in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)))
        trees = []
        for row, limit, (temperature, *kept), noise in zip(
            rows, budget.nodes, dists, rng.replay_noise_keys(sampling, self.pick)
        ):
            root = view.tokens(row)[-1]
            how = (1 / temperature, *kept) if temperature else (_CERTAIN, 0, 1.0, 0.0)
            tokens, parents, *_ = self.successors(row).grow(root, self._depth, limit, self._least, *how, noise)
            trees.append(([root, *tokens], [-1, *parents]))
        return Draft.trees(rows, trees, device=view.device)

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        assert output.logits is not None
        top, values = _likeliest(output.logits, self._top)
        tokens = draft.tokens.numpy(force=True)
        if self.shared:
            self._common.learn(tokens, top, values)
            return
        start = 0
        for row, count in zip(draft.host_rows(), draft.counts):
            own = slice(start, start + count)
            self.successors(row).learn(tokens[own], top[own], values[own])
            start += count

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._own.pop(row, None)

    def forget(self) -> None:
        """Empties the table that requests share."""
        self._common = self._make()


def _likeliest(logits: Tensor, width: int) -> tuple[Any, Any]:
    """The `width` likeliest tokens of every row, the likeliest first, -1 where there are no more; and their
    log-probabilities at temperature 1. Arrays [M, width], int64 and float32.
    """
    nodes, vocab = logits.shape
    width = min(width, vocab)
    device = logits.device
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    tokens, values, _ = tree_expand(
        logits,
        torch.ones(nodes, dtype=wide, device=device),
        torch.full((nodes,), float("-inf"), dtype=wide, device=device),
        torch.full((nodes,), vocab - 1, dtype=torch.int32, device=device),
        host_to_device([0, nodes], torch.int32, device),
        torch.zeros(nodes, dtype=wide, device=device),
        width=width,
        keep=1,
    )
    return tokens.numpy(force=True), values.float().numpy(force=True)


DRAFTER = RecyclingDrafter
