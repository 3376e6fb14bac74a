"""The plugin for vLLM beside the kernels that it calls: microseconds of one call of its sampler.

    PYTHONPATH=tests python -m benchmarks.vllm_plugin

A fake of vLLM's runner has B = 8 requests, K = 4 draft tokens and V = 32,000. The plugin's share is the time of a
call minus that of the same operators on ready arguments. Both run in turns, on one thread. vLLM is not needed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from oracles.fake_vllm import SamplerOutput, runner, sampling_metadata

from benchmarks.harness.interleave import environment, interleave
from benchmarks.harness.result_files import write_whole
from specdec_fast.integrations.vllm import chain_verification, v1_sampler
from specdec_fast.integrations.vllm.draft_sampling import SampledDrafts
from specdec_kernels import distribution_stats, draft_sample

B, K, V = 8, 4, 32_000
RESULTS = Path(__file__).parent / "results" / "vllm_plugin_cpu.json"
OPERATORS = ("replay_verify", "rejection_verify_logits", "distribution_stats", "replay_sample")


class Recorded:
    """An operator that notes its arguments, so that it can be called again on the same ones."""

    def __init__(self, operator: Callable[..., Any]) -> None:
        self.operator, self.calls = operator, []

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls.append((args, named))
        return self.operator(*args, **named)


def record(call: Callable[[], Any]) -> Callable[[], None]:
    """Returns a function that calls the operators of `call` alone."""
    noted = []
    for module in (chain_verification, v1_sampler):
        for name in OPERATORS:
            if hasattr(module, name):
                recorded = Recorded(getattr(module, name))
                setattr(module, name, recorded)
                noted.append((module, name, recorded))
    call()
    for module, name, recorded in noted:
        setattr(module, name, recorded.operator)
    calls = [(recorded.operator, each) for _, _, recorded in noted for each in recorded.calls]

    def run() -> None:
        for operator, (args, named) in calls:
            operator(*args, **named)

    return run


class Drafting:
    """Draft tokens that were sampled before the call, as `DraftSampling` hands them over."""

    def __init__(self, drafts: Callable[[], SampledDrafts]) -> None:
        self._drafts = drafts

    def take(self) -> tuple[SampledDrafts, frozenset[str]]:
        return self._drafts(), frozenset()


def sampler_of(rule: str, drafted: bool, sampled: bool) -> Callable[[], Any]:
    """One call of the plugin's sampler."""
    generator = torch.Generator().manual_seed(3)
    nodes = B * (K + 1 if drafted else 1)
    logits = torch.randn(nodes, V, generator=generator) * 3
    metadata = sampling_metadata([0.8] * B)
    seeds, lengths = list(range(B)), [100 + 7 * at for at in range(B)]
    positions = torch.tensor(lengths, dtype=torch.int32) - 1
    steps = []
    for step in range(K):
        rows = (logits[step :: K + 1] if drafted else logits) + torch.randn(B, V, generator=generator)
        stats = distribution_stats(rows, torch.full((B,), 0.8), positions * 0, torch.ones(B), torch.zeros(B))
        index = torch.full((B,), step, dtype=torch.int32)
        steps.append((draft_sample(rows, *stats, torch.tensor(seeds), positions, index), (rows, *stats)))
    drafts = torch.stack([tokens for tokens, _ in steps], 1).tolist() if drafted else None
    made, described = runner(seeds, metadata, lengths, drafts)
    sampler = v1_sampler.V1Sampler(made, rule, SamplerOutput)
    if sampled:
        tokens, stats = [each for each, _ in steps], [each[1:] for _, each in steps]
        kept = torch.cat([*(each[0] for _, each in steps), torch.zeros(1, V)])
        sampler._draws = True
        sampler._drafting = Drafting(lambda: SampledDrafts(made.input_batch.req_ids, tokens, kept, stats))
    return lambda: sampler.sample(logits, described)


CASES = {
    "replay": ("replay", True, False),
    "replay, no drafts": ("replay", False, False),
    "rejection": ("rejection", True, False),
    "rejection, sampled drafts": ("rejection", True, True),
    "block, sampled drafts": ("block", True, True),
    "rejection, no drafts": ("rejection", False, False),
}


def measure(rounds: int, turns: int) -> list[dict[str, Any]]:
    """One row for each case."""
    rows = []
    for name, case in CASES.items():
        with torch.inference_mode():
            plugin = sampler_of(*case)
            kernels = record(plugin)
            timing = interleave({"plugin": plugin, "kernels": kernels}, rounds, time.process_time, turns)
        each = {side: 1e6 * timing.median(side) / turns for side in ("plugin", "kernels")}
        paired = zip(timing.seconds["plugin"], timing.seconds["kernels"])
        share = 1e6 * median(whole - inner for whole, inner in paired) / turns
        row = {"case": name, "call_us": each["plugin"], "kernels_us": each["kernels"], "share_us": share}
        rows.append({key: value if key == "case" else round(value) for key, value in row.items()})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {"environment": environment(), "batch": B, "draft_tokens": K, "vocabulary": V}
    write_whole(asked.out, {**found, "rows": measure(asked.rounds, asked.turns)})


if __name__ == "__main__":
    main()
