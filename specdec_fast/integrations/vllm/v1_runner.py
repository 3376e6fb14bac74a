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
from specdec_fast.integrations.vllm.draft_sampling import why_not_sampled
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


_RUNNER = (
    "device",
    "requests",
    "model_config",
    "input_batch",
    "use_async_scheduling",
    "_draft_token_req_ids",
    "sampler",
)
_BUFFERS = ("query_start_loc", "input_ids")
_BATCH = ("req_ids", "generators", "sampling_metadata")
_FIRST_PASS = (
    "self", "target_token_ids", "next_token_ids", "target_positions", "target_hidden_states", "token_indices_to_sample",
    "cad",
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
    drafter: Any = getattr(runner, "drafter", None)
    if getattr(drafter, "needs_rule", False):
        reason += f"; drafter {drafter.name} drafts nothing without the plugin's rule"
    log.warning("specdec is off, and vLLM's own sampler runs: %s", reason)


def why_not(runner: Any, module: Any, stock_sample: Any) -> str | None:
    """Returns why a runner keeps vLLM's sampler, with what was expected and the remedy, or None."""
    foreign = _defined_in(stock_sample) != module.GPUModelRunner.__module__
    if foreign or type(runner)._sample is not stock_sample or "_sample" in vars(runner):
        owner = _defined_in(runner._sample)
        return (
            f"got GPUModelRunner._sample of module {owner}; expected vLLM's own; another plugin has replaced it: leave "
            "one of the two out by VLLM_PLUGINS"
        )
    differences = [*_differences(module), *_missing(runner)]
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
    runner, sampler, rejection = module.GPUModelRunner, module.Sampler, module.RejectionSampler
    processors = ("self", "logits", "sampling_metadata")
    expected = {
        "GPUModelRunner._sample": (runner._sample, ("self", "logits", "spec_decode_metadata")),
        "GPUModelRunner._get_spec_decode_draft_probs": (
            getattr(runner, "_get_spec_decode_draft_probs", None),
            ("self", "spec_decode_metadata"),
        ),
        "GPUModelRunner._get_draft_token_ids_cpu": (getattr(runner, "_get_draft_token_ids_cpu", None), ("self",)),
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


def _missing(runner: Any) -> list[str]:
    """What a runner lacks of what the sampler reads and calls on it, on its batch and on its drafter."""
    batch, drafter = getattr(runner, "input_batch", None), getattr(runner, "drafter", None)
    found = [f"GPUModelRunner has no {name}" for name in (*_RUNNER, "positions") if not hasattr(runner, name)]
    found += [f"GPUModelRunner has no {name}.gpu" for name in _BUFFERS if not hasattr(getattr(runner, name, 0), "gpu")]
    found += [f"InputBatch has no {name}" for name in _BATCH if not hasattr(batch, name)]
    expected = {
        "InputBatch.update_async_output_token_ids": (
            getattr(type(batch), "update_async_output_token_ids", None),
            ("self",),
        ),
        "InputBatch.update_async_spec_token_ids": (
            getattr(type(batch), "update_async_spec_token_ids", None),
            ("self", "draft_token_ids"),
        ),
    }
    if drafter is not None and why_not_sampled(drafter) is None:
        kind = type(drafter)
        found += [
            f"{kind.__name__} has no {name}"
            for name in ("positions", "pass_hidden_states_to_model", "num_speculative_tokens")
            if not hasattr(drafter, name)
        ]
        expected[f"{kind.__name__}.set_inputs_first_pass"] = (kind.set_inputs_first_pass, _FIRST_PASS)
        expected[f"{kind.__name__}._sample_draft_tokens"] = (
            kind._sample_draft_tokens,
            ("self", "hidden_states", "sampling_metadata"),
        )
    return [*found, *other_signatures(expected)]


def _defined_in(function: Any) -> str:
    """The module in which a function was written. A wrapper claims the module of what it wraps."""
    return str(getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__", "unknown"))
