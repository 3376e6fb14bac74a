"""The benchmark of prefix sharing: both sides write the same texts, and every round begins with an empty cache."""

from __future__ import annotations

import json

from benchmarks.harness.select_rows import RESULTS
from benchmarks.prefix_sharing import WORKLOADS, Workload, as_markdown, corpus, measure, merged, prompts_of
from specdec_fast.loading import load_model, load_tokenizer
from specdec_fast.targets.huggingface import HuggingFaceTarget


def test_prompts_begin_with_what_they_share() -> None:
    tokens, answer = list(range(1000)), [-1, -2]
    prompts = prompts_of(Workload(before=5, shared=12, own=3, requests=2, answer=2), tokens, answer)
    common = [0, 1, 2, 3, 4, -1, -2, 5, 6, 7, 8, 9]
    assert prompts == [[*common, 12, 13, 14], [*common, 15, 16, 17]]
    assert prompts_of(Workload(before=0, shared=4, own=0, requests=3), tokens, []) == [[0, 1, 2, 3]] * 3


def test_a_row_is_measured() -> None:
    target, tokenizer = (
        HuggingFaceTarget(load_model("demo-target"), max_length=256, max_rows=4),
        load_tokenizer("demo-target"),
    )
    few = Workload(before=0, shared=64, own=5, requests=3)
    row = measure(target, tokenizer, few, rounds=2, new_tokens=4)
    assert row["identical"] and row["prompt_tokens"] == 3 * 69 and row["rounds"] == 2
    assert row["cached_tokens"] == 2 * 64, "the first request of every round computes the beginning"
    low, high = row["ratio_range"]
    assert 0 < low <= row["ratio"] <= high and row["seconds_shared"] > 0
    turn = measure(target, tokenizer, Workload(40, 60, 9, 1, answer=10), rounds=1, new_tokens=2)
    assert turn["identical"] and turn["cached_tokens"] == 48, "the pages of 49 stored tokens"
    titles = {"model": "m", "workload": "w", "drafter": "none"}
    table = as_markdown([{**titles, **row}]).splitlines()
    assert len(table) == 3 and all(line.count("|") == 11 for line in table)


def test_a_row_replaces_its_own() -> None:
    one, two = ({"model": name, "workload": "w", "drafter": "none", "ratio": 1} for name in "ab")
    assert merged([one, two], {**one, "ratio": 2}) == [two, {**one, "ratio": 2}]


def test_the_corpus_is_as_long_as_needed() -> None:
    tokens = corpus(load_tokenizer("demo-target"), 5000)
    assert len(tokens) == 5000 and len(set(tokens)) > 100


def test_every_workload_was_recorded() -> None:
    rows = json.loads((RESULTS / "prefix_sharing_cpu.json").read_text(encoding="utf-8"))["rows"]
    assert {row["workload"] for row in rows} == set(WORKLOADS) and len({row["model"] for row in rows}) >= 2
    assert all(row["identical"] and row["ratio"] > 1.5 and row["cached_tokens"] for row in rows)
