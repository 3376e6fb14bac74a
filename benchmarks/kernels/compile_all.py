"""Compiles every Triton kernel for an architecture with the installed Triton, without a GPU.

    python -m benchmarks.kernels.compile_all [sm_90]

The exit status is 1 if a kernel does not compile, spills on sm_90 without a recorded ceiling, or costs more than was
recorded with this minor version of Triton.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from specdec_kernels.inspection import machine_code


def main(architecture: str = "sm_90") -> int:
    """Returns the number of kernels that failed."""
    import triton

    print(f"triton {triton.__version__}, {architecture}")
    failed, dear, spilling, ceilings = 0, 0, 0, machine_code.ceilings()
    if not ceilings:
        known = ", ".join(machine_code.recorded())
        print(f"no ceilings are recorded with this Triton, only with {known}: spills count, other costs do not")
    variants = [each for each in machine_code.variants() if architecture in each.architectures]
    for variant in variants:
        try:
            cost = machine_code.measure(variant, architecture)
        except Exception as error:  # whatever a compiler raises
            failed += 1
            print(f"{variant.name}: {type(error).__name__}: {str(error).strip().splitlines()[-1]}", flush=True)
            continue
        ceiling = ceilings.get(variant.name, {}).get(architecture)
        if not ceilings:
            ceiling = {**asdict(cost), "spills": 0 if architecture == "sm_90" else cost.spills}
        found = machine_code.breaches(cost, ceiling, architecture)
        dear, spilling = dear + bool(found), spilling + bool(cost.spills)
        if found:
            print(f"{variant.name}: {'; '.join(found)}", flush=True)
    print(f"{len(variants)} kernels, {failed} do not compile, {dear} exceed a ceiling, {spilling} spill")
    return failed + dear


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]) > 0)
