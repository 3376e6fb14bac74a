"""Ctrl-C on `specdec train` in a process of its own leaves a head that drafts, and a run that continues."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from oracles import forks
from oracles.tiny_folders import save_tiny

from specdec_fast.train.heads import trainer
from specdec_fast.train.heads.run_checkpoint import read_stored_step


def test_ctrl_c_leaves_a_head_that_drafts(
    forked: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not forks.can_train():
        pytest.skip("autograd has threads for a device here, and what is forked from such a process cannot train")
    target, out, text = save_tiny(tmp_path / "target"), tmp_path / "out", tmp_path / "text.txt"
    text.write_text("it was the best of times, it was the worst of times. " * 9)
    asked = ["train", "medusa", str(text), "-m", target, "--out", str(out), "--heads", "2", "--measure-every", "50000"]
    asked += ["--steps", "100000", "--batch", "1", "--length", "16", "--threads", "1"]
    said = tmp_path / "errors"
    process, _ = forked(*asked, errors=said)
    try:
        until = time.monotonic() + 120
        while " left\n" not in (said.read_text() if said.exists() else ""):
            assert process.is_alive() and time.monotonic() < until, said.read_text()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        process.join(120)
        errors = said.read_text()
        assert process.exitcode == 130, errors
    finally:
        process.kill()
    assert "e+" not in errors, "a time is shown once it is measured"
    step = read_stored_step(out)
    assert f"specdec: interrupted after step {step} of 100000; run the same command again to continue; " in errors
    assert "Traceback" not in errors and step > 0
    head = ["--drafter", "medusa", "-o", f"head={out / 'head'}"]
    result = run("generate", "it was", "-m", target, *head, "-T", "0", "--max-new-tokens", "8", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["requests"][0]["stats"]["num_draft_tokens"] > 0

    def stop(row: Any, at: int, *sizes: Any) -> Any:
        raise ValueError(f"step {at} begins")

    monkeypatch.setattr(trainer, "blocks", stop)
    again = run(*asked)
    assert f"continues after step {step} of 100000" in again.stderr and f"step {step} begins" in again.stderr
