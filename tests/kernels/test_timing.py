"""Timing on a GPU that is not the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from specdec_kernels.inspection import timing


def test_graphs_are_timed_on_the_requested_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(timing, "graph_times", lambda sides, rounds: {"": float(current[-1].index or 0)})
    assert timing.seconds_of(torch.device("cuda:1"), [], 3) == 1.0 and not current
