"""The examples of the contributing pages: two drafters with their tests, a rule and an operator."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documents.programs import programs


def test_the_examples_of_contributing_work(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters and rule decode like no drafter, the drafters' tests pass, the operator picks its backend."""
    import torch
    from oracles.automaton import AutomatonTarget, random_logits

    from specdec_fast import Engine, SamplingParams
    from specdec_kernels import OPS, use_backend

    scope: dict[str, Any] = {}
    for document in [root / "CONTRIBUTING.md", *sorted((root / "docs/contributing").glob("*.md"))]:
        for block in programs(document):
            exec(compile(block.source, f"{document.name}:{block.line}", "exec", dont_inherit=True), scope)
            for name in ("stutter", "bigram"):
                monkeypatch.setitem(sys.modules, f"specdec_fast.drafters.{name}", SimpleNamespace(**scope))
    scope["test_a_run_of_equal_tokens_is_drafted"]()
    scope["test_pairs_of_the_text_are_drafted_when_they_return"]()
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    texts = []
    for drafter, rule in (
        (None, "replay"),
        (scope["StutterDrafter"](), "replay"),
        (scope["BigramDrafter"](), "replay"),
        (scope["BigramDrafter"](), scope["RULE"]),
    ):
        engine = Engine(AutomatonTarget(random_logits(5, 7)), drafter, rule=rule)
        texts.append([handle.tokens for handle in engine.generate([[1, 2], [3]], params)])
    assert len(texts[0][0]) == 12 and texts == [texts[0]] * 4
    try:
        x, scaled = torch.ones(2), scope["scaled"]
        with use_backend():
            assert scaled.choose_backend(x, 2) == "doubling" and scaled.choose_backend(x, 3) == "reference"
        with use_backend(example_scaled="reference"):
            assert scaled(x, 2).tolist() == [2, 2]
    finally:
        OPS.pop("example_scaled", None)
