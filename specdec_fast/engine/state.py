"""What has been decoded: tokens, lengths and done flags of every row. The only writer of them.

The host mirror is what `sync` steps work on; the device side has fixed capacities ([max_rows, max_length]) and is what
captured steps read and write, for rows that were published. Knows nothing of models, caches or text.
Tests: tests/engine/test_state.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from specdec_fast.core.device_transfer import host_to_device, upload_values
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Acceptance, Rng
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.sampling.sampling_tensors import SamplingTable, SamplingTensors

SETTINGS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seeds": torch.int64,
}
"""Columns of sampling parameters on the device, in the order of `SamplingTensors`."""

_BLOCK = 256


@lru_cache(maxsize=64)
def _positions(block: int) -> tuple[Tensor, ...]:
    """Every position of a block as int32 [1], remembered; read only."""
    with torch.inference_mode(False):
        places = torch.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=torch.int32, device="cpu")
        return places[:, None].unbind()


class DecodeState:
    """Rows 0..max_rows-1, free or in use; it is also the `StateView` that drafters read.

    Device side: device_tokens int64 [max_rows, max_length + 1], the last column is for nobody; lengths int32
    [max_rows]; done bool [max_rows] (rows that were not published are done); limits int32 [max_rows], the length at
    which a text ends; ends int64 [max_rows, STOP_IDS], the ids that end it, -1 padded; and its sampling parameters.
    """

    STOP_IDS = 16

    def __init__(self, max_rows: int, max_length: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._on_host = self.device.type == "cpu"
        self.max_rows, self.max_length = max_rows, max_length
        self.device_tokens = torch.zeros(max_rows, max_length + 1, dtype=torch.int64, device=device)
        self.lengths, self.limits = torch.zeros(2, max_rows, dtype=torch.int32, device=device)
        self.done = torch.ones(max_rows, dtype=torch.bool, device=device)
        self.ends = torch.full((max_rows, self.STOP_IDS), -1, dtype=torch.int64, device=device)
        self._settings = {name: torch.zeros(max_rows, dtype=kind, device=device) for name, kind in SETTINGS.items()}
        self._settings["top_p"].fill_(1.0)  # rows that nobody uses have parameters too
        self._published: set[int] = set()
        self._host: list[list[int]] = [[] for _ in range(max_rows)]
        self._table = SamplingTable(self.device)
        self._free = list(range(max_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def join(self, tokens: Sequence[int], params: SamplingParams, prompt_length: int, stop_ids: Sequence[int]) -> int:
        """Give a free row to a text of committed tokens (prompt, and what was generated before a preemption)."""
        row = self._free[-1]
        self._host[row] = list(tokens)
        self._table.set(row, params, prompt_length, stop_ids, self._host[row])
        return self._free.pop()  # whatever raised, the row is free

    def leave(self, row: int) -> None:
        """Free a row."""
        self._host[row] = []
        self._table.clear(row)
        self.withdraw([row])
        self._free.append(row)

    def tokens(self, row: int) -> Sequence[int]:
        """Committed tokens of a row (host mirror; not to be written)."""
        return self._host[row]

    def length(self, row: int) -> int:
        return len(self._host[row])

    def prompt_length(self, row: int) -> int:
        """Tokens of a row's prompt: those behind it were generated, in part perhaps before it joined."""
        return self._table.entry(row)[1]

    def sampling(self, rows: Sequence[int]) -> SamplingTensors:
        """Packed sampling parameters of rows."""
        return self._table.pack(rows)

    def rng(self, rows: Sequence[int]) -> Rng:
        """Seeds and root positions of rows: the newest committed token is the root."""
        places = [len(self._host[row]) - 1 for row in rows]
        if (
            len(places) == 1 and self._on_host
        ):  # behind a pass, which empties the caches, even a small tensor takes a while
            positions = _positions(places[0] // _BLOCK)[places[0] % _BLOCK]
        else:
            positions = host_to_device(places, torch.int32, self.device)
        return Rng(self._table.pack(rows).seeds, positions)

    @staticmethod
    def read_emitted_tokens(draft: Draft, acceptance: Acceptance) -> list[tuple[list[int], int]]:
        """The step's one host synchronisation: per row, the emitted tokens and how many of them were drafted."""
        tokens = draft.tokens.tolist()
        emitted = []
        for path, count, following in zip(
            acceptance.path.tolist(), acceptance.num_accepted.tolist(), acceptance.next_token.tolist()
        ):
            emitted.append(([*(tokens[node] for node in path[1 : count + 1]), following], count))
        return emitted

    def append(self, rows: Sequence[int], kept: Sequence[Sequence[int]]) -> None:
        """Commit tokens to rows."""
        for row, tokens in zip(rows, kept):
            self._host[row].extend(tokens)
            if row in self._table.rows_to_update:
                self._table.append(row, tokens)

    # -- the device side --------------------------------------------------------------------------------------------

    def publish(self, rows: Sequence[int]) -> None:
        """Bring the device side of rows up to date with the host mirror: captured steps go on from there."""
        for row in rows:
            host, (params, prompt_length, stop_ids) = self._host[row], self._table.entry(row)
            upload_values(host, self.device_tokens[row, : len(host)])
            self.lengths[row] = len(host)
            self.limits[row] = min(prompt_length + params.max_new_tokens, self.max_length)
            upload_values([*stop_ids, *[-1] * self.STOP_IDS][: self.STOP_IDS], self.ends[row])
            for name, column in self._settings.items():
                column[row] = getattr(params, "seed" if name == "seeds" else name)
            self.done[row] = False
            self._published.add(row)

    def withdraw(self, rows: Sequence[int]) -> None:
        """Captured steps no longer work on these rows."""
        for row in self._published.intersection(rows):
            self.done[row] = True
            self.lengths[row] = 0
            self._published.remove(row)

    def device_sampling(self, rows: Tensor, all_greedy: bool) -> SamplingTensors:
        """Sampling parameters of rows int64 [B], gathered on the device."""
        temperature, top_k, top_p, min_p, seeds = (self._settings[name][rows] for name in SETTINGS)
        return SamplingTensors(temperature, top_k, top_p, min_p, seeds, all_greedy=all_greedy)

    def advance(self, rows: Tensor, emitted: Tensor, counts: Tensor) -> None:
        """Commit tokens on the device, up to the end of each text. rows: int64 [B], all different; emitted: int64
        [B, N], of which the first counts (int32 [B]) are there.
        """
        lengths, limits = self.lengths[rows], self.limits[rows]
        place = torch.arange(emitted.shape[1], dtype=torch.int32, device=self.device)
        there = place < counts[:, None]
        ends = there & (emitted[:, :, None] == self.ends[rows][:, None]).any(2)
        kept = there & (ends.cumsum(1) - ends.long() == 0) & (lengths[:, None] + place < limits[:, None])
        at = torch.where(kept, lengths[:, None] + place, self.max_length)
        self.device_tokens[rows[:, None], at] = emitted
        lengths = lengths + kept.sum(1, dtype=torch.int32)
        self.lengths[rows] = lengths
        self.done[rows] = self.done[rows] | ends.any(1) | (lengths >= limits)
