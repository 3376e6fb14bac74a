"""Compiles the kernels of a GPU session: runs its programs on simulated GPUs, so that Triton fills its cache."""

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
    """One program to run.

    Attributes:
        kind: "operator", "step" or "draws".
        given: Arguments of `run_operator`, `run_step` or `run_draws`.
    """

    kind: str
    given: tuple[Any, ...]

    def __str__(self) -> str:
        return " ".join(str(each) for each in (self.kind, *self.given))


def operator_jobs() -> list[Job]:
    """Returns every operator with a Triton kernel, at the sizes and settings of the GPU benchmark."""
    from specdec_kernels import OPS
    from specdec_kernels.testing.agreement import SAMPLES

    names = [op for op in SAMPLES if any(backend.name == "triton" for backend in OPS[op].backends)]
    return [Job("operator", (op, sizes)) for op in names for sizes in SAMPLES[op].gpu]


def step_jobs() -> list[Job]:
    """Returns the steps that a session times, by shape, rows and draft tokens."""
    rows, jobs = (1, 8, 64), []
    for shape in ("8b", "1b"):
        jobs += [Job("step", (shape, "eagle3", count, drafted, "graph")) for drafted in (4, 0) for count in rows]
    return [*jobs, Job("step", ("1b", "eagle3", 1, 4, "sync")), Job("step", ("1b", "draft_model", 1, 4, "graph"))]


def draw_jobs() -> list[Job]:
    """Returns the draws of every rule against its distribution."""
    from benchmarks.lab.draws_time import RULES

    return [Job("draws", (rule,)) for rule in RULES]


def tiny_jobs() -> list[Job]:
    """Returns one job of each kind, for rehearsals."""
    from specdec_kernels.testing.samples_attention import Sizes

    return [Job("operator", ("tree_plan", Sizes())), Job("step", ("tiny", "eagle3", 1, 2, "graph"))]


JOBS = {"operators": operator_jobs, "steps": step_jobs, "draws": draw_jobs, "tiny": tiny_jobs, "tests": list}
"""Groups of jobs by name; "tests" are those of tests/gpu, which run by themselves."""


def run(job: Job) -> None:
    """Runs the job on the simulated GPU of this process."""
    {"operator": run_operator, "step": run_step, "draws": run_draws}[job.kind](*job.given)


def run_operator(op: str, sizes: Any) -> None:
    """Calls an operator's Triton backend once."""
    from specdec_kernels import OPS, use_backend
    from specdec_kernels.testing.agreement import make_timed_sample

    with use_backend():
        call = make_timed_sample("cuda", op, sizes)
    with use_backend("triton"):
        OPS[op](*call.arguments, **call.options)


def run_step(shape: str, drafter: str, rows: int, drafted: int, mode: str) -> None:
    """Runs a benchmark step of a model with few layers; all matrix products are zero."""
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


def run_draws(rule: str, vocab: int = 32_000) -> None:
    """Draws a few texts under a rule: one number of them is a multiple of 16, which is compiled apart, one is not."""
    from benchmarks.lab.draws_time import place
    from specdec_fast.lab.draw_counts import Drawing
    from specdec_fast.rules import get_rule

    here = place(vocab)
    for count in (64, 69):
        Drawing(here, get_rule(rule), seed=1, device="cuda").run(count)


@contextmanager
def _simulated(job: Job) -> Iterator[None]:
    from specdec_kernels import simulated_gpu

    true_results = job.kind != "operator"  # samples at full size take minutes on a CPU
    with simulated_gpu.gpu(ARCHITECTURE, true_results=true_results):
        yield


def _work(job: Job, cache: str) -> tuple[float, str | None]:
    """Runs a job in a process of its own; returns its seconds, and an error or None."""
    import torch

    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        with recorded_keys(Path(cache)), _simulated(job):
            run(job)
    except Exception as error:  # of any kind; other jobs go on
        return time.monotonic() - started, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return time.monotonic() - started, None


def compile_all(names: list[str], cache: Path, processes: int) -> int:
    """Runs groups of jobs in parallel processes without a GPU.

    Args:
        names: Groups of `JOBS`.
        cache: Triton's cache folder.
        processes: Number of processes.

    Returns:
        The number of failed jobs.
    """
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
    """Runs tests/gpu on a simulated GPU, so that their kernels are compiled; failed tests have launched theirs too."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.rehearsal", "tests/gpu"]
    command += ["-k", "not dispatcher"]  # those trace with torch.compile, which a simulated GPU does not support
    command += ["-n", str(processes)] if processes > 1 else []
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, "SPECDEC_RECORD_KEYS": str(cache)}).returncode
    return status not in (0, 1)
