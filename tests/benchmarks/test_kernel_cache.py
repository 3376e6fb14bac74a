"""Compiled kernels that travel in one file: pruned, found by another installation of Triton, refused by versions."""

from __future__ import annotations

import json
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

pytest.importorskip("triton")

from benchmarks.gpu import cache_jobs, kernel_cache  # noqa: E402
from specdec_kernels.inspection import machine_code  # noqa: E402
from specdec_kernels.testing.agreement import SAMPLES  # noqa: E402

if machine_code.unavailable_reason() is not None:
    pytest.skip(f"nothing is compiled: {machine_code.unavailable_reason()}", allow_module_level=True)

VERSIONS = kernel_cache.Versions("3.9.9", "ptxas 1", "sm_90", "0123")


def compile_one() -> Any:
    """A small kernel for sm_90, from the cache where it is there."""
    variant = next(each for each in machine_code.variants() if each.name.startswith("kv_slots"))
    return machine_code.compile_variant(variant, "sm_90")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of Triton."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def packed(cache: Path, file: Path) -> Any:
    """Compiles a kernel and packs the cache into the file. Returns the compiled kernel."""
    with kernel_cache.recorded_keys(cache):
        compiled = compile_one()
    assert kernel_cache.pack(cache, file, VERSIONS) == 1
    return compiled


def test_a_packed_kernel_is_found_by_another_installation_of_triton(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with another version of Python, whose wheel has another hash. All other code of the kernel is gone."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import cache as triton_cache

    file = tmp_path / "packed.tar.xz"
    compiled = packed(cache, file)
    with tarfile.open(file) as tar:
        names = [name.rpartition("/")[2].rpartition(".")[2] for name in tar.getnames()]
    assert sorted(names) == ["cubin", "json", "json", "key"], "nothing but what loading needs"
    monkeypatch.setattr(triton_cache, "triton_key", lambda: "another installation")
    elsewhere = tmp_path / "elsewhere"
    assert kernel_cache.load(file, elsewhere, VERSIONS) == (1, None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(elsewhere))
    monkeypatch.setattr(CUDABackend, "add_stages", lambda *args: pytest.fail("a kernel was compiled"))
    found = compile_one()
    assert found.asm["cubin"] == compiled.asm["cubin"] and set(found.asm) == {"cubin"}
    assert found.metadata.shared == compiled.metadata.shared and found.hash != compiled.hash


@pytest.mark.parametrize(("name", "value"), [("triton", "3.6.0"), ("ptxas", "ptxas 2"), ("architecture", "sm_100")])
def test_a_cache_of_other_versions_is_not_loaded(name: str, value: str, cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "packed.tar.xz"
    packed(cache, file)
    count, reason = kernel_cache.load(file, tmp_path / "other", replace(VERSIONS, **{name: value}))
    assert count == 0 and not (tmp_path / "other").exists()
    assert reason == f"{file} is for {name} {getattr(VERSIONS, name)!r}, here is {value!r}"


def test_a_cache_of_other_sources_is_loaded_and_reported(cache: Path, tmp_path: Path) -> None:
    """Triton finds kernels by their sources, so that those which changed are compiled and the others are not."""
    file = tmp_path / "packed.tar.xz"
    packed(cache, file)
    count, reason = kernel_cache.load(file, tmp_path / "other", replace(VERSIONS, sources="4567"))
    assert count == 1 and str(reason).endswith("was made from other kernel sources (0123, here 4567)")


def test_a_file_that_is_no_cache_is_reported_in_one_line(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "packed.tar.xz"
    assert kernel_cache.load(file, cache, VERSIONS) == (0, f"there is no {file}; `make gpu-cache` makes it")
    packed(cache, file)
    whole = file.read_bytes()
    for contents in (b"no archive", whole[: len(whole) // 2], b""):
        file.write_bytes(contents)
        count, reason = kernel_cache.load(file, tmp_path / "other", VERSIONS)
        assert count == 0 and f"{file} is no packed cache, or is cut short" in str(reason)
        assert "\n" not in str(reason)


def test_a_file_that_would_be_too_large_is_not_written(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "MOST_BYTES", 1000)
    with kernel_cache.recorded_keys(cache):
        compile_one()
    with pytest.raises(ValueError, match="bytes packed; expected at most 1,000"):
        kernel_cache.pack(cache, tmp_path / "packed.tar.xz", VERSIONS)
    assert list(tmp_path.glob("packed*")) == []
    with pytest.raises(ValueError, match="holds no kernel with a recorded key"):
        kernel_cache.pack(tmp_path / "empty", tmp_path / "packed.tar.xz", VERSIONS)


@pytest.mark.parametrize(("version", "tested"), [("3.5.1", False), ("3.6.0", True), ("3.9.0", True), ("3.10.0", False)])
def test_a_triton_outside_of_the_tested_range_is_reported(version: str, tested: bool) -> None:
    words = kernel_cache.untested(version)
    assert (words is None) is tested
    assert tested or str(words).startswith(f"Triton {version} is outside of the tested range 3.6 to 3.9")


def test_what_does_not_fit_is_compiled_here(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(cache_jobs, "compile_all", lambda *given: asked.append(given) or 0)
    file = tmp_path / "none.tar.xz"
    assert kernel_cache.main(["load", str(file), "--jobs", "steps", "--processes", "3"]) == 0
    assert asked == [(["steps"], cache, 3)]
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("kernel cache:"))
    assert (
        line == f"kernel cache: there is no {file}; `make gpu-cache` makes it; kernels are compiled here in 3 processes"
    )


def test_jobs_name_what_a_session_launches() -> None:
    operators = {job.given for job in cache_jobs.operator_jobs()}
    assert ("tree_attention", SAMPLES["tree_attention"].gpu[0]) in operators
    assert {job.given[2] for job in cache_jobs.step_jobs()} == {1, 8, 64}
    assert {job.given for job in cache_jobs.draw_jobs()} >= {("rejection",), ("replay",), ("traversal",)}


def test_draws_launch_what_the_lab_launches() -> None:
    from specdec_kernels import simulated_gpu

    if reason := simulated_gpu.unavailable_reason():
        pytest.skip(reason)
    with simulated_gpu.gpu("sm_90") as gpu:
        cache_jobs.run_draws("rejection", vocab=300)
    launched = {launch.kernel.partition(".")[0] for launch in gpu.launches}
    assert {"draft_sample", "tree_plan"} < launched, launched


def test_a_job_that_fails_is_reported_and_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: cache_jobs.Job) -> None:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(cache_jobs, "run", run)
    seconds, reason = cache_jobs._work(cache_jobs.Job("operator", ("tree_plan",)), str(tmp_path))
    assert seconds >= 0 and reason == "RuntimeError: out of luck"


def test_the_versions_of_this_machine() -> None:
    import triton

    found = kernel_cache.versions()
    assert (found.triton, found.architecture) == (triton.__version__, "sm_90")
    assert "cuda" in found.ptxas and len(found.sources) == 16 and json.dumps(vars(found))
