"""The project's drafters without a model, for vLLM's `method="custom_class"`.

    speculative_config={"method": "custom_class", "num_speculative_tokens": 8,
                        "model": "specdec_fast.integrations.vllm.drafters.SuffixDrafter"}

Options go into `additional_config={"specdec": {"rule": ..., "drafter": {"min_match": 2}}}`. vLLM verifies chains, so
the likeliest path of a tree is drafted. Tests: tests/integrations/vllm/test_drafters.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdec_fast.core.draft import Draft
from specdec_fast.drafters import check_option_names, check_option_types, get_drafter
from specdec_fast.integrations.vllm.drafter_view import BatchView
from specdec_fast.integrations.vllm.request_batch import RequestBatch
from specdec_fast.integrations.vllm.settings import read_settings
from specdec_fast.interfaces import Acceptance, Budget, Drafter, Rng, TargetOutput

_BREADTH = 3
"""Nodes of a tree for each token of the chain that is taken from it."""


class RetrievalDrafter:
    """A drafter of `specdec_fast.drafters` behind vLLM's interface for drafters of one's own.

    Args:
        vllm_config: vLLM's configuration.

    Attributes:
        name: Key of the drafter.
        needs_rule: The drafter learns from logits that only the plugin sees, under a rule.
        cross_request: Drafts of one request may depend on the texts of others.

    Raises:
        ValueError: If an option is wrong, or if the drafter cannot work without the plugin's rules.
    """

    name = ""

    def __init__(self, vllm_config: Any) -> None:
        settings = read_settings(vllm_config.additional_config)
        rule = None if settings is None else settings.rule
        drafter_class = get_drafter(self.name)
        self.needs_rule = drafter_class.needs.logits
        if self.needs_rule and rule is None:
            raise ValueError(
                f"drafter {self.name}: got no rule; expected one, since the drafter learns from logits that only the "
                'plugin sees; pass additional_config={"specdec": {"rule": "replay"}}'
            )
        options = {} if settings is None else dict(settings.drafter)
        check_option_names(self.name, options)
        check_option_types(self.name, options)
        by_rule = getattr(drafter_class, "by_rule", None)
        defaults: dict[str, Any] = {} if by_rule is None else by_rule("coupled" if rule == "replay" else "sampled")
        self._drafter: Drafter = drafter_class(**{**defaults, **options})
        self.cross_request = self._drafter.needs.cross_request
        self._longest = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_length = int(vllm_config.model_config.max_model_len)
        self._view = BatchView(self._drafter.begin, self._drafter.release)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: vLLM calls it on a CPU, and there is no model."""

    def join_runner(self, runner: Any) -> None:
        """Is called by the plugin if the engine has a rule.

        Args:
            runner: vLLM's model runner, whose requests are followed from now on.
        """
        self._view.requests = runner.requests

    def observe_step(self, batch: RequestBatch, counts: Sequence[int], tokens: Tensor, logits: Tensor) -> None:
        """Is called by the plugin in every step, before `propose`.

        Args:
            batch: Seeds and parameters of the requests.
            counts: Nodes of each request, root included.
            tokens: Packed nodes, [M].
            logits: The target's logits, [M, V].
        """
        self._view.batch = batch
        if not self.needs_rule:
            return
        rows = [self._view.row_of(each) for each in batch.request_ids]
        packed, chains, start = tokens.tolist(), [], 0
        for count in counts:
            chains.append(packed[start : start + count])
            start += count
        draft = Draft.chains(rows, chains, device=logits.device)
        nothing = draft.tokens.new_zeros(0)
        self._drafter.observe(self._view, draft, Acceptance(nothing, nothing, nothing), TargetOutput(logits))

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Drafts a chain for each request.

        Args:
            sampled_token_ids: New tokens of each request. A request without any is not drafted for.
            num_tokens_no_spec: Length of each text, with the new tokens.
            token_ids_cpu: The texts, [max_reqs, max_len].
            slot_mappings: Not used.

        Returns:
            Draft tokens of each request.
        """
        lengths = [int(length) for length in num_tokens_no_spec[: len(sampled_token_ids)]]
        limits = [min(self._longest, self._max_length - length - 1) for length in lengths]
        places = [at for at, new in enumerate(sampled_token_ids) if new and limits[at] > 0]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = self._view.follow(places, lengths, token_ids_cpu)
        if not rows:
            return drafts
        breadth = _BREADTH if self._drafter.needs.topology == "tree" else 1
        budget = Budget([limits[at] * breadth for at in places])
        seeds, positions = self._view.keys(places, lengths)
        draft = self._drafter.propose(self._view, rows, budget, Rng(seeds, positions))
        if draft is None:
            return drafts
        tokens, parents, start = draft.tokens.tolist(), draft.parents.tolist(), 0
        for at, count in zip(places, draft.counts):
            drafts[at] = chain_of(tokens[start : start + count], parents[start : start + count])[: limits[at]]
            start += count
        return drafts


def chain_of(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Returns the tokens of a path from the root, at each node to the first child. Trees list likelier nodes first."""
    chain, last = [], 0
    for node in range(1, len(tokens)):
        if parents[node] == last:
            chain.append(int(tokens[node]))
            last = node
    return chain


class SuffixDrafter(RetrievalDrafter):
    """Continuations of the longest repeated suffix (see `specdec_fast.drafters.suffix`)."""

    name = "suffix"


class NgramDrafter(RetrievalDrafter):
    """What followed the newest n-gram (see `specdec_fast.drafters.ngram`)."""

    name = "ngram"


class RecyclingDrafter(RetrievalDrafter):
    """The likeliest next tokens that the target last showed (see `specdec_fast.drafters.recycling`).

    It learns from the logits of every step, so the engine must ask for a rule. Prompts teach it nothing, since vLLM
    computes the logits of their last tokens only.
    """

    name = "recycling"
