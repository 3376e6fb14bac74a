"""`model.generate` of an attached model against its engine alone: the same texts.

`python -m benchmarks.attached_generate` writes a row for each way of decoding to benchmarks/results. Both sides write
one text in turn. The steps of the engine are the same work and vary more than the rest, so `attached_over_engine` comes
from the times outside of steps; the ratio of whole times stands beside it. Each is a median.
Tests: tests/benchmarks/test_attached_generate.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch

from benchmarks.end_to_end import workload
from benchmarks.harness.interleave import environment, interleave
from benchmarks.harness.result_files import write_whole
from specdec_fast import SamplingParams
from specdec_fast.integrations.transformers import attach, attached, detach
from specdec_fast.loading import ASSETS, load_tokenizer

RESULTS = Path(__file__).parent / "results" / "attached_generate_cpu.json"
CLOCKS = {"wall": perf_counter, "cpu": process_time}
RECALLED = "auto, recalled texts"
SIDES: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "draft_model": {"draft": "demo-draft"},
    "auto": {"drafter": "auto"},
    RECALLED: {"drafter": "auto"},
}
"""Arguments of `attach`. `auto` remembers finished texts. It forgets them before each text, except in the last row."""


def load_target() -> Any:
    """Returns the bundled target as transformers loads it, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ASSETS / "demo-target", dtype=torch.float32).eval()


class StepClock:
    """Seconds of the steps of an engine, which are the same work on both sides."""

    def __init__(self, engine: Any, clock: Callable[[], float]) -> None:
        self._step, self._clock, self.seconds = engine.step, clock, 0.0
        engine.step = self

    def __call__(self) -> Any:
        began = self._clock()
        try:
            return self._step()
        finally:
            self.seconds += self._clock() - began


def measure(name: str, prompts: list[list[int]], *, tokens: int, rounds: int, clock: str) -> dict[str, Any]:
    """Times greedy texts of an attached model, one prompt at a time, beside its engine alone.

    Args:
        name: A way of `SIDES`.
        prompts: Token ids.
        tokens: Tokens of each text.
        rounds: Rounds that count. One before does not.
        clock: Name of a clock.
    """
    model = attach(load_target(), **SIDES[name])
    model.generation_config.eos_token_id = None  # all texts have the same length
    engine, inputs, now = attached(model).engine, [torch.tensor([prompt]) for prompt in prompts], CLOCKS[clock]
    forget = getattr(engine.drafter, "forget", None) if name != RECALLED else None
    params = SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True)
    steps = StepClock(engine, now)
    texts: dict[str, list[list[int]]] = {"attached": [], "engine": []}
    outside: dict[str, list[float]] = {side: [] for side in texts}
    turn = {side: cycle(range(len(prompts))) for side in texts}

    def write(side: str, text: Callable[[int], list[int]]) -> None:
        if forget is not None:
            forget()
        began, in_steps = now(), steps.seconds
        texts[side].append(text(next(turn[side])))
        outside[side].append(now() - began - (steps.seconds - in_steps))

    def by_generate(at: int) -> list[int]:
        found = model.generate(inputs[at], max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return found[0, inputs[at].shape[1] :].tolist()

    def by_engine(at: int) -> list[int]:
        return list(engine.generate([prompts[at]], params)[0].tokens)

    sides = {"attached": lambda: write("attached", by_generate), "engine": lambda: write("engine", by_engine)}
    timing = interleave(sides, rounds, now, turns=len(prompts))
    tau = engine.stats.tau
    detach(model)
    whole = timing.median("engine") / len(prompts)
    added = median(a - b for a, b in zip(outside["attached"][len(prompts) :], outside["engine"][len(prompts) :]))
    return {
        "decoding": name,
        "texts": len(prompts),
        "tokens": tokens,
        "rounds": rounds,
        "clock": clock,
        "identical": texts["attached"] == texts["engine"],
        "tau": round(tau, 2),
        "engine_ms_per_text": round(1e3 * whole, 2),
        "added_ms_per_text": round(1e3 * added, 2),
        "attached_over_engine": round(1 + added / whole, 4),
        "ratio_of_whole_times": round(timing.ratio("attached", "engine"), 4),
        "ratio_of_whole_times_spread": [round(each, 4) for each in timing.spread("attached", "engine")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu", help="cpu: on one thread, shared machines")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompts = workload(load_tokenizer("demo-target"), options.texts)
    rows: list[dict[str, Any]] = []
    for name in SIDES:
        row = measure(name, prompts, tokens=options.tokens, rounds=options.rounds, clock=options.clock)
        rows.append(row)
        print(row, flush=True)
        write_whole(options.out, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
