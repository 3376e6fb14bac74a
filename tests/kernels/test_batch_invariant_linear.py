"""batch_invariant_linear: every backend and instruction set against float64, and batch invariance."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.linear_cases import BANDS, Product, products
from torch import Tensor

from specdec_kernels import batch_invariant_linear, use_backend

BACKENDS = [backend.name for backend in batch_invariant_linear.backends]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ISAS = {"portable": 1, "avx2": 2, "avx512": 3, "avx512bf16": 4, "amx": 5}
"""Where the machine lacks one, its best is tested instead. The last two differ from the third in bfloat16 alone."""


def served(backend: str) -> bool:
    return next(b for b in batch_invariant_linear.backends if b.name == backend).missing() is None


def made(rows: int, inputs: int, outputs: int, dtype: torch.dtype, by_input: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + inputs + outputs)
    x, weight = (torch.randn(n, inputs, generator=generator).to(dtype) for n in (rows, outputs))
    bias = torch.randn(outputs, generator=generator).to(dtype)
    return x, weight.t().contiguous().t() if by_input else weight, bias


def error(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    want = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return float((got.double() - want).abs().max()) if want.numel() else 0.0


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, 20),
    inputs=st.sampled_from([0, 1, 3, 16, 37, 64, 200]),
    outputs=st.sampled_from([1, 7, 16, 63, 64, 65, 130, 300]),
    dtype=st.sampled_from(DTYPES),
    by_input=st.booleans(),
    with_bias=st.booleans(),
)
def test_against_float64(
    backend: str, rows: int, inputs: int, outputs: int, dtype: torch.dtype, by_input: bool, with_bias: bool
) -> None:
    if not served(backend):
        pytest.skip(f"backend {backend} is not available here")
    x, weight, bias = made(rows, inputs, outputs, dtype, by_input)
    own = bias if with_bias else None
    with use_backend(backend):
        got = batch_invariant_linear(x, weight, own)
    assert got.shape == (rows, outputs)
    assert got.dtype == dtype
    scale = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    size = float(torch.nn.functional.linear(x.double(), weight.double()).abs().max()) if rows else 0.0
    assert error(got, x, weight, own) <= scale * (size + 3 + inputs**0.5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("by_input", [True, False], ids=["by input", "by output"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, by_input: bool, threads: int) -> None:
    x, weight, bias = made(45, 448, 1030, dtype, by_input)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = batch_invariant_linear(x, weight, bias)
        for count in (1, 2, 3, 5, 6, 7, 12, 40):
            for start in (0, 45 - count):
                part = batch_invariant_linear(x[start : start + count], weight, bias)
                assert torch.equal(part, whole[start : start + count]), (count, start)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not served("cpu"), reason="CPU extension not built")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.sampled_from([12, 16, 23, 24, 25, 31, 64, 190]),
    inputs=st.sampled_from([1, 127, 128, 129, 300]),
    outputs=st.sampled_from([15, 16, 17, 64, 65, 150]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    with_bias=st.booleans(),
    isa=st.sampled_from(sorted(ISAS)),
)
def test_packed_weights_of_many_rows_give_the_bits_of_one_row(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, with_bias: bool, isa: str
) -> None:
    """Every leftover of tiles and of partial sums; what surrounds the weight in memory is NaN."""
    x, weight, bias = made(rows, inputs, outputs, dtype, True)
    table = torch.full((inputs, outputs + 5), torch.nan, dtype=dtype)
    table[:, 2 : 2 + outputs] = weight.t()
    place, added = table[:, 2 : 2 + outputs].t(), bias if with_bias else None
    got = torch.ops.specdec.batch_invariant_linear(x, place, added, ISAS[isa])
    for row in {0, 5, 6, rows // 2, rows - 1}:
        alone = torch.ops.specdec.batch_invariant_linear(x[row : row + 1], place, added, ISAS[isa])
        assert torch.equal(alone, got[row : row + 1]), row


@pytest.mark.skipif(not served("cpu"), reason="CPU extension not built")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("by_input", [True, False], ids=["by input", "by output"])
def test_instruction_sets_are_as_exact_as_torch(isa: str, by_input: bool) -> None:
    x, weight, bias = made(9, 1024, 331, torch.float32, by_input)
    got = torch.ops.specdec.batch_invariant_linear(x, weight, bias, ISAS[isa])
    one = torch.ops.specdec.batch_invariant_linear(x[4:5].clone(), weight, bias, ISAS[isa])
    assert torch.equal(got[4:5], one)
    assert error(got, x, weight, bias) <= 2 * error(torch.nn.functional.linear(x, weight, bias), x, weight, bias) + 2e-5


@pytest.mark.skipif(not served("cpu"), reason="CPU extension not built")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.sampled_from([1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 50]),
    inputs=st.sampled_from([1, 2, 31, 32, 33, 63, 64, 100, 129]),
    outputs=st.sampled_from([1, 15, 16, 17, 31, 32, 33, 64, 65, 100]),
    before=st.sampled_from([0, 3]),
    isa=st.sampled_from(sorted(ISAS)),
)
def test_pairs_of_bfloat16_from_a_weight_stored_by_output(
    rows: int, inputs: int, outputs: int, before: int, isa: str
) -> None:
    """Every leftover of tiles and pairs; what surrounds the weight in memory is NaN and must not be read into a sum."""
    x, weight, bias = made(rows, inputs, outputs, torch.bfloat16, False)
    table = torch.full((outputs, before + inputs + 5), torch.nan, dtype=torch.bfloat16)
    table[:, before : before + inputs] = weight
    place = table[:, before : before + inputs]
    got = torch.ops.specdec.batch_invariant_linear(x, place, bias, ISAS[isa])
    size = float(torch.nn.functional.linear(x.double(), weight.double(), bias.double()).abs().max())
    assert error(got, x, weight, bias) <= 4e-3 * size + 1e-4
    for row in {0, rows // 2, rows - 1}:
        alone = torch.ops.specdec.batch_invariant_linear(x[row : row + 1], place, bias, ISAS[isa])
        assert torch.equal(alone, got[row : row + 1]), row


# What an error (root mean square, largest) may be above twice that of torch, in units of the sum's size. In float32 the
# largest of few errors is random, on either side.
FLOOR = {torch.float32: (3e-8, 5e-7), torch.bfloat16: (1e-7, 1e-7), torch.float16: (1e-7, 1e-7)}


@pytest.mark.skipif(not served("cpu"), reason="CPU extension not built")
@pytest.mark.parametrize("band", BANDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_error_is_at_most_twice_that_of_torch(band: str, data: st.DataObject) -> None:
    """On every instruction set; a row's bits do not depend on the number of rows."""
    case: Product = data.draw(products(BANDS[band]))
    rows, inputs = case.x.shape
    floors = [floor * inputs**0.5 for floor in FLOOR[case.x.dtype]]
    limits = [2 * error + floor for error, floor in zip(case.errors(case.plain()), floors, strict=True)]
    counts = {1, data.draw(st.integers(1, rows)), *(first for first, _ in BANDS.values() if first < rows)}
    for isa, number in ISAS.items():
        whole = torch.ops.specdec.batch_invariant_linear(case.x, case.weight, case.bias, number)
        assert all(error <= limit for error, limit in zip(case.errors(whole), limits, strict=True)), isa
        for count in counts:
            start = (rows - count) // 2
            part = torch.ops.specdec.batch_invariant_linear(
                case.x[start : start + count], case.weight, case.bias, number
            )
            assert torch.equal(part, whole[start : start + count]), (isa, count)


@pytest.mark.skipif(not served("cpu"), reason="CPU extension not built")
@pytest.mark.parametrize("isa", ["portable", "avx512", "avx512bf16", "amx"])
def test_the_layout_follows_the_instruction_set(isa: str) -> None:
    """Weights of bfloat16 stay as they are only where pairs are multiplied; SPECDEC_ISA limits that."""
    program = (
        "import torch; from specdec_kernels import stores_by_input as by_input; "
        "by = by_input(torch.bfloat16); assert by_input(torch.float32) and by_input(torch.float16); "
        "found = torch.ops.specdec.batch_invariant_linear_isa; "
        "print(by, found(torch.zeros(1, dtype=torch.bfloat16)), found(torch.zeros(1)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"SPECDEC_ISA": isa}
    )
    assert done.returncode == 0, done.stderr
    by, pairs, floats = done.stdout.split()
    assert int(pairs) <= ISAS[isa]
    assert int(floats) <= ISAS["avx512"]
    assert (by == "False") == (int(pairs) >= ISAS["avx512bf16"])


def test_leading_dimensions_and_slices() -> None:
    x, weight, bias = made(12, 32, 48, torch.float32, True)
    want = batch_invariant_linear(x, weight, bias)
    assert torch.equal(batch_invariant_linear(x.view(2, 3, 2, 32), weight, bias), want.view(2, 3, 2, 48))
    assert torch.equal(batch_invariant_linear(x[3], weight, bias), want[3])
    wide = torch.cat([x, x], 1)
    assert torch.equal(batch_invariant_linear(wide[:, :32], weight, bias), want), "an x that is not contiguous"
    part = weight[8:24]
    assert torch.equal(batch_invariant_linear(x, part, bias[8:24]), want[:, 8:24]), "part of the outputs"


@pytest.mark.skipif(not served("cpu"), reason="CPU extension not built")
def test_a_weight_in_another_layout_falls_back_with_a_warning() -> None:
    x, weight, _ = made(2, 8, 8, torch.float32, False)
    odd = torch.zeros(16, 16)[::2, ::2]
    odd.copy_(weight)
    assert "strides" in str(batch_invariant_linear.explain(x, odd)[0].reason)
    with use_backend("reference"):
        torch.testing.assert_close(batch_invariant_linear(x, odd), batch_invariant_linear(x, weight))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 5)}, r"weight has shape \[3, 4\]; expected \['N', 5\]"),
        ({"x": torch.zeros(2, 4, dtype=torch.int64)}, "x is torch.int64"),
        ({"x": torch.zeros(2, 4, dtype=torch.float64)}, "weight has dtype torch.float32"),
        ({"weight": torch.zeros(4)}, r"weight has shape \[4\]"),
        ({"bias": torch.zeros(4)}, r"bias has shape \[4\]; expected \[3\]"),
        ({"bias": torch.zeros(3, dtype=torch.bfloat16)}, "bias has dtype torch.bfloat16"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_that_do_not_fit(backend: str, change: dict[str, Tensor], words: str) -> None:
    if not served(backend):
        pytest.skip(f"backend {backend} is not available here")
    arguments = {"x": torch.zeros(2, 4), "weight": torch.zeros(3, 4), "bias": torch.zeros(3), **change}
    with use_backend(backend), pytest.raises(ValueError, match=words):
        batch_invariant_linear(arguments["x"], arguments["weight"], arguments["bias"])
