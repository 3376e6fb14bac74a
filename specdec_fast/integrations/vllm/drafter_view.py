"""What the project's drafters see of vLLM's batch: texts under row numbers that stay when vLLM moves a request.

Tests: tests/integrations/vllm/test_drafters.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_fast.integrations.vllm.request_batch import RequestBatch
from specdec_fast.sampling.sampling_tensors import SamplingTensors

_HOST = torch.device("cpu")


_COMPARED = 16
"""Newest tokens that are compared if the id of a request says which text it is."""


class _Text:
    """The committed text of a request: as a list for drafters, and as an array for comparisons.

    Args:
        named: Whether an id tells this text from others. Then only its newest tokens are compared.
    """

    def __init__(self, named: bool) -> None:
        self.tokens: list[int] = []
        self._array: Any = None if named else np.zeros(0, dtype=np.int32)

    def update(self, row: Any) -> bool:
        """Appends what is new. Returns False if the text is another one."""
        known = len(self.tokens)
        if known > len(row):
            return False
        if self._array is None:
            newest = max(known - _COMPARED, 0)
            same = self.tokens[newest:] == row[newest:known].tolist()
        else:
            same = np.array_equal(self._array, row[:known])
        if same and known < len(row):
            self.tokens += row[known:].tolist()
            if self._array is not None:
                self._array = row.copy()
        return bool(same)


class BatchView:
    """A `StateView` over vLLM's batch.

    vLLM names no requests when it asks for drafts. The plugin knows their ids; without it, a request is known by its
    place, and found again by its text.

    Args:
        begin: Starts rows: `begin(view, rows, None)`.
        release: Ends rows: `release(rows)`.

    Attributes:
        batch: The requests of the step, or None without the plugin.
        requests: Ids of the requests that live, or None without the plugin.
    """

    def __init__(
        self, begin: Callable[[Any, Sequence[int], None], None], release: Callable[[Sequence[int]], None]
    ) -> None:
        self._begin, self._release = begin, release
        self.batch: RequestBatch | None = None
        self.requests: Container[str] | None = None
        self._rows: dict[str | int, int] = {}
        self._texts: dict[int, _Text] = {}
        self._next = 0
        self._sampling = _greedy(0)

    @property
    def device(self) -> torch.device:
        """Where drafts are made: on the host, since vLLM takes lists."""
        return _HOST

    def tokens(self, row: int) -> Sequence[int]:
        """Returns the text of a row."""
        return self._texts[row].tokens

    def length(self, row: int) -> int:
        """Returns the length of a row's text."""
        return len(self._texts[row].tokens)

    def prompt_length(self, row: int) -> int:
        """Returns 0: vLLM does not say where prompts end."""
        return 0

    def longest(self, row: int) -> int:
        """Returns a length that no text exceeds: vLLM does not say where texts end."""
        return 2**31 - 1

    def cache_salt(self, row: int) -> str | None:
        """Returns None: no prefixes are shared."""
        return None

    def sampling(self, rows: Sequence[int]) -> SamplingTensors:
        """Returns the parameters of the rows of the current call, in its order."""
        return self._sampling

    def row_of(self, key: str | int) -> int:
        """Returns the row number of a request, a new one for a new request."""
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._next
            self._next += 1
        return row

    def follow(self, places: Sequence[int], lengths: Sequence[int], token_ids: Any) -> list[int]:
        """Brings the texts up to date, starts new rows and ends those whose request has ended.

        Args:
            places: Places in vLLM's batch to draft for.
            lengths: Length of the text at each place of the batch.
            token_ids: Texts by place, [max_reqs, max_len].

        Returns:
            The row of each place.
        """
        if self.requests is not None:
            self._end([key for key in self._rows if key not in self.requests])
        rows, started = [], []
        for place in places:
            key = place if self.batch is None else self.batch.request_ids[place]
            text = token_ids[place, : lengths[place]]
            row = self.row_of(key)
            if row in self._texts and not self._texts[row].update(text):
                self._end([key])
                row = self.row_of(key)
            if row not in self._texts:
                self._texts[row] = _Text(named=self.batch is not None)
                self._texts[row].update(text)
                started.append(row)
            rows.append(row)
        if started:
            self._begin(self, started, None)
        return rows

    def _end(self, keys: Sequence[str | int]) -> None:
        rows = [self._rows.pop(key) for key in keys]
        for row in rows:
            self._texts.pop(row, None)
        if rows:
            self._release(rows)

    def keys(self, places: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Selects the parameters of the places for `sampling`.

        Args:
            places: Places in vLLM's batch.
            lengths: Length of the text at each place of the batch.

        Returns:
            Seeds, int64, and positions of the roots, int32.
        """
        positions = torch.tensor([lengths[place] - 1 for place in places], dtype=torch.int32)
        if self.batch is None:
            self._sampling = _greedy(len(places))
        else:
            own = self.batch.host_sampling()
            at = torch.tensor(list(places))
            self._sampling = SamplingTensors(
                own.temperature[at],
                own.top_k[at],
                own.top_p[at],
                own.min_p[at],
                own.seeds[at],
                all_greedy=own.all_greedy,
            )
        return self._sampling.seeds, positions


def _greedy(count: int) -> SamplingTensors:
    """Parameters of greedy requests, for engines whose parameters are not known."""
    zero = torch.zeros(count)
    whole = zero.to(torch.int32)
    return SamplingTensors(zero, whole, zero + 1, zero, zero.to(torch.int64), all_greedy=True)
