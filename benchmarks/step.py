"""Time of an engine's step on a random Llama-shaped model, and what of it is not the models: JSON and one table.

    python -m benchmarks.step --out results/ --shape 1b --rows 1 8        # a GPU
    python -m benchmarks.step --drafter eagle3 --modes graph --most-overhead 60
    python -m benchmarks.step --shape tiny --device cpu --steps 5         # a CPU

Weights are random. With a draft model almost nothing is accepted: a step costs what it costs whatever is accepted. With
an EAGLE-3 head, which has to store what was accepted, all is: target and head both favour token 0, and their passes
cost what they cost. The models' share is timed alone, on the same device, on as many nodes: one pass of the target over
all nodes, and those of the draft: one per drafted token of a draft model; of a head its fusion, what it stores of the
last step and one pass over the chain so far per further token (on a GPU as captured graphs). Overhead is what a step
takes beyond both.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from specdec_fast import Draft, Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.packed_shape import packed_shape
from specdec_fast.shapes import shape_of_widths
from specdec_fast.targets.head_rows import PagedHead
from specdec_kernels import tree_plan
from specdec_kernels.timing import graph_times, host_times

SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "tiny": {
        "target": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96},
        "draft": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 96},
    },
    "1b": {
        "target": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "vocab_size": 128_256},
        "draft": {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 128_256},
    },
    "8b": {
        "target": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 128_256},
        "draft": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "vocab_size": 128_256},
    },
}


DRAFTERS = ("draft_model", "eagle3")
_HEAD_VOCABULARY = 32_000  # as published


def favour(projection: torch.nn.Linear) -> None:
    """Make token 0 the likeliest by far, whatever is projected."""
    bias = torch.zeros_like(projection.weight[:, 0])
    bias[0] = 100.0
    projection.bias = torch.nn.Parameter(bias)


def model(
    size: dict[str, int], device: torch.device, rows: int, length: int, favours: bool = False
) -> HuggingFaceTarget:
    """A random model of a size over a cache of its own. favours: it always says token 0."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden = size["hidden_size"]
    config = LlamaConfig(
        **size, intermediate_size=7 * hidden // 2, num_key_value_heads=max(1, size["num_attention_heads"] // 4),
        max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=dtype)
    made.generation_config.eos_token_id = None
    if favours:
        favour(made.lm_head)
    return HuggingFaceTarget(made.eval(), max_rows=rows, max_length=length)


def eagle3_head(target: HuggingFaceTarget) -> PagedHead:
    """A random head of a target's shape that always says token 0."""
    from specdec_fast.train.recurrent import new_eagle3

    last = target.num_layers - 1
    layers = [min(2, last), target.num_layers // 2, max(last - 2, 0)]
    head = new_eagle3(target.model, torch.arange(min(_HEAD_VOCABULARY, target.num_embeddings)), layers)
    favour(head.lm_head)
    return PagedHead(head, target)


def waits(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def passes_of_model(draft: HuggingFaceTarget, rows: int, drafted: int) -> Callable[[], None]:
    """The passes of a draft model in a step: one token of every row, for each drafted one."""
    shape = packed_shape(tuple(range(rows)), (1,) * rows, draft.device)
    tokens, lengths = torch.ones(rows, dtype=torch.int64, device=draft.device), draft.cache.lengths.clone()

    def run() -> None:
        for _ in range(drafted):
            draft.extend(shape.rows, tokens, shape.offsets, logits=shape.last)
            draft.cache.lengths.copy_(lengths)

    return run


@torch.inference_mode()
def passes_of_head(head: PagedHead, rows: int, drafted: int) -> Callable[[], None]:
    """The passes of a head in a step behind one that accepted all: what that left to store, then chains that grow."""
    every, device, cache = tuple(range(rows)), head.device, head.cache
    for row in every:
        cache.reserve(row, cache.max_length)
    new = packed_shape(every, (drafted + 1,) * rows, device)
    count, lengths = rows * (drafted + 1), cache.lengths.clone()
    tapped = head.target.model.config.hidden_size
    taps = {name: torch.zeros(count, tapped, dtype=head.target.dtype, device=device) for name in head.taps}
    tokens, features = torch.ones(count, dtype=torch.int64, device=device), head.blank(count)
    chains = [Draft.chains(every, [[1] * size] * rows, device=device) for size in range(2, drafted + 1)]
    ends = [chain.offsets[1:].long() - 1 for chain in chains]

    def run() -> None:
        head.features(taps)
        head.logits(head.extend(new.rows, tokens, features, new.offsets)[new.last])
        cache.lengths.copy_(lengths)
        for chain, last in zip(chains, ends):
            head.logits(head.score(chain, features[: chain.num_nodes])[last])

    return run


@torch.inference_mode()
def passes(target: Any, draft: Callable[[], None] | None, rows: int, drafted: int, rounds: int) -> dict[str, float]:
    """Seconds of the target's pass over the rows of a running engine, as many nodes as a step has, and of `draft`."""
    chains = Draft.chains(list(range(rows)), [[1] * (drafted + 1)] * rows, device=target.device)
    plan = tree_plan(chains.parents, chains.offsets)
    sides: dict[str, list[Callable[[], Any]]] = {"target": [lambda: target.score(chains, plan)]}
    if draft is not None:
        sides["draft"] = [draft]
    return {"draft": 0.0, **(graph_times if target.device.type == "cuda" else host_times)(sides, rounds)}


def measure(
    shape: str, drafter: str, rows: int, drafted: int, mode: str, device: torch.device, steps: int, prompt: int
) -> dict:
    """One line of the table: microseconds of a step and of its parts."""
    torch.manual_seed(0)
    length = prompt + (steps + 16) * (drafted + 1) + 8
    target = model(SHAPES[shape]["target"], device, rows, length, favours=drafter == "eagle3")
    made: Any = None
    if drafted and drafter == "eagle3":
        chain = shape_of_widths((1,) * drafted).parents
        made = get_drafter("eagle3")(target, eagle3_head(target), depth=0, shape=chain)
    elif drafted:
        small = model(SHAPES[shape]["draft"], device, rows, length)
        made = get_drafter("draft_model")(small, num_draft_tokens=drafted)
    engine = Engine(target, made, step_mode=mode)
    for row in range(rows):
        engine.submit(
            [row % 90 + 1] * prompt, SamplingParams(seed=row, max_new_tokens=length - prompt, temperature=0.8)
        )
    for _ in range(4):
        engine.step()
    names = {"shape": shape, "drafter": drafter if drafted else "none", "rows": rows, "drafted": drafted}
    waits(device)
    start = perf_counter()
    for _ in range(steps):
        engine.step()
    waits(device)
    step = (perf_counter() - start) / steps
    draft = None
    if made is not None:
        draft = (passes_of_head if drafter == "eagle3" else passes_of_model)(made.model, rows, drafted)
    parts = passes(target, draft, rows, drafted, max(3, steps))
    models = parts["target"] + parts["draft"]
    return names | {
        "mode": engine.step_mode,
        "asked": mode,
        "explain": engine.explain(),
        "step_us": step * 1e6,
        "target_us": parts["target"] * 1e6,
        "draft_us": parts["draft"] * 1e6,
        "overhead_us": (step - models) * 1e6,
        "overhead_share": 1 - models / step,
        "tokens_per_step": sum(len(handle.tokens) for handle in engine._running.values()) / rows / (steps + 4),
    }


def table(found: list[dict]) -> str:
    names, times = ("shape", "drafter", "rows", "drafted", "mode"), ("step_us", "target_us", "draft_us", "overhead_us")
    head = "".join(f"{name:>12}" for name in (*names, *times))
    lines = [
        "".join([*(f"{each[name]:>12}" for name in names), *(f"{each[time]:>12.0f}" for time in times)])
        for each in found
    ]
    return "\n".join([head, *lines])


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of step.json (step-DRAFTER.json); written after every line")
    parser.add_argument("--shape", choices=list(SHAPES), default="1b")
    parser.add_argument("--drafter", choices=DRAFTERS, default=DRAFTERS[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafted", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--modes", nargs="+", default=["sync", "graph"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--most-overhead", type=float, help="microseconds: captured steps with more are a failure")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device, found = torch.device(options.device), []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    file = "step.json" if options.drafter == DRAFTERS[0] else f"step-{options.drafter}.json"
    for rows in options.rows:
        for drafted in options.drafted:
            for mode in options.modes:
                sizes = rows, drafted, mode, device, options.steps, options.prompt
                line = measure(options.shape, options.drafter, *sizes)
                found.append(line)
                print(table([line]), flush=True)
                if options.out is not None:
                    options.out.mkdir(parents=True, exist_ok=True)
                    held = {"device": name, "torch": torch.__version__, "steps": found}
                    (options.out / file).write_text(json.dumps(held, indent=1))
    print(table(found))
    most = float("inf") if options.most_overhead is None else options.most_overhead
    if slow := [line for line in found if line["mode"] == "graph" and line["overhead_us"] > most]:
        raise SystemExit(f"{len(slow)} captured steps take more than {most:g} us beyond their models' passes")
    return found


if __name__ == "__main__":
    main()
