"""The examples of the contributing pages: a drafter with its test, a rule and an operator."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documents.programs import programs


def test_the_examples_of_contributing_work(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter and the rule decode like no drafter, the drafter's test passes, the operator picks its backend."""
    import torch
    from oracles.automaton import AutomatonTarget, random_logits

    from specdec_fast import Engine, SamplingParams
    from specdec_kernels import OPS, use_backend

    scope: dict[str, Any] = {}
    for document in [root / "CONTRIBUTING.md", *sorted((root / "docs/contributing").glob("*.md"))]:
        for block in programs(document):
            exec(compile(block.source, f"{document.name}:{block.line}", "exec", dont_inherit=True), scope)
            monkeypatch.setitem(sys.modules, "specdec_fast.drafters.stutter", SimpleNamespace(**scope))
    scope["test_a_run_of_equal_tokens_is_drafted"]()
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    texts = []
    for drafter, rule in (
        (None, "replay"),
        (scope["DRAFTER"](), "replay"),
        (scope["DRAFTER"](), scope["RULE"]),
    ):
        engine = Engine(AutomatonTarget(random_logits(5, 7)), drafter, rule=rule)
        texts.append([handle.tokens for handle in engine.generate([[1, 2], [3]], params)])
    assert len(texts[0][0]) == 12 and texts == [texts[0]] * 3
    try:
        x, scaled = torch.ones(2), scope["scaled"]
        with use_backend():
            assert scaled.choose_backend(x, 2) == "doubling" and scaled.choose_backend(x, 3) == "reference"
        with use_backend(example_scaled="reference"):
            assert scaled(x, 2).tolist() == [2, 2]
    finally:
        OPS.pop("example_scaled", None)
