"""`specdec tune tree` writes a file that `draft_tree` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def test_a_shape_is_found_written_and_used(run: Any, pair: list[str], tmp_path: Path) -> None:
    file, prompts = tmp_path / "shape.json", tmp_path / "prompts.txt"
    prompts.write_text("Once upon\nThere was\n")
    where = ["--file", str(prompts), "--lines", "--out", str(file)]
    result = run("tune", "tree", *pair, "--nodes", "6", "--depth", "4", "--new-tokens", "20", *where, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["tokens"] == 40 and report["expected_tokens"] > 1.2 and len(report["parents"]) == 7
    assert json.loads(file.read_text())["rates"] == report["rates"]
    sampling = ["--seed", "3", "--max-new-tokens", "20"]
    plain = run("generate", "Once upon", *pair, "--draft-tokens", "0", *sampling)
    grown = run("generate", "Once upon", *pair, "--drafter", "draft_tree", "-o", f"shape={file}", *sampling)
    assert grown.exit_code == 0 and grown.stdout == plain.stdout
    text = run("tune", "tree", *pair, "--new-tokens", "8", *where)
    assert "tokens per step expected" in text.stdout and "64 nodes:" in text.stdout
    bad = run("tune", "tree", *pair, "--nodes", "0")
    assert bad.exit_code == 2 and "--nodes, --depth, --width, --new-tokens: got 0, 8, 8, 64" in bad.stderr
    bad = run("tune", "tree", *pair, "--out", str(tmp_path))
    assert bad.exit_code == 2 and f"--out: got '{tmp_path}', a folder; expected a file to write" in bad.stderr


def test_medusa_heads_get_a_tree_too(run: Any, tmp_path: Path) -> None:
    """For the bundled heads; the file is taken by the drafter and changes no text."""
    file, prompts = tmp_path / "shape.json", tmp_path / "prompts.txt"
    prompts.write_text("def main(\nAnd it came\n")
    where = ["--file", str(prompts), "--lines", "--out", str(file)]
    options = ["--drafter", "medusa", "--nodes", "5", "--width", "4", "--new-tokens", "24"]
    result = run("tune", "tree", *options, *where, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["tokens"] == 48 and len(report["parents"]) == 6 and len(report["rates"][0]) == 4
    sampling = ["--temperature", "0", "--max-new-tokens", "20"]
    plain = run("generate", "def main(", "--drafter", "none", *sampling)
    drafted = run("generate", "def main(", "--drafter", "medusa", "-o", f"shape={file}", *sampling)
    assert drafted.exit_code == 0 and drafted.stdout == plain.stdout
    for flag, words in (
        ("--drafter", "got 'ngram', which takes no shape; expected one of draft_tree, medusa, eagle, eagle3, mtp"),
        ("--how", "got 'ngram'; expected one of coupled, top_k"),
    ):
        bad = run("tune", "tree", flag, "ngram")
        assert bad.exit_code == 2 and bad.stderr == f"specdec: error: {flag}: {words}\n"


def test_heads_that_run_once_per_level_get_a_tree_too(run: Any, tmp_path: Path) -> None:
    """For the bundled head; the file is taken by the drafter, as a static tree, and changes no text."""
    file, prompts = tmp_path / "shape.json", tmp_path / "prompts.txt"
    prompts.write_text("def main(\nAnd it came\n")
    where = ["--file", str(prompts), "--lines", "--out", str(file)]
    options = ["--drafter", "eagle3", "--nodes", "5", "--depth", "3", "--width", "4", "--new-tokens", "24"]
    result = run("tune", "tree", *options, *where, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["tokens"] == 48 and len(report["parents"]) == 6 and report["expected_tokens"] > 1.2
    assert [len(rates) for rates in report["rates"]] == [4, 4, 4] and report["drafter"] == "eagle3"
    sampling = ["--temperature", "0", "--max-new-tokens", "20"]
    plain = run("generate", "def main(", "--drafter", "none", *sampling)
    drafted = run("generate", "def main(", "--drafter", "eagle3", "-o", f"shape={file}", "-o", "depth=0", *sampling)
    assert drafted.exit_code == 0 and drafted.stdout == plain.stdout


def test_a_drafter_without_accepted_tokens_is_named(run: Any, monkeypatch: Any, tmp_path: Path) -> None:
    from specdec_fast.tune import recurrent_head_acceptance

    monkeypatch.setattr(recurrent_head_acceptance, "measure_recurrent", lambda *_, **__: ([[0.0, 0.1]], 24))
    out = tmp_path / "shape.json"
    result = run("tune", "tree", "--drafter", "eagle3", "--out", str(out))
    assert result.exit_code == 2 and not out.exists()
    assert "the first choice of eagle3 was accepted for none of 24 tokens" in result.stderr


def test_the_interval_of_expected_tokens_is_that_of_simulated_steps() -> None:
    """A chain of two, each accepted with 0.5: 1, 2 or 3 tokens per step."""
    from specdec_fast.trees.static_shape import Shape, expected_spread, expected_tokens

    shape, rates = Shape((-1, 0, 1)), [[0.5], [0.5]]
    lengths = [1, 1, 2, 3]  # equally likely
    mean = sum(lengths) / 4
    variance = sum((length - mean) ** 2 for length in lengths) / 4
    assert expected_tokens(shape, rates) == mean
    assert abs(expected_spread(shape, rates, 700) - 1.96 * (variance / (700 / mean)) ** 0.5) < 1e-12
