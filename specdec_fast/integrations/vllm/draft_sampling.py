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
        none = self._size * self._steps
        self._tokens = torch.cat([*tokens, tokens[0].new_full((1,), -2)])  # no token equals the last one
        last = empty_row(1, logits.dtype, logits.device, current_stream_id(logits.device))[1:]
        inv_t, lse, cut, tie_id = zip(*stats, last)
        joined = torch.cat([*inv_t, *lse, *cut]).view(3, none + 1)
        self.dists: Distribution = (logits[: none + 1], joined[0], joined[1], joined[2], torch.cat(tie_id))

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
        return index.masked_fill(self._tokens.index_select(0, index) != tokens, self._size * self._steps)


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


@lru_cache(maxsize=256)
def _numbers(passes: int, rows: int, device: torch.device, stream: int) -> tuple[Tensor, ...]:
    """K times int32 [B], which hold 0 to K - 1. They are only read; each stream has its own."""
    with torch.inference_mode(False):
        return torch.arange(passes, dtype=torch.int32, device=device)[:, None].repeat(1, rows).unbind()


def copy_rows(kept: Tensor, first: int, rows: Tensor) -> None:
    """Copies rows [B, V] into `kept`, from row `first` on.

    Args:
        kept: Memory of the same width, dtype and device.
        first: Row of `kept`.
        rows: What is copied.
    """
    kept.narrow(0, first, rows.shape[0]).copy_(rows)


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
        self._metadata: Any = None
        self._parameters: tuple[Tensor, ...] = ()
        self._seeds = torch.empty(0)
        self._places: tuple[Tensor, ...] = ()
        """Of each pass, int32 [B]: absolute positions if coupled, else the number of the pass."""
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
        self._roots = (self._drafter.positions.index_select(0, found[1]) + behind).to(torch.int32)
        self._places, self._step = (), 0
        self._tokens, self._stats, self._greedy = [], [], frozenset()
        return found

    def _sample(self, hidden_states: Tensor, metadata: Any) -> tuple[Tensor, Tensor | None]:
        """Samples one draft token for each request."""
        roots, step = self._roots, self._step
        if roots is None or metadata.all_greedy:
            batch = self._batch_of(metadata)
            self._greedy = frozenset(batch.request_ids) if metadata.all_greedy else frozenset()
            return self._stock(hidden_states, metadata)
        logits = self._drafter.model.compute_logits(hidden_states)
        if step >= len(self._places) or metadata is not self._metadata:
            self._prepare(metadata, roots, logits)
        self._step += 1
        inv_t, lse, cut, tie_id = distribution_stats(logits, *self._parameters)
        if self._coupled:
            return replay_sample(logits, inv_t, cut, tie_id, self._seeds, self._places[step]), None
        tokens = draft_sample(logits, inv_t, lse, cut, tie_id, self._seeds, roots, self._places[step])
        self._tokens.append(tokens)
        self._stats.append((inv_t, lse, cut, tie_id))
        copy_rows(self._logits, step * logits.shape[0], logits)
        return tokens, None

    def _prepare(self, metadata: Any, roots: Tensor, logits: Tensor) -> None:
        """Sets what all passes of a step share. The time between passes counts, so they look nothing up."""
        batch, step, device = self._batch_of(metadata), self._step, logits.device
        self._metadata, self._parameters, self._seeds = metadata, batch.parameters, batch.seeds
        self._ids = batch.request_ids
        passes = max(int(self._drafter.num_speculative_tokens), step + 1)
        self._places = _numbers(passes, roots.shape[0], device, current_stream_id(device))
        if self._coupled:
            self._places = (torch.stack(self._places) + (roots + 1)).unbind()
        else:
            self._reserve(passes, step, logits)

    def _reserve(self, passes: int, step: int, logits: Tensor) -> None:
        """Makes room for the logits of all passes, and one row, in memory that is used again."""
        rows, columns = logits.shape
        kept, needed = self._logits, passes * rows + 1
        fits = kept.shape[0] >= needed and kept.shape[1] == columns
        if not fits or kept.dtype != logits.dtype or kept.device != logits.device:
            self._logits = logits.new_zeros(needed, columns)
            if step:
                self._logits[: step * rows] = kept[: step * rows]
