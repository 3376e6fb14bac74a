"""vLLM's own logits processors on the rows of a step, and log-probabilities of what the step emitted.

Penalties, bad words, allowed ids, minimum lengths and grammars stay vLLM's: its functions are called on copies.
Tests: tests/integrations/vllm/test_v1_sampler.py, tests/integrations/vllm/test_lane_texts.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_fast.integrations.vllm.chain_verification import StepLayout
from specdec_fast.integrations.vllm.request_batch import GREEDY_BELOW

_BUILT_IN = "vllm.v1.sample.logits_processor.builtin"
"""Module of vLLM's own processors."""
_STATE_OF_PROCESSORS = ("min_toks", "biases", "min_p_count")
"""Attributes of vLLM's own processors that are empty or 0 if no request uses them."""


def _is_active(processor: Any) -> bool:
    """Whether a processor changes any row. All but vLLM's own always count: their attributes may mean anything."""
    if type(processor).__module__ != _BUILT_IN:
        return True
    known = [getattr(processor, name) for name in _STATE_OF_PROCESSORS if hasattr(processor, name)]
    return any(known) if known else True


def needs_processing(metadata: Any) -> bool:
    """Returns whether some request has processors that act before temperature."""
    holder = getattr(metadata, "thinking_budget_state_holder", None)
    return (
        not metadata.no_penalties
        or bool(metadata.bad_words_token_ids)
        or metadata.allowed_token_ids_mask is not None
        or any(map(_is_active, metadata.logitsprocs.non_argmax_invariant))
        or (holder is not None and holder.has_tracked_requests())
    )


def process_logits(runner: Any, logits: Tensor, metadata: Any, drafts: Any) -> Tensor:
    """Applies vLLM's logits processors that act before temperature.

    Args:
        runner: vLLM's model runner.
        logits: [M, V]; they are not changed.
        metadata: `SamplingMetadata`.
        drafts: `SpecDecodeMetadata`, or None for a step without drafts.

    Returns:
        The same tensor if no request needs them, else processed float32 logits [M, V].
    """
    if not needs_processing(metadata):
        return logits
    if drafts is None:
        return runner.sampler.apply_logits_processors(logits.to(torch.float32, copy=True), metadata, False)
    found = torch.empty_like(logits, dtype=torch.float32)
    bonus, inner = drafts.bonus_logits_indices.long(), drafts.target_logits_indices.long()
    last = logits[bonus].to(torch.float32)
    found[bonus] = runner.sampler.apply_logits_processors(last, metadata, True)
    others = logits[inner].to(torch.float32)
    found[inner] = runner.rejection_sampler.apply_logits_processors(others, metadata, drafts)
    return found


def temper_logits(logits: Tensor, metadata: Any) -> tuple[Tensor, Tensor] | None:
    """Applies vLLM's processors that act after temperature, such as min-p, to a step without drafts.

    A request without such processors keeps its own logits and temperature. So its replayed text does not depend on the
    requests beside it, not even by rounding.

    Args:
        logits: [B, V]; they are not changed.
        metadata: `SamplingMetadata`.

    Returns:
        Processed logits, float32 [B, V], and the temperatures that remain to be applied, [B]. None if no such processor
        is in use.
    """
    active = [each for each in metadata.logitsprocs.argmax_invariant if _is_active(each)]
    if not active or metadata.temperature is None:
        return None
    temperature = metadata.temperature[: logits.shape[0]]
    before = logits.float() / _divisors(temperature)[:, None]
    after = before.clone()
    for processor in active:
        after = processor.apply(after)
    changed = (after != before).any(1)
    wanted = temperature.float().masked_fill(temperature < GREEDY_BELOW, 0.0)
    remaining = torch.where(changed, (wanted > 0).float(), wanted)
    return torch.where(changed[:, None], after, logits.float()), remaining


def _divisors(temperature: Tensor) -> Tensor:
    return temperature.masked_fill(temperature < GREEDY_BELOW, 1.0)


def emitted_logprobs(
    runner: Any, raw: Tensor, processed: Tensor, metadata: Any, layout: StepLayout, emitted: Tensor
) -> Any:
    """Computes the log-probabilities of emitted tokens as vLLM's samplers do.

    Args:
        runner: vLLM's model runner.
        raw: The model's logits, [M, V].
        processed: The logits after all processors that act before temperature, [M, V].
        metadata: `SamplingMetadata`.
        layout: Layout of the nodes.
        emitted: Emitted tokens, -1 padded, int32 [B, D + 1].

    Returns:
        vLLM's `LogprobsTensors` of B * (D + 1) rows, or None if no request asks.
    """
    specific = getattr(metadata, "logprob_token_ids", None) if emitted.shape[1] == 1 else None
    if metadata.max_num_logprobs is None and not specific:
        return None
    sampler, mode = runner.sampler, runner.sampler.logprobs_mode
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    nodes = (layout.first[:, None] + steps).clamp_(max=raw.shape[0] - 1).flatten()
    tokens = emitted.flatten().long().clamp(min=0)
    if mode.startswith("processed"):
        assert layout.row_of is not None
        rows = _constrain(processed[nodes].float(), metadata, layout.row_of[nodes])
    else:
        rows = raw[nodes].float()
    if mode.endswith("logprobs"):
        rows = sampler.compute_logprobs(rows)
    if specific:
        return sampler.gather_specific_token_logprobs(rows, specific, tokens)
    return sampler.gather_logprobs(rows, metadata.max_num_logprobs, tokens)


def _constrain(logits: Tensor, metadata: Any, row_of: Tensor) -> Tensor:
    """Applies temperature, top-k and top-p as vLLM does, which keeps ties at the cut."""
    if metadata.temperature is None:
        return logits
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = logits / _divisors(metadata.temperature)[row_of][:, None]
    if row_of.shape[0] == metadata.temperature.shape[0]:
        for processor in metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
    top_k, top_p = (None if each is None else each[row_of] for each in (metadata.top_k, metadata.top_p))
    return apply_top_k_top_p(logits, top_k, top_p)
