"""`--rule`: best reports its choice, lossy reports that it is lossy, and options are part of the name."""

from __future__ import annotations

import json
from typing import Any

import pytest

FEW = ["--max-new-tokens", "12", "--seed", "7", "--temperature", "0.9"]


@pytest.mark.parametrize(
    ("drafter", "temperature", "rule", "why"),
    [
        ("ngram", "0.9", "replay", "the drafter proposes deterministic tokens"),
        ("draft_model", "0.9", "block", "the drafter samples"),
        ("draft_model", "0", "greedy", "at temperature 0"),
    ],
)
def test_best_says_what_it_picked(
    run: Any, pair: list[str], drafter: str, temperature: str, rule: str, why: str
) -> None:
    where = pair if drafter == "draft_model" else [*pair[:2], "--drafter", drafter]
    result = run("generate", "Once upon", *where, *FEW, "--temperature", temperature, "--rule", "best", "--json")
    report = json.loads(result.stdout)
    assert report["rule"] == rule and report["lossless"] is True
    assert f"note: rule best is {rule} here: {why}" in result.stderr
    assert ("expected accepted tokens per draft of a sample: " in result.stderr) == (rule == "block")


@pytest.mark.parametrize("rule", ["lossy", "lossy:lenience=0.5"])
def test_lossy_rules_say_so_everywhere(run: Any, pair: list[str], rule: str) -> None:
    result = run("generate", "Once upon", *pair, *FEW, "--rule", rule, "--json")
    report = json.loads(result.stdout)
    assert report["rule"] == rule and report["lossless"] is False
    words = " ".join(result.stderr.split())
    assert f"warning: rule {rule}: texts do not have the target's distribution" in words
    plain = run("generate", "Once upon", *pair, *FEW).stderr
    assert "lossy" not in plain and "target's distribution" not in " ".join(plain.split())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("wish", "rule: got 'wish'; expected one of best, "),
        ("lossy:lenience=2", "rule lossy lenience: got 2.0"),
        ("rejection:x=1", "which has no options"),
    ],
)
def test_bad_rules_end_in_one_line(run: Any, pair: list[str], rule: str, message: str) -> None:
    result = run("generate", "Once upon", *pair, *FEW, "--rule", rule)
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr
