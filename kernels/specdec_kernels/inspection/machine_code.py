"""Triton kernels as machine code for GPUs that need not be present: what they cost, and ceilings they must keep.

Every operator with a Triton kernel lists its `Variant`s in its `launch.py`; `variants()` finds them. `measure` compiles
one with Triton's own compiler and reads registers, spills, shared memory and instructions out of the result with the
tools inside the triton wheel. `ceilings.json` beside this file holds what was measured once, with one section for each
minor version of Triton; `breaches` compares.
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
"""Variant -> architecture -> number."""
SLACK = 1.1
"""Registers, shared memory and narrow loads may grow by a tenth: versions of compilers differ."""
COUNTS = 0.1
"""By so much, and one at least, matrix instructions and wide loads may be fewer or more: another number is another
kernel. Where there were some, one has to stay."""
FETCHED_AHEAD = 16384
"""Bytes of shared memory from which on it holds tiles that are fetched ahead; much less is a pipeline that is gone."""


@dataclass(frozen=True)
class Cost:
    """What a compiled kernel uses.

    registers: per thread; stack: bytes per thread; spills: loads and stores of local memory; shared: bytes per block;
    wgmma, mma: warp-group (and Blackwell) and warp-level matrix instructions; wide_loads, narrow_loads: global loads of
    16 bytes per thread, and of fewer. Instructions are counted in the code, not as often as they run.
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
    """None, or why nothing can be compiled here."""
    if find_spec("triton") is None:
        return f"triton is not installed; {install_hint('gpu')}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set: this process interprets kernels; unset it to compile them"
    return None


def variants() -> list[Variant]:
    """Variants of all operators, by operator. Raises: ValueError for two of one name."""
    found: list[Variant] = []
    for place in sorted(_OPS.glob("*/launch.py")):
        found += getattr(import_module(f"specdec_kernels.ops.{place.parent.name}.launch"), "VARIANTS", [])
    names = [variant.name for variant in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"machine_code: variants named twice: {', '.join(twice)}; give each a name of its own")
    return found


def compile_variant(variant: Variant, architecture: str) -> Any:
    """Triton's compiled kernel; no GPU and no driver are needed. Raises: ValueError for a variant that does not fit."""
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
    """Compiles a variant for an architecture ("sm_90") and reads what it uses."""
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
    """One line per number of `cost` that is worse than its ceiling, and per count of instructions that is another; no
    ceiling at all is a breach too.
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
    if ceiling["shared"] >= FETCHED_AHEAD and 3 * cost.shared < 2 * ceiling["shared"]:
        found.append(f"shared {cost.shared}; expected two thirds of {ceiling['shared']} or more: less is fetched ahead")
    for name in ("wgmma", "mma", "wide_loads"):
        got, known = getattr(cost, name), ceiling[name]
        room = max(1, ceil(known * COUNTS))
        least, most = max(min(known, 1), known - room), known + room
        if not least <= got <= most:
            found.append(f"{name} {got}; expected {least} to {most}, for {known} were recorded")
    return found


def version() -> str:
    """Minor version of the Triton that is installed, such as "3.9"."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def recorded() -> dict[str, Ceilings]:
    """All that is recorded, by minor version of Triton."""
    return json.loads(CEILINGS.read_text(encoding="utf-8")) if CEILINGS.exists() else {}


def ceilings() -> Ceilings:
    """Recorded costs of the Triton that is installed; empty if none were recorded with it."""
    return recorded().get(version(), {})


def record(costs: Mapping[str, Mapping[str, Cost]]) -> None:
    """Writes costs to `ceilings.json` under the Triton that is installed; all other numbers stay.

    Variants that are gone, and architectures that a variant no longer exists for, are left out.
    """
    known = {variant.name: variant.architectures for variant in variants()}
    sections = {version(): {}, **recorded()}
    for name, found in costs.items():
        mine = sections[version()].setdefault(name, {})
        mine.update({architecture: asdict(cost) for architecture, cost in found.items()})

    def written(found: Mapping[str, Any], depth: int) -> str:
        """An object with one line per cost."""
        if depth == 3:
            return json.dumps(found)
        inside = ",\n".join(f"{'  ' * depth}  {json.dumps(key)}: {written(x, depth + 1)}" for key, x in found.items())
        return f"{{\n{inside}\n{'  ' * depth}}}"

    def kept(section: Ceilings) -> Ceilings:
        chosen = {name: section[name].items() for name in sorted(section) if name in known}
        return {name: {a: cost for a, cost in sorted(have) if a in known[name]} for name, have in chosen.items()}

    newest_first = sorted(sections, key=lambda each: [int(part) for part in each.split(".")], reverse=True)
    whole = {each: kept(sections[each]) for each in newest_first}
    CEILINGS.write_text(written(whole, 0) + "\n", encoding="utf-8")
