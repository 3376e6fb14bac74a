"""Kernels on a GPU against the references, the dispatcher's CUDA key, steps as CUDA graphs.

tests/interpreter runs the same kernels on similar calls without a GPU. Skipped without a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_kernels import OPS, tree_attention, use_backend
from specdec_kernels.dispatch import extension, meta_kernels, torch_ops
from specdec_kernels.testing.agreement import TOLERANCE, check, difference, make_sample, make_timed_sample, tensors_in
from specdec_kernels.testing.samples_attention import Sizes
from specdec_kernels.testing.samples_options import OPTIONS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SIZES = [
    Sizes(),
    Sizes(rows=1, nodes=1, length=1, vocab=64, heads=1, kv_heads=1, width=16),
    Sizes(rows=3, nodes=5, length=33, vocab=1025, heads=4, kv_heads=4, width=80, page=1),
    Sizes(rows=5, nodes=33, length=700, vocab=50_257, heads=8, kv_heads=1, width=128, page=64),
]


@pytest.mark.parametrize("op", OPS)
def test_every_kernel_runs_and_agrees_with_the_reference(op: str) -> None:
    agrees(op, (torch.float32,), SIZES[0])


def agrees(op: str, dtypes: tuple[torch.dtype, ...], sizes: Sizes) -> None:
    found = list(check([op], dtypes, torch.device("cuda"), sizes, only=("",)))
    assert [row for row in found if not row.agrees] == []
    if any(backend.name == "triton" for backend in OPS[op].backends):
        assert any(row.ran for row in found if row.backend == "triton")


@pytest.mark.parametrize("kind", ["none", "coupled", "greedy", "medusa", "eagle", "eagle dynamic", "eagle3 dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_graph_steps_write_the_same_text(kind: str, temperature: float, tmp_path: Path) -> None:
    prompts = [models.prompt(length) for length in (1, 5, 17, 40)]
    wanted = [
        SamplingParams(temperature=temperature, seed=at, max_new_tokens=20 + 3 * at, top_p=0.95) for at in range(4)
    ]
    texts: dict[str, Any] = {}
    for mode in ("sync", "graph"):
        drafter, (name, _, dynamic) = None, kind.partition(" ")
        target = HuggingFaceTarget(models.own("llama").cuda(), max_length=128, max_rows=4)
        if name == "medusa":
            drafter = get_drafter(name)(target, models.medusa_heads(target).cuda())
        elif name.startswith("eagle"):
            drafter = get_drafter(name)(target, **heads.options(name, tmp_path), depth=3 if dynamic else 0)
        elif kind != "none":
            small = HuggingFaceTarget(models.kin("llama").cuda(), max_length=128, max_rows=4)
            drafter = get_drafter("draft_model")(small, num_draft_tokens=3, pick=kind)
        engine = Engine(target, drafter, step_mode=mode)
        handles = [engine.submit(prompt, params) for prompt, params in zip(prompts[:2], wanted)]
        engine.step()
        handles += [engine.submit(prompt, params) for prompt, params in zip(prompts[2:], wanted[2:])]
        while not engine.idle:
            engine.step()
        assert engine.step_mode == mode, engine.explain()
        texts[mode] = [handle.tokens for handle in handles]
    assert texts["graph"] == texts["sync"]


@pytest.mark.parametrize("op", sorted(set(OPS) & set(torch_ops.LAUNCHES)))
def test_the_dispatcher_serves_tensors_on_a_gpu(op: str) -> None:
    name = f"specdec::{op}"
    assert extension.unavailable_reason() is None  # loads it
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") and op in meta_kernels.FAKES
    call = make_sample(op, Sizes(), "cuda")
    want = make_sample(op, Sizes(), "cuda")
    torch._dynamo.reset()
    program = torch.compile(lambda *args: OPS[op](*args, **call.options), backend="aot_eager", fullgraph=True)
    got = [*tensors_in(program(*call.arguments)), *call.writes]
    with use_backend("triton"):
        expected = [*tensors_in(OPS[op](*want.arguments, **want.options)), *want.writes]
    for one, other in zip(got, expected, strict=True):
        assert difference(one, other, TOLERANCE[torch.float32])[1] is None


@pytest.mark.parametrize("op", sorted(name for name, op in OPS.items() if op._direct_backends))
def test_calls_with_out_and_workspace_allocate_nothing(op: str) -> None:
    call = make_sample(op, Sizes(vocab=50_257), "cuda")
    with use_backend("triton"):
        want = list(tensors_in(OPS[op](*call.arguments, **call.options)))
        out = want[0].clone() if len(want) == 1 else tuple(map(torch.empty_like, want))
        size = OPS[op].workspace_size(*call.arguments, **call.options)
        given = {"out": out, "workspace": torch.empty(size, dtype=torch.uint8, device="cuda")}
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        found = OPS[op](*call.arguments, **call.options, **given)
        if op != "rejection_verify_logits":
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    for got, expected in zip(tensors_in(found), want, strict=True):
        assert difference(got, expected, 0.0)[1] is None


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_with_a_plan_equals_the_reference(sizes: Sizes) -> None:
    with use_backend("triton"):
        call = make_timed_sample("cuda", "tree_attention", sizes)
        got = tree_attention(*call.arguments, **call.options)
    assert call.options["plan"] is not None
    with use_backend("reference"):
        want = tree_attention(*call.arguments, **call.options)
    assert difference(got, want, TOLERANCE[torch.float32])[1] is None


@pytest.mark.parametrize(("op", "case"), [(op, case) for op in OPTIONS for case in OPTIONS[op]])
def test_calls_with_options_equal_the_reference(op: str, case: str) -> None:
    found = list(check([op], device=torch.device("cuda"), only=(case,)))
    assert [row for row in found if not row.agrees] == []
    if any(backend.name == "triton" for backend in OPS[op].backends):
        assert any(row.ran for row in found if row.backend == "triton"), found


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)  # the largest ones last
def test_every_backend_agrees_with_the_reference(op: str, sizes: Sizes) -> None:
    agrees(op, (torch.float32, torch.bfloat16, torch.float16), sizes)
