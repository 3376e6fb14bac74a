"""Engines and their settings by name."""

from __future__ import annotations

import pytest

from specdec_fast.lab.engines.scripts import build_pairs, record
from specdec_fast.lab.engines.settings import ENGINES, settings_of


def test_settings_come_in_the_order_of_tables() -> None:
    assert [each.name for each in settings_of("transformers", ["assisted", "plain"])] == ["plain", "assisted"]
    assert settings_of("vllm") == ENGINES["vllm"]


def test_every_setting_can_be_recorded() -> None:
    assert set(ENGINES) == set(record.RECORDERS)
    for settings in ENGINES.values():
        assert len({each.name for each in settings}) == len(settings)
        assert {each.pair for each in settings} <= set(build_pairs.PAIRS)


@pytest.mark.parametrize(
    ("engine", "names", "message"),
    [
        ("vlm", [], r"--engine: got 'vlm'.*did you mean 'vllm'"),
        ("vllm", ["ngrams"], r"--setting of engine vllm.*did you mean 'ngram'"),
        ("callable", ["plain"], r"--setting of engine callable.*expected.*sampler"),
    ],
)
def test_an_unknown_name_is_explained(engine: str, names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        settings_of(engine, names)
