"""Compilation does not depend on numbers that vary while serving: rows, nodes, lengths, addresses of tensors.

Launches bind and specialise their arguments as on a GPU, but compile and run nothing. Every new combination of
types, alignments and constants counts as one compilation, which costs seconds on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import OPS
from specdec_kernels.dispatch import argument_checks
from specdec_kernels.inspection import machine_code
from specdec_kernels.testing.agreement import SAMPLES, cases, make_sample, map_tensors
from specdec_kernels.testing.samples_attention import Call, Sizes

triton = pytest.importorskip("triton")
kernel = import_module("specdec_kernels.triton_shared.jit").kernel

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(machine_code.unavailable_reason() is not None, reason=str(machine_code.unavailable_reason())),
]
DEVICE = 77
"""Number of a GPU for which nothing else in this process compiles."""
PLACES = {
    "attention_plan": "tree_attention.stream_k", "kv_commit_scratch": "kv_commit.launch",
    "kv_commit_pages": "kv_commit.launch", "rejection_verify_logits": "rejection_verify.launch",
    "window_commit": "state_commit.launch",
}  # fmt: skip
OPERATORS = sorted(op for op in SAMPLES if any(each.name == "triton" for each in OPS[op].backends))
CALLS = [(op, case) for op in OPERATORS for case in cases(op) if op != "tree_attention" and "thresholds" not in op]
"""(Thresholds launch the kernels of verification, and then follow links that nothing has written here.)"""
BASE = Sizes(rows=2, nodes=5, length=70, heads=8, kv_heads=2, width=64, layers=1, vocab=160, dtype=torch.bfloat16)
WARM = [replace(BASE, rows=rows, nodes=nodes) for rows, nodes in ((1, 1), (1, 5), (8, 5), (64, 5), (64, 1))]
"""Few rows and many, with and without drafts: what an engine compiles before it serves."""
SERVED = [
    *(replace(BASE, rows=rows, nodes=nodes, length=64 + rows) for rows, nodes in product((1, 3, 9), (1, 2, 5, 9))),
    *(replace(BASE, rows=rows, nodes=3, length=101) for rows in (2, 4, 5, 6, 7, 8, 64)),
]


class Driver:
    """The functions of a driver that Triton calls before a launch."""

    def get_current_target(self) -> Any:
        return import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Compiled(list[tuple[str, str]]):
    """(kernel, what it is compiled for) of each compilation, in order."""

    def by(self, launch: Callable[[], object]) -> list[str]:
        """Names of the kernels that a launch adds."""
        before = len(self)
        launch()
        return [name for name, _ in self[before:]]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """Launches on tensors of the CPU bind their arguments for a GPU and compile nothing."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found, used, run = Compiled(), list[Any](), JITFunction.run

    def compile_nothing(self: Any, key: str, *args: object, **kwargs: object) -> str:
        assert self.device_caches[DEVICE][0].setdefault(key, "a kernel") == "a kernel"
        found.append((self.__name__, key))
        used.append(self)
        return "a kernel"

    def bind(self: Any, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    monkeypatch.setattr(JITFunction, "run", bind)
    monkeypatch.setattr(JITFunction, "_do_compile", compile_nothing)
    monkeypatch.setattr(argument_checks, "can_read_values", lambda tensor: False)
    for name in ("empty", "empty_like"):  # unwritten results are used as indices
        monkeypatch.setattr(torch, name, getattr(torch, name.replace("empty", "zeros")))
    monkeypatch.setattr(driver, "_active", Driver())
    yield found
    for kernel in used:
        kernel.device_caches.pop(DEVICE, None)


def launch_of(op: str) -> Callable[..., Any]:
    launch: Callable[..., Any] = getattr(import_module(f"specdec_kernels.ops.{PLACES.get(op, f'{op}.launch')}"), op)
    return launch


def shifted(call: Call) -> Call:
    """Returns the call with integers and statistics at unaligned addresses, as parts of larger tensors."""

    def move(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16 or not tensor.is_contiguous():
            return tensor
        whole = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
        return whole[1:].copy_(tensor.view(-1)).view(tensor.shape)

    return map_tensors(call, move)


def run(op: str, case: str, sizes: Sizes) -> None:
    call = make_sample(op, sizes, case=case)
    for each in (call, shifted(call)):
        launch_of(op)(*each.arguments, **each.options)


@pytest.mark.parametrize(("op", "case"), CALLS)
def test_serving_compiles_nothing_after_a_few_sizes(op: str, case: str, compiled: Compiled) -> None:
    for sizes in WARM:
        run(op, case, sizes)
    assert compiled
    later = [(sizes.rows, sizes.nodes, name) for sizes in SERVED for name in compiled.by(partial(run, op, case, sizes))]
    assert not later, "rows, nodes and kernel"


def attend(sizes: Sizes, planned: bool) -> None:
    """Runs attention over trees, with the plan of a target on a GPU."""
    from specdec_kernels.ops.tree_attention.launch import plan_numbers, tree_attention
    from specdec_kernels.ops.tree_attention.stream_k import attention_plan

    for call in (made := make_sample("tree_attention", sizes), shifted(made)):
        query, keys, _, table, lengths, offsets, *_ = call.arguments
        options = dict(call.options)
        if planned:
            options["plan"] = attention_plan(lengths, offsets, len(query), **plan_numbers(query, keys, table))
        tree_attention(*call.arguments, **options)


def test_attention_is_compiled_for_the_number_of_query_rows_of_a_block(compiled: Compiled) -> None:
    """Four kernels: blocks of 16, 32, 64 and 128 query rows, for any prompt chunk and number of rows."""
    few = [replace(BASE, nodes=nodes) for nodes in (1, 8, 16, 32)]
    for sizes in few:
        attend(sizes, True)
    assert {name for name, _ in compiled} == {"plan_shares", "attend_shares", "combine_shares"}
    assert len(compiled) == 3 * len(few)
    prompts = [replace(BASE, rows=1, nodes=nodes, length=0) for nodes in (33, 47, 64, 100, 129, 255)]
    assert compiled.by(lambda: [attend(sizes, True) for sizes in (*SERVED, *prompts)]) == []


def test_attention_without_a_plan_is_compiled_for_numbers_of_rows_and_pieces(compiled: Compiled) -> None:
    """Rows up to 15 and up to 127; pieces are powers of two."""
    for sizes in SERVED:
        attend(replace(sizes, length=sizes.length * 16), False)
    before = len(compiled)
    assert before < 3 * 6 * 2 + 6
    assert compiled.by(lambda: [attend(replace(each, length=each.length * 16 + 5), False) for each in SERVED]) == []


@triton.jit
def eager(numbers, count):
    pass


def test_a_count_that_specialises_is_seen(compiled: Compiled) -> None:
    numbers = torch.zeros(64, dtype=torch.int32)
    for where, count in ((numbers, 1), (numbers, 2), (numbers, 3), (numbers, 16), (numbers[1:], 3)):
        eager[(1,)](where, count)
    assert len(compiled) == 4


def test_an_argument_that_a_kernel_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="kernel eager: got arguments vocab; expected some of numbers, count"):
        kernel("vocab")(eager.fn)
