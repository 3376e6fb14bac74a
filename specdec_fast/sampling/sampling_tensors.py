"""Sampling parameters as tensors: of the requests of a batch, and of all rows of a decode state.

Tests: tests/sampling/test_sampling_tensors.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.distributions import PendingDistributions, TokenDistributions
from specdec_fast.sampling.grammar import GrammarState
from specdec_fast.sampling.logits_processors import LogitsProcessors, TokenCounts, has_penalties, pack_processors
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.sampling.text_processors import TextState, reads_text
from specdec_kernels import Overlay, distribution_stats, replay_sample

_MAX_REMEMBERED_BATCHES = 64
_MAX_REMEMBERED_SHAPES = 256


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The sampling parameters of B requests, or of M nodes after `expand_to_nodes`.

    Attributes:
        temperature: float32 [B]; 0 is greedy.
        top_k: int32 [B]; 0 is off.
        top_p: float32 [B]; 1 is off.
        min_p: float32 [B]; 0 is off.
        seeds: int64 [B].
        logits_processors: Changes to logits before temperature. None if no request has any.
        all_greedy: All requests are at temperature 0.
        any_greedy: Some request may be at temperature 0.
        any_filter: Some request may be at temperature 0, or have top-k, top-p or min-p.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    logits_processors: LogitsProcessors | None = None
    all_greedy: bool = False
    any_greedy: bool = True
    any_filter: bool = True
    _per_node: dict[tuple[int, ...], SamplingTensors] = field(default_factory=dict, repr=False, compare=False)
    _unfiltered: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def distributions(self, logits: Tensor, overlay: Overlay | None = None) -> TokenDistributions:
        """Computes the distributions of logits.

        Args:
            logits: One row for each request, any float dtype, [B, V].
            overlay: Logits processors that operators apply when they load the logits.

        Returns:
            B distributions.
        """
        sampling_args = (self.temperature, self.top_k, self.top_p, self.min_p)
        over = {} if overlay is None else {"overlay": overlay}
        inv_t, lse, cut, tie_id, mass = distribution_stats(logits, *sampling_args, masses=True, **over)
        return TokenDistributions(logits, inv_t, lse, cut, tie_id, mass=mass, overlay=overlay)

    def lazy_distributions(self, logits: Tensor) -> PendingDistributions:
        """Returns the distributions of logits [B, V], whose statistics are computed when they are first read."""
        return PendingDistributions(logits, (self.temperature, self.top_k, self.top_p, self.min_p))

    def sample_replay(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Samples under the replay noise.

        Returns the token of `replay_sample` over `distributions(logits)`. Without filters it reads the logits once.

        Args:
            logits: Any float dtype, [B, V].
            positions: Absolute position of the sampled token, int32 [B].

        Returns:
            Token ids, int64 [B].
        """
        if self.all_greedy:
            return logits.argmax(1)
        if self.any_filter:
            dists = self.distributions(logits)
            return replay_sample(logits, dists.inv_t, dists.cut, dists.tie_id, self.seeds, positions)
        inv_t, cut, tie = self.unfiltered_stats(logits)
        return replay_sample(logits, inv_t, cut, tie, self.seeds, positions)

    def unfiltered_stats(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns statistics of distributions that keep every token.

        Args:
            logits: [B, V]; only its dtype and V matter.

        Returns:
            Inverse temperature, cut and tie, each [B]. Requests at temperature 0 get inverse temperature 1.
        """
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        key = (wide, logits.shape[1])
        found = self._unfiltered.get(key)
        if found is None:
            inv_t = 1.0 / torch.where(self.temperature == 0, 1.0, self.temperature).to(wide)
            tie = torch.full_like(self.top_k, logits.shape[1] - 1)
            found = self._unfiltered[key] = (inv_t, torch.full_like(inv_t, float("-inf")), tie)
        return found

    def expand_to_nodes(self, counts: tuple[int, ...], row_of: Tensor) -> SamplingTensors:
        """Repeats the parameters of each request for its nodes.

        Results are remembered by `counts`, since most steps of a batch repeat a shape.

        Args:
            counts: Nodes of each request, as host integers.
            row_of: Request of each node, int64 [M].

        Returns:
            The parameters of the M nodes, without logits processors.
        """
        found = self._per_node.get(counts)
        if found is None:
            if len(self._per_node) > _MAX_REMEMBERED_SHAPES:
                self._per_node.clear()
            found = self._per_node[counts] = self.gather(row_of)
        return found

    def gather(self, row_of: Tensor) -> SamplingTensors:
        """Returns the parameters of the requests in `row_of`, int64 [M], without logits processors."""
        fields = ("temperature", "top_k", "top_p", "min_p", "seeds")
        return SamplingTensors(*(getattr(self, name)[row_of] for name in fields))


@dataclass(slots=True)
class SamplingTable:
    """The sampling parameters of every row of a decode state.

    Attributes:
        device: Device of the packed tensors.
        rows_to_update: Rows whose parameters depend on their generated tokens (penalties, grammars, processors that
            read texts). Pass new tokens of these rows to `append`.
    """

    device: torch.device
    rows_to_update: set[int] = field(default_factory=set)
    _rows: dict[int, tuple[SamplingParams, int, tuple[int, ...]]] = field(default_factory=dict)
    _packed: dict[tuple[int, ...], SamplingTensors] = field(default_factory=dict)
    _grammar_states: dict[int, GrammarState] = field(default_factory=dict)
    _text_states: dict[int, TextState] = field(default_factory=dict)
    _counts: TokenCounts = field(init=False)

    def __post_init__(self) -> None:
        self._counts = TokenCounts(self.device)

    def set(
        self,
        row: int,
        params: SamplingParams,
        prompt_length: int,
        stop_ids: Sequence[int],
        tokens: Sequence[int] = (),
    ) -> None:
        """Assigns parameters to a row.

        Args:
            row: The row; its former parameters are dropped.
            params: Parameters with a seed.
            prompt_length: Number of prompt tokens.
            stop_ids: Token ids that end the text.
            tokens: Committed tokens, prompt first.

        Raises:
            ValueError: If `params` has no seed.
        """
        if params.seed is None:
            raise ValueError("SamplingTable.set: got params without a seed; expected one; call params.with_seed()")
        self.clear(row)
        self._rows[row] = (params, prompt_length, tuple(stop_ids))
        if has_penalties(params):
            self._counts.join(row, tokens[:prompt_length], tokens[prompt_length:])
            self.rows_to_update.add(row)
        if params.grammar is not None:
            self._grammar_states[row] = GrammarState(params.grammar, stop_ids, tokens[prompt_length:])
            self.rows_to_update.add(row)
        if reads_text(params):
            self._text_states[row] = TextState(params, prompt_length, tokens)
            self.rows_to_update.add(row)

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Records generated tokens of a row in `rows_to_update`."""
        if row in self._counts and tokens:
            self._counts.append(row, tokens)
        if row in self._grammar_states:
            self._grammar_states[row].advance(tokens)
        if row in self._text_states:
            self._text_states[row].append(tokens)

    def clear(self, row: int) -> None:
        """Drops the parameters of a row, if it has any."""
        self._rows.pop(row, None)
        self._packed.clear()
        self.rows_to_update.discard(row)
        self._counts.leave(row)
        self._grammar_states.pop(row, None)
        self._text_states.pop(row, None)

    def entry(self, row: int) -> tuple[SamplingParams, int, tuple[int, ...]]:
        """Returns a row's parameters, the number of its prompt tokens, and the token ids that end its text."""
        return self._rows[row]

    def pack(self, rows: Sequence[int]) -> SamplingTensors:
        """Returns the parameters of `rows` in order. They are packed again only when the batch changed."""
        key = tuple(rows)
        found = self._packed.get(key)
        if found is None:
            if len(self._packed) > _MAX_REMEMBERED_BATCHES:
                self._packed.clear()
            found = self._packed[key] = self._pack(key)
        return found

    def _pack(self, rows: tuple[int, ...]) -> SamplingTensors:
        """Builds the tensors of `rows`."""
        entries = [self._rows[row] for row in rows]
        params = [entry[0] for entry in entries]

        def tensor(values: list, dtype: torch.dtype) -> Tensor:
            return host_to_device(values, dtype, self.device)

        return SamplingTensors(
            temperature=tensor([p.temperature for p in params], torch.float32),
            top_k=tensor([p.top_k for p in params], torch.int32),
            top_p=tensor([p.top_p for p in params], torch.float32),
            min_p=tensor([p.min_p for p in params], torch.float32),
            seeds=tensor([p.seed for p in params], torch.int64),
            all_greedy=all(p.temperature == 0 for p in params),
            any_greedy=any(p.temperature == 0 for p in params),
            any_filter=any(p.temperature == 0 or p.top_k or p.top_p < 1 or p.min_p for p in params),
            logits_processors=pack_processors(
                rows,
                params,
                [entry[1] for entry in entries],
                [entry[2] for entry in entries],
                self._counts,
                [self._grammar_states.get(row) for row in rows],
                [self._text_states.get(row) for row in rows],
                self.device,
            ),
        )
