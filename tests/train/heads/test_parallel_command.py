"""`specdec train demo-pair` reports missing parts and invalid options, and how to fix them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from specdec_fast.cli import main
from specdec_fast.train.demo_pair import hybrid_pipeline, pipeline
from specdec_fast.train.demo_pair.corpus import CorpusNotFound


def test_the_package_is_cheap_to_import():
    heavy = ("torch", "transformers", "typer")
    code = f"import sys, specdec_fast.train; print(any(m in sys.modules for m in {heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def call(*options: object) -> Result:
    return CliRunner().invoke(main, ["train", "demo-pair", *map(str, options)])


def test_a_missing_corpus_ends_with_2(monkeypatch, tmp_path):
    def absent(*_: object, **__: object) -> None:
        raise CorpusNotFound("install python3-doc")

    monkeypatch.setattr(pipeline, "run", absent)
    result = call("--out", tmp_path)
    assert result.exit_code == 2 and result.stderr == "specdec: error: install python3-doc\n"


def test_an_interrupt_prints_how_to_continue(monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "run", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    result = call("--out", tmp_path, "--minutes", 1)
    assert result.exit_code == 130
    again = "run the same command again to continue"
    assert result.stderr == f"specdec: interrupted; finished work is kept in {tmp_path}; {again}\n"


@pytest.mark.parametrize(
    "options", [("--minutes", 0), ("--minutes", "nan"), ("--target-tokens", 0), ("--workers", 0), ("--threads", -1)]
)
def test_what_cannot_be_is_refused(monkeypatch, tmp_path, options):
    monkeypatch.setattr(pipeline, "run", lambda *_, **__: pytest.fail("it ran"))
    result = call("--out", tmp_path, *options)
    assert result.exit_code == 2 and f"{options[0]}" in result.stderr and "expected" in result.stderr


@pytest.mark.parametrize("options", [("--draft-tokens", 5), ("--workers", 9)])
def test_what_does_not_go_with_hybrid_is_refused(monkeypatch, tmp_path, options):
    monkeypatch.setattr(hybrid_pipeline, "run_hybrid", lambda *_, **__: pytest.fail("it ran"))
    result = call("--hybrid", "--out", tmp_path, *options)
    assert result.exit_code == 2 and f"{options[0]}: got {options[1]} with --hybrid; expected" in result.stderr


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_result_is_installed_if_asked_for(monkeypatch, tmp_path, hybrid):
    numbers = {"alpha_held_out": {"all": {"alpha": 0.75}}, "bits_per_byte": {"target": {"all": 2.0}}}
    numbers["bits_per_byte"]["hybrid"] = numbers["bits_per_byte"]["target"]
    installed = []
    for module, run, install in ((pipeline, "run", "install"), (hybrid_pipeline, "run_hybrid", "install_hybrid")):
        monkeypatch.setattr(module, run, lambda *_, **__: numbers)
        monkeypatch.setattr(module, install, lambda *_, name=install: installed.append(name))
    result = call(*["--hybrid"] * hybrid, "--out", tmp_path, "--install", "--minutes", 1)
    assert result.exit_code == 0 and installed == ["install_hybrid" if hybrid else "install"]
    assert "alpha 0.750, target 2.000 bits per byte" in result.stdout
    assert ("train it again with --hybrid --install" in result.stdout) is not hybrid
