"""One model over several processes, by the tensor parallelism of transformers, with speculation in each of them.

Launch it with `torchrun --nproc-per-node 2 examples/tensor_parallel.py`. Without torchrun, one process has it all.
Needs the extra `device-map`.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch.distributed as dist
from transformers.distributed import DistributedConfig

from specdec_fast import SamplingParams, load

PROMPTS = ["And it came to pass", "In the beginning", "The king said"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=24)
    new_tokens = parser.parse_known_args()[0].new_tokens
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    options = {}
    if size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))  # on GPUs: cpu:gloo,cuda:nccl
        options["distributed_config"] = DistributedConfig(tp_size=size, tp_plan="auto")

    with load("demo-target", "demo-draft", model_options=options) as engine:  # the draft model is whole everywhere
        for prompt in PROMPTS:  # the same calls in the same order in every process
            handle = engine.submit(prompt, SamplingParams(temperature=0.8, seed=7, max_new_tokens=new_tokens))
            for piece in engine.stream(handle):
                if rank == 0:
                    print(piece, end="", flush=True)
            if rank == 0:
                print(f"\n{len(handle.tokens)} tokens, tau {handle.stats.tau:.2f}, processes: {size}", flush=True)

    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
