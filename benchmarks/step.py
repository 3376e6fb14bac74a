"""Time of an engine's step on a random Llama-shaped model, and its overhead beyond the models: JSON and a table.

    python -m benchmarks.step --out results/ --shape 8b --rows 1 8 64     # a GPU
    python -m benchmarks.step --drafter eagle3 --modes graph --acceptance none half all
    python -m benchmarks.step --shape tiny --device cpu --steps 5         # a CPU

Weights are random and acceptance is forced. The drafter always proposes token 0. The target chooses it never, always,
or so often that half of the drafted tokens are expected to be accepted.

The models' share is timed separately, on the same device and number of nodes. It is one pass of the target over all
nodes, and the passes of the draft: one per drafted token of a draft model. A head runs its fusion, stores the tokens of
the last step, and runs one pass over the chain so far per further token. On a GPU these passes are CUDA graphs.

Overhead is the rest of the step's time. On a GPU a few more steps are traced: kernels per step, busy time and gaps
(`benchmarks/gpu/trace_summary.py`).
"""

from __future__ import annotations

import argparse
import gc
import platform
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu.trace_summary import traced
from benchmarks.harness.result_files import write_whole
from specdec_fast import Draft, Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.draft_runners.head_runner import PagedHead
from specdec_fast.trees.static_shape import shape_of_widths
from specdec_kernels import tree_plan
from specdec_kernels.inspection.timing import Spread, graph_times, host_times

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
ACCEPTANCE = ("none", "half", "all")
TEMPERATURE = 0.8
WARM_UP, TRACED = 4, 5
"""Steps before the timed ones, and steps behind them that are traced."""
_HEAD_VOCABULARY = 32_000  # as published


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    shape: str
    drafter: str
    rows: int
    drafted: int
    mode: str
    acceptance: str = "all"


def rate_for_half(drafted: int) -> float:
    """Returns the acceptance rate at which half of a chain of `drafted` tokens is expected to be accepted."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        expected = sum(rate**length for length in range(1, drafted + 1))
        low, high = (rate, high) if expected < drafted / 2 else (low, rate)
    return low


def favour(projection: torch.nn.Linear, first: float, second: float) -> None:
    """Sets the logits of tokens 0 and 1 for all inputs; other logits are a few units around 0."""
    projection.weight.data[:2] = 0
    bias = torch.zeros_like(projection.weight[:, 0])
    bias[0], bias[1] = first, second
    projection.bias = torch.nn.Parameter(bias, requires_grad=False)


def force(target: torch.nn.Linear, draft: torch.nn.Linear | None, acceptance: str, drafted: int) -> None:
    """Makes the projections of target and draft agree on none, half or all of the drafted tokens."""
    if draft is not None:
        favour(draft, 100.0, 0.0)
    if acceptance == "half" and drafted:
        rate = rate_for_half(drafted)
        favour(
            target, 24.0 + TEMPERATURE * log(rate / (1 - rate)), 24.0
        )  # (the half formats round logits of 24 to 1/8)
    else:
        favour(target, *((0.0, 100.0) if acceptance == "none" else (100.0, 0.0)))


class Models:
    """The random models of one shape, each created once, since large weights take long."""

    def __init__(self, shape: str, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._made: dict[str, Any] = {}

    def of(self, part: str) -> Any:
        """Returns the transformers model "target" or "draft"."""
        if part not in self._made:
            self._made[part] = _model(SHAPES[self.shape][part], self.device)
        return self._made[part]

    def on_cache(self, part: str, rows: int, length: int) -> HuggingFaceTarget:
        """Returns the model with its own cache."""
        return HuggingFaceTarget(self.of(part), max_rows=rows, max_length=length)


def _model(size: dict[str, int], device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden = size["hidden_size"]
    config = LlamaConfig(
        **size, intermediate_size=7 * hidden // 2, num_key_value_heads=max(1, size["num_attention_heads"] // 4),
        max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=dtype)
    made.generation_config.eos_token_id = None
    return made.eval()


def eagle3_head(target: HuggingFaceTarget) -> PagedHead:
    """Returns a random head of a target's shape."""
    from specdec_fast.train.heads.recurrent import new_eagle3

    last = target.num_layers - 1
    layers = [min(2, last), target.num_layers // 2, max(last - 2, 0)]
    head = new_eagle3(target.model, torch.arange(min(_HEAD_VOCABULARY, target.num_embeddings)), layers)
    return PagedHead(head, target)


def waits(device: torch.device) -> None:
    """Waits until a GPU has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def passes_of_model(draft: HuggingFaceTarget, rows: int, drafted: int) -> Callable[[], None]:
    """Returns the passes of a draft model in a step: one token per row for each drafted token."""
    shape = chain_layout(tuple(range(rows)), (1,) * rows, draft.device)
    tokens, lengths = torch.ones(rows, dtype=torch.int64, device=draft.device), draft.cache.lengths.clone()

    def run() -> None:
        for _ in range(drafted):
            draft.extend(shape.rows, tokens, shape.offsets, logits=shape.last)
            draft.cache.lengths.copy_(lengths)

    return run


@torch.inference_mode()
def passes_of_head(head: PagedHead, rows: int, drafted: int) -> Callable[[], None]:
    """Returns the passes of a head in a step: storing all tokens of the last step, then growing chains."""
    every, device, cache = tuple(range(rows)), head.device, head.cache
    for row in every:
        cache.reserve(row, cache.max_length)
    new = chain_layout(every, (drafted + 1,) * rows, device)
    count, lengths = rows * (drafted + 1), cache.lengths.clone()
    hidden_size = head.target.model.config.hidden_size
    aux_hidden_states = {
        name: torch.zeros(count, hidden_size, dtype=head.target.dtype, device=device) for name in head.aux_hidden_states
    }
    tokens, features = torch.ones(count, dtype=torch.int64, device=device), head.zero_features(count)
    chains = [Draft.chains(every, [[1] * size] * rows, device=device) for size in range(2, drafted + 1)]
    ends = [chain.offsets[1:].long() - 1 for chain in chains]

    def run() -> None:
        head.features(aux_hidden_states)
        head.logits(head.extend(new.rows, tokens, features, new.offsets)[new.last])
        cache.lengths.copy_(lengths)
        for chain, last in zip(chains, ends):
            head.logits(head.score(chain, features[: chain.num_nodes])[last])

    return run


@torch.inference_mode()
def passes(target: Any, draft: Callable[[], None] | None, rows: int, drafted: int, rounds: int) -> dict[str, Spread]:
    """Times the target's pass over the nodes of a step, and `draft`."""
    chains = Draft.chains(list(range(rows)), [[1] * (drafted + 1)] * rows, device=target.device)
    plan = tree_plan(chains.parents, chains.offsets)
    sides: dict[str, list[Callable[[], Any]]] = {"target": [lambda: target.score(chains, plan)]}
    if draft is not None:
        sides["draft"] = [draft]
    return {
        "draft": Spread(0.0, 0.0, 0.0),
        **(graph_times if target.device.type == "cuda" else host_times)(sides, rounds),
    }


def measure(line: Line, models: Models, steps: int, prompt: int) -> dict[str, Any]:
    """Measures one line of the table: microseconds of a step and of its parts."""
    rows, drafted, device = line.rows, line.drafted, models.device
    gc.collect()  # frees caches and graphs of the previous line, which are in reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    length = prompt + (steps + WARM_UP + TRACED + 7) * (drafted + 1) + 8
    target = models.on_cache("target", rows, length)
    made: Any = None
    torch.manual_seed(0)
    if drafted and line.drafter == "eagle3":
        chain = shape_of_widths((1,) * drafted).parents
        made = get_drafter("eagle3")(target, eagle3_head(target), depth=0, shape=chain)
        force(target.model.lm_head, made.model.head.lm_head, line.acceptance, drafted)
    elif drafted:
        small = models.on_cache("draft", rows, length)
        made = get_drafter("draft_model")(small, num_draft_tokens=drafted)
        force(target.model.lm_head, small.model.lm_head, line.acceptance, drafted)
    else:
        force(target.model.lm_head, None, "all", 0)
    engine = Engine(target, made, step_mode=line.mode)
    handles = [
        engine.submit(
            [row % 90 + 1] * prompt, SamplingParams(seed=row, max_new_tokens=length - prompt, temperature=TEMPERATURE)
        )
        for row in range(rows)
    ]

    def tokens() -> int:
        return sum(len(handle.tokens) for handle in handles)

    while engine.num_queued or engine.prefilling:
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    waits(device)
    before, times, start = tokens(), [], perf_counter()
    for _ in range(steps):
        engine.step()
        times.append(perf_counter() - start)
    waits(device)
    step = (perf_counter() - start) / steps
    between = [(late - early) for early, late in zip([0.0, *times], times)]
    each = (tokens() - before) / rows / steps
    found = asdict(line) | {
        "drafter": line.drafter if drafted else "none",
        "acceptance": line.acceptance if drafted else "",
        "mode": engine.step_mode,
        "asked": line.mode,
        "explain": engine.explain(),
        "step_us": step * 1e6,
        **{f"step_{name}_us": value * 1e6 for name, value in asdict(Spread.of(between)).items()},
        "tokens_per_step": each,
        "tokens_per_s": each * rows / step,
        "accepted_share": (each - 1) / drafted if drafted else None,
        "trace": traced(engine.step, TRACED, device),
    }
    draft = None
    if made is not None:
        draft = (passes_of_head if line.drafter == "eagle3" else passes_of_model)(made.model, rows, drafted)
    parts = passes(target, draft, rows, drafted, max(3, steps))
    models_of_step = parts["target"].median + parts["draft"].median
    return found | {
        "target_us": parts["target"].median * 1e6,
        "draft_us": parts["draft"].median * 1e6,
        "overhead_us": (step - models_of_step) * 1e6,
        "overhead_share": 1 - models_of_step / step,
    }


def table(found: list[dict[str, Any]]) -> str:
    """Returns the lines as text."""
    names = ("shape", "drafter", "rows", "drafted", "acceptance", "mode")
    times = ("step_us", "target_us", "draft_us", "overhead_us", "tokens_per_s")
    head = "".join(f"{name:>12}" for name in (*names, *times))
    lines = [
        "".join([*(f"{each[name]:>12}" for name in names), *(f"{each[time]:>12.0f}" for time in times)])
        for each in found
    ]
    return "\n".join([head, *lines])


def lines_of(options: argparse.Namespace) -> list[Line]:
    """Returns the lines for the options; without drafted tokens, acceptance does not vary."""
    return [
        Line(options.shape, options.drafter, rows, drafted, mode, acceptance)
        for rows in options.rows
        for drafted in options.drafted
        for mode in options.modes
        for acceptance in (options.acceptance if drafted else options.acceptance[:1])
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of step-SHAPE-DRAFTER.json; written after every line")
    parser.add_argument("--shape", choices=list(SHAPES), default="1b")
    parser.add_argument("--drafter", choices=DRAFTERS, default=DRAFTERS[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafted", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--acceptance", choices=ACCEPTANCE, nargs="+", default=["all"])
    parser.add_argument("--modes", nargs="+", default=["sync", "graph"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument(
        "--most-overhead", type=float, help="microseconds; CUDA-graph steps with more overhead are a failure"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device, found, failed = torch.device(options.device), [], 0
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    models = Models(options.shape, device)
    for line in lines_of(options):
        try:
            found.append(measure(line, models, options.steps, options.prompt))
        except Exception as error:  # an error of one line does not stop the others
            failed += 1
            found.append(asdict(line) | {"error": f"{type(error).__name__}: {error}"})
            traceback.print_exc()
        print(table(found[-1:]) if "error" not in found[-1] else f"{line}: {found[-1]['error']}", flush=True)
        if options.out is not None:
            held = {"device": name, "torch": torch.__version__, "steps": found}
            write_whole(options.out / f"step-{options.shape}-{options.drafter}.json", held)
    whole = [each for each in found if "error" not in each]
    print(table(whole))
    most = float("inf") if options.most_overhead is None else options.most_overhead
    if slow := [line for line in whole if line["mode"] == "graph" and line["overhead_us"] > most]:
        raise SystemExit(f"{len(slow)} CUDA-graph steps take more than {most:g} us beyond their models' passes")
    if failed:
        raise SystemExit(f"{failed} of {len(found)} lines failed")
    return found


if __name__ == "__main__":
    main()
