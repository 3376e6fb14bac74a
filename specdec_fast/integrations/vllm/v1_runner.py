"""vLLM's V1 model runner: an engine that asks gets a sampler of its own, and all others stay as they are.

A CPU always has this runner. `GPUModelRunner.__init__` is wrapped, since the configuration is known there. The sampler
is bound to the one runner that was made, so two engines in a process do not see each other.
Tests: tests/integrations/vllm/test_plugin.py, tests/integrations/vllm/test_lane_texts.py.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from specdec_fast.integrations.vllm.compatibility import missing_fields, other_signatures
from specdec_fast.integrations.vllm.settings import MAX_DRAFT_TOKENS, read_settings
from specdec_fast.integrations.vllm.v1_sampler import V1Sampler

log = logging.getLogger("vllm.specdec")

_METADATA = (
    "temperature", "all_greedy", "top_p", "top_k", "max_num_logprobs", "no_penalties", "allowed_token_ids_mask",
    "bad_words_token_ids", "logitsprocs",
)  # fmt: skip
_DRAFTS = (
    "draft_token_ids", "num_draft_tokens", "cu_num_sampled_tokens", "target_logits_indices", "bonus_logits_indices",
    "logits_indices",
)  # fmt: skip


def prepare(module: Any) -> None:
    """Wraps the constructor of the runner. Calling it again changes nothing.

    Args:
        module: `vllm.v1.worker.gpu_model_runner`.
    """
    owner = module.GPUModelRunner
    stock = owner.__init__
    if getattr(stock, "_specdec", False):
        return
    stock_sample = owner._sample

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        attach(self, module, stock_sample)

    init._specdec = True  # type: ignore[attr-defined]
    owner.__init__ = init


def attach(runner: Any, module: Any, stock_sample: Any) -> None:
    """Gives a runner the sampler that its engine asks for. An engine that cannot be served gets a warning.

    Args:
        runner: A runner that was just made.
        module: `vllm.v1.worker.gpu_model_runner`.
        stock_sample: `GPUModelRunner._sample` as vLLM defines it.
    """
    try:
        settings = read_settings(getattr(runner.vllm_config, "additional_config", None))
        if settings is None or settings.rule is None:
            return
        reason = why_not(runner, module, stock_sample)
        if reason is None:
            runner._specdec = V1Sampler(runner, settings.rule, module.SamplerOutput)
            runner._sample = runner._specdec.sample
            log.info("specdec: this engine verifies and samples by rule %s", settings.rule)
            return
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
    log.warning("specdec: %s; vLLM runs with its own sampler", reason)


def why_not(runner: Any, module: Any, stock_sample: Any) -> str | None:
    """Returns why a runner keeps vLLM's sampler, with what was expected and the remedy, or None."""
    if type(runner)._sample is not stock_sample or "_sample" in vars(runner):
        owner = getattr(runner._sample, "__module__", "unknown")
        return (
            f"got GPUModelRunner._sample of module {owner}; expected vLLM's own; another plugin has replaced it: leave "
            "one of the two out by VLLM_PLUGINS"
        )
    differences = _differences(module)
    if differences:
        return f"got another vLLM than expected: {'; '.join(differences)}; install a version that the guide names"
    speculation = runner.speculative_config
    if speculation is not None:
        count = speculation.num_speculative_tokens
        if count > MAX_DRAFT_TOKENS:
            return f"num_speculative_tokens: got {count}; expected at most {MAX_DRAFT_TOKENS}; draft fewer tokens"
        if getattr(speculation, "rejection_sample_method", "standard") == "synthetic":
            return "got rejection_sample_method 'synthetic'; expected 'standard'; synthetic acceptance is not lossless"
    return None


def _differences(module: Any) -> list[str]:
    """What differs from the vLLM that this module was written for."""
    sampler, rejection = module.Sampler, module.RejectionSampler
    processors = ("self", "logits", "sampling_metadata")
    expected = {
        "GPUModelRunner._sample": (module.GPUModelRunner._sample, ("self", "logits", "spec_decode_metadata")),
        "Sampler.apply_logits_processors": (
            getattr(sampler, "apply_logits_processors", None),
            (*processors, "predict_bonus_token"),
        ),
        "RejectionSampler.apply_logits_processors": (
            getattr(rejection, "apply_logits_processors", None),
            (*processors, "metadata"),
        ),
        "Sampler.compute_logprobs": (getattr(sampler, "compute_logprobs", None), ("logits",)),
        "Sampler.gather_logprobs": (
            getattr(sampler, "gather_logprobs", None),
            ("logprobs", "num_logprobs", "token_ids"),
        ),
    }
    fields = [*missing_fields(module.SamplingMetadata, _METADATA), *missing_fields(module.SpecDecodeMetadata, _DRAFTS)]
    return [*other_signatures(expected), *fields]
