"""Every configuration of tree attention, in the kernels that need most registers: none spills.

Part of `make kernels-full`. Ceilings limit the costs of some of them (`test_machine_code.py`).
"""

from __future__ import annotations

import os
from importlib import import_module
from itertools import product

import pytest

from specdec_kernels.inspection import machine_code
from specdec_kernels.inspection.machine_code import measure
from specdec_kernels.triton_shared.aot_config import Variant

pytest.importorskip("triton")
config = import_module("specdec_kernels.ops.tree_attention.config")
variants = import_module("specdec_kernels.ops.tree_attention.aot_configs")

FULL = os.environ.get("SPECDEC_KERNELS_FULL") == "1"
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not FULL, reason="compiles a hundred kernels: make kernels-full"),
    pytest.mark.skipif(machine_code.unavailable_reason() is not None, reason=str(machine_code.unavailable_reason())),
]
OPTIONS = {"HAS_WINDOW": True, "HAS_SOFTCAP": True, "HAS_SINKS": True, "HAS_LSE": True}
FORMATS = {"fp32": ("fp32", "", 4), "bf16": ("bf16", "", 2), "bf16 over fp8": ("bf16", "fp8e4nv", 2)}


def demanding() -> dict[str, Variant]:
    """Returns by name: a prefill in one piece and a fixed grid, with all options, of every width and number of rows."""
    found: dict[str, Variant] = {}
    for name, width, rows in product(FORMATS, (64, 96, 128, 256), (16, 32, 64, 128)):
        dtype, kv, size = FORMATS[name]
        tiling = config.choose_config(rows, width, size, bool(kv))
        special = {"HEAD_DIM": width, "HAS_SCALES": bool(kv), **OPTIONS}
        title = f"{name} width {width} {tiling.block_m} by {tiling.block_n}"
        found[f"{title} prefill"] = variants._attend("", dtype, tiling, (), kv, IS_CAUSAL=True, NUM_PIECES=1, **special)
        found[f"{title} shares"] = variants._shares("", tiling, (), dtype, kv, **special)
    return found


@pytest.mark.parametrize("name", demanding())
def test_nothing_spills_on_hopper(name: str) -> None:
    cost = measure(demanding()[name], "sm_90")
    assert cost.spills == 0 and cost.stack == 0


def test_float32_heads_over_128_take_plain_products() -> None:
    """Three TF32 products for one would spill there; narrower heads use them."""
    wide, usual = (
        measure(variants._attend("", "fp32", config.choose_config(32, width, 4), (), HEAD_DIM=width), "sm_90")
        for width in (256, 64)
    )
    assert wide.mma == wide.wgmma == 0 < usual.mma
