"""Real vLLM with the plugin: texts have the target's distribution, by exact enumeration of three tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oracles.vllm_models import draw_triples, joint_law, p_of_triples, penalized

from .conftest import WITHOUT_VLLM, Engines

pytestmark = [WITHOUT_VLLM, pytest.mark.slow]

FILTERS = {"no filter": {}, "top-k and top-p": {"top_k": 6, "top_p": 0.8}}
SETTINGS = [("replay", "none"), ("rejection", "sampled"), ("block", "sampled"), ("token", "suffix")]
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("rule", "drafts"), SETTINGS)
def test_three_tokens_have_the_exact_distribution(
    engines: Engines, tiny: Path, rule: str, drafts: str, filters: str
) -> None:
    asked: dict[str, Any] = {"temperature": 0.9, **FILTERS[filters]}
    assert p_of_triples(draw_triples(engines(rule, drafts), 4000, **asked), joint_law(tiny, **asked)) > 1e-5


@pytest.mark.parametrize(("rule", "drafts"), [("replay", "greedy"), ("rejection", "sampled"), ("block", "sampled")])
def test_penalties_change_the_distribution_at_every_node(engines: Engines, tiny: Path, rule: str, drafts: str) -> None:
    drawn = draw_triples(engines(rule, drafts), 3000, temperature=0.9, **PENALTIES)
    exact = joint_law(tiny, penalized(1.4, 0.5, 0.3), temperature=0.9)
    assert p_of_triples(drawn, exact) > 1e-5
    assert p_of_triples(drawn, joint_law(tiny, temperature=0.9)) < 1e-9, "the test notices penalties"


@pytest.mark.parametrize(("rule", "drafts"), [("replay", "greedy"), ("rejection", "sampled")])
def test_requests_without_seeds_are_independent(engines: Engines, tiny: Path, rule: str, drafts: str) -> None:
    drawn = draw_triples(engines(rule, drafts), 3000, temperature=0.9, seed=None)
    assert p_of_triples(drawn, joint_law(tiny, temperature=0.9)) > 1e-5


def test_stock_speculation_on_a_cpu_is_still_wrong(engines: Engines, tiny: Path) -> None:
    """If this fails, vLLM has mended its fault 55005 on CPUs: change docs/guides/vllm.md, which warns of it."""
    drawn = draw_triples(engines(None, "sampled"), 1000, temperature=0.9)
    assert p_of_triples(drawn, joint_law(tiny, temperature=0.9)) < 1e-9
    stock = draw_triples(engines(None), 2000, temperature=0.9)
    assert p_of_triples(stock, joint_law(tiny, temperature=0.9)) > 1e-5, "without drafts vLLM is right"
