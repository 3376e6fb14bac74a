"""Seeds and sampling parameters of vLLM's batch, made again only when the batch changes.

vLLM makes a new `SamplingMetadata` whenever requests join, leave or move, and never otherwise. So the tensors here are
remembered with it. Tests: tests/integrations/vllm/test_v1_sampler.py, tests/integrations/vllm/test_lane_texts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.integrations.vllm.chain_verification import Sampling, StepLayout
from specdec_fast.sampling.sampling_tensors import SamplingTensors

GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy in vLLM."""


@dataclass(slots=True)
class RequestBatch:
    """The B requests of a batch.

    Attributes:
        metadata: vLLM's `SamplingMetadata` from which this was made.
        request_ids: vLLM's ids, in order.
        host_seeds: Seeds as host integers.
        sampling: Parameters and seeds as tensors, [B].
    """

    metadata: Any
    request_ids: tuple[str, ...]
    host_seeds: tuple[int, ...]
    sampling: SamplingTensors
    _per_node: tuple[StepLayout, Sampling] | None = None
    _host: SamplingTensors | None = None

    @property
    def seeds(self) -> Tensor:
        """Seeds, int64 [B]."""
        return self.sampling.seeds

    @property
    def parameters(self) -> Sampling:
        """Temperature, top-k, top-p and min-p of each request, [B]."""
        own = self.sampling
        return own.temperature, own.top_k, own.top_p, own.min_p

    def host_sampling(self) -> SamplingTensors:
        """Returns the parameters on the host. They are copied once for each batch."""
        own = self.sampling
        if own.seeds.device.type == "cpu":
            return own
        if self._host is None:
            self._host = SamplingTensors(
                own.temperature.cpu(),
                own.top_k.cpu(),
                own.top_p.cpu(),
                own.min_p.cpu(),
                own.seeds.cpu(),
                all_greedy=own.all_greedy,
            )
        return self._host

    def per_node(self, layout: StepLayout) -> Sampling:
        """Returns the parameters of each node, [M]. Those of the last layout are remembered."""
        known = self._per_node
        if known is None or known[0] is not layout:
            row_of = layout.row_of
            temperature, top_k, top_p, min_p = (each[row_of] for each in self.parameters)
            known = self._per_node = (layout, (temperature, top_k, top_p, min_p))
        return known[1]


def make_batch(
    metadata: Any, request_ids: Sequence[str], host_seeds: Sequence[int], device: torch.device
) -> RequestBatch:
    """Builds the tensors of a batch.

    Args:
        metadata: vLLM's `SamplingMetadata`.
        request_ids: vLLM's ids of the B requests.
        host_seeds: Their seeds.
        device: Device of the logits.

    Returns:
        The batch.
    """
    size = len(request_ids)
    if metadata.temperature is None:
        temperature = torch.zeros(size, device=device)
    else:
        asked = metadata.temperature[:size].to(torch.float32)
        temperature = asked.masked_fill(asked < GREEDY_BELOW, 0.0)
    top_k, top_p = metadata.top_k, metadata.top_p
    sampling = SamplingTensors(
        temperature=temperature,
        top_k=torch.zeros(size, dtype=torch.int32, device=device) if top_k is None else top_k[:size].to(torch.int32),
        top_p=torch.ones(size, device=device) if top_p is None else top_p[:size].to(torch.float32),
        min_p=torch.zeros(size, device=device),
        seeds=host_to_device(list(host_seeds), torch.int64, device),
        all_greedy=bool(metadata.all_greedy),
    )
    return RequestBatch(metadata, tuple(request_ids), tuple(host_seeds), sampling)


def drafts_across_requests(speculation: Any, drafter: Any) -> bool:
    """Returns whether drafts of one request may depend on the texts of others, whose seeds may be the same.

    Args:
        speculation: vLLM's speculative configuration, or None.
        drafter: vLLM's drafter, or None if it is not known. An attribute `cross_request` answers for it.
    """
    method = getattr(speculation, "method", None)
    if method == "custom_class":
        return bool(getattr(drafter, "cross_request", True))
    return method == "suffix"
