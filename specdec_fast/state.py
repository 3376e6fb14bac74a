"""What has been decoded: tokens, lengths and done flags of every row. The only writer of them.

The host mirror is what `sync` steps work on; the device side has fixed capacities ([max_rows, max_length]) so that a
captured step can own it after `publish`. Knows nothing of models, caches or text. Tests: tests/test_state.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_fast.draft import Draft
from specdec_fast.interfaces import Acceptance, Rng
from specdec_fast.sampling import Sampling, SamplingParams, SamplingTable


class DecodeState:
    """Rows 0..max_rows-1, free or in use; it is also the `StateView` that drafters read.

    tokens: int64 [max_rows, max_length]; lengths: int32 [max_rows]; done: bool [max_rows] (free rows are done).
    """

    def __init__(self, max_rows: int, max_length: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.max_rows, self.max_length = max_rows, max_length
        self.device_tokens = torch.zeros(max_rows, max_length, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.done = torch.ones(max_rows, dtype=torch.bool, device=device)
        self._host: list[list[int]] = [[] for _ in range(max_rows)]
        self._table = SamplingTable(self.device)
        self._free = list(range(max_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def join(self, tokens: Sequence[int], params: SamplingParams, prompt_length: int, stop_ids: Sequence[int]) -> int:
        """Give a free row to a text of committed tokens (prompt, and what was generated before a preemption)."""
        row = self._free.pop()
        self._host[row] = list(tokens)
        self._table.set(row, params, prompt_length, stop_ids, self._host[row])
        return row

    def leave(self, row: int) -> None:
        """Free a row."""
        self._host[row] = []
        self._table.clear(row)
        self._free.append(row)

    def tokens(self, row: int) -> Sequence[int]:
        """Committed tokens of a row (host mirror; not to be written)."""
        return self._host[row]

    def length(self, row: int) -> int:
        return len(self._host[row])

    def sampling(self, rows: Sequence[int]) -> Sampling:
        """Packed sampling parameters of rows."""
        return self._table.pack(rows)

    def rng(self, rows: Sequence[int]) -> Rng:
        """Seeds and root positions of rows: the newest committed token is the root."""
        positions = torch.tensor([len(self._host[row]) - 1 for row in rows], dtype=torch.int32).to(self.device)
        return Rng(self._table.pack(rows).seeds, positions)

    @staticmethod
    def read(draft: Draft, acceptance: Acceptance) -> list[tuple[list[int], int]]:
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
            if row in self._table.followed:
                self._table.append(row, tokens)

    def publish(self) -> None:
        """Bring the device side up to date with the host mirror (a captured step reads and writes it there)."""
        for row, host in enumerate(self._host):
            self.device_tokens[row, : len(host)] = torch.tensor(host, dtype=torch.int64)
            self.lengths[row] = len(host)
            self.done[row] = not host
