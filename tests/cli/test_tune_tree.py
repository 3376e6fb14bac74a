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
