"""What the target's law is: sampling parameters, and `process`, the one owner of logits -> `Laws` at every node.

Order: banned tokens (minimum length, vocabulary padding), temperature, top-k, top-p, min-p.
Tests: tests/test_sampling.py.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specdec_fast.draft import Draft, Laws
from specdec_kernels import TreePlan, law_stats, replay_sample

_SEED_LIMIT = 2**63


def _require(ok: bool, name: str, got: object, expected: str) -> None:
    if not ok:
        raise ValueError(f"SamplingParams.{name}: got {got!r}; expected {expected}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request wants its tokens. `temperature=0` is exact greedy, not a small epsilon.

    seed: 0 <= seed < 2**63, or None to draw one (it is recorded on the request). stop: strings that end the text
    (not part of it). stop_token_ids: further end-of-sequence ids; `ignore_eos` drops the model's own.
    min_new_tokens: no end-of-sequence id is produced before. max_new_tokens: exact upper bound.

    Raises ValueError for values that are out of range or contradict each other.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            _require(
                isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
                name,
                value,
                "a finite number",
            )
        for name in ("top_k", "max_new_tokens", "min_new_tokens"):
            value = getattr(self, name)
            _require(isinstance(value, int) and not isinstance(value, bool), name, value, "an integer")
        _require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or a positive number")
        _require(
            self.temperature == 0 or self.temperature >= 1e-3, "temperature", self.temperature, "0, or at least 0.001"
        )
        _require(0 <= self.top_k < 2**31, "top_k", self.top_k, "0 (off) or a positive integer")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]; 1 is off")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]; 0 is off")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            f"0 to max_new_tokens ({self.max_new_tokens})",
        )
        if self.seed is not None:
            _require(
                isinstance(self.seed, int) and 0 <= self.seed < _SEED_LIMIT, "seed", self.seed, "0 <= seed < 2**63"
            )
        stop, ids = self.stop, self.stop_token_ids
        _require(isinstance(stop, Iterable), "stop", stop, "non-empty strings")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        _require(all(isinstance(s, str) and s for s in stop), "stop", self.stop, "non-empty strings")
        object.__setattr__(self, "stop", stop)
        _require(
            isinstance(ids, Iterable) and all(isinstance(i, int) and i >= 0 for i in ids),
            "stop_token_ids",
            ids,
            "a sequence of token ids >= 0",
        )
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    def with_seed(self) -> SamplingParams:
        """Itself, or a copy with a fresh random seed when it has none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(_SEED_LIMIT))


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of B rows as tensors [B], ready to be gathered per node.

    `first_free` (int32 [B]) is the absolute position from which end-of-sequence ids may appear; `stop_ids` holds
    each row's ids on the host. Both matter only while `any_minimum` is set. all_greedy: every row is at T = 0;
    any_filter: some row is greedy or has top-k, top-p or min-p.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    first_free: Tensor
    stop_ids: tuple[tuple[int, ...], ...] = ()
    any_minimum: bool = False
    all_greedy: bool = False
    any_filter: bool = True
    _per_node: dict[tuple[int, ...], Sampling] = field(default_factory=dict, repr=False, compare=False)
    _kept_whole: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def laws(self, logits: Tensor) -> Laws:
        """The laws of logits [B, V], one row of logits per row of the batch."""
        return Laws(logits, *law_stats(logits, self.temperature, self.top_k, self.top_p, self.min_p))

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The token, int64 [B], that logits [B, V] give at `positions` (int32 [B]) under the replay noise.

        The same token as replay_sample over `laws`, without reading the rows twice where nothing is filtered.
        """
        if self.all_greedy:
            return logits.argmax(1)
        if self.any_filter:
            laws = self.laws(logits)
            return replay_sample(logits, laws.inv_t, laws.cut, laws.tie_id, self.seeds, positions)
        inv_t, cut, tie = self._unfiltered(logits)
        return replay_sample(logits, inv_t, cut, tie, self.seeds, positions)

    def _unfiltered(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(1/T, cut, tie) of laws that keep every token, remembered."""
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        key = (wide, logits.shape[1])
        found = self._kept_whole.get(key)
        if found is None:
            inv_t = 1.0 / self.temperature.to(wide)
            tie = torch.full_like(self.top_k, logits.shape[1] - 1)
            found = self._kept_whole[key] = (inv_t, torch.full_like(inv_t, float("-inf")), tie)
        return found

    def per_node(self, counts: tuple[int, ...], row_of: Tensor) -> Sampling:
        """Each row's parameters repeated for its nodes. counts: nodes per row; row_of: int64 [M] row of each node.

        Remembered per shape: most steps of a batch repeat one.
        """
        found = self._per_node.get(counts)
        if found is None:
            if len(self._per_node) > 256:
                self._per_node.clear()
            fields = ("temperature", "top_k", "top_p", "min_p", "seeds", "first_free")
            found = self._per_node[counts] = Sampling(*(getattr(self, name)[row_of] for name in fields))
        return found


@dataclass(slots=True)
class SamplingTable:
    """Sampling parameters of every row of a decode state; packs those of the rows asked for."""

    device: torch.device
    _rows: dict[int, tuple[SamplingParams, int, tuple[int, ...]]] = field(default_factory=dict)
    _packed: dict[tuple[int, ...], Sampling] = field(default_factory=dict)

    def set(self, row: int, params: SamplingParams, prompt_length: int, stop_ids: Sequence[int]) -> None:
        """Row `row` now follows `params` (which must carry a seed)."""
        if params.seed is None:
            raise ValueError("SamplingTable.set: got params without a seed; call params.with_seed() first")
        self._rows[row] = (params, prompt_length + params.min_new_tokens, tuple(stop_ids))
        self._packed.clear()

    def clear(self, row: int) -> None:
        self._rows.pop(row, None)
        self._packed.clear()

    def params(self, row: int) -> SamplingParams:
        return self._rows[row][0]

    def pack(self, rows: Sequence[int]) -> Sampling:
        """The parameters of `rows`, in order. Packed anew only when the batch changed."""
        key = tuple(rows)
        found = self._packed.get(key)
        if found is None:
            if len(self._packed) > 64:
                self._packed.clear()
            found = self._packed[key] = self._pack(key)
        return found

    def _pack(self, rows: tuple[int, ...]) -> Sampling:
        entries = [self._rows[row] for row in rows]
        params = [entry[0] for entry in entries]

        def tensor(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(self.device)

        return Sampling(
            temperature=tensor([p.temperature for p in params], torch.float32),
            top_k=tensor([p.top_k for p in params], torch.int32),
            top_p=tensor([p.top_p for p in params], torch.float32),
            min_p=tensor([p.min_p for p in params], torch.float32),
            seeds=tensor([p.seed for p in params], torch.int64),
            first_free=tensor([entry[1] for entry in entries], torch.int32),
            stop_ids=tuple(entry[2] for entry in entries),
            all_greedy=all(p.temperature == 0 for p in params),
            any_filter=any(p.temperature == 0 or p.top_k or p.top_p < 1 or p.min_p for p in params),
            any_minimum=any(p.min_new_tokens and entry[2] for p, entry in zip(params, entries)),
        )


def ban_early_stops(logits: Tensor, sampling: Sampling, row_of: Tensor, positions: Tensor) -> Tensor:
    """Set end-of-sequence ids to -inf, in place, where the token at `positions` comes before the row's minimum.

    logits: [R, V]; row_of: int64 [R]; positions: int32 [R] absolute position of the token a law row decides.
    """
    early = positions < sampling.first_free[row_of]
    for index, ids in enumerate(sampling.stop_ids):
        if ids:
            nodes = (early & (row_of == index)).nonzero().flatten()
            known = [token for token in ids if token < logits.shape[1]]  # a draft's vocabulary may be smaller
            logits[nodes[:, None], torch.tensor(known, dtype=torch.int64, device=logits.device)[None, :]] = float(
                "-inf"
            )
    return logits


def process(draft: Draft, plan: TreePlan, logits: Tensor, sampling: Sampling, root_positions: Tensor) -> Laws:
    """The target's law at every node, each on its own root path. logits: [M, V], edited in place.

    Row i of the result is the law of the token after node i. root_positions: int32 [B] absolute.
    """
    if sampling.any_minimum:
        ban_early_stops(logits, sampling, draft.row_of, root_positions[draft.row_of] + plan.depth + 1)
    return sampling.per_node(draft.counts, draft.row_of).laws(logits)
