"""Draft tokens of vLLM's draft models and EAGLE heads, sampled with keyed noise.

Under rule `replay` a draft model uses the noise that the target will use at the same position: it is coupled. Under the
other rules it samples independently of the verification, and its distributions are kept for it. vLLM's own draft
samples ignore the seeds of requests. Tests: tests/integrations/vllm/test_v1_sampler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.device_transfer import current_stream_id, host_to_device
from specdec_fast.integrations.vllm.chain_verification import Distribution, empty_row
from specdec_fast.integrations.vllm.request_batch import RequestBatch
from specdec_kernels import distribution_stats, draft_sample, replay_sample

FromMetadata = Callable[[Any], RequestBatch]


def why_not_sampled(drafter: Any) -> str | None:
    """Returns why a drafter of vLLM keeps its own draft tokens, or None if `DraftSampling` can take over."""
    if not hasattr(drafter, "set_inputs_first_pass") or not hasattr(drafter, "_sample_draft_tokens"):
        return "it runs no draft model"
    for name in ("parallel_drafting", "constant_draft_positions", "use_heterogeneous_vocab", "uses_mrope"):
        if getattr(drafter, name, False):
            return f"it has {name}"
    return None


class SampledDrafts:
    """Draft tokens of one step that were sampled from distributions.

    Args:
        request_ids: Requests of the B rows.
        tokens: Tokens of each of K passes, int64 [B].
        logits: Draft logits of all passes, K * B rows or more and one besides, which is not read.
        stats: Statistics of each pass, as `distribution_stats` returns them, B numbers each.

    Attributes:
        dists: Distributions of draft j of row b in row j * B + b, and one more row without any weight.
    """

    __slots__ = ("_size", "_steps", "_tokens", "dists", "request_ids")

    def __init__(
        self, request_ids: Sequence[str], tokens: Sequence[Tensor], logits: Tensor, stats: Sequence[Sequence[Tensor]]
    ) -> None:
        self.request_ids, self._size, self._steps = tuple(request_ids), len(request_ids), len(tokens)
        self._tokens = torch.cat([*tokens, tokens[0].new_full((1,), -2)])  # no token equals the last one
        last = empty_row(1, logits.dtype, logits.device, current_stream_id(logits.device))[1:]
        inv_t, lse, cut, tie_id = (torch.cat(each) for each in zip(*stats, last))
        self.dists: Distribution = (logits[: self._size * self._steps + 1], inv_t, lse, cut, tie_id)

    def index_of(self, request_ids: tuple[str, ...], counts: tuple[int, ...], tokens: Tensor) -> Tensor:
        """Finds the distribution of each node.

        A token that was not sampled in this step, of a request that is unknown or at another place, has the last one.

        Args:
            request_ids: Requests of the step that verifies.
            counts: Nodes of each request, root included.
            tokens: Packed nodes, int64 [M].

        Returns:
            int32 [M].
        """
        if request_ids == self.request_ids:
            places = tuple(range(self._size))
        else:
            rows = {each: row for row, each in enumerate(self.request_ids)}
            places = tuple(rows.get(each, -1) for each in request_ids)
        device = tokens.device
        index = _index(places, counts, self._size, self._steps, device, current_stream_id(device))
        return torch.where(self._tokens[index] == tokens, index, self._size * self._steps)


@lru_cache(maxsize=256)
def _index(
    places: tuple[int, ...], counts: tuple[int, ...], size: int, steps: int, device: torch.device, stream: int
) -> Tensor:
    """Index of each node in the order of `SampledDrafts.dists`. It is only read; each stream has its own."""
    none = size * steps
    found: list[int] = []
    for place, count in zip(places, counts):
        found.append(none)
        found += [at * size + place if place >= 0 and at < steps else none for at in range(count - 1)]
    with torch.inference_mode(False):
        return host_to_device(found, torch.int32, device)


class DraftSampling:
    """Takes over how one drafter of vLLM picks its draft tokens.

    Args:
        drafter: vLLM's drafter, which is changed.
        batch_of: Returns the batch of a `SamplingMetadata`.
        coupled: Use the noise of rule `replay`. Otherwise sample independently and keep the distributions.

    """

    def __init__(self, drafter: Any, batch_of: FromMetadata, coupled: bool) -> None:
        self._drafter, self._batch_of, self._coupled = drafter, batch_of, coupled
        self._first_pass, self._stock = drafter.set_inputs_first_pass, drafter._sample_draft_tokens
        self._roots: Tensor | None = None
        self._step = 0
        self._ids: tuple[str, ...] = ()
        self._greedy: frozenset[str] = frozenset()
        self._tokens: list[Tensor] = []
        self._stats: list[tuple[Tensor, ...]] = []
        self._logits = torch.empty(0, 0)
        try:
            drafter.set_inputs_first_pass, drafter._sample_draft_tokens = self._start, self._sample
        except Exception:
            vars(drafter).pop("set_inputs_first_pass", None)  # vLLM's own methods belong to the class
            raise

    def take(self) -> tuple[SampledDrafts | None, frozenset[str]]:
        """Returns what was sampled since the last call, or None, and the requests whose drafts are deterministic."""
        ids, tokens, stats, greedy = self._ids, self._tokens, self._stats, self._greedy
        self._tokens, self._stats, self._greedy = [], [], frozenset()
        return (SampledDrafts(ids, tokens, self._logits, stats) if tokens else None), greedy

    def _start(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares the first pass as vLLM does, and notes the positions of the roots.

        A draft model reads the root at its own position. A head that reads hidden states, such as EAGLE, reads the root
        beside the state before it, one position earlier.

        Returns:
            What vLLM's own method returns.
        """
        found = self._first_pass(*args, **kwargs)
        behind = 1 if self._drafter.pass_hidden_states_to_model else 0
        self._roots = (self._drafter.positions[found[1].long()] + behind).to(torch.int32)
        self._step = 0
        self._tokens, self._stats, self._greedy = [], [], frozenset()
        return found

    def _sample(self, hidden_states: Tensor, metadata: Any) -> tuple[Tensor, Tensor | None]:
        """Samples one draft token for each request."""
        batch, step = self._batch_of(metadata), self._step
        if metadata.all_greedy or self._roots is None:
            self._greedy = frozenset(batch.request_ids) if metadata.all_greedy else frozenset()
            return self._stock(hidden_states, metadata)
        logits = self._drafter.model.compute_logits(hidden_states)
        self._step += 1
        inv_t, lse, cut, tie_id = distribution_stats(logits, *batch.parameters)
        if self._coupled:
            positions = self._roots + (step + 1)
            return replay_sample(logits, inv_t, cut, tie_id, batch.seeds, positions), None
        index = torch.full_like(self._roots, step)
        tokens = draft_sample(logits, inv_t, lse, cut, tie_id, batch.seeds, self._roots, index)
        self._ids = batch.request_ids
        self._tokens.append(tokens)
        self._stats.append((inv_t, lse, cut, tie_id))
        self._keep(logits, step)
        return tokens, None

    def _keep(self, logits: Tensor, step: int) -> None:
        """Copies draft logits [B, V] behind those of earlier passes, into memory that is used again."""
        rows, columns = logits.shape
        kept, needed = self._logits, (step + 1) * rows + 1
        if kept.shape[1] != columns or kept.dtype != logits.dtype or kept.device != logits.device or len(kept) < needed:
            passes = max(int(self._drafter.num_speculative_tokens), step + 1)
            self._logits = logits.new_zeros(passes * rows + 1, columns)
            if step:
                self._logits[: step * rows] = kept[: step * rows]
        self._logits[step * rows : (step + 1) * rows] = logits
