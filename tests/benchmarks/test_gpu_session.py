"""The parts of a GPU session that run without one: peers, the step benchmark, the report."""

from __future__ import annotations

import json
import subprocess
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

from benchmarks import report, step  # noqa: E402
from benchmarks.kernels import gpu  # noqa: E402
from benchmarks.kernels.gpu import peers  # noqa: E402
from benchmarks.kernels.peers import PEERS, Peer, index_copy  # noqa: E402
from specdec_kernels import timing  # noqa: E402
from specdec_kernels.agreement import sample  # noqa: E402
from specdec_kernels.samples import Call, Sizes  # noqa: E402

SIZES = (Sizes(nodes=6, length=40, heads=4, kv_heads=2, width=16, vocab=200),)
HERE = {peer.name for peer in PEERS if not peer.gpu}


@pytest.mark.parametrize("op", sorted({peer.op for peer in PEERS}))
def test_peers_run_or_say_why_not(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = {row.backend: row for row in peers(op, torch.device("cpu"), 2, SIZES)}
    expected = {peer.name for peer in PEERS if peer.op == op}
    assert set(found) - expected == {name for name in found if name.startswith("ours (")} and expected <= set(found)
    for name in expected:
        if name in HERE:
            assert found[name].microseconds is not None and found[name].microseconds > 0, found[name].reason
        else:
            assert found[name].reason == "needs a GPU"
            assert f"{name}: skipped: needs a GPU" in capsys.readouterr().out or len(expected) > 1


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
    monkeypatch.setattr(gpu, "copies", lambda op, sizes, device: [sample(op, sizes) for _ in range(3)])
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


def test_copies_exceed_the_cache_and_count_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(rows=1, layers=2)
    monkeypatch.setattr(timing, "cache_size", lambda device: 100_000)
    calls = timing.copies("kv_commit", sizes, torch.device("cpu"))
    slots = 2  # of the path 0, 1, 3, 7 two lie elsewhere than they go
    assert calls[0].bytes == 2 * slots * 4 * sizes.kv_heads * sizes.width * 4
    assert len(calls) * calls[0].bytes >= 400_000 and len(calls) <= timing.MOST_COPIES
    tables = [call.arguments[0] for call in calls]
    assert len({cache.data_ptr() for table in tables for cache in table}) == 4 * len(calls)
    assert all(call.writes[0] is call.arguments[0][0] for call in calls), "a call writes to its own tensors"


def test_the_step_benchmark_and_the_report(tmp_path: Path) -> None:
    quick = ["--shape", "tiny", "--device", "cpu", "--steps", "3", "--prompt", "8", "--rows", "2", "--drafted", "2"]
    found = step.main([*quick, "--out", str(tmp_path)])
    assert [line["mode"] for line in found] == ["sync", "graph"]
    for line in found:
        assert line["step_us"] > 0 and line["target_us"] > 0 and line["draft_us"] > 0
        assert line["overhead_us"] == pytest.approx(line["step_us"] - line["target_us"] - line["draft_us"])
    assert json.loads((tmp_path / "step.json").read_text())["steps"] == found
    (tmp_path / "summary.tsv").write_text("build\tpassed\t3 s\n")
    text = report.page(tmp_path)
    assert "Steps" in text and "build" in text and "Kernels" not in text, "what is not there is left out"


def test_steps_with_a_head_of_the_targets_shape_accept_all_of_it(tmp_path: Path) -> None:
    quick = ["--shape", "tiny", "--device", "cpu", "--steps", "3", "--prompt", "8", "--rows", "2", "--drafted", "3"]
    found = step.main([*quick, "--drafter", "eagle3", "--out", str(tmp_path)])
    assert [(line["mode"], line["drafter"]) for line in found] == [("sync", "eagle3"), ("graph", "eagle3")]
    assert found[0]["tokens_per_step"] == 4, "three drafted tokens and the target's own, in every step"
    assert found[1]["tokens_per_step"] == 4 * 6 / 7, "the host is one step behind"
    assert all(line["overhead_us"] == line["step_us"] - line["target_us"] - line["draft_us"] for line in found)
    assert all(line["draft_us"] > 0 for line in found)
    assert json.loads((tmp_path / "step-eagle3.json").read_text())["steps"] == found
    assert "eagle3" in report.page(tmp_path)
    with pytest.raises(
        SystemExit, match=r"1 captured steps take more than -1e\+09 us beyond"
    ):  # whatever the clock says
        step.main([*quick, "--drafter", "eagle3", "--modes", "sync", "graph", "--most-overhead", "-1000000000"])


def test_the_session_script_is_sound() -> None:
    script = ROOT / "benchmarks" / "gpu_session.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    limits = [int(line.split()[2]) for line in script.read_text().splitlines() if line.startswith("part ")]
    assert sum(limits) <= 530, "parts that all run into their limits still end within nine minutes"
