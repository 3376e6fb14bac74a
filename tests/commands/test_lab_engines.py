"""`specdec lab --engine` as a program: rows, exit codes, bad input, an interrupt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from specdec_fast.lab.engines import recording
from specdec_fast.lab.engines.recording import Pair
from specdec_fast.lab.engines.scripts import build_pairs

Run = Callable[..., Result]
SOURCE = """
import json
from pathlib import Path
import numpy as np

def make(models, sharpen=1.0):
    folder = Path(models["target"]).parent
    texts = json.loads((folder / "texts.json").read_text())
    logits = np.load(folder / "logits.npy").astype(float)

    def dist(row):
        weights = np.exp(logits[row] / 0.9 * sharpen)
        return weights / weights.sum()

    def one(prompt, seed, count, temperature):
        if temperature == 0:
            return texts["greedy"][texts["prompts"].index(prompt)]
        source, row, found = np.random.default_rng(seed), 0, []
        for depth in range(3):
            found.append(int(source.choice(16, p=dist(row))))
            row = 1 + found[0] if depth == 0 else 17 + 16 * found[0] + found[-1]
        return found + [0] * (count - 3)

    def sample(prompts, seeds, max_new_tokens, temperature, **more):
        return [one(prompt, seed, max_new_tokens, temperature) for prompt, seed in zip(prompts, seeds)]
    return sample

def wrong(models):
    return make(models, sharpen=1.3)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pairs")
    build_pairs.build(folder / "llama", "llama")
    return Pair.load(folder / "llama")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Pair) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recording, "build_pair", lambda folder, name, python: built)


@pytest.mark.usefixtures("mine")
def test_a_right_sampler_and_a_wrong_one(run: Run, tmp_path: Path) -> None:
    asked = ["lab", "--engine", "callable", "--draws", "1000", "--temperature", "0.9", "--out", "found"]
    result = run(*asked, "--sampler", "mine:make")
    assert result.exit_code == 0, result.output
    assert "| matches | 8/8 | 16/16 | 16/16 |" in result.stdout and "results: found" in result.stdout
    result = run(*asked, "--sampler", "mine:wrong", "--json")
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout)["rows"]
    assert row["verdict"] == "differs" and row["greedy"] == [8, 8] and row["draws"] == 1000 and row["date"]
    assert len(json.loads((tmp_path / "found" / "engines.json").read_text())["rows"]) == 1, "a row is replaced"
    assert "**differs**" in (tmp_path / "found" / "engines.md").read_text()


@pytest.mark.usefixtures("mine")
def test_an_engine_that_cannot_run_gives_rows_with_the_reason(run: Run, tmp_path: Path) -> None:
    result = run("lab", "--engine", "vllm", "--setting", "plain", "--out", "found", "--json")
    rows = json.loads(result.stdout)["rows"]
    assert result.exit_code == 1 and len(rows) == 2, "two samplings by default"
    assert {row["verdict"] for row in rows} == {"did not run"}
    assert "No module named 'vllm'" in rows[0]["reason"]


@pytest.mark.usefixtures("mine")
def test_an_interrupt_keeps_the_rows(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def record(engine: str, setting: object, *more: object, **named: object) -> object:
        begun.append(engine)
        if len(begun) == 2:
            raise KeyboardInterrupt
        raise recording.EngineFailedError("no such thing")

    monkeypatch.setattr(recording, "record", record)
    result = run("lab", "--engine", "transformers", "--out", "found")
    assert result.exit_code == 130 and "rows of 2 tests are kept in found" in result.output.replace("\n", " ")
    assert len(json.loads((tmp_path / "found" / "engines.json").read_text())["rows"]) == 2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--engine", "vlm"], "did you mean 'vllm'"),
        (["--engine", "vllm", "--setting", "n-gram"], "did you mean 'ngram'"),
        (["--engine", "callable"], "got no --sampler"),
        (["--engine", "vllm", "--sampler", "a:b"], "got --sampler; expected --sampler MODULE:FACTORY"),
        (["--engine", "callable", "--sampler", "mine"], "expected MODULE:FACTORY"),
        (["--setting", "plain"], "--setting: got it without --engine"),
        (["--sampler", "a:b"], "--sampler: got it without --engine"),
        (["--engine", "vllm", "--python", "nowhere/python"], "nowhere/python does not exist"),
        (["--engine", "vllm", "--temperature", "0"], "expected a positive number"),
    ],
)
def test_bad_input_is_explained(run: Run, tmp_path: Path, asked: list[str], message: str) -> None:
    result = run("lab", *asked, "--out", str(tmp_path / "r"))
    assert result.exit_code != 0 and message in " ".join(result.output.split()), result.output
    assert not (tmp_path / "r").exists()
