"""vLLM's V2 model runner, which serves GPUs: samplers for its hook `ModelState.custom_sampler`.

Written against the interface of vLLM 0.32 and tested with tensors on a CPU. It has not run on a GPU. Draft models keep
their own samples here, so rule `replay` accepts fewer of them than on the V1 runner.
Tests: tests/integrations/vllm/test_v2_sampler.py.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.request_seeds import request_seed
from specdec_fast.integrations.vllm.chain_verification import (
    Chains,
    Sampling,
    StepLayout,
    verify_chains,
    with_empty_row,
)
from specdec_fast.integrations.vllm.compatibility import other_signatures
from specdec_fast.integrations.vllm.request_batch import drafts_across_requests
from specdec_fast.integrations.vllm.settings import MAX_DRAFT_TOKENS, read_settings
from specdec_kernels import distribution_stats, replay_sample, tree_plan

log = logging.getLogger("vllm.specdec")

_ROWS = ("self", "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids")
_ADD = ("self", "req_idx", "sampling_params")
_VERIFY = (
    "self", "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping", "idx_mapping_np",
    "expanded_idx_mapping", "expanded_local_pos", "seq_lens_upper_bound_np", "verify_draft_sampled",
)  # fmt: skip


def prepare(module: Any) -> None:
    """Wraps the hook `custom_sampler`. Calling it again changes nothing.

    Args:
        module: `vllm.v1.worker.gpu.model_states.interface`.
    """
    owner = module.ModelState
    stock = owner.custom_sampler
    if getattr(stock, "_specdec", False):
        return

    @functools.wraps(stock)
    def custom_sampler(self: Any, sampler: Any) -> tuple[Any, Any] | None:
        found = stock(self, sampler)
        return samplers_for(self, sampler) if found is None else found

    custom_sampler._specdec = True  # type: ignore[attr-defined]
    owner.custom_sampler = custom_sampler


def samplers_for(model_state: Any, sampler: Any) -> tuple[Any, Any] | None:
    """Returns the samplers of an engine that asks for a rule.

    Args:
        model_state: vLLM's model state.
        sampler: vLLM's sampler, which is changed if the engine asks.

    Returns:
        The sampler and the rejection sampler (None without speculation), or None to keep vLLM's own. An engine that
        cannot be served gets a warning.
    """
    try:
        config = model_state.vllm_config
        settings = read_settings(config.additional_config)
        if settings is None or settings.rule is None:
            return None
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

        reason = why_not(config, sampler, RejectionSampler)
        if reason is None:
            return make_samplers(config, sampler, RejectionSampler, settings.rule, model_state)
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
    log.warning("specdec is off, and vLLM's own sampler runs: %s", reason)
    return None


def why_not(config: Any, sampler: Any, rejection_sampler: Any) -> str | None:
    """Returns why an engine keeps vLLM's samplers, with what was expected and the remedy, or None."""
    differences = other_signatures(
        {
            "Sampler.sample": (getattr(type(sampler), "sample", None), _ROWS),
            "Sampler.apply_sampling_params": (getattr(type(sampler), "apply_sampling_params", None), _ROWS),
            "Sampler.add_request": (getattr(type(sampler), "add_request", None), _ADD),
            "RejectionSampler._verify": (getattr(rejection_sampler, "_verify", None), _VERIFY),
        }
    )
    if differences:
        return f"got another vLLM than expected: {'; '.join(differences)}; install a version that the guide names"
    if getattr(config, "watermark_config", None) is not None:
        return "got watermarking; expected none; watermarks need vLLM's own sampler"
    speculation = config.speculative_config
    if speculation is not None:
        count = speculation.num_speculative_tokens
        if count > MAX_DRAFT_TOKENS:
            return f"num_speculative_tokens: got {count}; expected at most {MAX_DRAFT_TOKENS}; draft fewer tokens"
        if speculation.rejection_sample_method == "synthetic":
            return "got rejection_sample_method 'synthetic'; expected 'standard'; synthetic acceptance is not lossless"
        if getattr(speculation, "enable_adaptive_verification", False):
            return "got enable_adaptive_verification; expected it off; the plugin has not been written for it"
    return None


def make_samplers(config: Any, sampler: Any, rejection_sampler: Any, rule: str, model_state: Any) -> tuple[Any, Any]:
    """Gives vLLM's sampler the noise of the project, and builds a rejection sampler with a rule of the project.

    Args:
        config: vLLM's configuration.
        sampler: vLLM's sampler. Its method `sample` is replaced on this object.
        rejection_sampler: vLLM's class, from which the new one inherits batching, processors and log-probabilities.
        rule: "replay", "rejection" or "block".
        model_state: vLLM's model state.

    Returns:
        The sampler and the rejection sampler, or None in its place without speculation.
    """
    stock_params = sampler.apply_sampling_params

    def sample(
        logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping: Tensor, idx_mapping_np: Any, pos: Tensor, *rest: Any,
        **named: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Stands for `Sampler.sample`: one row for each request."""
        named.pop("return_logprobs", None)
        processed = stock_params(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, *rest[:3])
        states = sampler.sampling_states
        rows = idx_mapping.long()
        sampling = _tempered(states.temperature.gpu[rows])
        seeds, positions = states.seeds.gpu[rows], pos.to(torch.int32)
        return sample_roots(rule, processed, sampling, seeds, positions), processed

    if config.speculative_config is None:
        sampler.sample = sample
        return sampler, None

    class KeyedRejectionSampler(rejection_sampler):
        """vLLM's rejection sampler with a rule of the project."""

        def _verify(
            self, logits: Tensor, draft_logits: Tensor | None, draft_sampled: Tensor, pos: Tensor,
            cu_num_logits: Tensor, idx_mapping: Tensor, idx_mapping_np: Any, expanded_idx_mapping: Tensor,
            expanded_local_pos: Tensor, seq_lens_upper_bound_np: Any, verify_draft_sampled: Tensor,
        ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
            processed = stock_params(
                logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, draft_sampled, expanded_local_pos,
                seq_lens_upper_bound_np,
            )  # fmt: skip
            states = self.sampler.sampling_states
            sampled, count = verify_step(
                rule, processed, draft_logits, verify_draft_sampled, cu_num_logits, pos, idx_mapping,
                expanded_idx_mapping, expanded_local_pos, states.temperature.gpu, states.seeds.gpu,
                self.num_speculative_steps,
            )  # fmt: skip
            return processed, sampled.to(draft_sampled.dtype), count

    verifying = KeyedRejectionSampler(sampler, config.speculative_config, model_state.device)
    if rule != "replay" and drafts_across_requests(config.speculative_config, None):
        join_ids(model_state, sampler)
    sampler.sample = sample  # the last, so that an error before it leaves vLLM's own
    return sampler, verifying


def join_ids(model_state: Any, sampler: Any) -> None:
    """Joins the seed of each request with its id, for drafters that learn from the texts of other requests.

    The runner tells its model state the id and the place of a request, and then the sampler the place and the seed.

    Args:
        model_state: vLLM's model state, whose `add_request` is replaced on this object.
        sampler: vLLM's sampler, whose `add_request` is replaced on this object.
    """
    stock_id, stock_seed = model_state.add_request, sampler.add_request
    ids: dict[int, str] = {}

    def add_id(req_index: int, new_req_data: Any, *rest: Any, **named: Any) -> Any:
        ids[req_index] = new_req_data.req_id
        return stock_id(req_index, new_req_data, *rest, **named)

    def add_seed(req_idx: int, sampling_params: Any) -> Any:
        found = stock_seed(req_idx, sampling_params)
        seeds = sampler.sampling_states.seeds.np
        seeds[req_idx] = request_seed(int(seeds[req_idx]), 0, ids[req_idx], with_id=True)
        return found

    model_state.add_request, sampler.add_request = add_id, add_seed


def _tempered(temperature: Tensor) -> Sampling:
    """Parameters of rows whose temperature and filters vLLM has applied: temperature 0 or 1."""
    return (
        (temperature > 0).float(),
        torch.zeros_like(temperature, dtype=torch.int32),
        torch.ones_like(temperature, dtype=torch.float32),
        torch.zeros_like(temperature, dtype=torch.float32),
    )


def sample_roots(rule: str, logits: Tensor, sampling: Sampling, seeds: Tensor, roots: Tensor) -> Tensor:
    """Samples the token after each root, without drafts.

    Args:
        rule: "replay", "rejection" or "block".
        logits: Processed logits, [B, V].
        sampling: Parameters of each row.
        seeds: int64 [B].
        roots: Absolute position of each root, int32 [B].

    Returns:
        Tokens, int64 [B].
    """
    if rule == "replay":
        inv_t, _, cut, tie_id = distribution_stats(logits, *sampling)
        return replay_sample(logits, inv_t, cut, tie_id, seeds, roots + 1)
    offsets = torch.arange(len(seeds) + 1, dtype=torch.int32, device=logits.device)
    layout = StepLayout(offsets, tree_plan(torch.full_like(roots, -1), offsets, 1), len(seeds), 0)
    return verify_chains(rule, Chains(torch.zeros_like(seeds), layout), logits, sampling, seeds, roots)[0][:, 0].long()


def verify_step(
    rule: str,
    logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    num_speculative_steps: int,
) -> tuple[Tensor, Tensor]:
    """Verifies the drafts of a step; the arguments are those of vLLM's `rejection_sample`. It never waits for a device.

    Args:
        rule: "replay", "rejection" or "block".
        logits: Processed logits, [M, V]: of each request the row of its root, then those of its draft tokens.
        draft_logits: Draft logits before temperature, [max_reqs, K, V], or None if draft tokens are deterministic.
        draft_sampled: Input token of each row, [M]; negative ids are no proposals.
        cu_num_logits: First row of each request, [B + 1].
        pos: Absolute position of each row, [M].
        idx_mapping: State of each request, [B].
        expanded_idx_mapping: State of each row, [M].
        expanded_local_pos: Place of each row in its request, [M].
        temperature: Temperature of each state, [max_reqs].
        seeds: Seed of each state, [max_reqs].
        num_speculative_steps: K.

    Returns:
        Emitted tokens, -1 padded, int32 [B, K + 1], and their number, int32 [B].
    """
    offsets, steps = cu_num_logits.to(torch.int32), num_speculative_steps
    local = expanded_local_pos.to(torch.int32)
    states = expanded_idx_mapping.long()
    tokens = torch.where(local == 0, 0, draft_sampled.long())
    layout = StepLayout(offsets, tree_plan(local - 1, offsets, steps + 1), len(tokens), steps)
    chains = Chains(tokens, layout)
    if draft_logits is not None and rule != "replay":
        at = states * steps + (local - 1).clamp(min=0)
        asked = temperature[states]
        rows = draft_logits.flatten(0, 1)[at]
        stats = distribution_stats(rows, asked.float(), *_tempered(asked)[1:])
        chains.sampled = with_empty_row((rows, stats[0], stats[1], stats[2], stats[3]))
        each = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        chains.dist_index = each.masked_fill(tokens < 0, len(tokens))
    own = idx_mapping.long()
    sampling = _tempered(temperature[states])
    roots = pos[layout.first].to(torch.int32)
    emitted, num_accepted = verify_chains(rule, chains, logits, sampling, seeds[own], roots)
    return emitted, num_accepted + 1
