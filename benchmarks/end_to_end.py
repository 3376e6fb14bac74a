"""End-to-end speed on the bundled pair: this engine and transformers, plain and speculative, interleaved in one run.

`python -m benchmarks.end_to_end` measures all settings, prints a table, and writes a result file (in
benchmarks/results) after every setting, so that an interrupted run keeps its finished rows.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context, parent_process
from pathlib import Path
from statistics import mean
from threading import Thread
from typing import Any

import torch

from benchmarks.harness.interleave import environment, interleave
from benchmarks.harness.select_rows import named, where
from specdec_fast import SamplingParams, load
from specdec_fast.loading import ASSETS, load_model, load_tokenizer

# most draft tokens at batch 8 by dtype: every drafted token costs arithmetic there, unlike at batch 1
FULL_BATCH_DRAFT = {"float32": 2, "bfloat16": 3}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. With `whole`, the target runs as fused forward, and transformers' model is compiled."""

    dtype: str = "float32"
    threads: int = 1
    compiled: bool = False
    batch: int = 1
    temperature: float = 0.0
    new_tokens: int = 200
    draft_tokens: int = 4
    whole: bool = False

    @property
    def name(self) -> str:
        how = "whole" if self.whole else "compiled" if self.compiled else "eager"
        return f"{self.dtype}-{self.threads}thread-{how}-batch{self.batch}-T{self.temperature:g}"


def all_settings(draft_tokens: int) -> list[Setting]:
    """Returns the settings of docs/benchmarks/end-to-end.md."""
    found = [
        Setting(dtype, threads, compiled, 1, temperature, draft_tokens=draft_tokens)
        for dtype, threads, compiled, temperature in product(("float32", "bfloat16"), (1, 2), (False, True), (0.0, 1.0))
    ]
    found += [
        Setting(dtype, threads, compiled, 8, temperature, draft_tokens=min(draft_tokens, FULL_BATCH_DRAFT[dtype]))
        for dtype, threads, compiled, temperature in product(("float32", "bfloat16"), (1, 2), (False, True), (0.0, 1.0))
    ]
    whole = [each for each in found if each.dtype == "float32" and each.compiled]
    return found + [replace(each, whole=True) for each in whole]


def workload(tokenizer: Any, count: int) -> list[list[int]]:
    """Returns `count` prompts of the bundled workload, alternating between kinds."""
    items = json.loads((ASSETS / "workload.json").read_text())
    kinds: dict[str, list[str]] = {}
    for item in items:
        kinds.setdefault(item["kind"], []).append(item["prompt"])
    turns = [prompt for group in zip(*kinds.values()) for prompt in group]
    return [list(tokenizer.encode(prompt)) for prompt in turns[:count]]


def distinct_4(tokens: list[int]) -> float:
    """Returns the share of distinct 4-grams: near 1 for text, near 0 for loops."""
    grams = [tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


class Sides:
    """Builds every side of a setting over the same weights."""

    def __init__(self, setting: Setting, prompts: int) -> None:
        self.setting = setting
        self.tokenizer = load_tokenizer("demo-target")
        self.prompts = workload(self.tokenizer, max(prompts, 4) * setting.batch // 2 if setting.batch > 1 else prompts)
        torch.set_num_threads(setting.threads)
        self.outputs: dict[str, list[list[int]]] = {}
        self.tau, self.alpha = 0.0, 0.0

    def ours(self, draft: bool) -> Callable[[], None]:
        setting = self.setting
        engine = load(
            "demo-target",
            "demo-draft" if draft else None,
            drafter="draft_model" if draft else "none",
            dtype=setting.dtype,
            compile=setting.compiled and not setting.whole,
            fused_forward=setting.whole,
            num_draft_tokens=setting.draft_tokens if draft else None,
            max_length=1024,
            max_rows=setting.batch,
        )
        params = [
            SamplingParams(
                temperature=setting.temperature, seed=index, max_new_tokens=setting.new_tokens, ignore_eos=True
            )
            for index in range(len(self.prompts))
        ]
        name = "speculative" if draft else "plain"

        def run() -> None:
            handles = engine.generate(self.prompts, params)  # a finished request makes room for the next one
            self.outputs[name] = [handle.tokens for handle in handles]
            if draft:
                self.tau = mean(handle.stats.tau for handle in handles)
                self.alpha = mean(handle.stats.alpha for handle in handles)

        return run

    def theirs(self, assisted: bool) -> Callable[[], None]:
        setting = self.setting
        model = load_model("demo-target", setting.dtype)
        model.generation_config.eos_token_id = None  # texts end by length, as ours do
        extra: dict[str, Any] = {}
        if assisted:
            extra["assistant_model"] = load_model("demo-draft", setting.dtype)
            extra["assistant_model"].generation_config.eos_token_id = None
            extra["assistant_model"].generation_config.num_assistant_tokens = setting.draft_tokens
            extra["assistant_model"].generation_config.num_assistant_tokens_schedule = "constant"
        if setting.compiled:
            extra["cache_implementation"] = "static"
            model.forward = torch.compile(model.forward, dynamic=None)
        if setting.temperature > 0:
            extra |= {"temperature": setting.temperature, "top_k": 0, "top_p": 1.0}
        name = "transformers assisted" if assisted else "transformers"

        def run() -> None:
            texts = []
            for prompt in self.prompts:
                ids = torch.tensor([prompt])
                torch.manual_seed(0)
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=setting.new_tokens,
                    do_sample=setting.temperature > 0,
                    pad_token_id=0,
                    **extra,
                )
                texts.append(out[0, len(prompt) :].tolist())
            self.outputs[name] = texts

        return run


def measure(setting: Setting, rounds: int, prompts: int) -> tuple[dict[str, Any], dict[str, Callable[[], None]]]:
    """Returns one row of the table, with speeds and ratios, and the timed functions by name."""
    sides = Sides(setting, prompts)
    runs = {"plain": sides.ours(draft=False), "speculative": sides.ours(draft=True)}
    if setting.batch == 1:
        runs["transformers"] = sides.theirs(assisted=False)
        if not setting.compiled:  # its shapes change at every step, so it would recompile every time
            runs["transformers assisted"] = sides.theirs(assisted=True)
    timing = interleave(runs, rounds)
    count = sum(map(len, sides.outputs["plain"]))
    row: dict[str, Any] = {
        "setting": setting.name,
        "dtype": setting.dtype,
        "threads": setting.threads,
        "compiled": setting.compiled,
        "whole": setting.whole,
        "batch": setting.batch,
        "temperature": setting.temperature,
        "new_tokens": setting.new_tokens,
        "draft_tokens": setting.draft_tokens,
        "rounds": rounds,
        "prompts": len(sides.prompts),
        "tokens_per_s": {name: count / timing.median(name) for name in runs},
        "speculative_vs_plain": timing.ratio("plain", "speculative"),
        "speculative_vs_plain_range": timing.spread("plain", "speculative"),
        "tau": sides.tau,
        "alpha": sides.alpha,
        "distinct_4": mean(map(distinct_4, sides.outputs["speculative"])),
        "identical": sides.outputs["plain"] == sides.outputs["speculative"],
    }
    if "transformers" in runs:
        row["plain_vs_transformers"] = timing.ratio("transformers", "plain")
        if setting.temperature == 0:
            row["identical_to_transformers"] = sides.outputs["plain"] == sides.outputs["transformers"]
    if "transformers assisted" in runs:
        row["speculative_vs_assisted"] = timing.ratio("transformers assisted", "speculative")
    return row, runs


def row_of(setting: Setting, rounds: int, prompts: int) -> dict[str, Any]:
    """Returns the row of `measure` from a fresh process, which shares no compiled code or threads with other rows.

    Batches take little time and get three times as many rounds.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_end_with_parent) as pool:
        return pool.submit(_row, setting, rounds * (3 if setting.batch > 1 else 1), prompts).result()


def _end_with_parent() -> None:
    """Ends this worker with its parent, since it would disturb later measurements."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _row(setting: Setting, rounds: int, prompts: int) -> dict[str, Any]:
    return measure(setting, rounds, prompts)[0]


COLUMNS = {
    "setting": "setting",
    "plain_vs_transformers": "plain / HF",
    "speculative_vs_plain": "spec / plain",
    "speculative_vs_assisted": "spec / HF assisted",
    "draft_tokens": "drafted",
    "tau": "tau",
    "alpha": "alpha",
    "distinct_4": "distinct-4",
    "identical": "identical",
}


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Returns the table of docs/benchmarks/end-to-end.md."""

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell(row.get(key)) for key in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="at batch 8 four times as many, at least 16")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--only", default="", help="names of settings, or parts of names, separated by |")
    parser.add_argument(
        "--out", type=Path, help="result file (default: that of all settings; with --only nothing is written)"
    )
    options = parser.parse_args()
    out = where(options.out, options.only, "end_to_end_cpu.json")
    rows: list[dict[str, Any]] = []
    facts = environment()
    settings = {setting.name: setting for setting in all_settings(options.draft_tokens)}
    for name in named(options.only, settings):
        setting = settings[name]
        row = row_of(setting, options.rounds, options.prompts)
        rows.append(row)
        print(as_markdown([row]).splitlines()[-1], flush=True)
        if out is not None:
            out.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
    print(as_markdown(rows))
    if out is not None:
        out.with_suffix(".md").write_text(as_markdown(rows) + "\n")


if __name__ == "__main__":
    main()
