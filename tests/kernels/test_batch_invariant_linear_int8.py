"""batch_invariant_linear_int8: every backend and instruction set against float64, batch invariance, rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import batch_invariant_linear_int8, quantize_int8, use_backend

BACKENDS = [backend.name for backend in batch_invariant_linear_int8.backends]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ISAS = {"portable": 1, "avx2": 2, "avx512": 3, "avx512bf16": 4, "amx": 5}
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def served(backend: str) -> bool:
    return next(b for b in batch_invariant_linear_int8.backends if b.name == backend).missing() is None


def made(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + inputs + outputs)
    x, bias = (torch.randn(*size, generator=generator).to(dtype) for size in ((rows, inputs), (outputs,)))
    weight = torch.randint(-127, 128, (outputs, inputs), generator=generator).to(torch.int8)
    return x, weight, torch.rand(outputs, generator=generator) / 50 + 1e-3, bias


def error(got: Tensor, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> float:
    """Returns the largest error in units of the rounding of the largest result."""
    own = None if bias is None else bias.double()
    want = torch.nn.functional.linear(x.double(), weight.double() * scale.double()[:, None], own)
    if not want.numel():
        return 0.0
    largest = float(want.abs().max()) + 1 + x.shape[1] ** 0.5
    return float((got.double() - want).abs().max()) / (ROUNDING[x.dtype] * largest)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 20),
    inputs=st.sampled_from([0, 1, 3, 16, 37, 64, 200]),
    outputs=st.sampled_from([1, 7, 16, 63, 64, 65, 130]),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
)
def test_against_float64(
    backend: str, rows: int, inputs: int, outputs: int, dtype: torch.dtype, with_bias: bool
) -> None:
    if not served(backend):
        pytest.skip(f"backend {backend} is not available here")
    x, weight, scale, bias = made(rows, inputs, outputs, dtype)
    own = bias if with_bias else None
    with use_backend(backend):
        got = batch_invariant_linear_int8(x, weight, scale, own)
    assert (got.shape, got.dtype) == ((rows, outputs), dtype)
    assert error(got, x, weight, scale, own) <= 1


@pytest.mark.skipif(not served("cpu"), reason="CPU extension not built")
@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    rows=st.sampled_from([1, 2, 3, 4, 5, 15, 16, 17, 32, 33, 50, 97, 130]),
    inputs=st.sampled_from([1, 15, 16, 31, 32, 33, 64, 100, 600]),
    outputs=st.sampled_from([1, 15, 16, 17, 33, 64, 65, 100]),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(sorted(ISAS)),
)
def test_every_leftover_on_every_instruction_set(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, isa: str
) -> None:
    """A weight inside a larger table, and a row alone."""
    x, weight, scale, bias = made(rows, inputs, outputs, dtype)
    table = torch.full((outputs, inputs + 5), 127, dtype=torch.int8)
    table[:, 3 : 3 + inputs] = weight
    got = torch.ops.specdec.batch_invariant_linear_int8(x, table[:, 3 : 3 + inputs], scale, bias, ISAS[isa])
    assert error(got, x, weight, scale, bias) <= 1
    for row in {0, rows // 2, rows - 1}:
        alone = torch.ops.specdec.batch_invariant_linear_int8(x[row : row + 1], weight, scale, bias, ISAS[isa])
        assert torch.equal(alone, got[row : row + 1]), row


@pytest.mark.parametrize("rows", [45, 140])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, threads: int, rows: int) -> None:
    x, weight, scale, bias = made(rows, 576, 1030, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = batch_invariant_linear_int8(x, weight, scale, bias)
        for count in (1, 2, 3, 5, 7, 12, 40):
            for start in (0, rows - count):
                part = batch_invariant_linear_int8(x[start : start + count], weight, scale, bias)
                assert torch.equal(part, whole[start : start + count]), (count, start)
    finally:
        torch.set_num_threads(before)


def test_leading_dimensions_and_slices() -> None:
    x, weight, scale, bias = made(12, 32, 48, torch.float32)
    want = batch_invariant_linear_int8(x, weight, scale, bias)
    assert torch.equal(batch_invariant_linear_int8(x.view(2, 6, 32), weight, scale, bias), want.view(2, 6, 48))
    assert torch.equal(batch_invariant_linear_int8(torch.cat([x, x], 1)[:, :32], weight, scale, bias), want)
    transposed = weight.t().contiguous().t()
    assert "strides" in str(batch_invariant_linear_int8.explain(x, transposed, scale, bias)[0].reason)
    with use_backend("reference"):
        torch.testing.assert_close(batch_invariant_linear_int8(x, transposed, scale, bias), want)


@settings(max_examples=50, deadline=None)
@given(outputs=st.integers(0, 40), inputs=st.integers(0, 40), exponent=st.integers(-30, 30))
def test_rounding_is_within_half_a_step(outputs: int, inputs: int, exponent: int) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)) * 2.0**exponent
    if outputs > 1:
        weight[1] = 0
    values, scale = quantize_int8(weight)
    assert (values.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (outputs,))
    assert bool((scale > 0).all())
    difference = (values.double() * scale.double()[:, None] - weight.double()).abs()
    assert bool((difference <= 0.5001 * scale.double()[:, None]).all())
    if outputs and inputs:
        assert int(values[0].abs().max()) == 127, "the largest magnitude uses the whole range"


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.zeros(3), r"quantize_int8: got torch.float32 \[3\]"),
        (torch.zeros(2, 2, dtype=torch.int8), "expected a float weight"),
        (torch.tensor([[1.0, torch.nan]]), "not finite"),
        (torch.tensor([[1.0, -torch.inf]]), "not finite"),
    ],
)
def test_weights_that_cannot_be_rounded(weight: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quantize_int8(weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 5)}, r"weight has shape \[3, 4\]; expected \['N', 5\]"),
        ({"x": torch.zeros(2, 4, dtype=torch.float64)}, "x is torch.float64"),
        ({"weight": torch.zeros(3, 4)}, "weight has dtype torch.float32"),
        ({"scale": torch.zeros(4)}, r"scale has shape \[4\]; expected \[3\]"),
        ({"scale": torch.zeros(3, dtype=torch.bfloat16)}, "scale has dtype torch.bfloat16"),
        ({"bias": torch.zeros(4)}, r"bias has shape \[4\]; expected \[3\]"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_that_do_not_fit(backend: str, change: dict[str, Tensor], words: str) -> None:
    if not served(backend):
        pytest.skip(f"backend {backend} is not available here")
    arguments = {"x": torch.zeros(2, 4), "weight": torch.zeros(3, 4, dtype=torch.int8), "scale": torch.ones(3)}
    arguments |= {"bias": torch.zeros(3), **change}
    with use_backend(backend), pytest.raises(ValueError, match=words):
        batch_invariant_linear_int8(**arguments)
