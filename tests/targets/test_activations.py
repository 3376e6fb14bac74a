"""Activations: the elements of a row have the same bits alone and beside others, in any number of threads."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import models
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.targets import activations
from specdec_fast.targets.activations import BatchInvariantActivation, call_by_whole_vectors, whole_part
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.tiny_models import SHAPE, tiny_model
from specdec_kernels.dispatch import extension

built = pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")
WIDTHS = [72, 80, 100, 1000]
NAMES = ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "sigmoid", "mish", "sqrtsoftplus", "relu2"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rows(width: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(width)) * 3).to(dtype)


def differing_rows(function: Callable[[Tensor], Tensor], given: Tensor) -> int:
    """Returns how many rows have other bits alone."""
    alone = torch.cat([function(row[None].clone()) for row in given])
    return int((function(given) != alone).any(1).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_equal_at_widths_that_are_no_whole_vectors(name: str, dtype: torch.dtype) -> None:
    function = functools.partial(call_by_whole_vectors, ACT2FN[name])
    for width in (1, 8, *WIDTHS):
        given = rows(width, 19, dtype)
        assert differing_rows(function, given) == 0, width
        torch.testing.assert_close(function(given), ACT2FN[name](given), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "sigmoid"])
def test_rows_are_equal_in_several_threads(name: str, dtype: torch.dtype, number: int) -> None:
    function = functools.partial(call_by_whole_vectors, ACT2FN[name])
    with threads(number):
        for width, count in ((896, 40), (11_008, 7), (13_826, 3), (40_000, 2)):
            assert differing_rows(function, rows(width, count, dtype)) == 0, width


@pytest.mark.parametrize(("number", "width", "count"), [(1, 100, 19), (1, 1000, 19), (3, 11_008, 7), (3, 896, 40)])
def test_torch_alone_gives_rows_other_bits(number: int, width: int, count: int) -> None:
    """The reason for all this. A processor without the defect skips the test."""
    with threads(number):
        if not any(differing_rows(ACT2FN[name], rows(width, count)) for name in NAMES):
            pytest.skip("torch computes all elements alike here")


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_views_have_the_bits_of_copies(name: str) -> None:
    """Models with one projection for gates and values pass halves of its rows."""
    function = functools.partial(call_by_whole_vectors, ACT2FN[name])
    for width in (96, 100):
        both = rows(2 * width, 7)
        for part in (both[:, :width], both[:, width:], both.t()[:width], both[:, ::2], both[:1].expand(5, -1)):
            assert torch.equal(function(part), function(part.clone(memory_format=torch.contiguous_format)))
            assert differing_rows(function, part) == 0


def test_shapes_without_elements_and_without_dimensions_stay() -> None:
    for shape in ((), (0,), (3, 0), (2, 1, 5)):
        given = torch.ones(shape)
        assert torch.equal(call_by_whole_vectors(torch.sigmoid, given), torch.sigmoid(given))


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 16, 64])
def test_every_thread_begins_at_a_whole_vector(number: int) -> None:
    for count in [32, 4096, 17 * 1024, 35_840, 77_056, 440_320, 32 * 65_537]:
        part = whole_part(count, 32, number)
        assert 0 < part <= count and part % 32 == 0
        if number > 1 and part > activations.SERIAL:
            shares = {number, *(min(number, -(-part // grain)) for grain in activations.GRAINS)}
            assert all(-(-part // share) % 32 == 0 for share in shares)


def target_of(model: Any, **options: Any) -> HuggingFaceTarget:
    return HuggingFaceTarget(model, max_rows=1, max_length=64, **options)


def logits_in_slices(target: HuggingFaceTarget, ends: list[int]) -> Tensor:
    prompt, found = models.prompt(ends[-1]), []
    assert target.cache.reserve(0, len(prompt))
    for begin, end in zip([0, *ends], ends, strict=False):
        shape, every = chain_layout((0,), (end - begin,), target.device), torch.arange(end - begin)
        found.append(target.extend(shape.rows, torch.tensor(prompt[begin:end]), shape.offsets, logits=every).logits)
    target.cache.release([0])
    return torch.cat(found)


def check_tokens(target: HuggingFaceTarget) -> None:
    """Each token of a pass has the bits of a pass of its own."""
    assert torch.equal(logits_in_slices(target, [30]), logits_in_slices(target, list(range(1, 31))))


@built
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("family", "activation"),
    [
        *(("llama", name) for name in ("silu", "gelu", "gelu_pytorch_tanh", "relu2", "mish")),
        ("gemma3", "gelu_pytorch_tanh"),
        ("qwen2", "quick_gelu"),
    ],
)
def test_tokens_have_their_own_bits_in_every_model(family: str, activation: str, width: int) -> None:
    named = {"hidden_activation" if family == "gemma3" else "hidden_act": activation}
    check_tokens(target_of(tiny_model(family, intermediate_size=width, **named)))


@built
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_fused_passes_keep_this_at_every_width(family: str, width: int) -> None:
    target = target_of(tiny_model(family, intermediate_size=width), fused_forward=True)
    check_tokens(target)


def gated_model(head_dim: int) -> Any:
    """A model that calls `torch.sigmoid` of a gate of attention, without experts."""
    shape = {**SHAPE, "head_dim": head_dim, "num_attention_heads": 1, "num_key_value_heads": 1, "num_dense_layers": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("afmoe", **shape)).float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


@built
@pytest.mark.parametrize("head_dim", [24, 32])
def test_gates_that_are_called_as_functions_have_their_own_bits(head_dim: int) -> None:
    check_tokens(target_of(gated_model(head_dim)))


@built
def test_gates_of_torch_alone_give_tokens_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(gated_model(24))
    monkeypatch.setattr(activations, "call_by_whole_vectors", lambda function, *args, **named: function(*args, **named))
    if not differing_rows(torch.sigmoid, rows(24, 29)):
        pytest.skip("torch computes all elements alike here")
    with pytest.raises(AssertionError):
        check_tokens(target)


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    torch.sigmoid, Tensor.sigmoid, torch.special.expit, functional.silu, functional.gelu, functional.mish,
    functional.softplus, functional.logsigmoid, functional.elu, functional.selu, functional.celu, functional.hardswish,
    functools.partial(functional.gelu, approximate="tanh"), functools.partial(functional.softplus, beta=2),
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: getattr(each, "__name__", "with options"))
def test_functions_have_their_own_bits_in_a_pass_and_are_those_of_torch_elsewhere(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    called, real = [], activations.call_by_whole_vectors

    def counted(*args: Any, **named: Any) -> Tensor:
        called.append(threading.current_thread())
        return real(*args, **named)

    def forward(given: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as others:
            others.submit(function, given).result()
        return function(given)

    monkeypatch.setattr(activations, "call_by_whole_vectors", counted)
    run = activations.with_batch_invariant_activations(torch.nn.Linear(1, 1), forward)
    for kind in (torch.float32, torch.bfloat16, torch.int64):
        if kind != torch.int64 or function in (torch.sigmoid, Tensor.sigmoid):
            assert run(given=torch.ones(0, 3, dtype=kind)).shape == (0, 3)
    for width in (8, 24, 100):
        given = rows(width, 19)
        assert differing_rows(lambda each: run(given=each), given) == 0, width
        torch.testing.assert_close(run(given=given), function(given))
    assert {*called} == {threading.current_thread()}
    called.clear()
    function(rows(8, 3))
    with pytest.raises((TypeError, AttributeError)):
        run(given=None)
    function(rows(8, 3))
    assert not called, "a pass that raises ends as others do"


def test_a_model_gets_its_activations_back() -> None:
    model = models.own("llama")
    module, own = model.model.layers[0].mlp.act_fn, type(model.model.layers[0].mlp.act_fn)
    first, second = target_of(model), target_of(model)
    assert isinstance(module, BatchInvariantActivation) and isinstance(module, own)
    first.close()
    assert isinstance(module, BatchInvariantActivation)
    second.close()
    assert type(module) is own


def test_copies_and_files_have_the_own_type(tmp_path: Path) -> None:
    model = models.own("llama")
    own = type(model.model.layers[0].mlp.act_fn)
    target = target_of(model)
    torch.save(model, tmp_path / "model.pt")
    for twin in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert type(twin.model.layers[0].mlp.act_fn) is own
    assert isinstance(model.model.layers[0].mlp.act_fn, BatchInvariantActivation)
    target.close()


def test_activations_of_users_and_in_place_stay() -> None:
    class Own(torch.nn.SiLU):
        pass

    model: Any = models.own("llama")
    model.model.layers[0].mlp.act_fn, model.model.layers[1].mlp.act_fn = Own(), torch.nn.SiLU(inplace=True)
    target = target_of(model)
    assert not any(isinstance(each, BatchInvariantActivation) for each in target.model.modules())


def test_gradients_pass_through_padded_activations() -> None:
    own, model = tiny_model("llama", intermediate_size=100), tiny_model("llama", intermediate_size=100)
    target = target_of(model)
    model.set_attn_implementation("sdpa")
    tokens = torch.arange(1, 9)[None]
    for each in (own, model):
        each(tokens, labels=tokens).loss.backward()
    assert any(isinstance(each, BatchInvariantActivation) for each in target.model.modules())
    for ours, theirs in zip(model.parameters(), own.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
