"""Times every drafter and plain decoding on the bundled target, interleaved in one run.

`python -m benchmarks.drafters` measures all drafters, prints a table, and writes a result file (in benchmarks/results)
after every workload and temperature. `--only NAME --merge` measures a few drafters and replaces their rows, which then
name the machine and the date of their own run.

Column `drafting` is the drafter's time outside of models, as a share of the steps. Speed / tau is the efficiency, 1 if
drafts cost nothing. The texts of all rounds are compared with those of plain decoding, except under rules that do not
replay. Sampled proposals for such rules are measured at T = 1 only.

The workloads are `mixed` (the bundled prompts), `edit` (the prompt's text with one token in twenty replaced) and
`repeat` (a prompt that asks to repeat a text, and the text). The bundled target does not copy by itself, so the tokens
of `edit` and `repeat` are forced (`SamplingParams.forced_tokens`). Target and drafters still do all their work.

All engines read the same weights. A second engine without drafts runs too: its speed relative to the first is the error
of a ratio on this machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, cycle
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.drafter_overhead import DraftClock
from benchmarks.drafter_table import FORCED, as_markdown, merged
from benchmarks.end_to_end import Setting, Sides, distinct_4, workload
from benchmarks.harness.arguments import CLOCKS, add_clock, clock_name
from benchmarks.harness.interleave import environment, interleave
from benchmarks.harness.progress_line import Progress
from benchmarks.harness.result_files import write_whole
from benchmarks.harness.select_rows import RESULTS, named, where
from specdec_fast import SamplingParams, load
from specdec_fast.loading import ASSETS, load_model, load_tokenizer
from specdec_fast.rules import DEFAULT

LAYERS = Path(__file__).parent / "layers_demo_target.json"
"""Result of `specdec tune layers` for the bundled target, on prompts of the workload that are not measured here."""


@dataclass(frozen=True, slots=True)
class Method:
    """A drafter with its options, as it is measured.

    Attributes:
        drafter: Name of the drafter.
        published: Speed-up that its paper reports, on other models and machines.
        options: Options of the drafter.
        own_head: Whether it needs a trained head, bundled or in `--heads`.
        draft_wanted: Whether it gets `demo-draft` although it works without a draft model.
        memory: "" if it learns from one request only, "shared" if it learns from earlier requests of the same round,
            "warm" if it learns from all rounds and, before them, from other prompts of the workload.
        rule: Rule of the engine. Rules other than `replay` give other texts of the same distribution.
    """

    drafter: str
    published: str
    options: dict[str, Any] = field(default_factory=dict)
    own_head: bool = False
    draft_wanted: bool = False
    memory: str = ""
    rule: str = DEFAULT

    @property
    def draft(self) -> str | None:
        from specdec_fast.drafters import takes_draft

        return "demo-draft" if self.draft_wanted or takes_draft(self.drafter) else None

    def head(self, heads: Path | None) -> Path | None:
        """Returns the folder of its trained head, or None."""
        places = [ASSETS / f"demo-{self.drafter}"] + ([heads / self.drafter] if heads else [])
        return next((place for place in reversed(places) if (place / "config.json").is_file()), None)


TABLE = "drafters_cpu.json"
TUNED = (
    "tuned"  # placeholder for the shape that `specdec tune tree` finds for the bundled pair, measured in the same run
)
MIDDLE = {"skip_attention": list(range(3, 9)), "skip_mlp": list(range(3, 9))}  # of the bundled target's 12 layers
METHODS: dict[str, Method] = {
    "draft_model": Method("draft_model", "2x to 3x (T5, Chinchilla)", {"num_draft_tokens": 4}),
    "draft_model, entropy stop": Method(
        "draft_model", "10% to 57% over fixed (AdaEDL)", {"num_draft_tokens": 8, "entropy_stop": 0.05}
    ),
    "draft_model, moving entropy stop": Method(
        "draft_model",
        "10% to 57% over fixed (AdaEDL)",
        {"num_draft_tokens": 8, "entropy_stop": 0.05, "entropy_goal": 0.9},
    ),
    "draft_model, tli": Method("draft_model", "up to 2.8x", {"num_draft_tokens": 4, "tokenizers": "tli"}),
    "draft_model, slem": Method("draft_model", "up to 2.8x", {"num_draft_tokens": 4, "tokenizers": "slem"}),
    "draft_tree, tuned shape of 8": Method("draft_tree", "up to 4.04x (Sequoia, A100)", {"shape": TUNED}),
    "draft_tree, dynamic of 8": Method(
        "draft_tree", "3.05x to 4.26x (EAGLE-2, trained heads)", {"depth": 4, "width": 3, "num_draft_tokens": 8}
    ),
    "forest of ngram and recycling": Method("forest", "2.3x to 2.5x (SAM with Token Recycling, Spec-Bench)"),
    "forest of ngram and draft_model": Method("forest", "", {"of": "ngram,draft_model"}, draft_wanted=True),
    "auto": Method("auto", "", memory="shared"),
    "draft_tree 2 1 1": Method("draft_tree", "1.5x to 2.8x (SpecInfer)", {"widths": [2, 1, 1]}),
    "draft_tree 2 1 1, iid, recursive_rejection": Method(
        "draft_tree", "1.5x to 2.8x (SpecInfer)", {"widths": [2, 1, 1], "how": "iid"}, rule="recursive_rejection"
    ),
    "draft_tree 2 1 1, iid, traversal": Method("draft_tree", "", {"widths": [2, 1, 1], "how": "iid"}, rule="traversal"),
    "draft_tree 2 1 1, without replacement, recursive_rejection": Method(
        "draft_tree", "", {"widths": [2, 1, 1], "how": "without_replacement"}, rule="recursive_rejection"
    ),
    "draft_tree 2 1 1, without replacement, traversal": Method(
        "draft_tree", "", {"widths": [2, 1, 1], "how": "without_replacement"}, rule="traversal"
    ),
    "draft_tree 2 1 1, hybrid, recursive_rejection": Method(
        "draft_tree", "", {"widths": [2, 1, 1], "how": "hybrid"}, rule="recursive_rejection"
    ),
    "draft_tree 2 1 1, hybrid, traversal": Method(
        "draft_tree", "", {"widths": [2, 1, 1], "how": "hybrid"}, rule="traversal"
    ),
    "eagle": Method("eagle", "2.1x to 2.4x (EAGLE), 2.4x to 2.6x (EAGLE-2, Spec-Bench)", {"width": 3}, own_head=True),
    "eagle, static": Method("eagle", "2.1x to 2.4x (EAGLE)", {"depth": 0, "num_draft_tokens": 8}, own_head=True),
    "eagle3": Method("eagle3", "3.0x (Spec-Bench, 13B)", {"width": 3}, own_head=True),
    "mtp": Method("mtp", "1.8x (DeepSeek-V3)", {"num_draft_tokens": 2}, own_head=True),
    "ngram": Method("ngram", "1.5x to 1.6x (Spec-Bench, 7B)"),
    # no warm rows at temperature 0: the rounds repeat their texts there, which the drafter would know
    "suffix": Method("suffix", "2.3x to 2.5x with others (Spec-Bench)", {"shared": False}),
    "suffix, shared": Method("suffix", "2.3x to 2.5x with others (Spec-Bench)", memory="shared"),
    "suffix, warm": Method("suffix", "2.3x to 2.5x with others (Spec-Bench)", memory="warm"),
    "rest": Method("rest", "1.6x to 2.4x (batch 1)"),
    "recycling": Method("recycling", "2x (Spec-Bench)", {"shared": False}),
    "recycling, shared": Method("recycling", "2x (Spec-Bench)", memory="shared"),
    "recycling, warm": Method("recycling", "2x (Spec-Bench)", memory="warm"),
    "recycling of 8": Method("recycling", "2x (Spec-Bench)", {"shared": False, "num_draft_tokens": 8}),
    "jacobi": Method("jacobi", "0.73x (CPU, MT)"),
    "jacobi, blocks of 4": Method("jacobi", "1.34x (CPU, MT)", {"block": 4}),
    "jacobi, blocks of 4 up to 64": Method("jacobi", "1.34x (CPU, MT)", {"block": 4, "horizon": 64}),
    "lookahead W7 N5 G7": Method("lookahead", "1.5x to 2.3x (A100, 7B)"),
    "lookahead W3 N3 G3": Method("lookahead", "1.5x to 2.3x (A100, 7B)", {"window": 3, "ngram": 3, "guesses": 3}),
    "medusa, 8 nodes": Method("medusa", "1.71x (Spec-Bench, 7B) to 2.18x (Medusa-1)", {"num_draft_tokens": 8}),
    "blockwise": Method("blockwise", "1.76 tokens per pass (frozen target)"),
    "layer_skip, middle half": Method("layer_skip", "1.53x (13B) to 1.99x (70B)", MIDDLE),
    "layer_skip, middle half, fixed threshold": Method(
        "layer_skip", "1.53x (13B) to 1.99x (70B)", {**MIDDLE, "stop": "threshold"}
    ),
    "layer_skip, middle half, 4 tokens": Method(
        "layer_skip", "1.53x (13B) to 1.99x (70B)", {**MIDDLE, "stop": "fixed"}
    ),
    "layer_skip, tuned": Method("layer_skip", "1.53x (13B) to 1.99x (70B)", {"layers": str(LAYERS)}),
    "layer_skip, exit after 4": Method("layer_skip", "1.53x (13B) to 1.99x (70B)", {"exit_after": 4}),
}

COPYING = ("ngram", "suffix", "forest", "auto")  # drafters that are measured on `edit` and `repeat`


def copiers(names: list[str]) -> list[str]:
    """Returns the methods that draft from the text alone."""
    return [name for name in names if METHODS[name].drafter in COPYING and METHODS[name].draft is None]


def copied_share(prompt: list[int], text: list[int], size: int = 8) -> float:
    """Returns the share of a text's tokens in runs of at least `size` tokens that the prompt contains."""
    known = {tuple(prompt[at : at + size]) for at in range(len(prompt) - size + 1)}
    covered = [False] * len(text)
    for at in range(len(text) - size + 1):
        if tuple(text[at : at + size]) in known:
            covered[at : at + size] = [True] * size
    return mean(covered) if text else 0.0


def copies(tokenizer: Any, task: str, count: int, length: int) -> list[tuple[list[int], list[int]]]:
    """Returns prompts with held-out text, and the text that follows: an edit of it, or the same text again."""
    found = []
    ask, go = tokenizer.encode("Repeat this text:\n"), tokenizer.encode("\nThe text again:\n")
    for text in (ASSETS / "heldout.txt").read_text(encoding="utf-8").split("\f"):
        ids = tokenizer.encode(text)
        for start in range(0, len(ids) - length, length):
            piece = ids[start : start + length]
            edited = [(token + 7) % 500 + 100 if at % 20 == 9 else token for at, token in enumerate(piece)]
            found.append((piece, edited) if task == "edit" else ([*ask, *piece, *go], piece))
    return found[:: max(len(found) // count, 1)][:count]


def datastore(folder: Path, tokenizer: Any) -> Path:
    """Builds a datastore for `rest` from held-out text, which the target was not trained on."""
    from specdec_fast.retrieval.datastore import build

    texts = (ASSETS / "heldout.txt").read_text(encoding="utf-8").split("\f")
    build(folder / "heldout", [tokenizer.encode(text) for text in texts], len(tokenizer))
    return folder / "heldout"


@cache
def tuned_shape(temperature: float, nodes: int = 8) -> tuple[int, ...]:
    """Returns the static tree with the most expected tokens for the bundled pair, measured on other prompts."""
    from specdec_fast.trees.static_shape import best_shape
    from specdec_fast.tune.draft_tree_acceptance import measure as rates_of

    engine = load("demo-target", "demo-draft", drafter="draft_tree", max_rows=8, max_length=256)
    made: Any = engine.drafter
    prompts = workload(load_tokenizer("demo-target"), 24)[8:]  # the first 8 are those of the benchmark
    params = SamplingParams(temperature=temperature, seed=100, max_new_tokens=64)
    rates, _ = rates_of(engine.target, made.model, prompts, params, how="coupled", width=4, depth=6)
    return best_shape(rates, nodes).parents


def assisted(texts: list[list[int]], temperature: float, new_tokens: int) -> Callable[[], None]:
    """Returns the same work for transformers' `generate`, with the bundled draft as assistant."""
    sides = Sides(Setting(temperature=temperature, new_tokens=new_tokens), 0)
    run, turns = sides.theirs(assisted=True), cycle(texts)

    def one() -> None:
        sides.prompts = [next(turns)]
        run()

    return one


def engine_of(
    name: str, target: Any, tokenizer: Any, temperature: float, budget: str, folder: Path, heads: Path | None = None
) -> Any:
    """Returns an engine of one row with the drafter of a method, if one has that name; `folder` is for a datastore."""
    method = METHODS.get(name)
    settings: dict[str, Any] = {"drafter": "none"}
    if method:
        options: dict[str, Any] = dict(method.options)
        if method.own_head:
            options["head"] = str(method.head(heads))
        if options.get("shape") == TUNED:
            options["shape"] = tuned_shape(temperature)
        if method.drafter == "rest":
            options["datastore"] = str(datastore(folder, tokenizer))
        settings = {"drafter": method.drafter, "draft": method.draft, "drafter_options": options}
        settings |= {"budget": budget, "rule": method.rule}
    return load(target, tokenizer=tokenizer, max_length=1024, max_rows=1, **settings)


def measure(
    names: list[str],
    temperature: float,
    *,
    rounds: int,
    prompts: int,
    new_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
    task: str = "mixed",
    heads: Path | None = None,
    progress: Callable[[str, int], Progress] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Callable[[], None]]]:
    """Measures methods with one thread, in float32, at batch 1. Every round has its own seeds.

    Args:
        names: Names of the methods.
        temperature: Temperature of all requests.
        rounds: Timed rounds.
        prompts: Number of prompts.
        new_tokens: New tokens of each prompt.
        clock: Clock of the measurement.
        task: The workload.
        heads: Folder of trained heads.
        progress: Creates a progress report from a title and the number of texts.

    Returns:
        One row per method, and the timed functions by name. Each call decodes the next prompt.
    """
    torch.set_num_threads(1)
    outputs: dict[str, list[Any]] = {}
    runs: dict[str, Callable[[], None]] = {}
    engines: dict[str, Any] = {}
    tokenizer = load_tokenizer("demo-target")
    params = [SamplingParams(temperature=temperature, seed=1, max_new_tokens=new_tokens, ignore_eos=True)] * prompts
    if task in FORCED:
        pairs = copies(tokenizer, task, prompts, new_tokens)
        texts = [prompt for prompt, _ in pairs]
        params = [replace(own, forced_tokens=tuple(text)) for own, (_, text) in zip(params, pairs)]
    else:
        texts = workload(tokenizer, prompts)
    target = load_model("demo-target")
    with tempfile.TemporaryDirectory() as folder:
        for name in ["plain", *names, "again"]:
            method = METHODS.get(name)
            engine = engine_of(name, target, tokenizer, temperature, "fixed", Path(folder), heads)
            if method is not None and method.memory == "warm":
                for at, text in enumerate(workload(tokenizer, 2 * prompts)[prompts:]):
                    engine.generate([text], replace(params[0], seed=1000 + at, forced_tokens=()))
            turns, outputs[name] = count(), []
            apart = method is not None and method.memory == "shared"

            def run(name: str = name, engine: Any = engine, turns: Iterator[int] = turns, apart: bool = apart) -> None:
                round_, at = divmod(next(turns), len(texts))
                if at == 0 and apart:
                    engine.drafter.forget()
                outputs[name] += engine.generate([texts[at]], replace(params[at], seed=1 + round_))

            runs[name], engines[name] = run, engine
        if task not in FORCED:
            runs["assisted"] = assisted(texts, temperature, new_tokens)
        sides = runs
        if progress is not None:
            report = progress(f"{task}, T = {temperature:g}", (rounds + 1) * len(texts) * len(runs))
            sides = {name: report.counted(run) for name, run in runs.items()}
        timing = interleave(sides, rounds, clock, turns=len(texts))
        timed = {name: [(handle.tokens, handle.stats.tau) for handle in found] for name, found in outputs.items()}
        shares = {}
        for name in names:  # one more text, outside of the timed rounds, which this clock would slow down
            drafting = DraftClock(engines[name])
            runs[name]()
            shares[name] = drafting.share
    plain = [text for text, _ in timed["plain"]]
    copied = mean(copied_share(prompt, text) for prompt, text in zip(texts, plain))
    rows = []
    for name in names:
        low, high = timing.spread("plain", name)
        own, taus = zip(*timed[name])
        tau, speed = mean(taus[len(texts) :]), timing.ratio("plain", name)  # the first round is not timed
        rows.append(
            {
                "workload": task,
                "drafter": name,
                "published": METHODS[name].published,
                "temperature": temperature,
                "tau": tau,
                "speed_vs_plain": speed,
                "speed_vs_plain_range": [low, high],
                "plain_again": timing.ratio("plain", "again"),
                "speed_vs_assisted": None if task in FORCED else timing.ratio("assisted", name),
                "efficiency": speed / tau,
                "drafting_share": shares[name],
                "distinct_4": mean(distinct_4(text) for text in own),
                "copied_share": copied,
                "identical": list(own) == plain if METHODS[name].rule == DEFAULT else None,
                "rounds": rounds,
                "prompts": prompts,
                "new_tokens": new_tokens,
            }
        )
    return rows, runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"rounds": 5, "prompts": 8, "new_tokens": 100}
    for name, default in numbers.items():
        said = f"default: {default}; with --merge as in the file"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=said)
    parser.add_argument("--only", default="", help="titles of methods, or parts of titles, separated by |")
    parser.add_argument("--merge", action="store_true", help="replace rows of the methods of --only")
    parser.add_argument("--heads", type=Path, help="folder of trained heads, by drafter, beside the bundled ones")
    add_clock(parser)
    parser.add_argument("--out", type=Path, help="result file (default: that of all methods; none with --only alone)")
    options = parser.parse_args()
    if options.merge and not options.only:
        parser.error("--merge: got no --only; expected the methods whose rows are replaced")
    if options.merge and options.out and not options.out.is_file():
        parser.error(f"--merge: got --out {options.out}, which is no file; expected one with rows")
    every = named(options.only, METHODS)
    out = options.out or RESULTS / TABLE if options.merge else where(options.out, options.only, TABLE)
    before = json.loads(out.read_text()) if options.merge else {}
    for name, default in numbers.items():
        if getattr(options, name) is None:
            setattr(options, name, before["rows"][0][name] if before.get("rows") else default)
    clock = CLOCKS[clock_name(parser, options, [1])]
    facts: dict[str, Any] = {**environment(), "clock": clock.__name__, "threads": 1, "dtype": "float32"}
    rows: list[dict[str, Any]] = []
    every = [name for name in every if not METHODS[name].own_head or METHODS[name].head(options.heads)]
    if not every:
        parser.error(f"--only: got {options.only!r}, which is not bundled; expected --heads with it")
    cold = [name for name in every if METHODS[name].memory != "warm" and METHODS[name].rule == DEFAULT]
    copying = copiers(cold)
    tasks = [(0.0, "mixed", cold), (1.0, "mixed", every), *((1.0, task, copying) for task in FORCED)]
    for temperature, task, names in tasks:
        if not names:
            continue
        found, _ = measure(
            names,
            temperature,
            task=task,
            rounds=options.rounds,
            prompts=options.prompts,
            new_tokens=options.new_tokens,
            clock=clock,
            heads=options.heads,
            progress=Progress,
        )
        rows += found
        if out is not None:
            whole = merged(before, rows, facts) if options.merge else {"environment": facts, "rows": rows}
            write_whole(out, json.dumps(whole, indent=1) + "\n")
            write_whole(out.with_suffix(".md"), as_markdown(whole["rows"]) + "\n")
    print(as_markdown(rows))


if __name__ == "__main__":
    main()
