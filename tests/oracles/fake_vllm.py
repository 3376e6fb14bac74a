"""Fakes of vLLM's model runner and its values, for tests without vLLM.

They have the attributes that the plugin reads, with the layouts of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class SamplerOutput(NamedTuple):
    """What a step emits."""

    sampled_token_ids: Tensor
    logprobs_tensors: Any


class Sampler:
    """vLLM's sampler: its processors add a bias that tests set."""

    logprobs_mode = "raw_logprobs"

    def __init__(self) -> None:
        self.bias: Tensor | None = None

    def apply_logits_processors(self, logits: Tensor, sampling_metadata: Any, predict_bonus_token: bool) -> Tensor:
        return logits if self.bias is None else logits.add_(self.bias)

    @staticmethod
    def compute_logprobs(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Tensor:
        return logprobs.gather(1, token_ids[:, None])


class RejectionSampler(Sampler):
    """vLLM's rejection sampler."""

    def apply_logits_processors(self, logits: Tensor, sampling_metadata: Any, metadata: Any) -> Tensor:
        return logits if self.bias is None else logits.add_(self.bias)


class InputBatch:
    """The persistent batch."""

    def __init__(self, request_ids: Sequence[str], metadata: Any) -> None:
        self.req_ids, self.sampling_metadata, self.updates = list(request_ids), metadata, 0
        self.generators: dict[int, Any] = {}
        self.spec_token_ids: Any = None

    def update_async_output_token_ids(self) -> None:
        self.updates += 1

    def update_async_spec_token_ids(self, draft_token_ids: Any) -> None:
        self.spec_token_ids = draft_token_ids


class Drafter:
    """A draft model of vLLM: logits are its hidden states."""

    method, num_speculative_tokens = "draft_model", 2

    def __init__(self, pass_hidden_states_to_model: bool = False, num_speculative_tokens: int = 2) -> None:
        self.pass_hidden_states_to_model = pass_hidden_states_to_model
        self.positions, self.num_speculative_tokens = torch.arange(1000), num_speculative_tokens
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden)

    def set_inputs_first_pass(self, places: Tensor) -> tuple[int, torch.Tensor, None]:
        return 0, places, None

    def _sample_draft_tokens(self, hidden: torch.Tensor, metadata: Any) -> tuple[torch.Tensor, None]:
        return hidden.argmax(-1), None


def sampling_metadata(temperature: Sequence[float], top_k: Any = None, top_p: Any = None, **changes: Any) -> Any:
    """`SamplingMetadata` of requests without processors."""
    greedy = [each < 1e-5 for each in temperature]
    found = {
        "temperature": None if all(greedy) else torch.tensor(temperature),
        "all_greedy": all(greedy), "all_random": not any(greedy),
        "top_k": None if top_k is None else torch.tensor(top_k, dtype=torch.int32),
        "top_p": None if top_p is None else torch.tensor(top_p),
        "max_num_logprobs": None, "no_penalties": True, "allowed_token_ids_mask": None, "bad_words_token_ids": {},
        "logitsprocs": SimpleNamespace(non_argmax_invariant=[], argmax_invariant=[]),
    }  # fmt: skip
    return SimpleNamespace(**{**found, **changes})


def buffer(values: Tensor) -> Any:
    """`CpuGpuBuffer`."""
    return SimpleNamespace(gpu=values, cpu=values)


def runner(
    seeds: Sequence[int | None],
    metadata: Any,
    lengths: Sequence[int],
    drafts: Sequence[Sequence[int]] | None = None,
    **changes: Any,
) -> tuple[Any, Any]:
    """A model runner before `_sample`, and vLLM's description of the drafts (None without drafts).

    Requests are called "a", "b", ... The root of each is its last token, at position length - 1.
    """
    ids = [chr(ord("a") + at) for at in range(len(seeds))]
    chains = [[0, *chain] for chain in drafts or [[]] * len(ids)]
    counts = torch.tensor([len(chain) for chain in chains])
    ends = counts.cumsum(0)
    positions = torch.cat([torch.arange(length - 1, length - 1 + len(chain)) for length, chain in zip(lengths, chains)])
    tokens = torch.tensor([token for chain in chains for token in chain], dtype=torch.int32)
    parts = {
        "device": torch.device("cpu"), "speculative_config": None, "use_async_scheduling": False, "requests": {
            each: SimpleNamespace(sampling_params=SimpleNamespace(seed=seed)) for each, seed in zip(ids, seeds)
        }, "model_config": SimpleNamespace(seed=0), "input_batch": InputBatch(ids, metadata),
        "sampler": Sampler(), "rejection_sampler": RejectionSampler(), "positions": positions,
        "query_start_loc": buffer(torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32)),
        "input_ids": buffer(tokens), "_draft_token_req_ids": None,
    }  # fmt: skip
    made = SimpleNamespace(**{**parts, **changes})
    if drafts is None:
        return made, None
    inner = torch.tensor([at for end, chain in zip(ends.tolist(), chains) for at in range(end - len(chain), end - 1)])
    inner = inner.to(torch.int32)
    described = SimpleNamespace(
        draft_token_ids=tokens[inner + 1], num_draft_tokens=(counts - 1).tolist(), max_spec_len=int(counts.max()) - 1,
        cu_num_sampled_tokens=ends.to(torch.int32), target_logits_indices=inner,
        bonus_logits_indices=(ends - 1).to(torch.int32), logits_indices=torch.arange(len(tokens), dtype=torch.int32),
    )  # fmt: skip
    return made, described
