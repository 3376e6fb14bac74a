"""One pair of tiny models for all tests of this folder."""

from __future__ import annotations

import pytest

from specdec_fast.lab.engines.recording import Pair
from specdec_fast.lab.engines.scripts import build_pairs


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pairs")
    build_pairs.build(folder / "llama", "llama")
    return Pair.load(folder / "llama")
