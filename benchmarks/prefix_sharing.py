"""Time to the first token with and without prefix sharing: a second turn, few-shot prompts, and samples of one prompt.

`python -m benchmarks.prefix_sharing` runs every workload by two engines over one target in turn. The engine that shares
begins every round with an empty cache, so a round has the cost of the first use as well. Requests of a workload arrive
together; seconds count until the last one has its first token. Every row is written to benchmarks/results at once, and
replaces the row of the same model, workload and drafter.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.harness.interleave import environment
from benchmarks.harness.progress_line import Progress
from benchmarks.harness.result_files import read_rows, write_whole
from benchmarks.harness.select_rows import RESULTS, named, where
from specdec_fast import Engine, SamplingParams
from specdec_fast.drafters import make_drafter
from specdec_fast.loading import ASSETS, load_model, load_tokenizer
from specdec_fast.targets.huggingface import HuggingFaceTarget

OFF, ON = "computed", "shared"


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that begin alike.

    Attributes:
        before: Tokens of a prompt whose answer has been generated before; 0 if there is no earlier turn.
        shared: Tokens with which all prompts begin, `before` and its answer included.
        own: Further tokens of each prompt. 0: all prompts are equal.
        requests: Number of prompts.
        answer: Tokens of the answer to the earlier turn.
    """

    before: int
    shared: int
    own: int
    requests: int
    answer: int = 0


WORKLOADS = {
    "second turn of a chat": Workload(before=400, shared=500, own=40, requests=1, answer=100),
    "8 prompts with 1,000 equal tokens": Workload(before=0, shared=1000, own=30, requests=8),
    "8 samples of a prompt of 500 tokens": Workload(before=0, shared=500, own=0, requests=8),
}


def corpus(tokenizer: Any, count: int) -> list[int]:
    """Returns `count` tokens of the bundled prompts."""
    items = json.loads((ASSETS / "workload.json").read_text())
    text = "\n\n".join(item["prompt"] for item in items)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return (tokens * -(-count // len(tokens)))[:count]


def prompts_of(work: Workload, tokens: list[int], answer: list[int]) -> list[list[int]]:
    """Returns the prompts of a workload, which begin with the earlier turn and its answer."""
    common = [*tokens[: work.before], *answer, *tokens[work.before : work.shared - len(answer)]]
    start = work.shared
    return [[*common, *tokens[start + at * work.own : start + (at + 1) * work.own]] for at in range(work.requests)]


def until_first_tokens(engine: Engine, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[Any]]:
    """Returns the seconds until all requests have a token, and the requests after their end."""
    params = [
        SamplingParams(temperature=0.8, seed=at, max_new_tokens=new_tokens, ignore_eos=True)
        for at in range(len(prompts))
    ]
    start = perf_counter()
    handles = [engine.submit(*each) for each in zip(prompts, params)]
    while not all(handle.tokens for handle in handles):
        engine.step()
    seconds = perf_counter() - start
    while not engine.idle:
        engine.step()
    return seconds, handles


def measure(
    target: HuggingFaceTarget,
    tokenizer: Any,
    work: Workload,
    *,
    rounds: int,
    new_tokens: int,
    drafter: Callable[[], Any] = lambda: None,
    count: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Returns the numbers of one workload. One round before is not counted.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
        work: The workload.
        rounds: Rounds that count.
        new_tokens: Tokens of each text, which must be equal on both sides.
        drafter: Makes a drafter.
        count: Called after every round.
    """
    tokens = corpus(tokenizer, work.shared + work.requests * max(work.own, 1))
    sides = {name: Engine(target, drafter(), prefix_sharing=name == ON) for name in (OFF, ON)}
    seconds: dict[str, list[float]] = {OFF: [], ON: []}
    texts: dict[str, list[list[int]]] = {}
    cached = total = 0
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds + 1):
            for name in (OFF, ON) if turn % 2 else (ON, OFF):
                sides[name].reset_prefix_cache()
                answer: list[int] = []
                if work.before:
                    _, (first,) = until_first_tokens(sides[name], [tokens[: work.before]], work.answer)
                    answer = first.tokens
                prompts = prompts_of(work, tokens, answer)
                taken, handles = until_first_tokens(sides[name], prompts, new_tokens)
                texts[name] = [handle.tokens for handle in handles]
                if name == ON:
                    cached = sum(handle.stats.cached_tokens for handle in handles)
                    total = sum(map(len, prompts))
                if turn:
                    seconds[name].append(taken)
            count()
    finally:
        gc.enable()
    ratios = [off / on for off, on in zip(seconds[OFF], seconds[ON])]
    return {
        "prompt_tokens": total,
        "cached_tokens": cached,
        "seconds_computed": median(seconds[OFF]),
        "seconds_shared": median(seconds[ON]),
        "ratio": median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "rounds": rounds,
        "identical": texts[OFF] == texts[ON],
    }


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    titles = "| model | drafter | workload | tokens | cached | computed | shared | times faster | range | identical |"
    lines = [titles, "|" + "---|" * 10]
    for row in rows:
        low, high = row["ratio_range"]
        lines.append(
            f"| {row['model']} | {row['drafter']} | {row['workload']} | {row['prompt_tokens']:,} | "
            f"{row['cached_tokens']:,} | {row['seconds_computed']:.2f} s | {row['seconds_shared']:.2f} s | "
            f"{row['ratio']:.1f} | {low:.1f} to {high:.1f} | {row['identical']} |"
        )
    return "\n".join(lines)


def merged(before: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns rows with `row` in place of the one of the same model, workload and drafter."""
    key = ("model", "workload", "drafter")
    return [*(each for each in before if [each[name] for name in key] != [row[name] for name in key]), row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo-target", help="bundled name, folder or hub id")
    parser.add_argument("--drafter", default="", help="drafter without a model, such as suffix; default: none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--only", default="", help="titles of workloads, or parts of titles, separated by |")
    parser.add_argument("--out", type=Path, help="result file; with --only nothing is written without it")
    options = parser.parse_args()
    out = where(options.out, options.only, "prefix_sharing_cpu.json")
    torch.set_num_threads(options.threads)
    tokenizer, model = load_tokenizer(options.model), load_model(options.model)
    target = HuggingFaceTarget(model, max_length=1200, max_rows=8)
    before = out if out is not None and out.exists() else RESULTS / "prefix_sharing_cpu.json"
    rows = read_rows(before) if out is not None else []

    def drafter() -> Any:
        return make_drafter(options.drafter, {}, target=target, tokenizer=tokenizer) if options.drafter else None

    for name in named(options.only, WORKLOADS):
        progress = Progress(name, options.rounds + 1)
        facts = {**environment(), "threads": options.threads, "dtype": "float32"}
        row = {
            "model": Path(options.model).name,
            "workload": name,
            "drafter": options.drafter or "none",
            **measure(
                target,
                tokenizer,
                WORKLOADS[name],
                rounds=options.rounds,
                new_tokens=options.new_tokens,
                drafter=drafter,
                count=progress.step,
            ),
            "environment": facts,
        }
        print(as_markdown([row]).splitlines()[-1], flush=True)
        rows = merged(rows, row)
        if out is not None:
            write_whole(out, {"rows": rows})
    if out is not None:
        out.with_suffix(".md").write_text(as_markdown(rows) + "\n")


if __name__ == "__main__":
    main()
