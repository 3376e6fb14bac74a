"""Engines of the real vLLM for the tests of the lane: each configuration is started once.

vLLM has an environment of its own (`make lane-vllm`). Elsewhere these tests are skipped, and nothing imports vLLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from oracles.vllm_models import ENVIRONMENT, engine_options, make_models

WITHOUT_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; make lane-vllm installs it")

Engines = Callable[..., Any]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the tiny target and its draft model."""
    folder = tmp_path_factory.mktemp("tiny")
    make_models(folder)
    return folder


@pytest.fixture(scope="session")
def engines(tiny: Path) -> Iterator[Engines]:
    """Makes engines in this process: `engines(rule, drafts, **options)`. Equal arguments give the same engine."""
    os.environ.update(ENVIRONMENT)
    made: dict[str, Any] = {}

    def engine(rule: str | None, drafts: str = "none", **options: Any) -> Any:
        key = json.dumps([rule, drafts, options], sort_keys=True)
        if key not in made:
            from vllm import LLM

            made[key] = LLM(**engine_options(tiny, rule, drafts, **options))
        return made[key]

    yield engine
    made.clear()
