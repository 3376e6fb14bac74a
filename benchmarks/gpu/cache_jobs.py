"""What a GPU session launches, run on stand-in GPUs so that Triton compiles it into its cache: see `kernel_cache`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.kernel_cache import ARCHITECTURE, recorded_keys

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """kind: "operator" or "step"; given: what `run` takes."""

    kind: str
    given: tuple[Any, ...]

    def __str__(self) -> str:
        return " ".join(str(each) for each in (self.kind, *self.given))


def operator_jobs() -> list[Job]:
    """Every operator with a Triton kernel at the sizes of the GPU benchmark, as it is timed there."""
    from specdec_kernels import OPS
    from specdec_kernels.testing.agreement import SAMPLES

    names = [op for op in SAMPLES if any(backend.name == "triton" for backend in OPS[op].backends)]
    return [Job("operator", (op, sizes)) for op in names for sizes in SAMPLES[op].gpu]


def step_jobs() -> list[Job]:
    """Steps of the shapes, rows and drafts that a session times, captured and not."""
    rows, jobs = (1, 8, 64), []
    for shape in ("8b", "1b"):
        jobs += [Job("step", (shape, "eagle3", count, drafted, "graph")) for drafted in (4, 0) for count in rows]
    return [*jobs, Job("step", ("1b", "eagle3", 1, 4, "sync")), Job("step", ("1b", "draft_model", 1, 4, "graph"))]


def tiny_jobs() -> list[Job]:
    """One of each kind, for rehearsals."""
    from specdec_kernels.testing.samples import Sizes

    return [Job("operator", ("tree_plan", Sizes())), Job("step", ("tiny", "eagle3", 1, 2, "graph"))]


JOBS = {"operators": operator_jobs, "steps": step_jobs, "tiny": tiny_jobs, "tests": list}
"""Groups of jobs by name; "tests" are those of tests/gpu, which run by themselves."""


def run(job: Job) -> None:
    """Does the job on the stand-in GPU of this process."""
    if job.kind == "operator":
        run_operator(*job.given)
    else:
        run_step(*job.given)


def run_operator(op: str, sizes: Any) -> None:
    from specdec_kernels import OPS, use_backend
    from specdec_kernels.testing.agreement import make_timed_sample

    with use_backend():
        call = make_timed_sample("cuda", op, sizes)
    with use_backend("triton"):
        OPS[op](*call.arguments, **call.options)


def run_step(shape: str, drafter: str, rows: int, drafted: int, mode: str) -> None:
    """The benchmark's steps on a model of the shape with few layers, whose products are all zero."""
    import torch

    from benchmarks import step

    def zeros(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], weight.shape[0])

    few = {
        part: size | {"num_hidden_layers": min(4, size["num_hidden_layers"])}
        for part, size in step.SHAPES[shape].items()
    }
    line = step.Line(shape, drafter, rows, drafted, mode, "all")
    with ExitStack() as stack:
        stack.enter_context(patch.dict(step.SHAPES, {shape: few}))
        if shape != "tiny":  # what does not matter to a compiler: products, initial weights, traces
            stack.enter_context(patch("torch.nn.functional.linear", zeros))
            for name in ("normal_", "kaiming_uniform_"):
                stack.enter_context(patch(f"torch.nn.init.{name}", lambda tensor, *_, **__: tensor))
            stack.enter_context(patch("benchmarks.step.traced", lambda *_: None))
        prompt = 512 if rows == 1 and shape != "tiny" else 8  # (a long one for all rows takes minutes on a CPU)
        step.measure(line, step.Models(shape, torch.device("cuda")), steps=1, prompt=prompt)


@contextmanager
def _without_answers(job: Job) -> Iterator[None]:
    from specdec_kernels import simulated_gpu

    with simulated_gpu.gpu(ARCHITECTURE, answers=job.kind != "operator"):  # samples at full size take minutes on a CPU
        yield


def _work(job: Job, cache: str) -> tuple[float, str | None]:
    """In a process of its own: seconds, and what went wrong or None."""
    import torch

    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        with recorded_keys(Path(cache)), _without_answers(job):
            run(job)
    except Exception as error:  # of any kind; other jobs go on
        return time.monotonic() - started, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return time.monotonic() - started, None


def compile_all(names: list[str], cache: Path, processes: int) -> int:
    """Runs the jobs of these groups in so many processes, none of which sees a GPU. Returns how many failed."""
    jobs = [job for name in names for job in JOBS[name]()]
    failed = 0
    with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(cache)}):
        with ProcessPoolExecutor(max(1, processes), mp_context=get_context("spawn")) as pool:
            running = {pool.submit(_work, job, str(cache)): job for job in jobs}
            for each in as_completed(running):
                seconds, reason = each.result()
                failed += reason is not None
                print(f"{running[each]}: {'compiled' if reason is None else reason} ({seconds:.1f} s)", flush=True)
        if "tests" in names:
            failed += _run_tests(cache, processes)
    return failed


def _run_tests(cache: Path, processes: int) -> int:
    """Runs tests/gpu on a stand-in GPU, so that what they launch is compiled. Tests that fail have launched, too."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.rehearsal", "tests/gpu"]
    command += ["-k", "not dispatcher"]  # those trace with torch.compile, which a stand-in cannot take
    command += ["-n", str(processes)] if processes > 1 else []
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, "SPECDEC_RECORD_KEYS": str(cache)}).returncode
    return status not in (0, 1)
