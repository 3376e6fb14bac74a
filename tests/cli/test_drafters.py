"""`specdec drafters` lists everybody, also one of another package and one that is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oracles.automaton import AutomatonTarget, random_logits

from specdec_fast.drafters import drafter_names, get_drafter, make_drafter
from specdec_fast.rules import DEFAULT, get_rule

DIST = "Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"


def test_all_are_listed_with_needs_law_defaults_and_a_line(run: Any) -> None:
    found = {entry["name"]: entry for entry in json.loads(run("drafters", "--json").stdout)}
    assert sorted(found) == drafter_names()
    for name, entry in found.items():
        assert "error" not in entry, entry
        assert entry["line"].endswith((".", ":")) or len(entry["line"]) > 20
        assert entry["needs"] is not None, f"{name}: give its class `needs`, as they are by default"
        assert entry["law"] in ("chosen", "drawn", "chosen, or drawn by option")
        assert "num_draft_tokens" in entry["defaults"] or not hasattr(get_drafter(name), "__init__")
    assert found["draft_tree"]["takes_draft"] and found["draft_tree"]["needs"]["topology"] == "tree"
    assert found["draft_tree"]["law"] == "chosen, or drawn by option" and found["ngram"]["law"] == "chosen"
    assert found["draft_tree"]["defaults"]["widths"] == [3, 2, 1]
    target = AutomatonTarget(random_logits(5, 8))
    for name in ("recycling", "suffix"):  # what a user gets, not what the constructor says
        made = make_drafter(name, {}, target=target, prefers=get_rule(DEFAULT).prefers)
        assert found[name]["defaults"]["pick"] == made.pick == "coupled"
        assert found[name]["defaults"]["shared"] == (getattr(made, "shared", None) or made.memory is not None)
        assert tuple(found[name]["needs"]["taps"]) == made.needs.taps
    for name in ("draft_model", "draft_tree", "eagle", "layer_skip", "medusa", "rest"):
        assert "coupled" in found[name]["defaults"].values(), name
    text = run("drafters").stdout
    for name, entry in found.items():
        assert f"{name}  {entry['line']}" in text
    document = (Path(__file__).parents[2] / "docs" / "drafters.md").read_text(encoding="utf-8")
    for name, entry in found.items():
        section = document.split(f"\n## {name}\n")[1].split("\n## ")[0]
        told = section.rsplit("\nOptions: ", 1)[1].replace("\n", " ").rstrip(". \n")
        assert told == ", ".join(f"`{option}`" for option in entry["defaults"]), name
    assert "needs   trees, draft model, own cache" in text and "n_max=" in text


def test_drafters_of_other_packages_are_listed_and_a_broken_one_says_why(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, point in (("good", "stutter_drafter:Stutter"), ("bad", "no_such_module:Nothing")):
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(DIST.format(name=name))
        (info / "entry_points.txt").write_text(f"[specdec_fast.drafters]\n{name} = {point}\n")
    (tmp_path / "stutter_drafter.py").write_text(
        '"""Says it again."""\nfrom specdec_fast.interfaces import Needs\n\n\nclass Stutter:\n    name = "good"\n'
        "    needs = Needs(host_tokens=True)\n\n    def __init__(self, often=2):\n        pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {entry["name"]: entry for entry in json.loads(run("drafters", "--json").stdout)}
    assert found["good"]["line"] == "Says it again." and found["good"]["defaults"] == {"often": 2}
    assert found["good"]["module"] == "stutter_drafter" and "No module named 'no_such_module'" in found["bad"]["error"]
    text = run("drafters").stdout
    assert "bad: cannot be loaded: ModuleNotFoundError" in text and "  options often=2" in text
