"""Accepted tokens by enumeration are those of the closed forms, and no rule beats the best possible."""

from __future__ import annotations

import pytest

from specdec_fast.lab.exact_distributions import has_a_dist, own_rules, takes_trees
from specdec_fast.lab.expected_acceptance import Expected, at_a_node, on_chains, run_expected
from specdec_fast.rules import get_rule

RULES = [name for name in own_rules() if has_a_dist(get_rule(name))]


@pytest.mark.parametrize("name", RULES)
def test_closed_forms_hold(name: str) -> None:
    found = run_expected([name])
    assert [row for row in found if not row.holds] == []
    assert not takes_trees(get_rule(name)) or len(found) >= 18


def test_the_series_and_the_sums_are_compared() -> None:
    sources = {row.source for row in on_chains("rejection", 3)}
    assert sources == {"sum of E[prod min(1, p/q)]", "(1 - a^(g+1)) / (1 - a)"}
    assert any(0.2 < row.accepted < 2.9 for row in on_chains("rejection", 3))


@pytest.mark.parametrize("name", [name for name in RULES if takes_trees(get_rule(name)) and get_rule(name).uses_q])
def test_the_hybrid_node_reaches_the_bound_and_the_others_do_not(name: str) -> None:
    rows = {proposal: at_a_node(name, proposal, 5) for proposal in ("sampled", "without", "hybrid")}
    assert all(row.relation == "=" for row in rows["hybrid"])
    assert all(row.relation == "<=" for row in rows["sampled"][1:])
    gaps = [row.value - row.accepted for seed in range(6) for row in at_a_node(name, "sampled", seed)[1:]]
    assert max(gaps) > 1e-3, "a bound that is always met is no bound"


def test_a_wrong_value_does_not_hold() -> None:
    assert not Expected("rejection", "", 1.0, 1.0 + 1e-9, "=", "").holds
    assert not Expected("rejection", "", 1.0 + 1e-9, 1.0, "<=", "").holds
    assert Expected("rejection", "", 0.5, 1.0, "<=", "").holds
