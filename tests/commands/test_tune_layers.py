"""`specdec tune layers`: searches, goes on where it stopped, and the drafter finds the result."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from specdec_fast.core.confidence import Interval
from specdec_fast.targets.skipped_layers import SkippedLayers
from specdec_fast.tune.skipped_layers_search import Verdict


def verdict_of(cost: float, apart: float = 0.02) -> Any:
    """A `judge` that finds this cost, and measures nothing."""

    def judge(measure: Any, skip: SkippedLayers, rounds: int) -> Verdict:
        return Verdict(skip, Interval(cost, cost - apart, cost + apart), rounds, 1.25)

    return judge


TINY = ["--new-tokens", "4", "--repeats", "1", "--threads", "1"]


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path / "data"))
    (tmp_path / "prompts.txt").write_text("one two three\nfour five\n")
    return str(tmp_path / "prompts.txt")


@pytest.mark.parametrize("method", ["bayes", "similarity"])
def test_a_search_and_its_continuation(
    run: Any, models: dict[str, str], prompts: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "bayes":
        pytest.importorskip("optuna")
    asked = ["tune", "layers", "-m", models["target"], "-f", prompts, "--lines", "--method", method, *TINY]
    monkeypatch.setattr("specdec_fast.tune.skipped_layers_search.judge", verdict_of(0.9))
    trials = 4 if method == "bayes" else 3
    result = run(*asked, "--trials", str(trials))
    assert result.exit_code == 0, result.output
    assert f"trial {trials} of {trials}: " in result.output and f"again {trials + 1} of " in result.output
    assert method == "bayes" or "similarity: 4 choices, 3 to be timed (--trials)\n" in result.stdout
    (place,) = (Path(prompts).parent / "data" / "layers").glob("target-*.json")
    stored = json.loads(place.read_text())
    first = len(stored["trials"])
    assert first == trials + min(3, len({json.dumps(trial["skip"]) for trial in stored["trials"]}))
    assert place.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("specdec_fast.tune.search_plot.search_chart", lambda *_: b"")  # it takes a while
    again = json.loads(run(*asked, "--trials", str(first + 4), "--json").stdout)
    assert again["trials"] > first and again["file"] == str(place)
    if method == "similarity":
        assert json.loads(run(*asked, "--trials", "2", "--json").stdout)["trials"] == again["trials"], "no more"
    assert json.loads(place.read_text())["trials"][:first] == stored["trials"]
    fresh = json.loads(run(*asked, "--trials", "2", "--fresh", "--json", "--out", str(place)).stdout)
    assert fresh["trials"] <= 2 + 3 and {"attention", "mlp", "cost", "noise", "pays"} <= set(fresh)
    text = [
        run("generate", "a b a b", "-m", models["target"], "-T", "0", "--max-new-tokens", "8", *more)
        for more in ([], ["--drafter", "layer_skip"], ["--drafter", "layer_skip", "-o", f"layers={place}"])
    ]
    assert [each.exit_code for each in text] == [0, 0, 0] and len({each.stdout for each in text}) == 1


def test_ctrl_c_keeps_the_trials(
    run: Any, models: dict[str, str], prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_fast.tune import skipped_layers_search

    place, calls, measure = tmp_path / "found.json", iter(range(9)), skipped_layers_search.Bench.__call__

    def interrupted(self: Any, skip: Any) -> Any:
        if next(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return measure(self, skip)

    asked = ["tune", "layers", "-m", models["target"], "-f", prompts, "--lines", "--method", "similarity", *TINY]
    asked += ["--trials", "4", "--out", str(place)]
    monkeypatch.setattr(skipped_layers_search.Bench, "__call__", interrupted)
    result = run(*asked)
    assert result.exit_code == 130 and "trial 2 of 4: " in result.stdout and "trial 3 " not in result.stdout
    goes_on = f"the best of them is in {place}; run the same command again to continue"
    assert result.stderr == f"specdec: interrupted after 2 trials; {goes_on}\n"
    assert len(json.loads(place.read_text())["trials"]) == 2
    monkeypatch.setattr(skipped_layers_search.Bench, "__call__", measure)
    again = run(*asked)
    assert again.exit_code in (0, 1) and "2 trials of earlier runs" in again.stdout and "trial 3 of " in again.stdout


def test_a_search_is_not_continued_under_other_settings(
    run: Any, models: dict[str, str], prompts: str, tmp_path: Path
) -> None:
    place, fewer, others = (str(tmp_path / name) for name in ("found.json", "fewer.txt", "others.txt"))
    Path(fewer).write_text("one two three")
    Path(others).write_text("one two three\nfour six")
    asked = ["tune", "layers", "-m", models["target"], "-f", prompts, "--lines", "--method", "similarity", *TINY]
    asked += ["--trials", "1", "--out", place]
    assert run(*asked).exit_code in (0, 1)
    stored = Path(place).read_text()
    for more, message in (
        (["--new-tokens", "5"], "new_tokens 4; got 5"),
        (["--stop", "fixed"], "stop 'adaptive'; got 'fixed'"),
        (["--dtype", "float64"], "dtype 'float32'; got 'float64'"),
        (["--device", "cpu:0"], "device 'cpu'; got 'cpu:0'"),
        (["--threads", "2"], "threads 1; got 2"),
        (["--model", models["draft"]], f"model {models['target']!r}; got {models['draft']!r}"),
        (["--file", fewer], "prompts 2; got 1"),
        (["--file", others], "prompt_ids '"),
    ):
        result = run(*asked, *more)
        assert result.exit_code == 2 and f" measured with {message}" in result.stderr
        assert (
            result.stderr.startswith(f"specdec: error: {place}: holds ") and "start again with --fresh" in result.stderr
        )
    assert Path(place).read_text() == stored
    assert run(*asked, "--stop", "fixed", "--fresh").exit_code in (0, 1)
    assert json.loads(Path(place).read_text())["stop"] == "fixed"


@pytest.mark.parametrize(("cost", "pays"), [(0.9, True), (0.99, False), (1.1, False)])
def test_a_gain_within_the_noise_is_no_success(
    run: Any, models: dict[str, str], prompts: str, monkeypatch: pytest.MonkeyPatch, cost: float, pays: bool
) -> None:
    monkeypatch.setattr("specdec_fast.tune.skipped_layers_search.judge", verdict_of(cost))
    monkeypatch.setattr("specdec_fast.tune.search_plot.search_chart", lambda *_: b"")  # it takes a while
    asked = ["tune", "layers", "-m", models["target"], "-f", prompts, "--lines", "--method", "similarity", *TINY]
    result = run(*asked, "--trials", "2")
    assert result.exit_code == (0 if pays else 1), result.output
    refusal = f"no set of layers pays on this model: the best of 4 trials takes {cost:.3f} +- 0.020 of plain decoding's"
    assert (refusal in result.stdout) is not pays
    assert ("use --drafter suffix or ngram" in result.stdout) is not pays
    assert ("specdec generate" in result.stdout) is pays
    assert "trial 2 of 2: " in result.stdout and " left" in result.stdout
    again = run(*asked, "--trials", "2", "--json")
    report = json.loads(again.stdout)
    assert again.exit_code == (0 if pays else 1) and report["pays"] is pays
    assert report["interval"] == pytest.approx([cost - 0.02, cost + 0.02]) and report["confidence"] == 0.95
    assert (report["command"] is None) is not pays and (report["advice"] is None) is pays
    assert len(report["attention"]) + len(report["mlp"]) > 0, "something is skipped"
    stored = json.loads(Path(report["file"]).read_text())
    assert stored["pays"] is pays and stored["attention"] == report["attention"] and len(stored["trials"]) == 4


def test_bad_input(run: Any, models: dict[str, str], prompts: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"format": "specdec-layers-1", "num_layers": 9}')
    for more, message in (
        (["--method", "guess"], "--method: got 'guess'; expected one of bayes, similarity"),
        (["--trials", "0"], "--trials: got 0; expected at least 1"),
        (["--rounds", "2"], "--rounds: got 2; expected at least 3"),
        (["--new-tokens", "0"], "new_tokens: got 0; expected at least 1"),
        (["--out", str(other)], "is for a model of 9 layers; expected 2"),
        (["--stop", "never"], "layer_skip stop: got 'never'"),
    ):
        result = run("tune", "layers", "-m", models["target"], "-f", prompts, *more)
        assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr
