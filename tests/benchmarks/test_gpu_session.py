"""The parts of a GPU session that run without one: peers, the step benchmark, the report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
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
from benchmarks.kernels.whole_chains import kept, torch_chain  # noqa: E402
from specdec_kernels import OPS, timing, use_backend  # noqa: E402
from specdec_kernels.agreement import SAMPLES, sample  # noqa: E402
from specdec_kernels.samples import Call, Sizes  # noqa: E402

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


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_the_chain_of_torch_operators_accepts_as_ours_does(top_p: float) -> None:
    """Mean number of accepted tokens, over draws of their own: the whole operator is compared, filters included."""
    sizes = Sizes(rows=64, nodes=4, vocab=50, top_p=top_p)
    call = sample("chain_verify_logits", sizes)
    torch.manual_seed(0)
    run = torch_chain(call)
    theirs = torch.cat([run()[0] for _ in range(200)]).float()
    with use_backend("reference"):
        accept, _ = OPS["chain_thresholds"](*sample("chain_thresholds", sizes).arguments)
    chains = accept.view(sizes.rows, sizes.nodes)[:, 1:]
    assert abs(float(theirs.mean()) - float(chains.cumprod(1).sum(1).mean())) < 0.05
    last = run()[1]
    assert last.shape == (sizes.rows,) and int(last.max()) < sizes.vocab


def test_a_cut_law_keeps_the_likeliest_tokens() -> None:
    law = torch.tensor([[0.1, 0.5, 0.3, 0.1]])
    torch.testing.assert_close(kept(law, 0.6), torch.tensor([[0.0, 0.625, 0.375, 0.0]]))
    assert kept(law, 1.0) is law


def test_chains_are_timed_whole_in_half_precision_and_under_top_p() -> None:
    shapes = SAMPLES["chain_verify_logits"].gpu
    assert {torch.bfloat16, torch.float32} <= {each.dtype for each in shapes}
    assert any(each.top_p < 1 for each in shapes)
    assert len([peer for peer in PEERS if peer.op == "chain_verify_logits"]) >= 3


def test_caches_of_a_cpu_are_left_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Copies exceed the largest cache four times, or there is one and the time says so."""
    cpu = torch.device("cpu")
    for at, size in enumerate(("32K", "1024K", "2M")):
        (tmp_path / f"index{at}").mkdir()
        (tmp_path / f"index{at}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(timing, "CPU_CACHES", tmp_path)
    assert timing.cache_size(cpu) == 2 << 20
    small, large = Sizes(rows=1, nodes=1, vocab=64), Sizes(vocab=20_000)
    one, many = (timing.copies("law_stats", sizes, cpu) for sizes in (small, large))
    assert len(one) == 1 and timing.in_cache(one, cpu)
    assert len(many) * many[0].bytes >= 8 << 20 and not timing.in_cache(many, cpu)
    monkeypatch.setattr(timing, "MOST_HELD_CPU", 4 << 20)
    assert len(timing.copies("law_stats", large, cpu)) == 1
    limit = timing.Ceilings(10.0, 10.0, 0.1)
    rows = [row for each in (small, large) for row in timing.bench(["law_stats"], cpu, each, 1, limit)]
    assert {row.cached for row in rows if row.microseconds} == {True}
    monkeypatch.setattr(timing, "CPU_CACHES", tmp_path / "nowhere")
    assert timing.cache_size(cpu) == 0


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
    (tmp_path / "step-medusa.json").write_text('{"device": "a GPU", "st')
    assert "step-medusa.json was cut short" in report.page(tmp_path)


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


SCRIPT = ROOT / "benchmarks" / "gpu_session.sh"
FAKE = """#!/bin/sh
case "$*" in
*benchmarks.report*) exec {python} "$@";;
*benchmarks.step*eagle3*) exit 0;;
*benchmarks.step*)
    cp {steps} "$SPECDEC_OUT/step.json"
    {python} -c "import signal, sys, time; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w'); time.sleep(60)" \
        "$SPECDEC_OUT/started";;
esac
"""
"""Python that runs the report only; steps leave a result, then take long and do not end when asked to."""


def test_the_session_ends_within_nine_minutes() -> None:
    """Also if every part runs into its limit and has to be killed after it."""
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0
    text = SCRIPT.read_text()
    limits = [int(limit) for limit in re.findall(r"^part \w+ (\d+) ", text, flags=re.MULTILINE)]
    assert len(limits) == len(re.findall(r"^part ", text, flags=re.MULTILINE)) >= 6
    (grace,) = map(int, re.findall(r"^grace=(\d+)$", text, flags=re.MULTILINE))
    (report_limit,) = map(int, re.findall(r"^  timeout --kill-after=\$grace (\d+) ", text, flags=re.MULTILINE))
    assert text.count("--kill-after=$grace") == text.count("--kill-after") == 2
    assert sum(limits) + report_limit + grace * (len(limits) + 1) < 540


@pytest.mark.parametrize(("ended_by", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_session_leaves_results_and_a_report(ended_by: int, status: int, tmp_path: Path) -> None:
    out = tmp_path / "results"
    quick = ["--shape", "tiny", "--device", "cpu", "--steps", "3", "--prompt", "8", "--rows", "1", "--drafted", "0"]
    step.main([*quick, "--modes", "sync", "--out", str(tmp_path)])
    fake = tmp_path / "python"
    fake.write_text(FAKE.format(python=sys.executable, steps=tmp_path / "step.json"))
    fake.chmod(0o755)
    own = {"PYTHON": str(fake), "SPECDEC_OUT": str(out)}
    session = subprocess.Popen(
        ["bash", SCRIPT, out], env=os.environ | own, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        for _ in range(1200):
            if (out / "started").exists():
                break
            time.sleep(0.05)
        session.send_signal(ended_by)
        printed, _ = session.communicate(timeout=60)
    finally:
        session.kill()
    assert session.returncode == status
    parts = dict(line.split("\t")[:2] for line in (out / "summary.tsv").read_text().splitlines())
    assert parts["build"] == "passed" and parts["steps"] == "interrupted" and "kernels" not in parts
    text = (out / "report.html").read_text()
    assert "interrupted" in text and "Steps" in text and f"report: {out}/report.html" in printed


def test_a_whole_session_counts_the_parts_that_fail(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(
        f'#!/bin/sh\ncase "$*" in *benchmarks.report*) exec {sys.executable} "$@";; *"-m pytest"*) exit 3;; esac\n'
    )
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", SCRIPT, tmp_path / "results"], env=os.environ | {"PYTHON": str(fake)}, capture_output=True, text=True
    )
    lines = (tmp_path / "results" / "summary.tsv").read_text().splitlines()
    failed = [line for line in lines if "failed (3)" in line]
    assert done.returncode == len(failed) == SCRIPT.read_text().count("-m pytest")
    assert len(lines) == SCRIPT.read_text().count("\npart ") and (tmp_path / "results" / "report.html").exists()
