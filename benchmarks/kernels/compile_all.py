"""Compiles every Triton kernel for an architecture with the Triton that is installed: python -m
benchmarks.kernels.compile_all [sm_90]. Nothing runs and no GPU is needed. Exit status 1 if one does not compile, spills
on sm_90 where that is not recorded, or costs more than was recorded with this minor version of Triton.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from specdec_kernels.inspection import machine_code


def main(architecture: str = "sm_90") -> int:
    """How many kernels failed."""
    import triton

    print(f"triton {triton.__version__}, {architecture}")
    failed, dear, spilling, ceilings = 0, 0, 0, machine_code.ceilings()
    if not ceilings:
        known = ", ".join(machine_code.recorded())
        print(f"no ceilings are recorded with this Triton, only with {known}: spills count, other costs do not")
    chosen = [each for each in machine_code.variants() if architecture in each.architectures]
    for variant in chosen:
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
    print(f"{len(chosen)} kernels, {failed} do not compile, {dear} exceed a ceiling, {spilling} spill")
    return failed + dear


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]) > 0)
