"""Commands that `train` and `tune` print run as they are, with spaces in every path."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from oracles.tiny_folders import save_tiny

from specdec_fast.targets.skipped_layers import SkippedLayers
from specdec_fast.train.heads import training_curve

TEXT = Path(argparse.__file__).read_text(encoding="utf-8")[:4000]
TINY = ["--steps", "2", "--batch", "2", "--length", "16", "--threads", "1"]


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(training_curve, "training_curve", lambda *_: None)  # it takes a while
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path / "my data"))
    (tmp_path / "my text.txt").write_text(TEXT)
    (tmp_path / "my prompts.txt").write_text(TEXT[:200])
    return save_tiny(tmp_path / "my model", num_hidden_layers=6)


def printed(shown: str) -> list[str]:
    """The arguments of the printed command, as a shell would pass them."""
    (line,) = (line for line in shown.splitlines() if line.startswith("specdec generate"))
    return shlex.split(line)[1:]


def drafts(run: Any, command: list[str]) -> Any:
    """Runs a printed command, checks that drafts were verified, and returns its JSON."""
    result = run(*command, "--max-new-tokens", "8", "-T", "0", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["requests"][0]["stats"]["num_draft_tokens"] > 0 and found["drafter"] in command
    return found


@pytest.mark.parametrize("kind", ["medusa", "blockwise", "eagle", "eagle3"])
def test_commands_of_train_and_of_tune_tree(run: Any, target: str, tmp_path: Path, kind: str) -> None:
    out, shape = tmp_path / "my head", tmp_path / "my tree.json"
    extra = {"eagle3": ["--vocab", "60"]}.get(kind, [])
    trained = run("train", kind, str(tmp_path / "my text.txt"), "-m", target, "--out", str(out), *TINY, *extra)
    assert trained.exit_code == 0, trained.output
    command = printed(trained.stdout)
    assert drafts(run, command)["drafter_options"] == {"head": str(out / "head")}
    if kind == "blockwise":
        return
    where = ["--file", str(tmp_path / "my prompts.txt"), "--out", str(shape)]
    head = ["--drafter", kind, "-o", f"head={out / 'head'}"]
    how = ["--nodes", "4", "--new-tokens", "60", "--lines", "--how", "top_k"]
    tuned = run("tune", "tree", "-m", target, *head, *how, *where)
    assert tuned.exit_code == 0, tuned.output
    assert "+- " in tuned.stdout
    own = drafts(run, printed(tuned.stdout))["drafter_options"]
    assert own["head"] == str(out / "head") and own["shape"] == str(shape)
    if kind == "eagle3":
        layers = run("tune", "head-layers", "-m", target, "--head", str(out / "head"), *where[:2])
        assert layers.exit_code == 0, layers.output
        drafts(run, printed(layers.stdout))


def test_commands_of_tune_layers(run: Any, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_fast.core.confidence import Interval
    from specdec_fast.tune.skipped_layers_search import Verdict

    monkeypatch.setattr("specdec_fast.tune.search_plot.search_chart", lambda *_: b"")  # it takes a while
    monkeypatch.setattr(
        "specdec_fast.tune.skipped_layers_search.judge",
        lambda _, skip, rounds: Verdict(skip, Interval(0.8, 0.7, 0.9), rounds, 1.5),
    )
    place = tmp_path / "my layers" / "found.json"
    how = ["--method", "similarity", "--trials", "1", "--repeats", "1", "--new-tokens", "4", "--threads", "1"]
    asked = ["tune", "layers", "-m", target, "--file", str(tmp_path / "my prompts.txt"), "--out", str(place), *how]
    result = run(*asked, "--stop", "fixed")
    assert result.exit_code == 0, result.output
    found = drafts(run, printed(result.stdout))
    assert found["drafter_options"] == {"layers": str(place), "stop": "fixed"}
    stored = json.loads(place.read_text())
    assert len(SkippedLayers.of(stored["attention"], stored["mlp"])) > 0


def test_options_of_the_model_are_kept(run: Any, target: str, tmp_path: Path) -> None:
    """An adapter, remote code and a dtype."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    adapter, out = tmp_path / "my adapter", tmp_path / "head"
    model = AutoModelForCausalLM.from_pretrained(target)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(adapter)
    options = ["-m", target, "--adapter", str(adapter), "--trust-remote-code", "--dtype", "bfloat16"]
    trained = run("train", "blockwise", str(tmp_path / "my text.txt"), *options, "--out", str(out), *TINY)
    assert trained.exit_code == 0, trained.output
    setup = drafts(run, printed(trained.stdout))
    assert (setup["adapter"], setup["dtype"]) == (str(adapter), "bfloat16")
    assert "--trust-remote-code" in printed(trained.stdout)
    other = run("train", "blockwise", str(tmp_path / "my text.txt"), "-m", target, "--out", str(out), *TINY)
    assert other.exit_code == 2 and "differs from the run in it" in other.stderr, "another target"
