"""The plugin for vLLM beside the kernels that it calls: microseconds of its part of one step.

    PYTHONPATH=tests python -m benchmarks.vllm_plugin

A fake of vLLM's runner has B = 8 requests, K = 4 draft tokens and V = 32,000. The plugin's share is its time minus that
of the same operators on ready arguments. Both run in turns, on one thread. vLLM is not needed. Cases are calls of the
sampler; draft passes, whose tokens the plugin samples, have rows of their own.
Tests: tests/benchmarks/test_vllm_plugin.py.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from oracles.fake_vllm import Drafter, SamplerOutput, runner, sampling_metadata

from benchmarks.harness.interleave import environment, interleave
from benchmarks.harness.result_files import write_whole
from specdec_fast.integrations.vllm import chain_verification, draft_sampling, v1_sampler
from specdec_fast.integrations.vllm.draft_sampling import SampledDrafts

B, K, V = 8, 4, 32_000
RESULTS = Path(__file__).parent / "results" / "vllm_plugin_cpu.json"
MODULES = chain_verification, draft_sampling, v1_sampler
OPERATORS = (
    "replay_verify",
    "rejection_verify_logits",
    "distribution_stats",
    "replay_sample",
    "draft_sample",
    "copy_rows",
)


class Recorded:
    """An operator that notes its calls, so that they can be repeated on the same arguments.

    Args:
        operator: The operator.
        calls: Calls of all operators in their order.
    """

    def __init__(self, operator: Callable[..., Any], calls: list[partial[Any]]) -> None:
        self.operator, self.calls = operator, calls

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls.append(partial(self.operator, *args, **named))
        return self.operator(*args, **named)


def record(call: Callable[[], Any]) -> Callable[[], None]:
    """Returns a function that calls the operators of `call` alone, in the same order."""
    calls: list[partial[Any]] = []
    noted = []
    for module in MODULES:
        for name in OPERATORS:
            if hasattr(module, name):
                recorded = Recorded(getattr(module, name), calls)
                setattr(module, name, recorded)
                noted.append((module, name, recorded))
    call()
    for module, name, recorded in noted:
        setattr(module, name, recorded.operator)

    def run() -> None:
        for each in calls:
            each()

    return run


def parts_of(rule: str, drafted: bool, sampled: bool) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """The plugin's parts of a step: a call of its sampler, and the draft tokens of K passes.

    Args:
        rule: A rule.
        drafted: The step has draft tokens.
        sampled: The plugin samples them, from the logits of a fake draft model. Otherwise there is no second part.
    """
    generator = torch.Generator().manual_seed(3)
    every = torch.randn(B * (K + 1), V, generator=generator) * 3
    passes = [every[step :: K + 1] + torch.randn(B, V, generator=generator) for step in range(K)]
    logits = every if drafted else every[:: K + 1].contiguous()
    metadata, lengths = sampling_metadata([0.8] * B), [100 + 7 * at for at in range(B)]
    drafter = Drafter(num_speculative_tokens=K) if sampled else None
    speculation = SimpleNamespace(draft_sample_method="probabilistic", method="draft_model") if sampled else None
    drafts = torch.stack([each.argmax(-1) for each in passes], 1).tolist() if drafted else None
    made, described = runner(range(B), metadata, lengths, drafts, drafter=drafter, speculative_config=speculation)
    sampler = v1_sampler.V1Sampler(made, rule, SamplerOutput)

    def verify() -> Any:
        return sampler.sample(logits, described)

    if drafter is None:
        return verify, None
    roots = torch.tensor(lengths) - 1

    def draft() -> list[Any]:
        drafter.set_inputs_first_pass(roots)
        return [drafter._sample_draft_tokens(each, metadata)[0] for each in passes]

    made.input_ids.gpu[described.target_logits_indices.long() + 1] = torch.stack(draft(), 1).flatten().int()
    drafting = sampler._drafting
    assert drafting is not None
    ids, tokens, kept, stats = drafting._ids, drafting._tokens, drafting._logits, drafting._stats
    if tokens:  # else they are coupled, and the verification needs no distributions
        sampler._drafting = SimpleNamespace(take=lambda: (SampledDrafts(ids, tokens, kept, stats), frozenset()))
    return verify, draft


CASES = {
    "replay": ("replay", True, False),
    "replay, coupled drafts": ("replay", True, True),
    "replay, no drafts": ("replay", False, False),
    "rejection": ("rejection", True, False),
    "rejection, sampled drafts": ("rejection", True, True),
    "block, sampled drafts": ("block", True, True),
    "rejection, no drafts": ("rejection", False, False),
}
DRAFTING = {
    "replay, coupled drafts": "four coupled draft passes",
    "rejection, sampled drafts": "four sampled draft passes",
}


def measure_part(part: Callable[[], Any], rounds: int, turns: int) -> dict[str, int]:
    """Microseconds of a part, of its kernels, and the median of the difference."""
    with torch.inference_mode():
        kernels = record(part)
        timing = interleave({"plugin": part, "kernels": kernels}, rounds, time.process_time, turns)
    each = {side: 1e6 * timing.median(side) / turns for side in ("plugin", "kernels")}
    paired = zip(timing.seconds["plugin"], timing.seconds["kernels"])
    share = 1e6 * median(whole - inner for whole, inner in paired) / turns
    return {"call_us": round(each["plugin"]), "kernels_us": round(each["kernels"]), "share_us": round(share)}


def measure(rounds: int, turns: int) -> list[dict[str, Any]]:
    """A row for each case, then one for each way of drafting."""
    parts = {}
    for name, case in CASES.items():
        with torch.inference_mode():
            parts[name], draft = parts_of(*case)
        if draft is not None and name in DRAFTING:
            parts[DRAFTING[name]] = draft
    rows = []
    for name in (*CASES, *DRAFTING.values()):
        rows.append({"case": name, **measure_part(parts[name], rounds, turns)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {"environment": environment(), "batch": B, "draft_tokens": K, "vocabulary": V}
    write_whole(asked.out, {**found, "rows": measure(asked.rounds, asked.turns)})


if __name__ == "__main__":
    main()
