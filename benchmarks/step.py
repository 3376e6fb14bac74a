"""Time of an engine's step on a random Llama-shaped model, and what of it is not the models: JSON and one table.

    python -m benchmarks.step --out results/ --shape 1b --rows 1 8        # a GPU
    python -m benchmarks.step --shape tiny --device cpu --steps 5         # a CPU

Weights are random, so almost nothing is accepted: a step costs what it costs whatever is accepted. The models' share is
timed alone, on the same device, on as many nodes: one pass of the target over all nodes and one pass of the draft per
drafted token (on a GPU as captured graphs). Overhead is what a step takes beyond both.
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
from specdec_fast.draft import packed_shape
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


def model(size: dict[str, int], device: torch.device, rows: int, length: int) -> HuggingFaceTarget:
    """A random model of a size over a cache of its own."""
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
    return HuggingFaceTarget(made.eval(), max_rows=rows, max_length=length)


def waits(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def passes(engine: Engine, draft: HuggingFaceTarget, rows: int, drafted: int, rounds: int) -> dict[str, float]:
    """Seconds of one pass of each model over the rows of a running engine, as many nodes as a step has."""
    target: Any = engine.target
    device = target.device
    chains = Draft.chains(list(range(rows)), [[1] * (drafted + 1)] * rows, device=device)
    plan = tree_plan(chains.parents, chains.offsets)
    shape = packed_shape(tuple(range(rows)), (1,) * rows, device)
    tokens, lengths = torch.ones(rows, dtype=torch.int64, device=device), draft.cache.lengths.clone()

    def one() -> None:
        draft.extend(shape.rows, tokens, shape.offsets, logits=shape.last)
        draft.cache.lengths.copy_(lengths)

    sides: dict[str, list[Callable[[], Any]]] = {"target": [lambda: target.score(chains, plan)], "draft": [one]}
    return (graph_times if device.type == "cuda" else host_times)(sides, rounds)


def measure(shape: str, rows: int, drafted: int, mode: str, device: torch.device, steps: int, prompt: int) -> dict:
    """One line of the table: microseconds of a step and of its parts."""
    torch.manual_seed(0)
    length = prompt + (steps + 16) * (drafted + 1) + 8
    target, small = (model(SHAPES[shape][name], device, rows, length) for name in ("target", "draft"))
    drafter = get_drafter("draft_model")(small, num_draft_tokens=drafted) if drafted else None
    engine = Engine(target, drafter, step_mode=mode)
    for row in range(rows):
        engine.submit(
            [row % 90 + 1] * prompt, SamplingParams(seed=row, max_new_tokens=length - prompt, temperature=0.8)
        )
    for _ in range(4):
        engine.step()
    found = {"shape": shape, "rows": rows, "drafted": drafted, "mode": engine.step_mode, "asked": mode}
    waits(device)
    start = perf_counter()
    for _ in range(steps):
        engine.step()
    waits(device)
    step = (perf_counter() - start) / steps
    if drafter is None:
        for row in range(rows):
            small.cache.reserve(row, prompt)
    parts = passes(engine, small, rows, drafted, max(3, steps))
    models = parts["target"] + drafted * parts["draft"]
    return found | {
        "explain": engine.explain(),
        "step_us": step * 1e6,
        "target_us": parts["target"] * 1e6,
        "draft_us": drafted * parts["draft"] * 1e6,
        "overhead_us": (step - models) * 1e6,
        "overhead_share": 1 - models / step,
        "tokens_per_step": sum(len(handle.tokens) for handle in engine._running.values()) / rows / (steps + 4),
    }


def table(found: list[dict]) -> str:
    head = f"{'shape':<6}{'rows':>5}{'drafted':>9}{'mode':>7}{'step us':>11}{'target':>11}{'draft':>11}{'overhead':>11}"
    lines = [
        f"{each['shape']:<6}{each['rows']:>5}{each['drafted']:>9}{each['mode']:>7}{each['step_us']:>11.0f}"
        f"{each['target_us']:>11.0f}{each['draft_us']:>11.0f}{each['overhead_us']:>11.0f}"
        for each in found
    ]
    return "\n".join([head, *lines])


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of step.json; written after every line")
    parser.add_argument("--shape", choices=list(SHAPES), default="1b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafted", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--modes", nargs="+", default=["sync", "graph"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device, found = torch.device(options.device), []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    for rows in options.rows:
        for drafted in options.drafted:
            for mode in options.modes:
                line = measure(options.shape, rows, drafted, mode, device, options.steps, options.prompt)
                found.append(line)
                print(table([line]), flush=True)
                if options.out is not None:
                    options.out.mkdir(parents=True, exist_ok=True)
                    held = {"device": name, "torch": torch.__version__, "steps": found}
                    (options.out / "step.json").write_text(json.dumps(held, indent=1))
    print(table(found))
    return found


if __name__ == "__main__":
    main()
