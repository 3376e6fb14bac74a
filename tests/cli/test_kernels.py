"""`specdec kernels`: list, explain, check, inspect and bench, in both forms, and what they refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels import OPS, agreement, machine_code, tree_plan
from specdec_kernels.agreement import SAMPLES
from specdec_kernels.machine_code import Cost
from specdec_kernels.samples import Sizes

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
    assert result.exit_code == 0 and all(row["agrees"] for row in rows)
    assert {row["op"] for row in rows} == set(OPS)
    assert all(row["reason"] for row in rows if not row["ran"])
    assert "of them differ" in run("kernels", "check", "tree_plan").stdout


def test_a_backend_that_differs_is_shown_and_fails(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [backend for backend in tree_plan.backends if backend.name != "cpu"]
    (backend,) = (backend for backend in tree_plan.backends if backend.name == "cpu")

    def wrong(*arguments: Any) -> Any:
        plan = tree_plan.reference(*arguments)
        return replace(plan, depth=plan.depth + (torch.arange(len(plan.depth)) == 3).int())

    tree_plan.forget()
    changed = replace(backend, load=lambda: wrong, missing=lambda: None)
    monkeypatch.setattr(tree_plan, "backends", [changed, *others])
    try:
        result = run("kernels", "check", "tree_plan")
    finally:
        tree_plan.forget()
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
        (("check", "nonsense"), "got operator 'nonsense'; expected one of"),
        (("explain", "tree_plan", "vocab=3"), "expected NAME=VALUE with a name of tree_plan: rows, nodes"),
        (("explain", "tree_plan", "nodes=0"), "at least 1"),
        (("explain", "law_stats", "dtype=text"), "got dtype 'text'"),
        (("inspect", "--arch", "sm_1"), "got 'sm_1'; expected one of sm_80"),
        (("bench", "--size", "rows=1"), "--size goes with one operator"),
        (("bench", "tree_plan", "--rounds", "0"), "at least 1"),
    ],
)
def test_what_is_refused(run: Any, arguments: tuple[str, ...], words: str) -> None:
    result = run("kernels", *arguments)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split())


@pytest.mark.skipif(machine_code.missing() is not None, reason=str(machine_code.missing()))
def test_inspect_shows_costs_and_fails_on_growth(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "measure", lambda variant, architecture: COST)
    monkeypatch.setattr(machine_code, "ceilings", lambda: {v.name: {"sm_90": vars_of(COST)} for v in variants})
    variants = machine_code.variants()
    result = run("kernels", "inspect", "--arch", "sm_90")
    assert result.exit_code == 0 and "8 wgmma" in result.stdout and "4,096" in result.stdout
    assert f"{len(variants)} kernels, none above what was recorded" in result.stdout
    monkeypatch.setattr(machine_code, "measure", lambda variant, architecture: replace(COST, spills=2))
    result = run("kernels", "inspect", "--json", "--everyday")
    rows = json.loads(result.stdout)
    assert result.exit_code == 1 and all("2 spills" in " ".join(row["problems"]) for row in rows)
    assert len(rows) == sum(bool(variant.everyday) for variant in variants)


def vars_of(cost: Cost) -> dict[str, int]:
    return {name: getattr(cost, name) for name in cost.__dataclass_fields__}


def test_bench_times_what_is_here(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_kernels import timing

    monkeypatch.setattr(timing, "measure_ceilings", lambda device: timing.Ceilings(10.0, 10.0, 0.1))
    asked = ("kernels", "bench", "tree_attention", "--rounds", "2", "-s", "nodes=2", "-s", "dtype=bfloat16")
    found = json.loads(run(*asked, "--json", "--device", "cpu").stdout)
    times = {row["backend"]: row for row in found["times"]}
    assert times["reference"]["microseconds"] > 0 and times["reference"]["share"] > 0
    assert all(row["reason"] for row in found["times"] if row["microseconds"] is None)
    assert "TFLOP/s" in run(*asked, "--device", "cpu").stdout


def test_the_report_of_all_kernels_and_its_script(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.kernels.gpu", "--device", "cpu", "--rounds", "1", "--out", tmp_path]
    done = subprocess.run([*command, "tree_plan", "kv_commit"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "kernels.json").read_text())
    backends = {row["backend"] for row in found["times"] if row["op"] == "kv_commit" and row["microseconds"]}
    assert {"reference", "torch index_copy per layer"} <= backends and all(r["agrees"] for r in found["agreement"])
    assert "torch index_copy per layer" in (tmp_path / "kernels.html").read_text()
    script = ROOT / "benchmarks" / "gpu_session.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    limits = [int(limit) for limit in re.findall(r"^part \w+ (\d+) ", script.read_text(), flags=re.MULTILINE)]
    assert len(limits) >= 6 and sum(limits) < 9 * 60


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
