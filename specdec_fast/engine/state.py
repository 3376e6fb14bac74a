"""The decode state: tokens, lengths and parameters of every row. Only this module writes tokens.

`sync` steps work on the host side. The device side has fixed shapes; CUDA-graph steps read and write it for published
rows. The state knows nothing of models, caches or text. Tests: tests/engine/test_state.py.
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
"""Sampling parameters on the device, in the order of `SamplingTensors`."""

_POSITIONS_PER_BLOCK = 256


@lru_cache(maxsize=64)
def _positions(block: int) -> tuple[Tensor, ...]:
    """All positions of a block, int32 [1] each. They are remembered and must not be written to."""
    with torch.inference_mode(False):
        first, stop = block * _POSITIONS_PER_BLOCK, (block + 1) * _POSITIONS_PER_BLOCK
        return torch.arange(first, stop, dtype=torch.int32, device="cpu")[:, None].unbind()


class DecodeState:
    """Tokens and sampling parameters of rows 0 to max_rows - 1. It is the `StateView` that drafters read.

    Args:
        max_rows: Number of rows.
        max_length: Most tokens of a row.
        device: Device of the device side.

    Attributes:
        device_tokens: Committed tokens of published rows, int64 [max_rows, max_length + 1]. The last column receives
            writes that nothing reads.
        lengths: Committed tokens of published rows, int32 [max_rows].
        limits: Length at which a text ends, int32 [max_rows].
        done: Whether a text has ended, bool [max_rows]. Rows that are not published are done.
        ends: Token ids that end a text, padded with -1, int64 [max_rows, STOP_IDS].
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
        self._settings["top_p"].fill_(1.0)  # unused rows need valid parameters too
        self._published: set[int] = set()
        self._host: list[list[int]] = [[] for _ in range(max_rows)]
        self._salts: list[str | None] = [None] * max_rows
        self._table = SamplingTable(self.device)
        self._free = list(range(max_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    @property
    def taken_rows(self) -> set[int]:
        """Rows that have a text."""
        return set(range(self.max_rows)) - set(self._free)

    def join(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        prompt_length: int,
        stop_ids: Sequence[int],
        cache_salt: str | None = "",
    ) -> int:
        """Assigns a free row to a text.

        Args:
            tokens: Committed tokens: the prompt, and tokens that were generated before a preemption.
            params: Sampling parameters with a seed.
            prompt_length: Number of prompt tokens.
            stop_ids: Token ids that end the text.
            cache_salt: Rows of one salt may share stored prefixes. None: the row shares none.

        Returns:
            The row.
        """
        row = self._free[-1]
        self._host[row], self._salts[row] = list(tokens), cache_salt
        self._table.set(row, params, prompt_length, stop_ids, self._host[row])
        return self._free.pop()  # last, so that the row stays free if something raises

    def leave(self, row: int) -> None:
        """Frees a row."""
        self._host[row] = []
        self._table.clear(row)
        self.withdraw([row])
        self._free.append(row)

    def tokens(self, row: int) -> Sequence[int]:
        """Returns the committed tokens of a row. They must not be written to."""
        return self._host[row]

    def length(self, row: int) -> int:
        """Returns the number of committed tokens of a row."""
        return len(self._host[row])

    def prompt_length(self, row: int) -> int:
        """Returns the number of prompt tokens of a row. Later tokens were generated, some maybe before it joined."""
        return self._table.entry(row)[1]

    def longest(self, row: int) -> int:
        """Returns the number of tokens at which the text of a row ends at the latest."""
        params, prompt_length, _ = self._table.entry(row)
        return int(min(prompt_length + params.max_new_tokens, self.max_length))

    def cache_salt(self, row: int) -> str | None:
        """Returns a name of the rows with which a row may share stored prefixes. None: it shares with no row."""
        return self._salts[row]

    def sampling(self, rows: Sequence[int]) -> SamplingTensors:
        """Returns the sampling parameters of rows, [B] each."""
        return self._table.pack(rows)

    def rng(self, rows: Sequence[int]) -> Rng:
        """Returns the seeds of rows and the positions of their roots, [B] each. The root is the newest token."""
        places = [len(self._host[row]) - 1 for row in rows]
        # a pass evicts the processor's caches, after which creating even a small tensor is slow
        if len(places) == 1 and self._on_host:
            positions = _positions(places[0] // _POSITIONS_PER_BLOCK)[places[0] % _POSITIONS_PER_BLOCK]
        else:
            positions = host_to_device(places, torch.int32, self.device)
        return Rng(self._table.pack(rows).seeds, positions)

    @staticmethod
    def read_emitted_tokens(draft: Draft, acceptance: Acceptance) -> list[tuple[list[int], int]]:
        """Reads the tokens of a step on the host: the one synchronisation of a `sync` step.

        Args:
            draft: The draft that was verified.
            acceptance: What the rule accepted.

        Returns:
            Per request, the accepted tokens with the next token, and the number of accepted tokens.
        """
        tokens = draft.tokens.tolist()
        emitted = []
        for path, count, following in zip(
            acceptance.path.tolist(), acceptance.num_accepted.tolist(), acceptance.next_token.tolist()
        ):
            emitted.append(([*(tokens[node] for node in path[1 : count + 1]), following], count))
        return emitted

    def append(self, rows: Sequence[int], kept: Sequence[Sequence[int]]) -> None:
        """Commits tokens to rows.

        Args:
            rows: Rows of the step.
            kept: New tokens of each.
        """
        for row, tokens in zip(rows, kept):
            self._host[row].extend(tokens)
            if row in self._table.rows_to_update:
                self._table.append(row, tokens)

    # -- the device side --------------------------------------------------------------------------------------------

    def publish(self, rows: Sequence[int]) -> None:
        """Copies rows to the device side, from which CUDA-graph steps continue."""
        for row in rows:
            host, (params, _, stop_ids) = self._host[row], self._table.entry(row)
            upload_values(host, self.device_tokens[row, : len(host)])
            self.lengths[row] = len(host)
            self.limits[row] = self.longest(row)
            upload_values([*stop_ids, *[-1] * self.STOP_IDS][: self.STOP_IDS], self.ends[row])
            for name, column in self._settings.items():
                column[row] = getattr(params, "seed" if name == "seeds" else name)
            self.done[row] = False
            self._published.add(row)

    def withdraw(self, rows: Sequence[int]) -> None:
        """Removes rows from the device side, so that CUDA-graph steps ignore them."""
        for row in self._published.intersection(rows):
            self.done[row] = True
            self.lengths[row] = 0
            self._published.remove(row)

    def device_sampling(self, rows: Tensor, all_greedy: bool) -> SamplingTensors:
        """Gathers sampling parameters on the device.

        Args:
            rows: int64 [B].
            all_greedy: Whether all of these rows are at temperature 0.

        Returns:
            The parameters, [B] each.
        """
        temperature, top_k, top_p, min_p, seeds = (self._settings[name][rows] for name in SETTINGS)
        return SamplingTensors(temperature, top_k, top_p, min_p, seeds, all_greedy=all_greedy)

    def advance(self, rows: Tensor, emitted: Tensor, counts: Tensor) -> None:
        """Commits tokens on the device, up to the end of each text.

        Args:
            rows: Rows, all different, int64 [B].
            emitted: New tokens of each row, int64 [B, N].
            counts: Number of new tokens, the first ones of each row of `emitted`, int32 [B].
        """
        lengths, limits = self.lengths[rows], self.limits[rows]
        place = torch.arange(emitted.shape[1], dtype=torch.int32, device=self.device)
        valid = place < counts[:, None]
        ends = valid & (emitted[:, :, None] == self.ends[rows][:, None]).any(2)
        kept = valid & (ends.cumsum(1) - ends.long() == 0) & (lengths[:, None] + place < limits[:, None])
        at = torch.where(kept, lengths[:, None] + place, self.max_length)
        self.device_tokens[rows[:, None], at] = emitted
        lengths = lengths + kept.sum(1, dtype=torch.int32)
        self.lengths[rows] = lengths
        self.done[rows] = self.done[rows] | ends.any(1) | (lengths >= limits)
