"""Drafters by name: `specdec drafters` lists all of them, and `specdec generate --drafter` decodes with each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oracles import heads
from oracles.automaton import AutomatonTarget, random_logits

from specdec_fast import SamplingParams, load
from specdec_fast.drafters import drafter_names, get_drafter, make_drafter, takes_draft
from specdec_fast.heads.blockwise import BlockwiseHeads
from specdec_fast.heads.checkpoint_blockwise import save_blockwise
from specdec_fast.heads.checkpoint_medusa import save_medusa
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.retrieval.datastore import build
from specdec_fast.rules import DEFAULT, get_rule

DIST = "Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"


def test_all_are_listed_with_needs_distribution_defaults_and_a_line(run: Any) -> None:
    found = {entry["name"]: entry for entry in json.loads(run("drafters", "--json").stdout)}
    assert sorted(found) == drafter_names()
    for name, entry in found.items():
        assert "error" not in entry, entry
        assert entry["line"].endswith((".", ":")) or len(entry["line"]) > 20
        assert entry["needs"] is not None, f"{name}: give its class `needs`, as they are by default"
        assert entry["dist"] in ("deterministic", "sampled", "deterministic, or sampled by option")
        assert "num_draft_tokens" in entry["defaults"] or not hasattr(get_drafter(name), "__init__")
    assert found["draft_tree"]["takes_draft"] and found["draft_tree"]["needs"]["topology"] == "tree"
    assert (
        found["draft_tree"]["dist"] == "deterministic, or sampled by option"
        and found["ngram"]["dist"] == "deterministic"
    )
    assert found["draft_tree"]["defaults"]["widths"] == [3, 2, 1]
    target = AutomatonTarget(random_logits(5, 8))
    for name in ("recycling", "suffix"):  # what a user gets, not what the constructor says
        made = make_drafter(name, {}, target=target, prefers=get_rule(DEFAULT).prefers)
        assert found[name]["defaults"]["pick"] == made.pick == "coupled"
        assert found[name]["defaults"]["shared"] == (getattr(made, "shared", None) or made.memory is not None)
        assert tuple(found[name]["needs"]["aux_hidden_states"]) == made.needs.aux_hidden_states
    for name in ("draft_model", "draft_tree", "eagle", "layer_skip", "medusa", "rest"):
        assert "coupled" in found[name]["defaults"].values(), name
    text = run("drafters").stdout
    for name, entry in found.items():
        assert f"{name}  {entry['line']}" in text
    document = (Path(__file__).parents[2] / "docs" / "guides" / "choosing-a-drafter.md").read_text(encoding="utf-8")
    for name, entry in found.items():
        section = document.split(f"\n## {name}\n")[1].split("\n## ")[0]
        options = section.rsplit("\nOptions: ", 1)[1].split("\n\n")[0].replace("\n", " ").rstrip(". \n")
        assert options == ", ".join(f"`{option}`" for option in entry["defaults"]), name
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


def given(name: str, folder: Path) -> dict[str, Any]:
    """Options of the drafters that cannot do without, for the tiny models; files are written to a folder."""
    if name in ("eagle", "eagle3", "mtp"):
        return heads.options(name, folder)
    if name == "medusa":
        save_medusa(MedusaHeads(heads.HIDDEN, heads.VOCAB, 2), folder, base_model="tiny")
        return {"head": str(folder)}
    if name == "blockwise":
        save_blockwise(BlockwiseHeads(heads.HIDDEN, heads.VOCAB, 2), folder, base_model="tiny")
        return {"head": str(folder)}
    if name == "rest":
        build(folder / "store", [list(range(1, 90))], heads.VOCAB)
        return {"datastore": str(folder / "store")}
    return {}


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> str:
    params = SamplingParams(seed=3, max_new_tokens=3)
    return load(models["target"], max_rows=1).generate(["ab ab ab"], params)[0].text


@pytest.mark.parametrize("name", drafter_names())
def test_each_decodes_by_name(run: Any, models: dict[str, str], expected: str, tmp_path: Path, name: str) -> None:
    asked = ["generate", "ab ab ab", "--seed", "3", "--max-new-tokens", "3", "--model", models["target"]]
    asked += ["--draft", models["draft"]] if takes_draft(name) else []
    for option, value in given(name, tmp_path).items():
        asked += ["-o", f"{option}={value if isinstance(value, str) else json.dumps(value)}"]
    result = run(*asked, "--drafter", name, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (request,) = report["requests"]
    assert report["drafter"] == name and request["text"] == expected and request["stats"]["faults"] == 0
