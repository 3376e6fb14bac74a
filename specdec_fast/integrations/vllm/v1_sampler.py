"""The sampler of one V1 model runner: verification by the project's operators, keyed by the requests' seeds.

All tokens of an engine that asks come from here, with and without drafts. So a text under rule `replay` is a function
of the request and its seed.
Tests: tests/integrations/vllm/test_v1_sampler.py, tests/integrations/vllm/test_lane_texts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.request_seeds import request_seed
from specdec_fast.integrations.vllm.chain_verification import (
    Chains,
    StepLayout,
    step_layout,
    verify_chains,
    with_empty_row,
)
from specdec_fast.integrations.vllm.draft_sampling import DraftSampling, why_not_sampled
from specdec_fast.integrations.vllm.logits_processing import emitted_logprobs, process_logits, temper_logits
from specdec_fast.integrations.vllm.request_batch import RequestBatch, drafts_across_requests, make_batch
from specdec_kernels import distribution_stats, replay_sample


class V1Sampler:
    """Samples and verifies in place of `GPUModelRunner._sample`.

    Args:
        runner: vLLM's model runner.
        rule: "replay", "rejection" or "block".
        output: Makes vLLM's `SamplerOutput` of emitted tokens and log-probabilities.
    """

    def __init__(self, runner: Any, rule: str, output: Callable[..., Any]) -> None:
        self._runner, self._rule, self._output = runner, rule, output
        self._batch: RequestBatch | None = None
        drafter, speculation = getattr(runner, "drafter", None), runner.speculative_config
        replays = rule == "replay"
        self._draws = getattr(speculation, "draft_sample_method", "greedy") == "probabilistic"
        """Draft tokens may be sampled from distributions, which rules other than `replay` need."""
        self._own_drafter = drafter if hasattr(drafter, "join_runner") else None
        if self._own_drafter is not None:
            self._own_drafter.join_runner(runner)
        self._with_id = not replays and drafts_across_requests(speculation, drafter)
        self._drafting: DraftSampling | None = None
        if drafter is not None and (replays or self._draws) and why_not_sampled(drafter) is None:
            self._drafting = DraftSampling(drafter, self.batch_of, coupled=replays)  # the last, as it changes vLLM

    def batch_of(self, metadata: Any) -> RequestBatch:
        """Returns the tensors of the runner's batch, which are made again when vLLM makes another `metadata`."""
        batch = self._batch
        if batch is None or batch.metadata is not metadata:
            ids = self._runner.input_batch.req_ids
            seeds = [self._seed_of(each) for each in ids]
            batch = self._batch = make_batch(metadata, ids, seeds, self._runner.device)
        return batch

    def _seed_of(self, request_id: str) -> int:
        params = self._runner.requests[request_id].sampling_params
        seed, engine_seed = None if params is None else params.seed, self._runner.model_config.seed or 0
        return request_seed(seed, engine_seed, request_id, with_id=self._with_id)

    def sample(self, logits: Tensor, spec_decode_metadata: Any) -> Any:
        """Samples the tokens of a step.

        Args:
            logits: The target's logits, [M, V]: for each request the row of its root, then those of its draft tokens.
            spec_decode_metadata: vLLM's description of the drafts, or None if no request has any.

        Returns:
            vLLM's `SamplerOutput`.
        """
        runner, drafts = self._runner, spec_decode_metadata
        inputs = runner.input_batch
        metadata = inputs.sampling_metadata
        inputs.update_async_output_token_ids()
        if drafts is not None and runner.use_async_scheduling and runner._draft_token_req_ids is not None:
            inputs.update_async_spec_token_ids(runner._get_draft_token_ids_cpu()[0])
        inputs.generators.clear()  # nothing draws from them, and vLLM rewinds those of unfinished prompts
        batch = self.batch_of(metadata)
        processed = process_logits(runner, logits, metadata, drafts)
        size = len(batch.request_ids)
        counts = (1,) * size if drafts is None else tuple([count + 1 for count in drafts.num_draft_tokens])
        layout = step_layout(counts, logits.device)
        nodes = self._nodes_of(drafts, size)
        first = nodes if drafts is None else nodes.index_select(0, layout.first)
        roots = runner.positions.index_select(0, first).to(torch.int32)
        if drafts is None:
            emitted = self._sample_roots(processed, metadata, batch, layout, roots)
        else:
            emitted = self._verify(processed, drafts, batch, layout, counts, roots)
        if self._own_drafter is not None:
            self._own_drafter.observe_step(batch, counts, runner.input_ids.gpu[nodes], logits)
        return self._output(emitted, emitted_logprobs(runner, logits, processed, metadata, layout, emitted))

    def _nodes_of(self, drafts: Any, size: int) -> Tensor:
        """Place of each node among the tokens of the step, [M]."""
        if drafts is not None:
            return drafts.logits_indices
        return self._runner.query_start_loc.gpu[1 : size + 1] - 1

    def _sample_roots(
        self, logits: Tensor, metadata: Any, batch: RequestBatch, layout: StepLayout, roots: Tensor
    ) -> Tensor:
        """Samples a step without drafts; returns int32 [B, 1]."""
        parameters = batch.parameters
        tempered = temper_logits(logits, metadata)
        if tempered is not None:
            logits, parameters = tempered[0], (tempered[1], *parameters[1:])
        if self._rule == "replay":
            inv_t, _, cut, tie_id = distribution_stats(logits, *parameters)
            return replay_sample(logits, inv_t, cut, tie_id, batch.seeds, roots + 1).to(torch.int32)[:, None]
        chains = Chains(torch.zeros_like(batch.seeds), layout)
        return verify_chains(self._rule, chains, logits, parameters, batch.seeds, roots)[0]

    def _verify(
        self, logits: Tensor, drafts: Any, batch: RequestBatch, layout: StepLayout, counts: tuple[int, ...],
        roots: Tensor,
    ) -> Tensor:  # fmt: skip
        """Verifies the drafts of a step; returns what it emits, int32 [B, D + 1]."""
        chains = Chains(self._runner.input_ids.gpu.index_select(0, drafts.logits_indices).long(), layout)
        if self._draws and self._rule != "replay":
            self._add_distributions(chains, drafts, batch, counts)
        return verify_chains(self._rule, chains, logits, batch.per_node(layout), batch.seeds, roots)[0]

    def _add_distributions(self, chains: Chains, drafts: Any, batch: RequestBatch, counts: tuple[int, ...]) -> None:
        """Adds the distributions of sampled draft tokens. A token whose distribution is not known is no proposal."""
        if self._drafting is None:
            self._add_probabilities(chains, drafts, batch)
            return
        sampled, greedy = self._drafting.take()
        if sampled is not None:
            chains.sampled = sampled.dists
            chains.dist_index = sampled.index_of(batch.request_ids, counts, chains.tokens)
            return
        unknown = [each not in greedy for each in batch.request_ids]
        if any(unknown):
            of_row = host_to_device(unknown, torch.bool, chains.tokens.device)
            chains.tokens.masked_fill_(of_row[chains.layout.row_of], -1)

    def _add_probabilities(self, chains: Chains, drafts: Any, batch: RequestBatch) -> None:
        """Adds the probabilities that vLLM kept for a drafter which samples in its own way."""
        probs = self._runner._get_spec_decode_draft_probs(drafts)
        if probs is None:
            if not batch.sampling.all_greedy:
                chains.tokens.fill_(-1)
            return
        rows, vocab = probs.shape
        one = probs.new_ones(rows)
        last = torch.full((rows,), vocab - 1, dtype=torch.int32, device=probs.device)
        chains.sampled = with_empty_row((probs.log(), one, torch.zeros_like(one), one - torch.inf, last))
        index = torch.full_like(chains.layout.deterministic, rows)
        index[drafts.target_logits_indices + 1] = torch.arange(rows, dtype=torch.int32, device=probs.device)
        chains.dist_index = index
