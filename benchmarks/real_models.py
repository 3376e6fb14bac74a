"""Speed on models that people use: transformers, plain decoding and drafters without a model, interleaved in one run.

    python -m benchmarks.real_models --model SmolLM2-135M-Instruct=FILE.gguf --model gemma-3-270m=FOLDER

Every task is a prompt of its own: prose, a story, code, a list, an edit of code, and a summary that repeats its source.
Instruct models get it as a question in their chat template, base models as the beginning of a text. In each round every
side writes the same task, and who goes first rotates. Steps of a side alternate with steps of plain decoding, so other
load on the machine affects both alike. Drafters begin every text with an empty memory, and budgets with what `load`
measured.

A row is one side on one task; its speed is the median over rounds of the ratio to plain decoding in the same round,
prefill included. Texts are compared with those of plain decoding. Rows are written to benchmarks/results as soon as
their task is measured, and replace the rows of the same model, setting, task and side.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness.arguments import CLOCKS, add_clock, add_models, clock_name
from benchmarks.harness.interleave import alternate, environment
from benchmarks.harness.progress_line import Progress
from benchmarks.harness.result_files import read_rows, write_whole
from benchmarks.harness.select_rows import RESULTS, named
from specdec_fast import SamplingParams, load
from specdec_fast.adaptive.budget import budget_for
from specdec_fast.loading import load_model, load_tokenizer

TABLE = "real_models_cpu.json"
PLAIN, PEER = "plain", "transformers"
SIDES: dict[str, dict[str, Any]] = {
    PLAIN: {"drafter": "none"},
    "auto": {"drafter": "auto"},
    "suffix": {"drafter": "suffix"},
    "suffix with budget goodput": {"drafter": "suffix", "num_draft_tokens": 16, "budget": "goodput"},
    **{f"suffix, {count} tokens": {"drafter": "suffix", "num_draft_tokens": count} for count in (2, 4, 8, 16)},
    "ngram": {"drafter": "ngram"},
    "forest of suffix and recycling": {"drafter": "forest", "drafter_options": {"of": "suffix,recycling"}},
    "forest with budget goodput": {
        "drafter": "forest", "drafter_options": {"of": "suffix,recycling"}, "budget": "goodput"
    },
}  # fmt: skip

_CLASS = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("insufficient balance")
        self.balance -= amount
        return self.balance
"""
_REPORT = (
    "The city council of Harlow voted on Tuesday to close the old bridge over the river Stour for eighteen months. "
    "Engineers found cracks in three of the five stone piers during an inspection in March. The bridge, built in 1874, "
    "carries about nine thousand vehicles a day. The council expects repairs to cost four million pounds, half of "
    "which the county will pay. Shop owners on the east bank fear a loss of customers during the works."
)


@dataclass(frozen=True, slots=True)
class Task:
    """A task, as a text that base models continue and as a question that instruct models answer."""

    beginning: str
    question: str

    def prompt(self, tokenizer: Any) -> list[int]:
        """Returns token ids: the question in the tokenizer's chat template if it has one, else the beginning."""
        if getattr(tokenizer, "chat_template", None) is None:
            return list(tokenizer.encode(self.beginning))
        message = {"role": "user", "content": self.question}
        return list(tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False))


_RENAME = "Rewrite the class below with the name `Wallet` in place of `Account`."
TASKS = {
    "prose": Task("The history of the Roman Empire begins with", "How did the Roman Empire begin?"),
    "story": Task(
        "Once upon a time, in a small village by the sea, there lived",
        "Write a story about a boy in a small village by the sea.",
    ),
    "code": Task('def quicksort(items):\n    """Sorts a list."""\n', "Write quicksort in Python."),
    "list": Task(
        "Countries and capitals:\nFrance: Paris\nGermany: Berlin\nSpain: Madrid\nItaly:",
        "List twenty countries of Europe with their capitals, one line each.",
    ),
    "rename": Task(
        f"{_RENAME}\n\n{_CLASS}\nAnswer:\n\nclass Wallet:\n    def __init__(self, owner, balance):\n",
        f"{_RENAME}\n\n```python\n{_CLASS}```",
    ),
    "summary": Task(f"{_REPORT}\n\nSummary: The city council of Harlow", f"Summarize this text:\n\n{_REPORT}"),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One condition under which all sides are measured."""

    dtype: str
    threads: int
    temperature: float
    new_tokens: int


def transformers_side(model: Any, setting: Setting) -> Callable[[list[int]], list[int]]:
    """Returns plain `generate` over a model of its own."""
    model.generation_config.eos_token_id = None  # texts end by length, as ours do

    def run(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {"do_sample": False}
        if setting.temperature > 0:
            options = {"do_sample": True, "temperature": setting.temperature, "top_k": 0, "top_p": 0.95}
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=setting.new_tokens, pad_token_id=0, **options
        )
        return list(out[0, len(prompt) :].tolist())

    return run


def measure(
    place: str | Path,
    setting: Setting,
    names: list[str],
    tasks: list[str],
    rounds: int,
    clock: Callable[[], float],
    peer_rounds: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields the rows of one model under one setting, those of a task after its last round.

    Args:
        place: Folder, GGUF file or hub id of the model.
        setting: Data type, threads, temperature and length.
        names: Sides beside plain decoding.
        tasks: Names of tasks.
        rounds: Rounds of each task, after one that does not count.
        clock: Seconds, of the wall or of the process.
        peer_rounds: Rounds in which transformers takes part, the first ones. None for all.
    """
    torch.set_num_threads(setting.threads)
    tokenizer, model = load_tokenizer(place), load_model(place, setting.dtype)
    own = list(dict.fromkeys([PLAIN, *(name for name in names if name != PEER)]))
    shape = {"max_rows": 1, "max_length": 2048, "prefix_sharing": False}  # prompts are computed anew in every round
    engines, policies, starts = {}, {}, {}
    for name in own:
        policies[name] = budget_for(SIDES[name].get("budget", "fixed"))
        options = {**shape, **SIDES[name], "budget": policies[name]}
        engines[name] = load(model, tokenizer=tokenizer, **options)
        starts[name] = deepcopy(vars(policies[name]))
    order, peer_limit = own[1:] or own, rounds if peer_rounds is None else min(max(peer_rounds, 1), rounds)
    if PEER in names:
        peer = transformers_side(load_model(place, setting.dtype), setting)
        order = [PEER, *order]
    params = SamplingParams(
        temperature=setting.temperature, top_p=0.95, seed=5, max_new_tokens=setting.new_tokens, ignore_eos=True
    )
    runs = (rounds + 1) * len(order) - (rounds - peer_limit) * (PEER in names)
    progress = Progress(f"{setting.dtype}, {setting.threads} threads", len(tasks) * runs)
    for task in tasks:
        prompt = TASKS[task].prompt(tokenizer)
        seconds: dict[str, list[float]] = {name: [] for name in [PLAIN, *order]}
        plain: dict[str, list[float]] = {name: [] for name in order}  # of plain decoding, beside each side
        texts: dict[str, list[int]] = {}
        taus: dict[str, float] = {PEER: 1.0}
        for turn in range(rounds + 1):
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                if name == PEER and turn > peer_limit:
                    continue
                if name == PEER:
                    gc.collect()
                    gc.disable()  # as beside the others
                    start = clock()
                    texts[PEER] = peer(prompt)
                    found = [clock() - start]
                    gc.enable()
                else:
                    getattr(engines[name].drafter, "forget", lambda: None)()
                    vars(policies[name]).update(deepcopy(starts[name]))
                    pair = dict.fromkeys([PLAIN, name])
                    found, handles = alternate([engines[each] for each in pair], prompt, params, clock)
                    for each, handle in zip(pair, handles):
                        texts[each], taus[each] = handle.tokens, handle.stats.tau
                if turn:
                    seconds[name].append(found[-1])
                    plain[name].append(found[0])
                progress.step()
        seconds[PLAIN] = [sum(each) / len(each) for each in zip(*(plain[name] for name in order if name != PEER))]
        for name in dict.fromkeys([PLAIN, *order]):
            beside = seconds[PLAIN] if name in (PLAIN, PEER) else plain[name]
            ratios = [plain / own for plain, own in zip(beside, seconds[name])]  # of rounds that both took part in
            peers = [theirs / own for theirs, own in zip(seconds.get(PEER, ()), seconds[name])]
            yield {
                "task": task,
                "side": name,
                "tau": taus[name],
                "tokens_per_second": setting.new_tokens / median(seconds[name]),
                "speed_vs_plain": median(ratios),
                "speed_vs_plain_range": [min(ratios), max(ratios)],
                "speed_vs_transformers": median(peers) if peers else None,
                # transformers draws with another generator
                "identical": None if name == PEER and setting.temperature > 0 else texts[name] == texts[PLAIN],
                "rounds": len(ratios),
            }


KEYS = ("model", "dtype", "threads", "temperature", "task", "side")


def merged(rows: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows with one replaced."""
    return [row for row in rows if any(row[key] != new[key] for key in KEYS)] + [new]


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    titles = (
        "| model | dtype | threads | T | task | side | tau | tokens/s | / plain | range | / transformers | identical |"
    )
    lines = [titles, "|" + "---|" * 12]
    for row in rows:
        low, high = row["speed_vs_plain_range"]
        peer = row.get("speed_vs_transformers")
        same = {True: "yes", False: "no", None: "–"}[row["identical"]]
        lines.append(
            f"| {row['model']} | {row['dtype']} | {row['threads']} | {row['temperature']:g} | {row['task']} | "
            f"{row['side']} | {row['tau']:.2f} | {row['tokens_per_second']:.1f} | {row['speed_vs_plain']:.2f} | "
            f"{low:.2f} to {high:.2f} | {'–' if peer is None else f'{peer:.2f}'} | {same} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer-rounds", type=int, help="rounds in which transformers takes part, at least 1; default: all"
    )
    parser.add_argument("--only", default="", help="titles of sides, or parts of titles, separated by |")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    add_clock(parser)
    parser.add_argument("--out", type=Path, default=RESULTS / TABLE)
    asked = parser.parse_args()
    clock = clock_name(parser, asked, asked.threads)
    names = named(asked.only, [PEER, *SIDES])
    facts = {**environment(), "clock": clock}
    rows = read_rows(asked.out)
    for model, place in asked.model:
        for dtype, threads, temperature in product(asked.dtype, asked.threads, asked.temperature):
            setting = Setting(dtype, threads, temperature, asked.new_tokens)
            own = {"model": model, "dtype": dtype, "threads": threads, "temperature": temperature}
            limits = asked.tasks, asked.rounds, CLOCKS[clock], asked.peer_rounds
            for row in measure(place, setting, names, *limits):
                rows = merged(rows, {**own, **row, "new_tokens": asked.new_tokens, "environment": facts})
                write_whole(asked.out, {"rows": rows})
                print(as_markdown(rows[-1:]).splitlines()[-1], flush=True)
    write_whole(asked.out.with_suffix(".md"), as_markdown(rows) + "\n")


if __name__ == "__main__":
    main()
