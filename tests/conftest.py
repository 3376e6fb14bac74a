"""Shared by all tests: one thread (small tensors run faster so, and sums come out the same) and fixed seeds."""

from __future__ import annotations

import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a network

import pytest
import torch

SEED = 20_260_101


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same state of the stateful generators, alone or among others."""
    random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator for test data."""
    return torch.Generator().manual_seed(SEED)
