"""`specdec kernels`: list, explain, check, inspect and bench, in both forms, and what they refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels import OPS, tree_plan, use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.inspection import machine_code
from specdec_kernels.inspection.machine_code import Cost
from specdec_kernels.testing import agreement
from specdec_kernels.testing.agreement import SAMPLES
from specdec_kernels.testing.samples_attention import Sizes
from specdec_kernels.testing.samples_options import OPTIONS
from specdec_kernels.triton_shared import triton_backend

ROOT = Path(__file__).parents[2]
COST = Cost(registers=100, stack=0, spills=0, shared=4096, wgmma=8, mma=0, wide_loads=4, narrow_loads=10)


def test_list_names_every_backend_with_its_reason(run: Any) -> None:
    rows = json.loads(run("kernels", "list", "--json").stdout)
    assert {(r["op"], r["backend"]) for r in rows} == {(op, b.name) for op in OPS for b in OPS[op].backends}
    text = run("kernels", "list")
    assert text.exit_code == 0 and "\x1b" not in text.stdout and all(op in text.stdout for op in OPS)


def test_every_operator_has_a_sample_and_the_backends_here_agree(run: Any) -> None:
    assert set(SAMPLES) == set(OPS)
    result = run("kernels", "check", "--json")
    rows = json.loads(result.stdout)
    assert result.exit_code == 0 and [row for row in rows if not row["agrees"]] == []
    assert {row["op"] for row in rows} == set(OPS)
    assert all(row["reason"] for row in rows if not row["ran"])
    ran = {(row["op"], row["case"]) for row in rows if row["ran"] and row["backend"] == "cpu"}
    if extension.unavailable_reason() is None:
        left = {(op, case) for op in OPTIONS for case in OPTIONS[op]} - ran
        assert left == {("tree_attention", "float8 cache")}, "what the C++ kernels do not take"


def test_check_names_what_is_not_run_once_and_an_operator_asked_for_twice_too(run: Any) -> None:
    once, twice = run("kernels", "check", "tree_plan").stdout, run("kernels", "check", "tree_plan", "tree_plan").stdout
    assert once == twice and "of them differ" in once
    text = run("kernels", "check", "tree_plan", "kv_slots", "process_logits").stdout
    if "no CUDA device" in text:
        assert text.count("no CUDA device") == 1 and "all 3 that have it" in text
    if extension.unavailable_reason() is None and "no CUDA device" in text:
        assert "1 run, 0 of them differ" in once, "dtypes are of no matter to it"
        alone = run("kernels", "check", "process_logits_overlay", "kv_slots").stdout
        assert "only the reference is available: process_logits_overlay\n" in alone


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    if len(one) != len(other):
        return False
    pairs = [(a.double() if a.is_floating_point() else a, b) for a, b in zip(one, other, strict=True)]
    return all(agreement.difference(a, b.to(a.dtype), 0.0)[1] is None for a, b in pairs)


ANSWERS_DIFFER = {"distribution_stats", "tree_expand", "tree_grow", "process_logits", "ngram_match"}
"""Operators whose results for the samples depend on every option; others sample, or change only thresholds."""


@pytest.mark.parametrize("op", OPTIONS)
def test_no_sample_with_options_is_the_plain_one_or_another(op: str) -> None:
    with use_backend("reference"):
        calls = {case: agreement.make_sample(op, Sizes(), case=case) for case in agreement.cases(op)}
        given = {
            case: [*agreement.tensors_in((call.arguments, tuple(call.options.values())))]
            for case, call in calls.items()
        }
        given = {case: [each.clone() for each in tensors] for case, tensors in given.items()}
        answers = {case: agreement.run_sample(op, call) for case, call in calls.items()}
    plain = {case: str({n: v for n, v in call.options.items() if isinstance(v, (int, float, str))})
             for case, call in calls.items()}  # fmt: skip
    for one, other in combinations(calls, 2):
        assert plain[one] != plain[other] or not equal(given[one], given[other]), f"{one!r} and {other!r}"
        if op in ANSWERS_DIFFER or "thresholds" in op:
            assert not equal(answers[one], answers[other]), f"{one!r} and {other!r}"


def test_samples_that_do_not_exist_are_named() -> None:
    with pytest.raises(ValueError, match="got sample 'nonsense' of tree_expand; expected one of noise"):
        agreement.make_sample("tree_expand", Sizes(), case="nonsense")


def test_the_interpreter_alone_is_no_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors are mended by the tests; without them differences would be shown that no kernel has."""
    (backend,) = (each for each in tree_plan.backends if each.name == "triton")
    served = replace(backend, missing=lambda: None, why_not=lambda *args: None, load=lambda: tree_plan.reference)
    monkeypatch.setattr(agreement, "INTERPRETED", True)
    monkeypatch.setattr(tree_plan, "backends", [served])
    (row,) = agreement.check(["tree_plan"])
    assert not row.ran and row.agrees and "make lane-interpreter" in str(row.reason)
    assert "make lane-interpreter" in str(triton_backend.unavailable_reason()) or torch.cuda.is_available()


def test_a_backend_that_differs_is_shown_and_fails(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [backend for backend in tree_plan.backends if backend.name != "cpu"]
    (backend,) = (backend for backend in tree_plan.backends if backend.name == "cpu")

    def wrong(*arguments: Any) -> Any:
        plan = tree_plan.reference(*arguments)
        return replace(plan, depth=plan.depth + (torch.arange(len(plan.depth)) == 3).int())

    tree_plan.clear_choices()
    changed = replace(backend, load=lambda: wrong, missing=lambda: None)
    monkeypatch.setattr(tree_plan, "backends", [changed, *others])
    try:
        result = run("kernels", "check", "tree_plan")
    finally:
        tree_plan.clear_choices()
    assert result.exit_code == 1 and "1 of 16 integers differ" in result.stdout


def test_differences_are_measured() -> None:
    x = torch.tensor([1.0, float("nan"), -float("inf")])
    assert agreement.difference(x, x.clone(), 0.0) == (0.0, None)
    worst, reason = agreement.difference(torch.tensor([1.0, 2.3]), torch.tensor([1.0, 2.0]), 0.05)
    assert worst == pytest.approx(0.1, rel=1e-5) and reason is not None
    assert agreement.difference(torch.tensor([float("nan")]), torch.tensor([1.0]), 1.0)[1] is not None
    assert "expected torch.int64" in str(agreement.difference(torch.zeros(2), torch.zeros(2).long(), 1.0)[1])


def test_explain_is_about_one_shape(run: Any) -> None:
    found = json.loads(run("kernels", "explain", "tree_attention", "nodes=3", "dtype=float64", "--json").stdout)
    assert "nodes=3" in found["sizes"] and "dtype=float64" in found["sizes"]
    assert sum(row["chosen"] for row in found["backends"]) == 1
    assert "rows=2 nodes=8" in run("kernels", "explain", "tree_plan").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("check", "nonsense"), "kernels operator: got 'nonsense'; expected one of"),
        (("explain", "tree_plan", "vocab=3"), "expected NAME=VALUE with a name of tree_plan: rows, nodes"),
        (("explain", "tree_plan", "nodes=0"), "at least 1"),
        (("explain", "distribution_stats", "dtype=text"), "dtype: got 'text'; expected one of float32, bfloat16"),
        (("explain", "tree_attention", "dtype=float8_e4m3fn"), "dtype: got 'float8_e4m3fn'; expected one of float32"),
        (("explain", "tree_attention", "dtype=int32"), "dtype: got 'int32'"),
        (("explain", "tree_attention", "dtype=complex64"), "dtype: got 'complex64'"),
        (
            ("explain", "process_logits_overlay", "dtype=float64"),
            "dtype: got 'float64'; expected one of float32, bfloat16, float16",
        ),
        (("explain", "distribution_stats", "vocab=1000000000000"), "at most 1,048,576"),
        (("explain", "distribution_stats", "vocab=" + 5000 * "9"), "at most 1,048,576"),
        (("explain", "distribution_stats", "vocab=²"), "expected a whole number"),
        (("explain", "distribution_stats", "rows=-1"), "expected a whole number of at least 1"),
        (
            ("explain", "distribution_stats", "rows=4096", "nodes=4096", "vocab=1048576"),
            "half of this machine's memory",
        ),
        (("explain", "kv_commit", "rows=4096", "length=1048576", "width=1024"), "half of this machine's memory"),
        (("explain", "tree_attention", "heads=3", "kv_heads=2"), "got heads=3 and kv_heads=2; expected a multiple"),
        (("explain", "tree_attention", "kv_heads=3"), "got heads=8 and kv_heads=3"),
        (("explain", "rejection_verify", "top_p=1.5"), "expected a number above 0 and at most 1"),
        (("bench", "distribution_stats", "-s", "vocab=1"), "at least 32"),
        (("inspect", "--arch", "sm_1"), "got 'sm_1'; expected one of sm_80"),
        (("bench", "--size", "rows=1"), "--size: got no single operator; expected one; name it"),
        (("bench", "tree_plan", "--rounds", "0"), "at least 1"),
        (("bench", "tree_plan", "--peers", "no.such.module"), "expected a module with peers(op,"),
    ],
)
def test_what_is_refused(run: Any, arguments: tuple[str, ...], words: str) -> None:
    result = run("kernels", *arguments)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split())


@pytest.mark.skipif(machine_code.unavailable_reason() is not None, reason=str(machine_code.unavailable_reason()))
def test_inspect_shows_costs_and_fails_on_growth(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "measure", lambda variant, architecture: COST)
    monkeypatch.setattr(machine_code, "ceilings", lambda: {v.name: {"sm_90": vars_of(COST)} for v in variants})
    variants = machine_code.variants()
    result = run("kernels", "inspect", "--arch", "sm_90")
    assert result.exit_code == 0 and "8 wgmma" in result.stdout and "4,096" in result.stdout
    assert f"note: compiling {len(variants)} kernels takes minutes; --everyday takes fewer\n" in result.stderr
    assert (
        f"{len(variants)} kernels with Triton {machine_code.version()}: none of those recorded differs\n"
        in result.stdout
    )
    names = {line.split("  ")[0].strip() for line in result.stdout.splitlines()}
    assert {variant.name for variant in variants} <= names, "names stand on one line"
    assert result.stdout.count("  8 wgmma   4 / 10\n") == len(variants) and "loads 16 B / less\n" in result.stdout
    monkeypatch.setattr(machine_code, "measure", lambda variant, architecture: replace(COST, spills=2))
    result = run("kernels", "inspect", "--json", "--everyday")
    rows = json.loads(result.stdout)
    assert result.exit_code == 1 and all("2 spills" in " ".join(row["problems"]) for row in rows)
    assert len(rows) == sum(bool(variant.everyday) for variant in variants)


@pytest.mark.skipif(machine_code.unavailable_reason() is not None, reason=str(machine_code.unavailable_reason()))
def test_inspect_tells_missing_ceilings_from_growth(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = machine_code.variants()[:2]
    monkeypatch.setattr(machine_code, "variants", lambda: [first, second])
    monkeypatch.setattr(machine_code, "ceilings", lambda: {first.name: {"sm_90": vars_of(COST)}})
    monkeypatch.setattr(machine_code, "measure", lambda variant, architecture: COST)
    of = first.name.partition("/")[0], second.name.partition("/")[0]
    result = run("kernels", "inspect", *of)
    assert result.exit_code == 1
    assert "none of those recorded differs; for 1 nothing is recorded" in result.stdout
    assert f"\n{second.name}, sm_90: no ceiling is recorded for Triton" in result.stdout
    monkeypatch.setattr(machine_code, "measure", lambda variant, architecture: replace(COST, registers=200))
    result = run("kernels", "inspect", *of)
    assert result.exit_code == 1 and "1 of those recorded differs; for 1 nothing is recorded" in result.stdout
    assert f"\n{first.name}, sm_90: registers 200; expected at most 110\n" in result.stdout


def vars_of(cost: Cost) -> dict[str, int]:
    return {name: getattr(cost, name) for name in cost.__dataclass_fields__}


def test_bench_times_what_is_here(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_kernels.inspection import timing

    monkeypatch.setattr(timing, "measure_ceilings", lambda device: timing.Ceilings(10.0, 10.0, 0.1))
    asked = ("kernels", "bench", "tree_attention", "--rounds", "2", "-s", "nodes=2", "-s", "dtype=bfloat16")
    found = json.loads(run(*asked, "--json", "--device", "cpu").stdout)
    times = {row["backend"]: row for row in found["times"]}
    assert times["reference"]["microseconds"] > 0 and times["reference"]["share"] > 0
    assert all(row["reason"] for row in found["times"] if row["microseconds"] is None)
    text = run(*asked, "--device", "cpu").stdout
    assert "TFLOP/s" in text and text.count("nodes=2") == 1, "the shape stands there once"
    monkeypatch.setattr(timing, "cache_size", lambda device: 1 << 40)
    assert "% (in cache)" in run(*asked, "--device", "cpu").stdout


def test_bench_times_what_grows_with_every_call(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_kernels.inspection import timing

    monkeypatch.setattr(timing, "measure_ceilings", lambda device: timing.Ceilings(10.0, 10.0, 0.1))
    asked = ("kernels", "bench", "draft_chain", "--rounds", "3", "-s", "length=30", "--json", "--device", "cpu")
    times = {row["backend"]: row for row in json.loads(run(*asked).stdout)["times"]}
    assert times["reference"]["microseconds"] > 0
    assert times["cpu"]["microseconds"] or times["cpu"]["reason"]


def test_bench_times_peers_beside_ours(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_kernels.inspection import timing

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(timing, "measure_ceilings", lambda device: timing.Ceilings(10.0, 10.0, 0.1))
    asked = ("kernels", "bench", "kv_commit", "--rounds", "1", "--device", "cpu", "--peers", "benchmarks.kernels.gpu")
    times = {row["backend"]: row for row in json.loads(run(*asked, "--json").stdout)["times"]}
    assert times["reference"]["share"] > 0 and times["torch index_copy per layer"]["microseconds"] > 0
    assert any(name.startswith("ours (") for name in times) and times["SGLang KV move"]["reason"] == "needs a GPU"
    text = run(*asked).stdout
    assert "torch index_copy per layer" in text and "SGLang KV move: not timed: needs a GPU" in text


def test_the_report_of_all_kernels(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.kernels.gpu", "--device", "cpu", "--rounds", "1", "--out", tmp_path]
    done = subprocess.run([*command, "tree_plan", "kv_commit"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([*command, "--peers", "kv_commit"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "SGLang KV move: not timed: needs a GPU" in done.stdout, done.stderr
    for file, backend in (("kernels.json", "reference"), ("peers.json", "torch index_copy per layer")):
        times = json.loads((tmp_path / file).read_text())["times"]
        assert backend in {row["backend"] for row in times if row["op"] == "kv_commit" and row["microseconds"]}


def test_the_example_of_embedding_runs() -> None:
    done = subprocess.run([sys.executable, ROOT / "examples" / "embed_ops.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    paths = re.findall(r"path \[([\d, ]+)\].* (\d+) tokens committed", done.stdout)
    assert [int(total) - len(path.split(",")) for path, total in paths] == [40, 21]
    assert all(len(path.split(",")) >= 2 for path, _ in paths), "the planted guesses are accepted"


def test_samples_of_gpu_benchmarks_name_sizes_their_operator_knows() -> None:
    usual = Sizes()
    for op, sample in SAMPLES.items():
        for sizes in sample.gpu:
            changed = {n for n in Sizes.__dataclass_fields__ if getattr(sizes, n) != getattr(usual, n)}
            assert changed <= {*sample.names, "heads"}, op
