"""Option `--sampling`: the model's own sampling parameters are followed, or a note says that they are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec_fast import SamplingParams
from specdec_fast.commands.sampling_options import follow_defaults

NOTE = "specdec: note: the model's generation_config sets temperature=0.6, top_k=1, max_new_tokens=6, which is not used"


@pytest.fixture(scope="module")
def choosy(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder whose generation config sets sampling parameters."""
    place = tmp_path_factory.mktemp("choosy") / "model"
    shutil.copytree(models["target"], place)
    file = Path(place) / "generation_config.json"
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 1, "max_new_tokens": 6}
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return str(place)


def sampling(run: Any, model: str, *options: str) -> tuple[dict[str, Any], str]:
    result = run("generate", "Once", "--model", model, "--ignore-eos", "--json", *options)
    assert result.exit_code == 0
    (request,) = json.loads(result.stdout)["requests"]
    return {**request["sampling"], "count": len(request["tokens"])}, result.stderr


def test_the_model_s_parameters_are_followed_but_for_given_options(run: Any, choosy: str) -> None:
    found, noted = sampling(run, choosy, "--sampling", "model")
    assert (found["temperature"], found["top_k"], found["count"]) == (0.6, 1, 6) and noted == ""
    found, _ = sampling(run, choosy, "--sampling", "model", "--top-k", "0", "--max-new-tokens", "3")
    assert (found["temperature"], "top_k" in found, found["count"]) == (0.6, False, 3)
    found, _ = sampling(run, choosy, "--sampling", "model", "--rule", "greedy")
    assert found["temperature"] == 0.0


def test_rule_best_chooses_by_the_model_s_parameters(
    run: Any, choosy: str, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def sample(target: object, drafter: object, requests: Any, *more: object) -> dict[str, Any]:
        seen.extend(params for _, params in requests)
        return {}

    monkeypatch.setattr("specdec_fast.loading.engine_builder.sample_ways", sample)
    sampling(run, choosy, "--draft", models["draft"], "--rule", "best", "--sampling", "model", "--top-k", "3")
    (params,) = seen
    assert (params.temperature, params.top_k, params.max_new_tokens) == (0.6, 3, 6)


def test_a_note_says_that_they_are_not_followed_where_it_matters(run: Any, choosy: str, models: dict[str, str]) -> None:
    found, noted = sampling(run, choosy, "--max-new-tokens", "4")
    assert found["temperature"] == 1.0 and noted.startswith(NOTE) and noted.count("\n") == 1
    for options in (("--sampling", "neutral"), ("--temperature", "0.5"), ("--top-p", "0.9")):
        assert sampling(run, choosy, "--max-new-tokens", "4", *options)[1] == ""
    assert sampling(run, models["target"], "--max-new-tokens", "4")[1] == ""


def test_other_values_are_refused(run: Any, models: dict[str, str]) -> None:
    result = run("generate", "x", "--model", models["target"], "--sampling", "mode")
    assert result.exit_code == 2
    assert "--sampling: got 'mode'; expected one of model, neutral; did you mean 'model'?" in result.stderr


def test_defaults_replace_what_was_not_given() -> None:
    flags = SamplingParams(temperature=1.0, max_new_tokens=1024, seed=3, top_p=0.5)
    defaults = SamplingParams(temperature=0.6, top_p=0.9, min_p=0.1)
    found = follow_defaults(flags, defaults, {"top_p", "seed"})
    assert found == SamplingParams(temperature=0.6, max_new_tokens=1024, seed=3, top_p=0.5, min_p=0.1)
