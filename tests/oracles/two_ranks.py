"""One of two processes that compute a tiny Llama together: a program that test_tensor_parallel.py launches."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from oracles import models
from specdec_fast import HuggingFaceTarget, SamplingParams, load
from specdec_fast.core.ranks import RanksError

RANK = int(os.environ.get("RANK", 0))
PROMPTS = [models.prompt(9), models.prompt(17)]
PARAMS = [SamplingParams(temperature=t, seed=7, max_new_tokens=8, logprobs=0) for t in (0, 0.8)]
BRIEF = SamplingParams(max_new_tokens=4)
SHARED = {"max_rows": 2, "max_length": 128}


class FailsHere:
    """A logits processor that fails in process 1."""

    def __call__(self, tokens: Any, logits: Any) -> Any:
        if RANK == 1:
            raise KeyError("in one process alone")
        return logits


def why_refused(model: Any, **options: Any) -> str:
    try:
        load(model, **SHARED, **options).close()
    except ValueError as error:
        return str(error)
    return ""


def measure(folder: Path, engines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Texts, refusals and messages of this process."""
    plan = DistributedConfig(tp_size=2, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32, distributed_config=plan)
    whole = HuggingFaceTarget(models.own("llama"), max_rows=1)
    heads = {name: {"drafter_options": {"head": make(whole)}} for name, make in models.HEADS.items()}
    found: dict[str, Any] = {"texts": {}, "logprobs": {}, "faults": {}}
    for name, options in engines.items():
        with load(model, **SHARED, **options, **heads.get(name, {})) as engine:
            handles = engine.generate(PROMPTS, PARAMS)
            found["texts"][name] = [each.tokens for each in handles]
            found["logprobs"][name] = [[one.logprob for one in each.logprobs] for each in handles]
            found["faults"][name] = sum(each.stats.faults for each in handles)
    asked: dict[str, dict[str, Any]] = {
        "auto": {"drafter": "auto"},
        "goodput": {"drafter": "ngram", "budget": "goodput"},
        "compile": {"compile": True},
        "fused_forward": {"fused_forward": True},
    }
    found["refused"] = {name: why_refused(model, **options) for name, options in asked.items()}
    named = {"model_options": {"distributed_config": plan}, "step_mode": "graph"}
    with load(str(folder / "target"), **SHARED, **named) as engine:
        found["explained"] = engine.explain()
        found["unseeded"] = [(each.params.seed, each.tokens) for each in engine.generate(PROMPTS, BRIEF)]
        engine.warm([(1, 0)])
        try:
            engine.generate(PROMPTS[:1], SamplingParams(logits_processors=(FailsHere(),), max_new_tokens=4))
        except RanksError as error:
            found["disagreement"] = str(error)
        found["after"] = [each.tokens for each in engine.generate(PROMPTS, PARAMS)]
    with load(str(folder / "draft"), **SHARED) as alone:  # a process group alone changes nothing
        found["whole"] = [each.params.seed for each in alone.generate(PROMPTS[: RANK + 1], BRIEF)]
        found["whole ranks"] = alone.target.ranks is not None
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1 + RANK)  # sums in another order, where threads decide about it
    engines = json.loads((folder / "engines.json").read_text())
    (folder / f"{RANK}.json").write_text(json.dumps(measure(folder, engines)))
    dist.barrier()
    (folder / f"done-{RANK}").touch()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:  # as if it worked: torchrun ends it
        time.sleep(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
