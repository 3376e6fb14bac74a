"""torch.ops.specdec: every operator passes opcheck, traces whole under torch.compile, and costs little Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from oracles.recorded_calls import calls_of

from specdec_kernels import OPS, use_backend
from specdec_kernels.dispatch import extension, meta_kernels, torch_ops
from specdec_kernels.dispatch.operator import UnsupportedError, _pick_graph_backend
from specdec_kernels.testing.agreement import make_sample, tensors_in
from specdec_kernels.testing.samples_attention import Sizes

pytestmark = pytest.mark.skipif(extension.unavailable_reason() is not None, reason=str(extension.unavailable_reason()))
SIZES = Sizes(vocab=50, length=20, width=16)
MORE: dict[str, Callable[..., Any]] = {
    "dist_masses": partial(OPS["distribution_stats"], masses=True),
    "tree_attention_lse": partial(OPS["tree_attention"], return_lse=True),
    "tree_attention_out": lambda query, *rest, **options: OPS["tree_attention"](
        query, *rest, out=torch.empty_like(query), **options
    ),
    "draft_chain_dists": partial(OPS["draft_chain"], first_draw=0),
    "fused_forward_states": partial(OPS["fused_forward"], states=(0, 2)),
    "kv_commit": lambda caches, *rest: OPS["kv_commit"](list(caches), *rest),
}
"""Operators of the extension that a sample call does not reach on its own."""
OUTSIDE = {
    "kv_commit": "a CacheTable is no argument of a schema",
    "kv_commit_scratch": "the same",
    "fused_forward": "a DecoderTable is no argument of a schema",
    "draft_chain": "the same",
    "attention_plan": "made on the host from shapes, outside of the model",
    "process_logits_overlay": "an Overlay is no argument of a schema; compiled programs get processed logits",
}
"""Operators that torch.ops.specdec does not have under their own name."""
FOLDER = {
    "dist_masses": "distribution_stats",
    "kv_commit_table": "kv_commit",
    "draft_chain_dists": "draft_chain",
    "fused_forward_states": "fused_forward",
}


HELD: list[Any] = []
"""Calls whose tensors live on: a table of addresses does not hold them."""


def arguments(name: str) -> tuple[Any, ...]:
    """Returns the arguments of the sample call to torch.ops.specdec.<name>."""
    folder = FOLDER.get(name, name.removesuffix("_lse").removesuffix("_out"))
    # NaN in a result marks rows that were not read; opcheck would count it as a difference
    call = make_sample(
        folder, replace(SIZES, nodes=1) if name in ("replay_verify", "rejection_verify_logits") else SIZES
    )
    if name == "dist_masses":
        call.arguments[3].fill_(1.0)
    with use_backend("cpu"):
        found = calls_of(name, lambda: MORE.get(name, OPS[folder])(*call.arguments, **call.options))
    assert len(found) == 1
    if folder == "draft_chain":  # it is called again
        call.arguments[6].fill_(SIZES.length)
    HELD.append(call)
    return found[0]


def test_every_operator_has_a_fake_kernel_and_a_call_here() -> None:
    there = {each.partition("::")[2] for each in torch._C._dispatch_get_all_op_names() if each.startswith("specdec::")}
    assert there - {"noise", "batch_invariant_linear_isa"} == set(meta_kernels.FAKES)
    assert set(torch_ops.LAUNCHES) <= set(meta_kernels.FAKES)
    folders = {name for name, op in OPS.items() if any(backend.name == "triton" for backend in op.backends)}
    assert folders - set(OUTSIDE) <= set(torch_ops.LAUNCHES)


@pytest.mark.parametrize("name", meta_kernels.FAKES)
def test_opcheck(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(getattr(torch.ops.specdec, name).default, arguments(name))


IN_GRAPHS = sorted(set(OPS) - set(OUTSIDE))


@pytest.mark.parametrize("name", IN_GRAPHS)
def test_an_operator_does_not_break_a_compiled_graph(name: str) -> None:
    torch._dynamo.reset()
    want, call = (make_sample(name, SIZES) for _ in range(2))
    found: list[str] = []

    def keep(module: Any, _inputs: Any) -> Any:
        found.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    program = torch.compile(lambda *args: OPS[name](*args, **call.options), backend=keep, fullgraph=True)
    got = [*tensors_in(program(*call.arguments)), *call.writes]
    assert any(target.startswith("specdec.") for target in found), found
    expected = [*tensors_in(OPS[name](*want.arguments, **want.options)), *want.writes]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_launches_of_the_extension_on_a_gpu_count_as_triton() -> None:
    for wish in ("triton", None, "reference"):
        with use_backend(wish):
            assert _pick_graph_backend("distribution_stats", "cuda") == "cuda" + ("" if wish is None else f", {wish}")
    calls = OPS["distribution_stats"]._graph_calls
    assert calls["cuda, triton"] is calls["cuda"] is not calls["cuda, reference"]
    with use_backend("cpu"), pytest.raises(UnsupportedError, match="backend 'cpu' cannot serve compiled code on cuda"):
        _pick_graph_backend("distribution_stats", "cuda")


def test_a_request_holds_while_a_program_is_compiled() -> None:
    call, found = make_sample("batch_invariant_linear", SIZES), []

    def keep(module: Any, _inputs: Any) -> Any:
        found.append({str(node.target) for node in module.graph.nodes if node.op == "call_function"})
        return module

    def program(*args: Any) -> Any:
        return OPS["batch_invariant_linear"](*args, **call.options)

    for wish in (None, "reference", "cpu"):
        torch._dynamo.reset()
        with use_backend(wish):
            torch.compile(program, backend=keep, fullgraph=True)(*call.arguments)
    assert [any(target.startswith("specdec.") for target in targets) for targets in found] == [True, False, True]
    torch._dynamo.reset()
    with use_backend("cuda"), pytest.raises(Exception, match="backend 'cuda' cannot serve compiled code on cpu"):
        torch.compile(program, backend=keep, fullgraph=True)(*call.arguments)


@pytest.mark.parametrize("op", sorted(set(OPS) & set(torch_ops.LAUNCHES)))
def test_compiled_code_for_a_gpu_calls_the_kernel_and_not_the_reference(op: str) -> None:
    assert any("cuda" in backend.graph_devices for backend in OPS[op].backends), op
