"""Machine code of Triton kernels, compiled without a GPU: its cost, and the ceilings that it must keep.

Every operator with a Triton kernel lists its `Variant`s in its `launch.py`; `variants()` finds them. `measure` compiles
a variant with Triton's compiler. The tools of the triton wheel then report registers, spills, shared memory and
instructions. `ceilings.json` beside this file has one section of recorded costs for each minor version of Triton, and
`breaches` compares with them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

from ..dispatch.extras import install_hint
from ..triton_shared.aot_config import Variant

_OPS = Path(__file__).parents[1] / "ops"
CEILINGS = Path(__file__).with_name("ceilings.json")
Ceilings = dict[str, dict[str, dict[str, int]]]
"""Costs by variant, architecture and name of the number."""
SLACK = 1.1
"""Registers, shared memory and narrow loads may grow by a tenth: versions of compilers differ."""
COUNT_TOLERANCE = 0.1
"""Relative change of the numbers of matrix instructions and wide loads that is accepted; a change by one always is.

A larger change means another kernel. At least one instruction of a recorded kind must remain.
"""
PIPELINE_BYTES = 16384
"""A kernel with at least these bytes of shared memory prefetches tiles. Much less means that its pipeline is gone."""


@dataclass(frozen=True)
class Cost:
    """Resources of a compiled kernel. Instruction counts are those of the code, not of its execution.

    Attributes:
        registers: Registers per thread.
        stack: Stack bytes per thread.
        spills: Loads and stores of local memory.
        shared: Bytes of shared memory per block.
        wgmma: Matrix instructions of warp groups (and of Blackwell).
        mma: Matrix instructions of warps.
        wide_loads: Global loads of 16 bytes per thread.
        narrow_loads: Global loads of fewer bytes per thread.
    """

    registers: int
    stack: int
    spills: int
    shared: int
    wgmma: int
    mma: int
    wide_loads: int
    narrow_loads: int


def unavailable_reason() -> str | None:
    """Returns why nothing can be compiled here, or None."""
    if find_spec("triton") is None:
        return f"triton is not installed; {install_hint('gpu')}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set: this process interprets kernels; unset it to compile them"
    return None


def variants() -> list[Variant]:
    """Returns the variants of all operators, in order of the operators. Raises ValueError for duplicate names."""
    found: list[Variant] = []
    for place in sorted(_OPS.glob("*/launch.py")):
        found += getattr(import_module(f"specdec_kernels.ops.{place.parent.name}.launch"), "VARIANTS", [])
    names = [variant.name for variant in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"machine_code: got variants with equal names: {', '.join(twice)}; expected unique names; rename them"
        )
    return found


def compile_variant(variant: Variant, architecture: str) -> Any:
    """Compiles a variant with Triton. No GPU and no driver are needed.

    Args:
        variant: Kernel and launch configuration.
        architecture: Target architecture, such as "sm_90".

    Returns:
        Triton's compiled kernel.

    Raises:
        ValueError: If the arguments of the variant are not those of the kernel.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    module, _, name = variant.kernel.partition(":")
    kernel = getattr(import_module(f"specdec_kernels.ops.{module}"), name)
    names = list(kernel.arg_names)
    given = {*variant.arguments, *variant.constants}
    if given != set(names):
        raise ValueError(
            f"machine_code: {variant.name}: {variant.kernel} has other arguments; missing "
            f"{sorted(set(names) - given)}, unknown {sorted(given - set(names))}"
        )
    signature, hints = {}, {}
    for place, argument in enumerate(names):
        kind, _, divisor = variant.arguments.get(argument, "constexpr").partition(":")
        signature[argument] = kind
        if kernel.params[place].do_not_specialize:
            continue
        if divisor == "16" or (kind.startswith("*") and not divisor):
            hints[(place,)] = [["tt.divisibility", 16]]
    constants = {(names.index(n),): value for n, value in variant.constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": variant.fusion}
    if variant.most_registers is not None:
        options["maxnreg"] = variant.most_registers
    return compile_source(source, target=target, options=options)


@lru_cache(maxsize=1)
def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"machine_code: {command[0]} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def measure(variant: Variant, architecture: str) -> Cost:
    """Compiles a variant for an architecture such as "sm_90", and returns its resources."""
    compiled = compile_variant(variant, architecture)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run(str(_tools() / "cuobjdump"), "-res-usage", str(cubin))
        code = _run(str(_tools() / "cuobjdump"), "-sass", str(cubin))

    def used(what: str) -> int:
        found = re.search(rf"\b{what}:(\d+)", usage)
        return int(found[1]) if found else 0

    def count(pattern: str) -> int:
        return len(re.findall(rf"^\s+/\*[0-9a-f]{{4,}}\*/\s+(?:@!?U?P\w+ )?{pattern}", code, flags=re.MULTILINE))

    wide = count(r"(?:LDG|LDGSTS)\.E\.(?:\w+\.)*128") + count(r"UTMALDG")
    return Cost(
        registers=used("REG"),
        stack=used("STACK"),
        spills=count(r"LDL") + count(r"STL"),
        shared=int(compiled.metadata.shared),
        wgmma=count(r"(?:HGMMA|QGMMA|IGMMA|UTC\w*MMA)"),
        mma=count(r"(?:HMMA|QMMA|IMMA)"),
        wide_loads=wide,
        narrow_loads=count(r"(?:LDG|LDGSTS)\.") - (wide - count(r"UTMALDG")),
    )


def breaches(cost: Cost, ceiling: Mapping[str, int] | None, architecture: str) -> list[str]:
    """Compares the cost of a kernel with its ceiling.

    Args:
        cost: Resources of the kernel.
        ceiling: Recorded resources; None is a breach.
        architecture: Architecture of the kernel.

    Returns:
        One line for every number above its ceiling and for every changed count of instructions.
    """
    found = []
    if architecture == "sm_90" and cost.spills and not (ceiling or {}).get("spills"):
        found.append(f"{cost.spills} spills; expected none on sm_90")
    if ceiling is None:
        return [*found, f"no ceiling is recorded for Triton {version()}; run `specdec kernels inspect --record`"]
    for name in ("registers", "shared", "stack", "spills", "narrow_loads"):
        got, most = getattr(cost, name), ceiling[name]
        allowed = int(most * SLACK) if name in ("registers", "shared", "narrow_loads") else most
        if got > allowed:
            found.append(f"{name} {got}; expected at most {allowed}")
    if ceiling["shared"] >= PIPELINE_BYTES and 3 * cost.shared < 2 * ceiling["shared"]:
        found.append(
            f"shared {cost.shared}; expected two thirds of {ceiling['shared']} or more: fewer tiles are prefetched"
        )
    for name in ("wgmma", "mma", "wide_loads"):
        got, known = getattr(cost, name), ceiling[name]
        change = max(1, ceil(known * COUNT_TOLERANCE))
        least, most = max(min(known, 1), known - change), known + change
        if not least <= got <= most:
            found.append(f"{name} {got}; expected {least} to {most}, since {known} were recorded")
    return found


def version() -> str:
    """Returns the minor version of the installed Triton, such as "3.9"."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def recorded() -> dict[str, Ceilings]:
    """Returns all recorded costs, by minor version of Triton."""
    return json.loads(CEILINGS.read_text(encoding="utf-8")) if CEILINGS.exists() else {}


def ceilings() -> Ceilings:
    """Returns the costs recorded with the installed Triton; empty if there are none."""
    return recorded().get(version(), {})


def record(costs: Mapping[str, Mapping[str, Cost]]) -> None:
    """Writes costs to the section of the installed Triton in `ceilings.json`; other numbers stay.

    Removed variants and architectures are dropped.

    Args:
        costs: Costs by variant and architecture.
    """
    known = {variant.name: variant.architectures for variant in variants()}
    sections = {version(): {}, **recorded()}
    for name, found in costs.items():
        mine = sections[version()].setdefault(name, {})
        mine.update({architecture: asdict(cost) for architecture, cost in found.items()})

    def written(found: Mapping[str, Any], depth: int) -> str:
        """Returns the JSON text of a section, with one line per cost."""
        if depth == 3:
            return json.dumps(found)
        inside = ",\n".join(f"{'  ' * depth}  {json.dumps(key)}: {written(x, depth + 1)}" for key, x in found.items())
        return f"{{\n{inside}\n{'  ' * depth}}}"

    def kept(section: Ceilings) -> Ceilings:
        current = {name: section[name].items() for name in sorted(section) if name in known}
        return {name: {a: cost for a, cost in sorted(have) if a in known[name]} for name, have in current.items()}

    newest_first = sorted(sections, key=lambda each: [int(part) for part in each.split(".")], reverse=True)
    whole = {each: kept(sections[each]) for each in newest_first}
    CEILINGS.write_text(written(whole, 0) + "\n", encoding="utf-8")
