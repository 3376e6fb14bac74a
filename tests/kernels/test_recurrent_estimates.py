"""Estimates of the triangular systems: bytes and products against formulas, and the table of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specdec_kernels.inspection import machine_code
from specdec_kernels.ops._recurrence.gpu_blocks import NODES, choose_blocks, triangle_work
from specdec_kernels.testing.agreement import make_sample
from specdec_kernels.testing.samples_attention import Sizes, size_of

PAGE = Path(__file__).parents[2] / "docs/kernels/recurrent-kernels.md"
SHAPES = {"tree_delta": (32, 16, 128, 128), "tree_ssm": (128, 8, 128, 64)}
MULTIPROCESSOR = 65_536
"""Registers of a multiprocessor."""


@pytest.mark.parametrize("op", SHAPES)
def test_bytes_are_those_of_all_tensors(op: str) -> None:
    sizes = Sizes(rows=3, nodes=5, heads=4, kv_heads=2, width=32)
    call = make_sample(op, sizes)
    vectors, state = call.arguments[:4], call.writes[0]
    results = [vectors[2]] if op == "tree_ssm" else [vectors[2], vectors[2], call.arguments[4]]
    assert triangle_work(3, 5, 4, 2, 32, 32, delta=op == "tree_delta").bytes == size_of(*vectors, *results, state)


def test_products_of_one_tile() -> None:
    """What 16 nodes read by keys and queries, their products with each other, and those with corrections."""
    want = 2 * 16 * 128 * 32 + 2 * 16 * 16 * 128 + 16 * 16 * 32
    assert triangle_work(1, 1, 1, 1, 128, 32).products == triangle_work(1, 16, 1, 1, 128, 32).products == 3 * want
    assert triangle_work(1, 17, 1, 1, 128, 32).products > 6 * want, "two tiles, and one against the other"


def test_products_of_sums_by_hand() -> None:
    """A row of the page: 128 heads of 64 columns in two programs, 8 nodes in one tile, no products of keys with keys.

    A program multiplies 16 queries by 128 x 32 of the state, 16 queries by 16 keys of 128, and 16 x 16 by 32 values.
    """
    found = triangle_work(1, 8, *SHAPES["tree_ssm"], delta=False)
    assert found.products == 3 * 256 * (65_536 + 32_768 + 8_192) == 81_788_928
    state, queries_and_keys, values_and_outputs, gates = 1_048_576, 8 * 2 * 1_024, 8 * 2 * 8_192, 8 * 128
    assert found.bytes == 4 * (state + queries_and_keys + values_and_outputs + gates) == 4_788_224
    assert "| 1 | 8 | 4,676 | 82 | 17 |" in PAGE.read_text()


def test_the_page_has_these_numbers() -> None:
    rows = re.findall(
        r"^\|.*`(tree_\w+)` \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \| (\d+) \|$", PAGE.read_text(), re.M
    )
    assert len(rows) == 5
    for op, requests, nodes, kibibytes, millions, intensity in rows:
        found = triangle_work(int(requests), int(nodes), *SHAPES[op], delta=op == "tree_delta")
        assert int(kibibytes.replace(",", "")) == round(found.bytes / 1024)
        assert int(millions.replace(",", "")) == round(found.products / 1e6)
        assert int(intensity) == round(found.products / found.bytes) < 52


@pytest.mark.parametrize(("op", "programs"), [("tree_delta", 3), ("tree_ssm", 4)])
def test_so_many_programs_fit_on_a_multiprocessor(op: str, programs: int) -> None:
    for version, recorded in machine_code.recorded().items():
        triangles = {name: each["sm_90"] for name, each in recorded.items() if name.startswith(f"{op}/triangle")}
        assert triangles
        for name, cost in triangles.items():
            assert cost["registers"] * 128 * programs <= MULTIPROCESSOR, (version, name)
            assert cost["shared"] * programs <= 227 * 1024


@pytest.mark.parametrize("keys", [1, 16, 64, 128, 256, 512])
def test_blocks_hold_the_state_and_fill_matrix_instructions(keys: int) -> None:
    for width in (1, 16, 24, 64, 128, 8192):
        blocks = choose_blocks(keys, width)
        assert keys <= blocks.keys < max(2 * keys, 17) and NODES <= blocks.columns <= 128
        assert blocks.keys * blocks.columns <= 32 * 32 * blocks.warps, "at most 32 numbers of the state per thread"
