"""The benchmark of drafters: what it asks of them exists, what it reports of trained heads, and
what its forced workloads force."""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import drafters
from benchmarks.drafter_table import FORCED, NOTE, OWN_RUN, as_markdown, key_of, merged
from benchmarks.drafters import METHODS, copied_share, copiers, copies, measure
from benchmarks.harness.interleave import interleave
from benchmarks.harness.progress_line import Progress
from specdec_fast.drafters import check_option_names, drafter_names
from specdec_fast.loading import load_tokenizer
from specdec_fast.rules import DEFAULT

ROW = {
    "workload": "mixed", "drafter": "ngram", "temperature": 0.0, "tau": 1.0, "speed_vs_plain": 1.0,
    "speed_vs_assisted": None, "efficiency": 1.0, "drafting_share": 0.0, "copied_share": 0.0, "distinct_4": 1.0,
    "identical": True, "published": "",
}  # fmt: skip


def test_every_drafter_is_measured_with_options_that_it_takes() -> None:
    assert {method.drafter for method in METHODS.values()} >= set(drafter_names())
    for method in METHODS.values():
        check_option_names(method.drafter, method.options)
    verified = {(method.options.get("how"), method.rule) for method in METHODS.values() if method.rule != DEFAULT}
    hows = ("hybrid", "iid", "without_replacement")
    assert verified == {(how, rule) for how in hows for rule in ("traversal", "recursive_rejection")}, (
        "trees that are drawn"
    )


def test_texts_that_are_forced_copy_their_prompts() -> None:
    tokenizer = load_tokenizer("demo-target")
    for task in FORCED:
        pairs = copies(tokenizer, task, 3, 60)
        assert len(pairs) == 3 and all(len(text) == 60 for _, text in pairs)
        for prompt, text in pairs:
            assert (copied_share(prompt, text) == 1) == (task == "repeat") and copied_share(prompt, text) > 0.9
            assert task == "edit" or tokenizer.decode(prompt).startswith("Repeat this text:")


def test_drafters_that_know_the_text_are_not_measured_on_copies() -> None:
    """A draft model's distribution takes a request's forced tokens, so it would draft the text that is forced."""
    found = copiers(list(METHODS))
    assert {"ngram", "suffix", "forest of ngram and recycling"} <= set(found)
    assert not any("draft_" in name or "tree" in name for name in found)


def test_the_table_says_which_tokens_are_forced() -> None:
    assert NOTE not in as_markdown([ROW])
    for task in FORCED:
        assert as_markdown([ROW, {**ROW, "workload": task}]).endswith(f"\n\n{NOTE}")


def test_heads_are_measured() -> None:
    """Their time outside of passes is measured separately, and their text equals plain decoding's."""
    names = ["eagle3", "medusa, 8 nodes"]
    rows, runs = measure(names, 0.0, rounds=1, prompts=2, new_tokens=8)
    assert [row["drafter"] for row in rows] == names and set(runs) == {"plain", "again", "assisted", *names}
    for row in rows:
        assert row["identical"] and row["tau"] > 1, "nothing was accepted"
        assert row["efficiency"] == pytest.approx(row["speed_vs_plain"] / row["tau"]) and row["efficiency"] > 0
        assert 0 < row["drafting_share"] < 0.9
        assert 0.3 < row["plain_again"] < 3
    assert as_markdown(rows).count("\n") == 3 + len(names)
    assert as_markdown([ROW, {**ROW, "plain_again": 0.96}]).endswith(
        "without drafts: 0.96 to 0.96 of the first one's speed."
    )


def test_sides_take_turns_within_a_round() -> None:
    """A piece of work each, every side's own pieces in order; the first round is not counted."""
    done: list[str] = []
    clock = iter(range(1000))
    sides = {name: lambda name=name: done.append(name) for name in "ab"}
    timing = interleave(sides, 2, lambda: float(next(clock)), turns=3)
    assert done == [*"ababab", *"abbaab", *"baabba"]
    assert timing.seconds == {"a": [3.0, 3.0], "b": [3.0, 3.0]} and timing.ratio("a", "b") == 1


class Writer:
    """A fake engine that generates three tokens, with another third token in one round. Its tau is the round."""

    def __init__(self, odd_round: int | None = None) -> None:
        verbs = {verb: lambda *args: None for verb in ("begin", "propose", "observe")}
        self.drafter, self.target, self.step = SimpleNamespace(**verbs), None, lambda: None
        self.odd_round, self.rounds = odd_round, count()

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        round_ = next(self.rounds)
        text = [1, 2, 9 if round_ == self.odd_round else 3]
        return [SimpleNamespace(tokens=text, stats=SimpleNamespace(tau=float(round_)))]


def test_every_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that differs in one of three rounds is seen; tau is that of the rounds that are timed."""
    odd = {"ngram": 1, "draft_tree 2 1 1, iid, recursive_rejection": 1}
    monkeypatch.setattr(drafters, "engine_of", lambda name, *args: Writer(odd.get(name)))
    monkeypatch.setattr(drafters, "load_model", lambda name: None)
    names = ["ngram", "suffix", "draft_tree 2 1 1, iid, recursive_rejection"]
    rows, _ = measure(names, 1.0, task="edit", rounds=2, prompts=1, new_tokens=3)
    assert [row["identical"] for row in rows] == [False, True, None], "another rule writes other texts"
    assert [row["tau"] for row in rows] == [1.5] * 3
    assert "| 1.00 |  | 1.5x" in as_markdown(rows).splitlines()[4], "nothing is said of texts that are not compared"


def test_sampled_trees_are_measured_under_their_rules() -> None:
    engine = drafters.engine_of("draft_tree 2 1 1, hybrid, traversal", "demo-target", None, 1.0, "fixed", None)  # type: ignore[arg-type]
    assert engine.rule.name == "traversal" and engine.drafter.how == "hybrid"


NEW = "lookahead W3 N3 G3"
FACTS = {"date": "2026-11-26", "cpu": "A CPU", "cores": 2, "isa": "AVX2", "clock": "process_time"}
OLD = {**ROW, "rounds": 2, "prompts": 3, "new_tokens": 40}
FILE = {
    "environment": {"date": "2026-11-01"},
    "rows": [OLD, {**OLD, "drafter": "rest"}, {**OLD, "temperature": 1.0}, {**OLD, "workload": "edit"}],
}


def test_merged_rows_replace_those_of_the_same_method() -> None:
    found = merged(FILE, [{**OLD, "tau": 9.0}, {**OLD, "drafter": "new"}, {**OLD, "workload": "repeat"}], FACTS)
    assert found["environment"] == FILE["environment"]
    keys = [key_of(row) for row in found["rows"]]
    mixed, edit = ("mixed", 0.0), ("edit", 0.0)
    assert keys[:3] == [(*mixed, "ngram"), (*mixed, "rest"), (*mixed, "new")], "in its place, or below its kind"
    assert keys[3:] == [("mixed", 1.0, "ngram"), (*edit, "ngram"), ("repeat", 0.0, "ngram")]
    assert [row.get(OWN_RUN) for row in found["rows"]] == [FACTS, None, FACTS, None, None, FACTS]
    assert found["rows"][0]["tau"] == 9.0 and found["rows"][1:2] == FILE["rows"][1:2]
    again = merged(found, [{**OLD, "tau": 8.0}], {**FACTS, "date": "2026-12-01"})
    assert again["rows"][0]["tau"] == 8.0 and again["rows"][0][OWN_RUN]["date"] == "2026-12-01"
    assert len(again["rows"]) == len(found["rows"])
    end = "\n\nMeasured in runs of their own, beside plain decoding in the same run:\n\n"
    assert as_markdown(found["rows"]).endswith(f"{end}- ngram, new: 2026-11-26, A CPU, 2 cores, AVX2")


def test_every_run_reports_how_steady_the_machine_was() -> None:
    whole = merged({"rows": [{**OLD, "plain_again": 0.98}]}, [{**OLD, "drafter": "new", "plain_again": 0.5}], FACTS)
    *_, first, _, _, _, second = as_markdown(whole["rows"]).splitlines()
    assert first == "A second engine without drafts: 0.98 to 0.98 of the first one's speed."
    assert second.endswith("AVX2; a second engine without drafts: 0.50 to 0.50 of the first one's speed.")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the benchmark measures, which gives rows at once."""
    seen: list[dict[str, Any]] = []

    def fake(names: list[str], temperature: float, task: str, **options: Any) -> tuple[list[dict[str, Any]], None]:
        seen.append({"names": names, "temperature": temperature, "task": task, **options})
        return [
            {**OLD, "drafter": name, "temperature": temperature, "workload": task, "tau": 5.0} for name in names
        ], None

    monkeypatch.setattr(drafters, "measure", fake)
    return seen


def test_one_drafter_is_merged_into_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]
) -> None:
    out = tmp_path / "drafters.json"
    out.write_text(json.dumps(FILE))
    monkeypatch.setattr(sys, "argv", ["drafters", "--only", NEW, "--merge", "--out", str(out), "--processor-time"])
    drafters.main()
    assert [(each["names"], each["temperature"], each["task"]) for each in asked] == [
        ([NEW], 0.0, "mixed"),
        ([NEW], 1.0, "mixed"),
    ], "workloads without a method are not run"
    assert {(each["rounds"], each["prompts"], each["new_tokens"]) for each in asked} == {(2, 3, 40)}, "as in the file"
    found = json.loads(out.read_text())
    assert found["environment"] == FILE["environment"]
    own = [row for row in found["rows"] if row["drafter"] == NEW]
    assert [row["temperature"] for row in own] == [0.0, 1.0] and all(row["tau"] == 5.0 for row in own)
    for row in own:
        assert row[OWN_RUN]["clock"] == "process_time" and row[OWN_RUN]["cpu"] and row[OWN_RUN]["load_before"]
    assert [row for row in found["rows"] if row["drafter"] != NEW] == FILE["rows"]
    assert f"- {NEW}: " in out.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--merge"], "--merge: got no --only"),
        (["--only", "mtp", "--merge", "--out", "nowhere.json"], "--merge: got --out nowhere.json, which is no file"),
        (["--only", "mtp", "--merge"], "--only: got 'mtp', which is not bundled; expected --heads with it"),
    ],
)
def test_what_cannot_be_merged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["drafters", *arguments])
    with pytest.raises(SystemExit):
        drafters.main()
    assert words in capsys.readouterr().err


def test_progress_is_reported_for_every_text() -> None:
    said: list[tuple[str, int, Progress]] = []

    def progress(what: str, total: int) -> Progress:
        said.append((what, total, Progress(what, total, write=lambda _: None)))
        return said[-1][2]

    measure(["ngram"], 1.0, rounds=1, prompts=1, new_tokens=4, task="edit", progress=progress)
    ((what, total, told),) = said
    assert (what, total) == ("edit, T = 1", 6), "two rounds of the method and two plain engines"
    assert told.done == total
