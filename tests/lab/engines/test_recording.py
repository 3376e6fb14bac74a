"""Engines in interpreters of their own: texts, failures of jobs, and engines that do not start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from specdec_fast.lab.engines import recording
from specdec_fast.lab.engines.recording import EngineFailedError, Job, Pair, build_pair, installed_version, record
from specdec_fast.lab.engines.scripts.record import CallableRecorder, TransformersRecorder
from specdec_fast.lab.engines.settings import settings_of

GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 0, "top_p": 1.0}
SAMPLER = settings_of("callable")[0]
SOURCE = """
__version__ = "7"

def make(models):
    assert models["target"].endswith("target")
    def sample(prompts, seeds, max_new_tokens, temperature, top_k, top_p):
        if temperature == 0:
            raise RuntimeError("no greedy texts here")
        return [[seed % 16] * max_new_tokens for seed in seeds]
    return sample

def dies(models):
    def sample(prompts, seeds, max_new_tokens, temperature, **more):
        if temperature == 0:
            import os
            os._exit(9)
        return [[0] * max_new_tokens for _ in prompts]
    return sample

def never(models):
    raise SystemExit(0)

def leaves(models):
    def sample(prompts, seeds, max_new_tokens, temperature, **more):
        if temperature == 0:
            raise SystemExit(0)
        return [[0] * max_new_tokens for _ in prompts]
    return sample

def stalls_with_a_child(models):
    import subprocess
    subprocess.Popen(["sleep", "60"])
    return stalls(models)

def stalls(models):
    def sample(prompts, seeds, max_new_tokens, temperature, **more):
        if temperature == 0:
            import time
            time.sleep(60)
        return [[0] * max_new_tokens for _ in prompts]
    return sample

def short(models):
    return lambda prompts, **more: [[0] for _ in prompts]
"""


@pytest.fixture
def samplers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("samplers")
def test_a_sampler_of_ones_own_answers_in_a_process_of_its_own(pair: Pair) -> None:
    jobs = {
        "draws 0": Job([[1, 2]] * 120, range(120), SAMPLED, 3, True),
        "greedy": Job([[1]], [1], GREEDY, 3, False),
    }
    shown: list[tuple[str, int, int]] = []
    found = record(
        "callable", SAMPLER, pair, jobs, more={"sampler": "mine:make"}, progress=lambda *at: shown.append(at)
    )
    assert found.versions == {"mine:make": "7"}
    assert found.texts == {"draws 0": [[seed % 16] * 3 for seed in range(120)]}
    assert found.failures == {"greedy": "RuntimeError: no greedy texts here"}, "the other job is not lost"
    assert shown == [("draws 0", 50, 120), ("draws 0", 100, 120)]


@pytest.mark.usefixtures("samplers")
@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        ("dies", "the engine ended: exit status 9"),
        ("leaves", "the engine ended in its first job, without an error"),
        ("stalls", "the engine ended: no text in 5 s"),
        ("stalls_with_a_child", "the engine ended: no text in 5 s"),
    ],
)
def test_an_engine_that_dies_or_stalls_loses_its_jobs_alone(
    pair: Pair, sampler: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "PATIENCE", 5.0)
    sampled, greedy = Job([[1]], [1], SAMPLED, 3, True), Job([[1]], [1], GREEDY, 3, False)
    jobs = {"draws 0": sampled, "greedy": greedy, "draws 1": sampled, "batch": greedy}
    found = record("callable", SAMPLER, pair, jobs, more={"sampler": f"mine:{sampler}"})
    assert found.texts == {"draws 0": [[0, 0, 0]], "draws 1": [[0, 0, 0]]}
    assert found.failures == dict.fromkeys(["greedy", "batch"], reason)


@pytest.mark.usefixtures("samplers")
@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("mine:other", "no attribute 'other'"),
        ("nowhere:make", "No module named 'nowhere'"),
        ("mine:never", "it ended before its first text"),
    ],
)
def test_a_sampler_that_cannot_be_imported_is_named(pair: Pair, sampler: str, message: str) -> None:
    with pytest.raises(EngineFailedError, match=message):
        record("callable", SAMPLER, pair, {}, more={"sampler": sampler})


@pytest.mark.usefixtures("samplers")
def test_texts_of_another_length_are_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match=r"got 2 texts of \[1\] tokens; expected 2 of 3"):
        list(CallableRecorder(pair.models, {"sampler": "mine:short"}).texts([[1]] * 2, [1, 2], SAMPLED, 3, True))


def test_an_interpreter_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineFailedError, match="which cannot be started"):
        build_pair(tmp_path, "llama", str(tmp_path / "python"))


def test_a_pair_that_cannot_be_built_gives_the_last_error(tmp_path: Path) -> None:
    with pytest.raises(EngineFailedError, match="KeyError: 'lama'"):
        build_pair(tmp_path, "lama")


def test_versions_are_read_without_an_import() -> None:
    import transformers

    found = installed_version("transformers", sys.executable)
    assert found["transformers"] == transformers.__version__ and "torch" in found
    assert "no-such-engine" not in installed_version("no-such-engine", sys.executable)


def test_transformers_generates_the_targets_greedy_text(pair: Pair) -> None:
    """With a draft model, and in a padded batch without one."""
    count = len(pair.greedy[0])
    assisted = TransformersRecorder(pair.models, settings_of("transformers", ["assisted"])[0].recorder)
    assert list(assisted.texts(pair.prompts[:2], [1, 2], GREEDY, count, False)) == pair.greedy[:2]
    plain = TransformersRecorder(pair.models, {})
    assert list(plain.texts(pair.prompts, [1] * len(pair.prompts), GREEDY, count, True)) == pair.greedy
    one, other = (list(assisted.texts([pair.prompt] * 2, [5, 6], SAMPLED, 8, False)) for _ in range(2))
    assert one == other and one[0] != one[1]
