"""Token recycling: drafts trees from the likeliest next tokens that the target last showed (Luo et al. 2024).

Needs no model. For every token, the likeliest next tokens of its newest node are stored with their log-probabilities.
Prompts and rejected branches count too. A tree grows best-first from this table. If the rule replays, every node is a
Gumbel-max of the stored distribution under the noise that the target will use there (Kool et al. 2019); the probability
that a token outside the table wins is included. Sampled texts are thus drafted as well as greedy ones.
Tests: tests/drafters/test_recycling.py and the contract suite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_fast.core.device_transfer import current_stream_id, host_to_device
from specdec_fast.core.draft import Draft
from specdec_fast.core.proposal_kind import DETERMINISTIC_PICKS, check_pick
from specdec_fast.interfaces import Acceptance, Budget, DrafterParts, Needs, Rng, StateView, TargetOutput
from specdec_fast.retrieval.suffix_index import structures
from specdec_kernels import tree_expand

_AUX_HIDDEN_STATE = "final_norm"
_ROWS = 256  # rows of a prompt whose logits are computed together
_GREEDY_INV_T = 1.5  # at temperature 0 the likeliest token is right more often than its probability says


class RecyclingDrafter:
    """Drafts from a table of the last seen next tokens of each token.

    With `shared`, tokens that the target showed for one request are drafted for another. This includes distributions
    under the logits processors of requests with bans or grammars (in half precision, processors work on a copy). Rules
    that replay stay exact functions of the seed. Other rules then key their uniforms by the request too
    (`Needs.cross_request`), so a text is no function of its seed. That is why `from_parts` shares by default only under
    rules that replay and greedy ones.

    Args:
        num_draft_tokens: Default budget per row.
        top_k: Next tokens that are stored per token.
        depth: Depth limit of a tree.
        min_probability: Paths with a smaller probability are dropped.
        pick: "greedy" ranks paths by the stored distributions, "coupled" with the noise of rule `replay`. "sampled"
            means "greedy" here.
        shared: One table for all requests, kept when they end. Otherwise each request has its own.
        learn_prompts: Learn the successors of prompt tokens as well. `from_parts` then computes the target's logits of
            every distinct prompt token, which takes time with a large vocabulary.

    Attributes:
        confidence: Level of each row's last proposal: the expected accepted tokens in steps of 0.5, at most 4.
        level_rates: Usual acceptance of the first token, by level.

    Raises:
        ValueError: If an option is out of range.

    Source:
        Luo et al. 2024 (token recycling), section 3.
    """

    name = "recycling"
    needs = Needs(topology="tree", prompt_aux_hidden_states=(_AUX_HIDDEN_STATE,), host_tokens=True, logits=True)
    level_rates = (0.3, 0.4, 0.5, 0.6, 0.7)
    may_rest = True  # a step that it does not observe teaches it nothing, and costs nothing

    def __init__(
        self,
        num_draft_tokens: int = 12,
        top_k: int = 128,
        depth: int = 6,
        min_probability: float = 0.05,
        pick: str = "greedy",
        shared: bool = False,
        learn_prompts: bool = True,
    ) -> None:
        if num_draft_tokens < 1 or depth < 1 or top_k < 1:
            raise ValueError(
                f"recycling num_draft_tokens, depth, top_k: got {num_draft_tokens}, {depth}, {top_k}; "
                "expected at least 1"
            )
        if not 0 <= min_probability <= 1:
            raise ValueError(f"recycling min_probability: got {min_probability}; expected 0 to 1")
        pick = "greedy" if pick == "sampled" else pick
        check_pick("recycling", pick, DETERMINISTIC_PICKS)
        self.num_draft_tokens = num_draft_tokens
        self._top_k, self._depth, self._min_probability = top_k, depth, float(min_probability)
        self.pick, self.shared, self._learns_prompts = pick, shared, learn_prompts
        self.confidence: list[int] = []
        # the shared table has learnt from the earlier request with which a prompt shares tokens
        self.needs = replace(
            self.needs, prompt_aux_hidden_states=(), all_prompt_states=not shared, cross_request=shared
        )
        self._lm_head: Callable[[Tensor], Tensor] | None = None
        self._new_table = structures().Successors
        self._shared_table = self._new_table()
        self._tables: dict[int, Any] = {}

    @staticmethod
    def by_rule(prefers: str) -> dict[str, Any]:
        """Returns the defaults of options that follow from the rule."""
        return {"pick": prefers, "shared": prefers in ("coupled", "greedy")}

    @classmethod
    def from_parts(cls, parts: DrafterParts, **options: Any) -> RecyclingDrafter:
        """Builds a drafter that picks as the rule prefers, learns from prompts, and shares where that is exact."""
        made = cls(**{**cls.by_rule(parts.prefers), **options})
        lm_head = getattr(parts.target, "lm_head", None)
        if made._learns_prompts and lm_head is not None and getattr(parts.target, "why_no_lm_head", None) is None:
            made.read_prompts(lm_head)
        return made

    def read_prompts(self, lm_head: Callable[[Tensor], Tensor]) -> None:
        """Makes the drafter learn from prompts too. Call it before the engine is built.

        Args:
            lm_head: The target's projection from hidden states "final_norm" [N, hidden] to logits [N, V].
        """
        self._lm_head, self.needs = lm_head, replace(self.needs, prompt_aux_hidden_states=(_AUX_HIDDEN_STATE,))

    def successors(self, row: int) -> Any:
        """Returns the table of a row (`Successors` of specdec_fast/retrieval/suffix_index.py)."""
        return self._shared_table if self.shared else self._tables.setdefault(row, self._new_table())

    def begin(self, view: StateView, rows: Sequence[int], prompt_output: TargetOutput | None) -> None:
        """Learns the successors of prompt tokens, if the drafter reads prompts."""
        if self._lm_head is None or prompt_output is None or _AUX_HIDDEN_STATE not in prompt_output.aux_hidden_states:
            return
        hidden, start = prompt_output.aux_hidden_states[_AUX_HIDDEN_STATE], 0
        for row, skipped in zip(rows, prompt_output.num_shared or (0,) * len(rows)):
            prompt = view.tokens(row)[skipped:-1]
            newest = list({token: start + at for at, token in enumerate(prompt)}.items())
            start += len(prompt)
            for first in range(0, len(newest), _ROWS):
                tokens, places = zip(*newest[first : first + _ROWS])
                top = _top_tokens(self._lm_head(hidden[list(places)]), self._top_k)
                self.successors(row).learn(np.array(tokens), *top)

    def propose(self, view: StateView, rows: Sequence[int], budget: Budget, rng: Rng) -> Draft:
        """Grows trees from the tables of successors."""
        return Draft.trees(rows, self.grow_trees(view, rows, budget.nodes, rng), device=view.device)

    def grow_trees(
        self, view: StateView, rows: Sequence[int], limits: Sequence[int], rng: Rng
    ) -> list[tuple[list[int], list[int]]]:
        """Returns the tokens and parents of the trees that `propose` packs, the root first, and sets `confidence`."""
        sampling = view.sampling(rows)
        dists = zip(*(each.tolist() for each in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)))
        trees, self.confidence = [], []
        for row, limit, (temperature, *kept), noise in zip(
            rows, limits, dists, rng.replay_noise_keys(sampling, self.pick)
        ):
            root = view.tokens(row)[-1]
            how = (1 / temperature, *kept) if temperature else (_GREEDY_INV_T, 0, 1.0, 0.0)
            tokens, parents, expected, _ = self.successors(row).grow(
                root, self._depth, limit, self._min_probability, *how, noise
            )
            self.confidence.append(min(int(2 * expected), len(self.level_rates) - 1))
            trees.append(([root, *tokens], [-1, *parents]))
        return trees

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Learns the likeliest successors of all scored tokens, rejected ones included."""
        assert output.logits is not None
        top, values = _top_tokens(output.logits, self._top_k)
        tokens = draft.tokens.numpy(force=True)
        if self.shared:
            self._shared_table.learn(tokens, top, values)
            return
        start = 0
        for row, count in zip(draft.host_rows(), draft.counts):
            own = slice(start, start + count)
            self.successors(row).learn(tokens[own], top[own], values[own])
            start += count

    def release(self, rows: Sequence[int]) -> None:
        """Drops the tables of these rows; a shared table stays."""
        for row in rows:
            self._tables.pop(row, None)

    def forget(self) -> None:
        """Empties the table that requests share."""
        self._shared_table = self._new_table()


def _top_tokens(logits: Tensor, width: int) -> tuple[Any, Any]:
    """The likeliest tokens of every row in order, int64 [M, width], -1 padded, and their log-probabilities, float32."""
    nodes, vocab = logits.shape
    width = min(width, vocab)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    plain = _plain_distributions(nodes, vocab, wide, logits.device, current_stream_id(logits.device))
    tokens, values, _ = tree_expand(logits, *plain, width=width, keep=1)
    return tokens.numpy(force=True), values.float().numpy(force=True)


@lru_cache(maxsize=64)
def _plain_distributions(
    nodes: int, vocab: int, dtype: torch.dtype, device: torch.device, stream: int
) -> tuple[Tensor, ...]:
    """Arguments of `tree_expand` for distributions at temperature 1 without filters. They are only read."""
    # other streams would not wait for the copies that fill them, so each stream has its own
    with torch.inference_mode(False):
        return (
            torch.ones(nodes, dtype=dtype, device=device),
            torch.full((nodes,), float("-inf"), dtype=dtype, device=device),
            torch.full((nodes,), vocab - 1, dtype=torch.int32, device=device),
            host_to_device([0, nodes], torch.int32, device),
            torch.zeros(nodes, dtype=dtype, device=device),
        )


DRAFTER = RecyclingDrafter
