"""`specdec lab` as a program: a report, exit codes, draws that are kept, bad input."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from specdec_fast.commands import open_engine
from specdec_fast.lab.kill_matrix import Planted
from specdec_fast.lab.mutant_rules import MUTANTS

FEW = ["--draws", "1500", "--prompts", "1", "--no-exact"]
Run = Callable[..., Result]


@pytest.fixture
def rendered() -> None:
    """For tests that look at the pictures."""


@pytest.fixture(autouse=True)
def composed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere they are composed and not rendered, which is most of the time of a short run."""

    def blank(figure: Any) -> bytes:
        from matplotlib import pyplot

        pyplot.close(figure)
        return b"blank"

    if "rendered" not in request.fixturenames:
        monkeypatch.setattr("specdec_fast.lab.plots.as_png", blank)
        monkeypatch.setattr("specdec_fast.lab.proof_figures.as_png", blank)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy texts of two short lengths, for tests that look at other things or at the first few tokens."""
    monkeypatch.setattr("specdec_fast.commands.lab._LENGTHS", (8, 24))


@pytest.mark.usefixtures("rendered")
def test_the_whole_command_on_a_tiny_pair(run: Run, pair: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("[5, 6, 7]")
    asked = ["--file", str(tmp_path / "mine.json"), "--draws", "1500", "--no-exact"]
    result = run("lab", *pair, *asked, "--out", str(tmp_path / "r"), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["holds"] and report["rule"] == "rejection" and report["draws"] == 1500
    assert "rule rejection is under test" in report["notes"][0] and "test that with --rule replay" in report["notes"][0]
    assert {each["name"].partition("/")[2] for each in report["places"]} <= {
        "first speculated", "after a rejection", "bonus",
    }  # fmt: skip
    assert report["tests"] and all(not each["rejected"] for each in report["tests"])
    assert report["places"] and all(each["tokens"][:3] == [5, 6, 7] for each in report["places"])
    assert len(report["greedy"]) == 3 and report["exact"] == []
    page = (tmp_path / "r" / "index.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == len(report["figures"])
    assert "rule rejection is under test" in page
    assert json.loads((tmp_path / "r" / "report.json").read_text())["holds"]


@pytest.mark.usefixtures("short")
def test_the_same_command_goes_on(run: Run, pair: list[str], tmp_path: Path) -> None:
    where = ["--out", str(tmp_path / "r"), "--seed", "4"]
    assert run("lab", *pair, *FEW, *where).exit_code == 0
    more = run("lab", *pair, "--prompts", "1", "--no-exact", "--draws", "2500", *where, "--json")
    assert more.exit_code == 0, more.output
    assert {row["draws"] for row in json.loads(more.stdout)["summaries"]} == {2500}
    other = run("lab", *pair, *FEW, *where, "--temperature", "0.5", "--json")
    assert other.exit_code == 0, other.output
    assert {row["draws"] for row in json.loads(other.stdout)["summaries"]} == {1500}, "draws of its own"
    assert "holds a report of other settings (temperature 1.0, now 0.5), which this run replaces" in other.stderr
    assert "other settings" not in more.stderr
    fresh = run("lab", *pair, *FEW, "--out", str(tmp_path / "r"), "--seed", "5", "--json")  # draws of its own
    assert "other settings (temperature 0.5, now 1.0; seed 4, now 5)" in fresh.stderr
    assert {row["draws"] for row in json.loads(fresh.stdout)["summaries"]} == {1500}


@pytest.mark.usefixtures("short")
def test_the_ledger_takes_new_seeds_every_time(run: Run, pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "ledger.json"
    for night in (1, 2):
        result = run("lab", *pair, *FEW, "--out", str(tmp_path / "r"), "--ledger", str(file))
        assert result.exit_code == 0 and f"ledger: {night} run{'s' if night > 1 else ''}, " in result.stdout
        assert "other settings" not in result.stderr, "a seed of its own is what a ledger is for"
    data = json.loads(file.read_text())
    assert data["next_seed"] == 2 and len(data["entries"]) >= 2
    for entry in data["entries"].values():  # every place is found again, and drawn at with other seeds
        assert entry["runs"] == 2 and sum(entry["counts"]) == 3000
    nights = [sorted((tmp_path / "r" / "draws" / f"seed-{night}").glob("*.npz")) for night in (0, 1)]
    assert [path.name.rpartition("-")[0] for path in nights[0]] == [path.name.rpartition("-")[0] for path in nights[1]]
    for first, second in zip(*nights, strict=True):
        assert (np.load(first)["first"] != np.load(second)["first"]).any()


def test_the_kill_matrix(run: Run, pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two distributions are measured; the tests of planted mistakes, which take minutes, answer at once."""
    planted = [Planted("dist_holds-a", True, 1.0), Planted("dist_holds-b", False, 2.0)]
    folders: list[Path] = []
    monkeypatch.setattr("specdec_fast.lab.kill_matrix.MUTANTS", MUTANTS[:2])
    monkeypatch.setattr("specdec_fast.lab.run.run_planted", lambda folder: folders.append(folder) or planted)
    few = ["--prompts", "1", "--no-exact", "--temperature", "0", "--mutants", "--draws", "1000"]
    alive = run("lab", *pair, *few, "--out", str(tmp_path / "a"), "--json")
    assert alive.exit_code == 1, alive.output
    assert "planted mutant survived or its check is broken: dist_holds-b" in alive.stderr
    assert "dist_holds-a" not in alive.stderr and folders[0].name == "mutants"
    report, page = json.loads(alive.stdout), (tmp_path / "a" / "index.html").read_text("utf-8")
    assert [row["name"] for row in report["mutants"]] == [mutant.name for mutant in MUTANTS[:2]]
    assert all(row["killed"] for row in report["mutants"]) and report["planted"][1]["passed"] is False
    assert "Mutants planted in the engine" in page and MUTANTS[1].name in page
    assert [page.count(words) for words in (">passed<", ">survived<")] == [1, 1]
    planted.pop()
    killed = run("lab", "--recorded", recorded(tmp_path / "x.npz", False), "--mutants", "--out", str(tmp_path / "b"))
    assert killed.exit_code == 0, killed.output
    assert "mutants: 2 of 2 killed; planted in the engine: 1 checks" in killed.stdout


@pytest.mark.usefixtures("short")
def test_a_lossy_rule_is_rejected(run: Run, pair: list[str], tmp_path: Path) -> None:
    result = run(
        "lab", *pair, "--draws", "20000", "--prompts", "1", "--no-exact", "--rule", "lossy", "--out", str(tmp_path)
    )
    assert result.exit_code == 1, result.output
    assert "distribution rejected" in result.stderr and "lossy by design" in result.stdout


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("drafter", "options", "rule"),
    [
        ("medusa", [], "replay"),
        ("eagle3", [], "replay"),
        ("eagle3", ["--drafter-option", "depth=0", "--rule", "traversal", "--pick", "without"], "traversal"),
    ],
)
def test_drafters_with_trained_heads(run: Run, tmp_path: Path, drafter: str, options: list[str], rule: str) -> None:
    """The article's two experiments with heads in place of a draft model: greedy texts, and draws of tokens."""
    few = ["--draws", "1200", "--prompts", "1", "--no-exact", "--draft-tokens", "6"]
    result = run("lab", "--drafter", drafter, *options, *few, "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    why = "as --rule says" if options else "which `best` picks (the drafter proposes deterministic tokens"
    assert any(f"rule {rule} is under test, {why}" in note for note in report["notes"])
    assert report["holds"] and report["rule"] == rule and report["drafter"] == drafter
    assert report.get("pick") == ("without" if "--pick" in options else None)
    judged = {test["name"] for test in report["tests"]}
    assert ("acceptance rate" in judged) == ("--pick" not in options), "siblings without replacement have no short form"
    assert all(text["identical"] for text in report["greedy"]) and report["greedy"][0]["tokens_per_pass"] > 1
    assert any(place["name"].endswith("first speculated") for place in report["places"])
    assert all(place["row_error"] < 1e-3 for place in report["places"])
    assert (tmp_path / "index.html").exists()


def recorded(path: Path, wrong: bool) -> str:
    dist = np.full(10, 0.1)
    bent = np.array([0.15, 0.05, *dist[2:]])
    tokens = np.random.default_rng(0).choice(10, 20_000, p=bent if wrong else dist)
    np.savez(path, tokens=tokens, p=dist)
    return str(path)


def test_recorded_draws_are_judged(run: Run, tmp_path: Path) -> None:
    good = run("lab", "--recorded", recorded(tmp_path / "a.npz", False), "--out", str(tmp_path / "a"))
    assert good.exit_code == 0, good.output
    bad = run("lab", "--recorded", recorded(tmp_path / "b.npz", True), "--out", str(tmp_path / "b"))
    assert bad.exit_code == 1 and "bin 0" in bad.stderr and "bin 1" in bad.stderr
    assert "at least one check does not hold" in (tmp_path / "b" / "index.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--draws", "0"], "--draws: got 0"),
        (["--seed", "1", "--ledger", "x.json"], "drop --seed"),
        (["--temperature", "0", "--ledger", "x.json"], "--ledger: got it without"),
        (["--recorded", "x.npz", "--ledger", "x.json"], "--ledger: got it without"),
        (["--recorded", "absent.npz"], "absent.npz does not exist"),
        (["--rule", "none-such"], "rule: got 'none-such'"),
        (["--prompts", "9999"], "--prompts: got 9999"),
        (["--min-p", "-0.1"], "error: --min-p: got -0.1"),
        (["--model", "/none/such", "--draft", "demo-draft"], "/none/such"),
        (["--file", "absent.txt"], "--file: got 'absent.txt'"),
        (["--file", "x.txt", "--prompts", "2"], "--file with --prompts: got both"),
        (["--file", "x.txt", "--recorded", "x.npz"], "--file with --recorded: got both"),
        (["--lines"], "--lines: got no --file"),
        (["--drafter", "eagle3", "--rule", "rejection"], "rule rejection"),
        (["--pick", "iid"], "pick for rule rejection: got 'iid'; expected one of sampled, deterministic"),
        (["--pick", "sampled", "--temperature", "0"], "--pick: got it without sampled drafts of this run"),
    ],
)
def test_bad_input_is_explained(run: Run, tmp_path: Path, options: list[str], words: str) -> None:
    result = run("lab", "--no-exact", "--out", str(tmp_path / "r"), *options)
    assert result.exit_code == 2 and words in result.stderr, result.output
    assert len(result.stderr.splitlines()) == 1, "one error, and nothing before it"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--model", "/any"],
            "--drafter: got none, which has no distribution of its own to draw from; expected --draft MODEL",
        ),
        (
            ["--drafter", "ngram"],
            "--drafter: got ngram, which has no distribution of its own to draw from; expected --draft",
        ),
        (["--drafter", "none"], "--drafter: got none, which has no distribution"),
        (["--rule", "greedy"], "rule greedy: got temperature 1.0; expected 0"),
    ],
)
def test_what_leaves_nothing_to_draw_is_refused_first(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
) -> None:
    monkeypatch.setattr(open_engine, "open_engine", lambda *_, **__: pytest.fail("models were loaded first"))
    result = run("lab", "--out", str(tmp_path / "r"), *options)
    assert result.exit_code == 2 and result.stderr.startswith(f"specdec: error: {words}"), result.output
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "r").exists()


def test_where_no_place_can_be_drawn_at_the_rest_is_reported(run: Run, pair: list[str], tmp_path: Path) -> None:
    asked = ["--rule", "traversal", "--pick", "hybrid", "--top-k", "1", "--no-exact", "--prompts", "1"]
    result = run("lab", *pair, *asked, "--out", str(tmp_path / "r"), "--json")
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert report["greedy"] and (tmp_path / "r").is_dir() and "nothing to draw at any place" in str(report["failures"])


def test_prompts_of_ones_own(run: Run, pair: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("one two\n\nthree\n")
    asked = ["--temperature", "0", "--no-exact", "--file", str(tmp_path / "mine.txt"), "--lines", "--rule", "replay"]
    result = run("lab", *pair, *asked, "--out", str(tmp_path / "r"), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {text["prompt"] for text in report["greedy"]} == {"mine-1", "mine-2"} and report["prompts"] == 2
    assert (
        report["file"] == str(tmp_path / "mine.txt") and "rule replay is under test, as --rule says" in report["notes"]
    )


def test_a_file_in_the_way_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "r").write_text("mine")
    result = run("lab", "--no-exact", "--out", str(tmp_path / "r"))
    assert result.exit_code == 2 and (tmp_path / "r").read_text() == "mine"


def test_ctrl_c_keeps_the_draws(forked: Callable[..., Any], pair: list[str], tmp_path: Path) -> None:
    out, errors = tmp_path / "r", tmp_path / "errors"
    many = ["--draws", "200000000", "--prompts", "1", "--no-exact", "--out", str(out)]
    process, output = forked("lab", *pair, *many, errors=errors)
    deadline = time.monotonic() + 240
    while not (out / "draws").exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(3.0)  # some chunks
    assert process.is_alive(), errors.read_text()
    os.kill(process.pid, signal.SIGINT)
    process.join(120)
    output.close()
    assert process.exitcode == 130, errors.read_text()
    assert "run the same command again" in errors.read_text()
    (kept,) = [np.load(path)["draws"] for path in (out / "draws").rglob("*.npz")]
    assert int(kept) > 0
