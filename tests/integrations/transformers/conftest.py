"""The bundled pair as transformers' models: one untouched, and attached ones, each with another drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specdec_fast.integrations.transformers import attach, attached, detach
from specdec_fast.loading import ASSETS

TARGET = ASSETS / "demo-target"
TEXTS = ["And it came to pass", "In the beginning", "1:1 And the sons of Adam were seven"]


def load_target() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TARGET, padding_side="left")


@pytest.fixture(scope="session")
def stock() -> Any:
    """The model as transformers has it. Nothing attaches it."""
    return load_target()


@pytest.fixture(scope="session")
def attached_by() -> Iterator[Callable[[str], Any]]:
    """Attached models by drafter, made once."""
    made: dict[str, Any] = {}

    def get(drafter: str) -> Any:
        if drafter not in made:
            draft = "demo-draft" if drafter.startswith("draft_") else None
            made[drafter] = attach(load_target(), draft, drafter)
        return made[drafter]

    yield get
    for model in made.values():
        engine = attached(model).engine
        assert engine.idle, "a call left requests behind"
        engine.reset_prefix_cache()
        pages: Any = engine.target.cache.pages  # type: ignore[attr-defined]
        assert pages.num_free == pages.num_pages - 1, "a call left pages behind"
        detach(model)


@pytest.fixture
def drafted(attached_by: Callable[[str], Any]) -> Any:
    """An attached model with a draft model."""
    return attached_by("draft_model")


@pytest.fixture
def plain(attached_by: Callable[[str], Any]) -> Any:
    """An attached model without a drafter."""
    return attached_by("none")


@pytest.fixture
def one(tokenizer: Any) -> Any:
    """One prompt, as a tokenizer returns it."""
    return tokenizer(TEXTS[0], return_tensors="pt")


@pytest.fixture
def batch(tokenizer: Any) -> Any:
    """Three prompts of different lengths, padded on the left."""
    return tokenizer(TEXTS, return_tensors="pt", padding=True)
