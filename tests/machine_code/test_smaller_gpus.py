"""Tree attention on GPUs with less shared memory: its kernels fit, and GPUs with too little are refused."""

from __future__ import annotations

import os
from importlib import import_module

import pytest
import torch

from specdec_kernels.inspection import machine_code
from specdec_kernels.inspection.machine_code import measure
from specdec_kernels.triton_shared.aot_config import Variant

pytest.importorskip("triton")
config = import_module("specdec_kernels.ops.tree_attention.config")
launch = import_module("specdec_kernels.ops.tree_attention.launch")
variants = import_module("specdec_kernels.ops.tree_attention.aot_configs")

pytestmark = pytest.mark.aot
compiles = pytest.mark.skipif(
    machine_code.unavailable_reason() is not None, reason=str(machine_code.unavailable_reason())
)
ALL = [(variant, each) for variant in variants.FRUGAL_VARIANTS for each in variant.architectures]
EVERYDAY = [(variant, each) for variant, each in ALL if variant.name.endswith("frugal rows 32") and each == "sm_89"]
"""The one of the everyday sizes that takes most; the others with SPECDEC_KERNELS_FULL=1 (`make kernels-full`)."""


def call(rows: int, width: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns query, key_cache and page_table of one request with this many query rows per key/value head."""
    query = torch.zeros(rows // 4, 32, width, dtype=torch.bfloat16)
    return query, torch.zeros(64, 16, 8, width, dtype=torch.bfloat16), torch.zeros(1, 64, dtype=torch.int32)


@compiles
@pytest.mark.parametrize(
    ("variant", "architecture"),
    ALL if os.environ.get("SPECDEC_KERNELS_FULL") == "1" else EVERYDAY,
    ids=lambda x: getattr(x, "name", x),
)
def test_kernels_of_smaller_gpus_fit_in_their_shared_memory(variant: Variant, architecture: str) -> None:
    cost = measure(variant, architecture)
    assert cost.shared <= config.SMALL_SHARED_MEMORY
    assert cost.mma, "products on matrix instructions"


def test_a_smaller_gpu_is_given_fewer_stages_and_one_program_of_a_multiprocessor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = [launch.partition_call(*call(rows)).config for rows in (16, 32, 64, 128)]
    programs = launch.plan_numbers(*call(16))["programs"]
    monkeypatch.setattr(launch, "_shared_memory", lambda device: config.SMALL_SHARED_MEMORY)
    small = [launch.partition_call(*call(rows)).config for rows in (16, 32, 64, 128)]
    assert [each.stages for each in small] == [each.stages - 1 for each in large]
    assert [(each.block_m, each.block_n) for each in small] == [(each.block_m, each.block_n) for each in large], (
        "tiles decide the order of sums"
    )
    assert launch.partition_call(*call(16), batch_invariant=True).config.stages == 3
    assert launch.plan_numbers(*call(16))["programs"] == programs // 2
    assert launch.why_not(*call(16)) is None


def test_a_gpu_with_less_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_shared_memory", lambda device: 64 * 1024)
    assert launch.why_not(*call(16)) == ("this GPU gives a program 65536 bytes of shared memory; needed are 101376")
