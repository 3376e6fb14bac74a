"""`specdec generate --weights`: the text is that of the engine with int8 weights."""

from __future__ import annotations

import json
from typing import Any

from specdec_fast import SamplingParams, load


def test_int8_weights_are_used_and_reported(run: Any, models: dict[str, str]) -> None:
    arguments = ["generate", "Once upon", "--model", models["target"], "--seed", "7", "--max-new-tokens", "40"]
    result = run(*arguments, "--ignore-eos", "--json", "--weights", "int8")
    assert result.exit_code == 0, result.stderr
    params = SamplingParams(seed=7, max_new_tokens=40, ignore_eos=True)
    want = load(models["target"], weights="int8").generate(["Once upon"], params)[0].text
    answer = json.loads(result.stdout)
    assert answer["weights"] == "int8"
    assert answer["requests"][0]["text"] == want


def test_another_kind_of_weights_is_refused(run: Any, models: dict[str, str]) -> None:
    result = run("generate", "Once upon", "--model", models["target"], "--weights", "int4")
    assert result.exit_code != 0
    assert "--weights: got 'int4'; expected 'int8', or leave --weights out" in result.stderr
