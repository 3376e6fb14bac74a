"""tree_attention: every backend and instruction set against the reference, and all against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.eager_attention import errors, measured_shapes
from oracles.packed_trees import Batch, Shape, build, shapes
from torch import Tensor

from specdec_kernels import UnsupportedError, kv_stage, tree_attention, use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.ops.tree_attention import sdpa_kernel

NEEDS_C = pytest.mark.skipif(extension.unavailable_reason() is not None, reason=str(extension.unavailable_reason()))
BACKENDS = [pytest.param("cpu", marks=NEEDS_C), "sdpa"]
INSTRUCTION_SETS = {"portable": 1, "avx2": 2, "avx512": 3}
# Outputs are means of values of size one: absolute errors in units of the dtype's own rounding.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-13}
# What an error (root mean square, largest) may be above twice that of torch's attention. In float32 the largest of few
# errors is random, on either side: the limit is a few roundings of values and scores of size one.
FLOOR = {torch.float32: (4e-8, 1e-6), torch.bfloat16: (1e-7, 1e-7), torch.float16: (1e-7, 1e-7)}


def arguments(case: Batch, causal: bool) -> tuple[Any, ...]:
    return case.cache if causal else (*case.cache, case.ancestors, case.depth)


def run(backend: str, case: Batch, causal: bool = False, **kwargs: Any) -> Any:
    with use_backend(tree_attention=backend):
        result = tree_attention(*arguments(case, causal), scale=case.shape.width**-0.5, **kwargs)
    assert tree_attention.last_backend == backend
    return result


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert got[0].dtype == want[0].dtype and got[1].dtype == want[1].dtype
    assert (got[0] - want[0]).abs().max() <= TOLERANCE[want[0].dtype] if want[0].numel() else True
    empty = want[1] == -torch.inf
    assert torch.equal(got[1] == -torch.inf, empty)
    torch.testing.assert_close(got[1][~empty], want[1][~empty], rtol=1e-5, atol=1e-5)


def assert_as_exact_as_torch(found: dict[str, tuple[float, float]], dtype: torch.dtype, sharpness: float = 1.0) -> None:
    for kind, floor in enumerate(FLOOR[dtype]):
        limit = 2 * found["torch"][kind] + sharpness * floor
        assert all(error[kind] <= limit for error in found.values()), (found, limit)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from([0, 0, 1, 6, 70])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 2.0, 50.0])),
        "sinks": draw(st.booleans()),
    }


@NEEDS_C
@settings(max_examples=45, deadline=None)
@given(shape=shapes(), option=options())
def test_the_extension_equals_the_reference(shape: Shape, option: dict[str, Any]) -> None:
    case = build(shape)
    sinks = torch.randn(shape.heads) if option.pop("sinks") else None
    want = run("reference", case, sinks=sinks, return_lse=True, **option)
    assert_same(run("cpu", case, sinks=sinks, return_lse=True, **option), want)


@NEEDS_C
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@settings(max_examples=12, deadline=None)
@given(shape=shapes(most_length=80), option=options())
def test_every_instruction_set_equals_the_reference(name: str, shape: Shape, option: dict[str, Any]) -> None:
    case = build(shape)
    sinks = torch.randn(shape.heads) if option["sinks"] else None
    extra = (None, None) if option["causal"] else (case.ancestors, case.depth)
    want = run(
        "reference",
        case,
        option["causal"],
        sinks=sinks,
        return_lse=True,
        **{k: option[k] for k in ("window", "softcap")},
    )
    got = torch.full_like(want[0], torch.nan), torch.full_like(want[1], torch.nan)
    torch.ops.specdec.tree_attention_out(
        *case.cache,
        *extra,
        shape.width**-0.5,
        option["softcap"],
        option["window"],
        sinks,
        *got,
        INSTRUCTION_SETS[name],
    )
    assert_same(got, want)


@settings(max_examples=10, deadline=None)
@given(shape=shapes(most_length=80), causal=st.booleans(), window=st.sampled_from([0, 5]))
def test_sdpa_equals_the_reference(shape: Shape, causal: bool, window: int) -> None:
    case = build(shape)
    want, got = (run(b, case, causal, window=window) for b in ("reference", "sdpa"))
    assert (got - want).abs().max() <= TOLERANCE[shape.dtype] if want.numel() else True


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_causal_prefill(backend: str, dtype: torch.dtype) -> None:
    case = build(Shape([130, 0, 97], [0, 5, 70], width=72, dtype=dtype, heads=6, kv_heads=2))
    want, got = (run(b, case, True) for b in ("reference", backend))
    assert (got - want).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_at_most_twice_that_of_torch(backend: str, dtype: torch.dtype) -> None:
    """Against float64, with torch's own attention in the same dtype as the measure."""
    case = build(Shape([9, 70], [200, 30], dtype=dtype))
    assert_as_exact_as_torch(errors(case, {backend: run(backend, case)}, scale=0.125, causal=False), dtype)


@NEEDS_C
@settings(max_examples=120, deadline=None, derandomize=True)
@given(shape=measured_shapes(), option=options(), sharpness=st.sampled_from([1.0, 1.0, 4.0]))
def test_the_error_is_at_most_twice_that_of_torch_on_any_batch(
    shape: Shape, option: dict[str, Any], sharpness: float
) -> None:
    """Every instruction set, on ragged trees and prompts, with windows, softcaps and sinks, and with peaked weights."""
    case, causal = build(shape), option.pop("causal")
    own = torch.randn(shape.heads, generator=torch.Generator().manual_seed(shape.seed)).to(shape.dtype).float()
    sinks, scale = own if option.pop("sinks") else None, sharpness * shape.width**-0.5
    extra = (None, None) if causal else (case.ancestors, case.depth)
    outputs = {}
    with use_backend("cpu"):
        outputs["cpu"] = tree_attention(*case.cache, *extra, scale=scale, sinks=sinks, **option)
    for name, number in INSTRUCTION_SETS.items():
        out = torch.full_like(case.query, torch.nan), torch.empty(case.query.shape[:2])
        numbers = scale, option["softcap"], option["window"], sinks
        torch.ops.specdec.tree_attention_out(*case.cache, *extra, *numbers, *out, number)
        outputs[name] = out[0]
    found = errors(case, outputs, scale=scale, causal=causal, sinks=sinks, **option)
    assert_as_exact_as_torch(found, shape.dtype, sharpness)


@NEEDS_C
def test_a_node_has_the_same_bits_in_any_batch() -> None:
    """A chain scored at once equals one node after the other, in any batch."""
    case = build(Shape([40, 3], [1000, 7], heads=6, kv_heads=2, deep=True))
    together = run("cpu", case, True)
    for i in (0, 1, 17, 39):
        alone = tree_attention(
            case.query[: i + 1], case.key_cache, case.value_cache, case.page_table[:1], case.lengths[:1],
            torch.tensor([0, i + 1], dtype=torch.int32), scale=0.125,
        )  # fmt: skip
        assert torch.equal(alone, together[: i + 1])
    plain = tree_attention(
        case.query[39:40], case.key_cache, case.value_cache, case.page_table[:1], case.lengths[:1] + 39,
        torch.tensor([0, 1], dtype=torch.int32), scale=0.125,
    )  # fmt: skip
    assert torch.equal(plain, together[39:40])


@NEEDS_C
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(("width", "dtype"), [(40, torch.float32), (64, torch.bfloat16), (128, torch.float16)])
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_a_prompt_has_the_same_bits_in_slices_of_any_length(
    name: str, width: int, dtype: torch.dtype, window: int
) -> None:
    """Passes of many nodes use another algorithm than passes of few, across the blocks of 64 and 512 keys."""
    case = build(Shape([580], [30], heads=3, kv_heads=1, width=width, dtype=dtype))
    ends = [1, 65, 129, 130, 194, 300, 450, 514, 580]

    def attend(begin: int, end: int) -> tuple[Tensor, Tensor]:
        query, ends = case.query[begin:end], torch.tensor([0, end - begin], dtype=torch.int32)
        found = torch.empty_like(query), torch.empty(query.shape[:2])
        where = case.key_cache, case.value_cache, case.page_table, case.lengths + begin, ends
        numbers = width**-0.5, 3.0, window, None
        torch.ops.specdec.tree_attention_out(query, *where, None, None, *numbers, *found, INSTRUCTION_SETS[name])
        return found

    whole = attend(0, 580)
    parts = [attend(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    assert torch.equal(torch.cat([part[0] for part in parts]), whole[0])
    assert torch.equal(torch.cat([part[1] for part in parts]), whole[1])


@NEEDS_C
@pytest.mark.parametrize("lengths", [[6000], [2000, 900, 3000, 10], [700], [60, 90, 120, 10]])
def test_threads_do_not_change_bits(lengths: list[int]) -> None:
    case = build(Shape([5] * len(lengths), lengths, heads=8, kv_heads=1, width=128))
    one = run("cpu", case, return_lse=True)
    torch.set_num_threads(2)
    try:
        two = run("cpu", case, return_lse=True)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_strided_queries_and_the_caller_s_output(backend: str) -> None:
    case = build(Shape([3], [20]))
    qkv = torch.randn(3, 8 * 64)
    query = qkv[:, : 4 * 64].view(3, 4, 64)
    out = torch.empty(3, 4, 128)[:, :, :64]
    with use_backend(backend):
        result = tree_attention(query, *case.cache[1:], case.ancestors, scale=0.1, out=out)
        want = tree_attention(query.contiguous(), *case.cache[1:], case.ancestors, scale=0.1)
    assert result.data_ptr() == out.data_ptr() and torch.equal(out, want)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("page", {"page_table": torch.full((1, 2), 99, dtype=torch.int32)}, "page"),
    ("length", {"lengths": torch.tensor([40], dtype=torch.int32)}, "slots"),
    ("heads", {"query": torch.zeros(3, 3, 64)}, "heads"),
    ("dtype", {"lengths": torch.tensor([20])}, "int32"),
    ("width", {"query": torch.zeros(3, 4, 32)}, "expected"),
    ("offsets", {"offsets": torch.tensor([0, 9], dtype=torch.int32)}, "offsets"),
]


@NEEDS_C
@pytest.mark.parametrize(("name", "change", "words"), BAD, ids=[b[0] for b in BAD])
def test_bad_arguments_raise_clear_errors(name: str, change: dict[str, Tensor], words: str) -> None:
    case = build(Shape([3], [20]))
    names = ("query", "key_cache", "value_cache", "page_table", "lengths", "offsets")
    values = [change.get(n, v) for n, v in zip(names, case.cache, strict=True)]
    with use_backend("cpu"), pytest.raises(ValueError, match=f"(?s)tree_attention.*{words}"):
        tree_attention(*values, case.ancestors, scale=0.1)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_a_window_over_a_tree_needs_depths(backend: str) -> None:
    case = build(Shape([3], [20]))
    with use_backend(backend), pytest.raises(ValueError, match="window with ancestors needs depth"):
        tree_attention(*case.cache, case.ancestors, scale=0.1, window=4)


def test_sdpa_says_why_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (
        build(Shape([3], [20], dtype=torch.bfloat16)),
        build(Shape([300], [0], dtype=torch.bfloat16)),
    )

    def reason(case: Batch) -> str:
        rows = tree_attention.explain(*case.cache, scale=1.0)
        return next(str(row.reason) for row in rows if row.backend == "sdpa")

    assert "nodes" in reason(small)
    with use_backend("sdpa"), pytest.raises(UnsupportedError, match="no softcap"):
        tree_attention(*small.cache, scale=1.0, softcap=1.0)
    monkeypatch.setattr(sdpa_kernel, "matrix_units", lambda: True)
    assert tree_attention.choose_backend(*large.cache, scale=1.0) == "sdpa"
    monkeypatch.setattr(sdpa_kernel, "matrix_units", lambda: False)
    assert "neither AMX nor AVX512-BF16" in reason(large)


@NEEDS_C
def test_torch_compile_keeps_staging_before_attention() -> None:
    """Both operators see the same cache tensors: the graph must not reorder or lose the write."""
    case = build(Shape([4], [20]))
    slots = case.page_table[0].long()[torch.arange(20, 24) // 16] * 16 + torch.arange(20, 24) % 16

    def layer(hidden: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        key, value = (hidden * 2)[:, :2], (hidden - 1)[:, 2:]
        kv_stage(key, value, key_cache, value_cache, slots)
        return tree_attention(hidden, key_cache, value_cache, *case.cache[3:], case.ancestors, scale=0.125) + 1

    eager_caches = case.key_cache.clone(), case.value_cache.clone()
    graph_caches = case.key_cache.clone(), case.value_cache.clone()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        hidden = torch.randn_like(case.query)
        assert torch.equal(compiled(hidden, *graph_caches), layer(hidden, *eager_caches))
    assert all(torch.equal(a, b) for a, b in zip(graph_caches, eager_caches, strict=True))
    assert not torch.equal(eager_caches[0], case.key_cache)


@NEEDS_C
def test_unsupported_options_in_a_graph_raise_clear_errors() -> None:
    """Inside torch.compile the registered operator serves all devices, without scales and modes."""
    from specdec_kernels.ops.tree_attention import cpu_kernel

    case = build(Shape([3], [20]))
    scales = {"key_scale": torch.ones(2), "value_scale": torch.ones(2)}
    program = torch.compile(
        lambda *args: tree_attention(*args, scale=0.1, **scales), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="leave tree_attention out of the graph"):
        program(*arguments(case, False))
    elsewhere = [each.to("meta") for each in arguments(case, False)]
    with pytest.raises(ValueError, match=r"tree_attention: got .*batch_invariant inside of torch\.compile; expected"):
        cpu_kernel.tree_attention(*elsewhere, scale=0.1, batch_invariant=True)
    assert run("cpu", case, batch_invariant=True).shape == case.query.shape
    out, lse = cpu_kernel.tree_attention(*elsewhere, scale=0.1, out=torch.empty_like(elsewhere[0]), return_lse=True)
    assert out.device == lse.device == elsewhere[0].device


@NEEDS_C
@pytest.mark.parametrize("name", ["tree_attention", "tree_attention_lse", "tree_attention_out"])
def test_opcheck(name: str) -> None:
    case = build(Shape([3, 0], [20, 5], tail=1))
    inputs = (*case.cache, case.ancestors, case.depth, 0.1, 0.0, 7, torch.randn(4))
    if name == "tree_attention_out":
        inputs = (*inputs, torch.empty_like(case.query), torch.empty(4, 4))
    torch.library.opcheck(getattr(torch.ops.specdec, name).default, inputs)
