"""Masses of distribution_stats are float64, which is slow on most GPUs: per token the kernel only adds in float64."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdec_kernels.inspection import machine_code

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(machine_code.unavailable_reason() is not None, reason=str(machine_code.unavailable_reason())),
]
TOKENS = 2048
"""Elements of the smallest tensor that holds one number for each of many tokens of a row."""
MOST = 150
"""Products of float64 in the code. Logarithms and filters of a row take 125 with Triton 3.9."""


def joined() -> Any:
    name = "distribution_stats/join_blocks bf16 256 blocks"
    (variant,) = (each for each in machine_code.variants() if each.name == name)
    return machine_code.compile_variant(variant, "sm_90")


def test_no_token_needs_a_product_or_an_exponential_in_float64() -> None:
    lines = joined().asm["ttir"].splitlines()
    exponentials = [line for line in lines if re.search(r"math\.exp\d?\b.*f64", line)]
    wide = [(line, re.search(r"tensor<(\d+)x(?:\d+x)?f64>", line)) for line in lines]
    costly = [
        line
        for line, found in wide
        if found and int(found[1]) >= TOKENS and re.search(r"math\.|arith\.(?:mulf|divf|subf)\b", line)
    ]
    assert exponentials == costly == []
    assert any(found and int(found[1]) >= TOKENS for _, found in wide), "masses of tokens are float64"


def test_instructions_of_float64_are_few() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(joined().asm["cubin"])
        code = machine_code._run(str(machine_code._tools() / "cuobjdump"), "-sass", str(cubin))
    found = Counter(re.findall(r"\b(DADD|DMUL|DFMA)\b", code))
    assert 0 < found["DMUL"] + found["DFMA"] < MOST, found
