"""What has been decoded: tokens, lengths and done flags of every row. The only writer of them.

Laid out with fixed capacities ([max_rows, max_length]) on the device beside a host mirror, so that a captured step can
own the device side. Knows nothing of models, caches or text. Tests: tests/test_state.py.
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
        self.device_tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        self.lengths[row] = len(tokens)
        self.done[row] = False
        self._table.set(row, params, prompt_length, stop_ids)
        return row

    def leave(self, row: int) -> None:
        """Free a row."""
        self._host[row] = []
        self.lengths[row] = 0
        self.done[row] = True
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
        row_ids, places, values, grown = [], [], [], []
        for row, tokens in zip(rows, kept):
            host = self._host[row]
            row_ids.extend([row] * len(tokens))
            places.extend(range(len(host), len(host) + len(tokens)))
            values.extend(tokens)
            host.extend(tokens)
            grown.append(len(host))
        index = torch.tensor([row_ids, places, values], dtype=torch.int64).to(self.device)
        self.device_tokens[index[0], index[1]] = index[2]
        self.lengths[torch.tensor(rows, dtype=torch.int64)] = torch.tensor(grown, dtype=torch.int32).to(self.device)
