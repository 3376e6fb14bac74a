"""Peers of the GPU benchmark: those of torch run on a CPU, others on planted packages, and what fails ends nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kernels import gpu  # noqa: E402
from benchmarks.kernels.gpu import peers  # noqa: E402
from benchmarks.kernels.peers import PEERS, Peer, index_copy  # noqa: E402
from benchmarks.kernels.verify_peers import kept, torch_chain  # noqa: E402
from specdec_kernels import OPS, use_backend  # noqa: E402
from specdec_kernels.testing.agreement import SAMPLES, make_sample  # noqa: E402
from specdec_kernels.testing.samples_attention import Call, Sizes  # noqa: E402

SIZES = (Sizes(nodes=6, length=40, heads=4, kv_heads=2, width=16, vocab=200),)
HERE = {peer.name for peer in PEERS if not peer.gpu}


@pytest.mark.parametrize("op", sorted({peer.op for peer in PEERS}))
def test_peers_run_or_say_why_not(op: str) -> None:
    found = {row.backend: row for row in peers(op, torch.device("cpu"), 2, SIZES)}
    expected = {peer.name for peer in PEERS if peer.op == op}
    assert set(found) - expected == {name for name in found if name.startswith("ours (")} and expected <= set(found)
    for name in expected:
        if name in HERE:
            assert found[name].microseconds is not None and found[name].microseconds > 0, found[name].reason
        else:
            assert found[name].reason == "needs a GPU"


def test_a_peer_that_is_wrong_or_fails_is_not_timed_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def fail() -> None:
        raise RuntimeError("out of luck")

    def late(call: Call) -> Callable[[], None]:
        made.append(1)
        return index_copy(call) if len(made) != 2 else fail

    wrong = [
        Peer("moves nothing", "kv_commit", "torch", lambda call: lambda: None, gpu=False, same=True),
        Peer("fails late", "kv_commit", "torch", late, gpu=False, same=True),
        Peer("moves", "kv_commit", "torch", index_copy, gpu=False, same=True),
    ]
    monkeypatch.setattr(gpu, "PEERS", wrong)
    monkeypatch.setattr(gpu, "copies", lambda op, sizes, *_: [make_sample(op, sizes) for _ in range(3)])
    found = {row.backend: row for row in peers("kv_commit", torch.device("cpu"), 3, SIZES)}
    assert "differs from ours by" in str(found["moves nothing"].reason)
    assert "out of luck" in str(found["fails late"].reason)
    assert found["moves"].microseconds and any(name.startswith("ours") for name in found)


def test_what_sglang_is_given_is_our_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """With plain attention under its signature: prefix by slots, nodes apart, a mask [nodes, prefix + nodes] a row."""

    def extend(
        q_extend: Tensor, k_extend: Tensor, v_extend: Tensor, o_extend: Tensor, k_buffer: Tensor, v_buffer: Tensor,
        qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, custom_mask: Tensor, is_causal: bool,
        mask_indptr: Tensor, max_len_extend: int, k_scale: float, v_scale: float, sm_scale: float,
    ) -> None:  # fmt: skip
        for row in range(len(qo_indptr) - 1):
            own = slice(*qo_indptr[row : row + 2].tolist())
            prefix = kv_indices[slice(*kv_indptr[row : row + 2].tolist())]
            keys, values = torch.cat([k_buffer[prefix], k_extend[own]]), torch.cat([v_buffer[prefix], v_extend[own]])
            nodes = own.stop - own.start
            seen = custom_mask[slice(*mask_indptr[row : row + 2].tolist())].view(nodes, len(keys)).clone()
            seen[:, : len(prefix)] = True
            q, k, v = (each.transpose(0, 1) for each in (q_extend[own], keys, values))
            answer = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=sm_scale, enable_gqa=True)
            o_extend[own] = answer.transpose(0, 1)
            assert nodes == max_len_extend and is_causal

    place = "sglang.srt.layers.attention.triton_ops.extend_attention"
    monkeypatch.setitem(sys.modules, place, SimpleNamespace(extend_attention_fwd=extend))
    (peer,) = (each for each in PEERS if each.name == "SGLang Triton extend")
    assert gpu.differs(peer, SIZES[0], torch.device("cpu")) is None


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_the_chain_of_torch_operators_accepts_as_ours_does(top_p: float) -> None:
    """Mean number of accepted tokens, over draws of their own: the whole operator is compared, filters included."""
    sizes = Sizes(rows=64, nodes=4, vocab=50, top_p=top_p)
    call = make_sample("rejection_verify_logits", sizes)
    torch.manual_seed(0)
    run = torch_chain(call)
    theirs = torch.cat([run()[0] for _ in range(200)]).float()
    with use_backend("reference"):
        accept, _ = OPS["rejection_thresholds"](*make_sample("rejection_thresholds", sizes).arguments)
    chains = accept.view(sizes.rows, sizes.nodes)[:, 1:]
    assert abs(float(theirs.mean()) - float(chains.cumprod(1).sum(1).mean())) < 0.05
    last = run()[1]
    assert last.shape == (sizes.rows,) and int(last.max()) < sizes.vocab


def test_a_cut_distribution_keeps_the_likeliest_tokens() -> None:
    dist = torch.tensor([[0.1, 0.5, 0.3, 0.1]])
    torch.testing.assert_close(kept(dist, 0.6), torch.tensor([[0.0, 0.625, 0.375, 0.0]]))
    assert kept(dist, 1.0) is dist


def test_chains_are_timed_whole_in_half_precision_and_under_top_p() -> None:
    shapes = SAMPLES["rejection_verify_logits"].gpu
    assert {torch.bfloat16, torch.float32} <= {each.dtype for each in shapes}
    assert any(each.top_p < 1 for each in shapes)
    assert len([peer for peer in PEERS if peer.op == "rejection_verify_logits"]) >= 3


def test_peers_that_compile_for_each_shape_come_after_all_others() -> None:
    late = {peer.name for peer in PEERS if peer.late}
    assert {"torch FlexAttention", "FlashInfer custom mask"} <= late
    cpu = torch.device("cpu")
    first, last = ({row.backend for row in peers("tree_attention", cpu, 1, SIZES, when)} for when in (False, True))
    assert late & last and not late & first and "torch sdpa with mask" in first - last


def test_the_first_shape_of_every_operator_comes_before_the_second_of_any() -> None:
    ops, cuda = ["distribution_stats", "kv_stage", "tree_plan"], torch.device("cuda")
    order = [op for op, _ in gpu.shapes_in_turn(ops, cuda, False)]
    assert order[:3] == ops and len(order) == sum(len(SAMPLES[op].gpu) for op in ops)
    assert [op for op, _ in gpu.shapes_in_turn(ops, cuda, True)] == ops
