"""Tiny models on disk, and the command line in this process, in a fork of it, or as a separate program."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from specdec_fast.cli import main
from specdec_fast.targets.tiny_models import tiny_model

ROOT = Path(__file__).parents[2]
CONTEXT = 2048


def _letters(shift: int = 0) -> Any:
    """A tokenizer of printable ASCII, one token a letter; id 0 ends a text. `shift` moves all other ids."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<end>": 0} | {chr(32 + (at + shift) % 95): at + 1 for at in range(95)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", clean_up_tokenization_spaces=False)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders: target, draft (a noisy copy), stranger (other tokenizer), bare (none), and refused ones."""
    root = tmp_path_factory.mktemp("models")
    shape: dict[str, Any] = {"max_position_embeddings": CONTEXT}
    target = tiny_model("llama", **shape)
    draft = tiny_model("llama", **shape)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.08)
    everyone = {
        "target": (target, _letters()),
        "draft": (draft, _letters()),
        "stranger": (draft, _letters(shift=1)),
        "bare": (target, None),
    }
    for name, (model, tokenizer) in everyone.items():
        model.save_pretrained(root / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(root / name)
    broken = root / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    cut = root / "cut"
    target.save_pretrained(cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:1000])
    partial = root / "partial"
    target.save_pretrained(partial)
    weights = load_file(partial / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    return {path.name: str(path) for path in root.iterdir()}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Call `specdec` in this process; colours only when the test forces them."""
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def call(*args: str, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
        return CliRunner().invoke(main, list(args), input=stdin, env=env)

    return call


@pytest.fixture
def pair(models: dict[str, str]) -> list[str]:
    """Options that name the tiny pair."""
    return ["--model", models["target"], "--draft", models["draft"]]


@pytest.fixture(scope="session")
def program() -> Callable[..., subprocess.Popen[bytes]]:
    """Starts `specdec` as a separate program, with pipes."""

    def start(*args: str, **env: str) -> subprocess.Popen[bytes]:
        clean = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
        return subprocess.Popen(
            [sys.executable, "-m", "specdec_fast", *args],
            cwd=ROOT,
            env=clean | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # a shell that starts the tests in the background leaves SIGINT ignored, and children inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    return start


def _in_a_fork(args: tuple[str, ...], reading: int, writing: int, errors: Path) -> None:
    os.close(reading)  # else nobody notices that the reader went away
    torch.set_num_threads(1)  # threads of the parent are not there, and would be waited for
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(writing, "w", buffering=1) as sys.stdout, errors.open("w", buffering=1) as sys.stderr:
        sys.stdout.reconfigure(write_through=True)
        status = _as_a_program(args)
        sys.stderr.flush()
        os._exit(status)


def _as_a_program(args: tuple[str, ...]) -> int:
    """The exit status of the command, and its end as the interpreter would make it: traces, the last flush."""
    try:
        main(args)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        sys.stdout.flush()
    except OSError:
        traceback.print_exc()
        status = 120
    return status


@pytest.fixture(scope="session")
def forked() -> Callable[..., tuple[BaseProcess, BinaryIO]]:
    """Start `specdec` in a process that has imported everything already: (it, its output); its errors are in a file."""

    def start(*args: str, errors: Path) -> tuple[BaseProcess, BinaryIO]:
        reading, writing = os.pipe()
        process = multiprocessing.get_context("fork").Process(
            target=_in_a_fork, args=(args, reading, writing, errors), daemon=True
        )
        process.start()
        os.close(writing)
        return process, open(reading, "rb", buffering=0)

    return start
