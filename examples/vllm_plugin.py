"""vLLM with the verification rules of this project: the same text for a seed, with and without drafts.

Runs in vLLM's environment (docs/guides/vllm.md), on the bundled pair: `python examples/vllm_plugin.py`. It prints a
text, whether a second run of its seed gives the same one, and how many tokens a target pass yields.
"""

from __future__ import annotations

import os

from specdec_fast.loading import ASSETS


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; on a GPU, vLLM measures what is free
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(ASSETS / "demo-target"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        disable_log_stats=False,  # llm.get_metrics needs them
        speculative_config={
            "method": "draft_model",
            "model": str(ASSETS / "demo-draft"),
            "num_speculative_tokens": 4,
        },
        additional_config={"specdec": {"rule": "replay"}},
    )
    prompts = ["And it came to pass", "In the beginning", "def main("]
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=64) for seed in range(3)]
    first, second = ([each.outputs[0].text for each in llm.generate(prompts, params)] for _ in range(2))
    print(first[0])
    print("same seed, same text:", first == second)
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    accepted, passes = (counts[f"vllm:spec_decode_num_{name}"] for name in ("accepted_tokens", "drafts"))
    print(f"{1 + accepted / passes:.2f} tokens per target pass")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
