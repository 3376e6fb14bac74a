"""Calls operators once, for tools that look at their kernels: python -m benchmarks.kernels.once --size small OP ...

small: every option of the operator, in float32 and bfloat16, on few numbers. large: the third and the last shape of the
GPU benchmark, each after a first call that is not looked at.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from dataclasses import replace

import torch

from benchmarks.kernels.nvidia_tools import REHEARSAL
from specdec_kernels import OPS, use_backend
from specdec_kernels.inspection.timing import shapes_of
from specdec_kernels.testing.agreement import SAMPLES, cases, make_sample, make_timed_sample
from specdec_kernels.testing.samples_attention import Sizes

SMALL = Sizes(rows=2, nodes=5, length=33, vocab=1030)


def small(op: str) -> None:
    """All cases of an operator, in the backends that a GPU would choose."""
    for dtype in (torch.float32, torch.bfloat16):
        if dtype != torch.float32 and "dtype" not in SAMPLES[op].names:
            continue
        for case in cases(op):
            with use_backend():
                call = make_sample(op, replace(SMALL, dtype=dtype), "cuda", case)
                OPS[op](*call.arguments, **call.options)
            torch.cuda.synchronize()
            print(f"{op} {case or 'plain'} {dtype}: ran", flush=True)


def large(op: str, tiny: bool) -> None:
    """One call of each shape between the profiler's start and stop."""
    device = torch.device("cuda")
    shapes = (Sizes(),) if tiny else shapes_of(op, device)
    for place in sorted({min(2, len(shapes) - 1), len(shapes) - 1}):
        run = make_timed_sample(device, op, shapes[place]).repeatable(OPS[op])
        run()
        torch.cuda.synchronize()
        with nullcontext() if REHEARSAL in os.environ else torch.cuda.profiler.profile():
            run()
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("small", "large", "tiny"), default="small")
    parser.add_argument("ops", nargs="+", choices=list(SAMPLES))
    options = parser.parse_args()
    for op in options.ops:
        if options.size == "small":
            small(op)
        else:
            large(op, options.size == "tiny")


if __name__ == "__main__":
    main()
