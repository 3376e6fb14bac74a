"""GPUs, drivers, extensions and versions of Triton that do not fit: one line says so, and what happens instead."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec_kernels import OPS, explain, simulated_gpu, use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.dispatch.devices import MIN_SHARED_MEMORY, gpu_unavailable_reason, unsupported_gpu_reason
from specdec_kernels.dispatch.operator import FallbackWarning
from specdec_kernels.inspection.machine_code import CEILINGS
from specdec_kernels.testing.agreement import make_sample
from specdec_kernels.testing.samples_attention import Sizes
from specdec_kernels.triton_shared import triton_backend, versions

ROOT = Path(__file__).resolve().parents[2]
SMALL = Sizes(rows=2, nodes=3, vocab=64, length=20, heads=2, kv_heads=1, width=16, layers=2)
HERE = torch.device("cuda:0")
needs_simulated_gpu = pytest.mark.skipif(
    simulated_gpu.unavailable_reason() is not None, reason=str(simulated_gpu.unavailable_reason())
)


@pytest.fixture
def gpu() -> Iterator[simulated_gpu.Gpu]:
    with simulated_gpu.gpu("sm_80") as made, torch.inference_mode():
        yield made


DRIVERS = {
    "no driver": (
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver\nfrom",
        "no CUDA device: Found no NVIDIA driver on your system (torch is built for CUDA 13.0); operators run on the "
        "CPU",
    ),
    "an old driver": (
        "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver.",
        "no CUDA device: The NVIDIA driver on your system is too old (found version 12020) (torch is built for CUDA "
        "13.0); operators run on the CPU",
    ),
    "no GPU": (
        "No CUDA GPUs are available",
        "no CUDA device: No CUDA GPUs are available (torch is built for CUDA 13.0); operators run on the CPU",
    ),
}
"""What torch.cuda.init raises, and what becomes of it."""


@pytest.mark.parametrize("case", DRIVERS)
def test_a_driver_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    torch_says, reason = DRIVERS[case]

    def fail() -> None:
        raise RuntimeError(torch_says)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert gpu_unavailable_reason() == reason
    if not triton_backend.INTERPRETED:
        assert str(triton_backend.unavailable_reason.__wrapped__()).startswith(reason)
    assert extension.cuda_unavailable_reason.__wrapped__() == reason


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert (
        gpu_unavailable_reason()
        == f"no CUDA device: torch {torch.__version__} is built without CUDA; operators run on the CPU"
    )


def device_of(major: int, minor: int, shared: int, name: str) -> SimpleNamespace:
    """Properties of a device."""
    return SimpleNamespace(
        name=name, major=major, minor=minor, shared_memory_per_block_optin=shared, multi_processor_count=40
    )


UNFIT = {
    "sm_75": (
        device_of(7, 5, 65_536, "Tesla T4"),
        "cuda:0 (Tesla T4) has compute capability 7.5; expected 8.0 or later",
    ),
    "little shared memory": (
        device_of(8, 0, 49_152, "small"),
        f"cuda:0 (small) gives a program 49152 bytes of shared memory; expected at least {MIN_SHARED_MEMORY}",
    ),
}


@needs_simulated_gpu
@pytest.mark.parametrize("case", UNFIT)
def test_the_reference_serves_a_gpu_that_does_not_fit(
    gpu: simulated_gpu.Gpu, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    properties, reason = UNFIT[case]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    assert unsupported_gpu_reason(HERE) == reason and unsupported_gpu_reason(torch.device("cpu")) is None
    for name, op in OPS.items():
        backends = {backend.name for backend in op.backends}
        if "triton" in backends:
            call = make_sample(name, SMALL, device=HERE)
            reasons = {row.backend: row.reason for row in op.explain(*call.arguments, **call.options)}
            assert op.choose_backend(*call.arguments, **call.options) == "reference", name
            assert reason in str(reasons["triton"]), name
    call, expected = make_sample("kv_stage", SMALL, device=HERE), make_sample("kv_stage", SMALL)
    gpu.clear()
    with pytest.warns(FallbackWarning, match=re.escape(reason)):
        OPS["kv_stage"](*call.arguments)
    assert gpu.launches == []
    OPS["kv_stage"].reference(*expected.arguments)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(call.writes, expected.writes, strict=True))


@needs_simulated_gpu
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if "triton" in {b.name for b in op.backends}])
def test_a_cached_choice_does_not_serve_an_unlike_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The first GPU fits and the second does not: each has its own choice."""
    with simulated_gpu.gpu("sm_90", devices=2), torch.inference_mode():
        first, (unfit, _) = torch.cuda.get_device_properties(0), UNFIT["sm_75"]
        of_device = lambda device=None: unfit if device is not None and device.index == 1 else first  # noqa: E731
        monkeypatch.setattr(torch.cuda, "get_device_properties", of_device)
        found = []
        for device in ("cuda:0", "cuda:1", "cuda:0"):
            call = make_sample(name, SMALL, device=torch.device(device))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                found.append(OPS[name]._select_backend(call.arguments, call.options)[0])
    assert found[1] == "reference" and found[0] == found[2] != "reference"


def test_programs_of_other_kernels_than_attention_fit_into_the_least_shared_memory() -> None:
    recorded = json.loads(CEILINGS.read_text(encoding="utf-8"))
    costs = {
        name: each["shared"] for section in recorded.values() for name, by in section.items() for each in by.values()
    }
    above = {name: shared for name, shared in costs.items() if shared > MIN_SHARED_MEMORY}
    assert {name: shared for name, shared in above.items() if "attention" not in name} == {}


@needs_simulated_gpu
def test_commits_run_through_triton_where_cuda_code_is_not_built(
    gpu: simulated_gpu.Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "_load_cuda", extension._load_cuda.__wrapped__)
    monkeypatch.setitem(sys.modules, "specdec_kernels._C_cuda", None)
    for name in ("kv_commit", "kv_commit_scratch", "kv_commit_pages", "kv_stage"):
        call, expected = make_sample(name, SMALL, device=HERE), make_sample(name, SMALL)
        table = explain(name, *call.arguments, **call.options).splitlines()
        assert table[0].split(maxsplit=2)[:2] == [name, "cuda"]
        assert "no: extension specdec_kernels._C_cuda not built; run `SPECDEC_BUILD=cuda pip install" in table[0]
        assert table[1].split() == [name, "triton", "chosen"]
        gpu.clear()
        OPS[name](*call.arguments, **call.options)
        assert [launch.kernel.partition(".")[0] for launch in gpu.launches] == [
            name.removesuffix("_scratch").removesuffix("_pages")
        ]
        with use_backend("cpu"):
            OPS[name](*expected.arguments, **expected.options)
        assert all(torch.equal(one.cpu(), other) for one, other in zip(call.writes, expected.writes, strict=True))


@pytest.mark.parametrize(
    ("version", "fits"),
    [("3.6.0", True), ("3.9.1", True), ("3.9.0+git1234", True), ("3.5.1", False), ("3.10.0", False), ("4.0.0", False)],
)
def test_versions_of_triton(version: str, fits: bool) -> None:
    warning = versions.untested_warning(version)
    assert (warning is None) == fits
    if warning is not None:
        assert warning == (
            f"Triton {version} is outside of the tested range, 3.6 to 3.9: the kernels run, but their results and "
            "speed are not known; install triton==3.9.* for tested ones"
        )


def test_an_untested_triton_warns_once_and_its_kernels_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from specdec_kernels.triton_shared import device_guard

    class Kernel:
        """What `triton.jit` returns in the interpreter, say."""

    kernel: Any = Kernel()
    versions.warn_if_untested.cache_clear()
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    try:
        with pytest.warns(RuntimeWarning, match=r"Triton 3\.10\.0 is outside of the tested range, 3\.6 to 3\.9"):
            assert device_guard.on_own_device(kernel) is kernel
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert device_guard.on_own_device(kernel) is kernel
    finally:
        versions.warn_if_untested.cache_clear()


def test_the_range_is_that_of_ceilings_and_documents() -> None:
    sections = {tuple(map(int, each.split("."))) for each in json.loads(CEILINGS.read_text(encoding="utf-8"))}
    assert (min(sections), max(sections)) == (versions.FIRST, versions.LAST)
    assert f"Triton {versions.tested_range()}" in (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    (row,) = (
        line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| triton")
    )
    for version in (versions.FIRST, versions.LAST):
        assert f"`{version[0]}.{version[1]}" in row
