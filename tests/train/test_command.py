"""`specdec train demo-pair` says what is missing and what to do."""

from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from specdec_fast.train import command, demo_pair
from specdec_fast.train.corpus import CorpusNotFound


def test_the_package_is_cheap_to_import():
    heavy = ("torch", "transformers", "typer")
    code = f"import sys, specdec_fast.train; print(any(m in sys.modules for m in {heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_missing_corpus_ends_with_2(monkeypatch, tmp_path):
    def absent(*_: object, **__: object) -> None:
        raise CorpusNotFound("install python3-doc")

    monkeypatch.setattr(demo_pair, "run", absent)
    result = CliRunner().invoke(command.app, ["demo-pair", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "python3-doc" in result.output


def test_an_interrupt_says_how_to_go_on(monkeypatch, tmp_path):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_pair, "run", interrupted)
    result = CliRunner().invoke(command.app, ["demo-pair", "--out", str(tmp_path), "--minutes", "1"])
    assert result.exit_code == 130 and f"--out {tmp_path}" in result.output
