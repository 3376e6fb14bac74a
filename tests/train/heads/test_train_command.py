"""`specdec train` with a tokenizer that begins texts, with interruptions and with errors."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.tiny_folders import BEGIN, END, save_tiny
from safetensors.torch import load_file

from specdec_fast import SamplingParams, load
from specdec_fast.train.heads import trainer, training_curve
from specdec_fast.train.heads.eagle_command import eagle
from specdec_fast.train.heads.parallel_command import blockwise, medusa
from specdec_fast.train.heads.run_checkpoint import read_stored_step
from specdec_fast.train.heads.target_states import TargetStates

TINY: dict[str, Any] = {"steps": 5, "batch": 2, "length": 24, "lr": 3e-3, "measure_every": 5, "threads": 1}


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(training_curve, "training_curve", lambda *_: None)  # it takes a while
    return save_tiny(tmp_path / "target")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("it was the best of times, it was the worst of times. " * 9)
    (tmp_path / "c.txt").write_text("<begin>it was an age" * 2)
    return tmp_path


def test_every_block_begins_as_prompts_do(
    target: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training, in measurements and for the tree of Medusa; and so does every document."""
    seen: list[torch.Tensor] = []
    call = TargetStates.__call__

    def noted(self: Any, tokens: torch.Tensor) -> Any:
        seen.append(tokens)
        return call(self, tokens)

    monkeypatch.setattr(TargetStates, "__call__", noted)
    out = tmp_path / "out"
    medusa([text / name for name in ("a.txt", "b.txt", "c.txt")], model=target, out=out, heads=2, **TINY)
    assert len(seen) > 5 + 2 and all((tokens[:, 0] == BEGIN).all() for tokens in seen)
    assert not any((tokens[:, 1] == BEGIN).any() for tokens in seen), "twice"
    (stored,) = out.glob("tokens-*.npy")
    row = np.load(stored)
    ends = np.flatnonzero(row == END)
    assert len(ends) == 3 and (row[ends + 1] == BEGIN).all() and (row == BEGIN).sum() == 4, "none is doubled"


def test_chats_are_asked_through_the_template(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"a{at:02d}"}) + "\n" for at in range(20)))
    how: dict[str, Any] = {**TINY, "steps": 1, "length": 8, "model": target, "answer": 6, "heads": 1}
    blockwise([prompts], out=tmp_path / "chat", chat=True, **how)
    assert "--chat" in capsys.readouterr().out
    (stored,) = (tmp_path / "chat").glob("tokens-*.npy")
    want = load(target).encode_chat([{"role": "user", "content": "a00"}])
    assert np.load(stored)[: len(want)].tolist() == [~token for token in want] and want[0] == BEGIN
    blockwise([prompts], out=tmp_path / "plain", **how)
    assert "note: the model has a chat template; --chat applies it" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--chat: got no --answer; expected the number of tokens"):
        blockwise([prompts], out=tmp_path / "none", chat=True, model=target)


@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_ends_early_leaves_the_head_of_its_last_checkpoint(
    end: type[BaseException],
    target: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error in step 4, whose weights may be broken: the head is that of step 3, and the run can go on."""
    cut = trainer.blocks

    def failing(row: Any, step: int, *sizes: Any) -> Any:
        if step == 3:
            if end is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            else:
                raise end("no space left")
        return cut(row, step, *sizes)

    monkeypatch.setattr(trainer, "blocks", failing)
    out = tmp_path / "out"
    how: dict[str, Any] = {**TINY, "out": out, "model": target, "attention_heads": 2, "saving": 1.0}
    with pytest.raises(end):
        eagle([text / "a.txt"], **how)
    step = 4 if end is KeyboardInterrupt else 3
    errors = capsys.readouterr().err
    what = "interrupted" if end is KeyboardInterrupt else "training failed"
    assert f"specdec: {what} after step {step} of 5; run the same command again to continue; {out}/head" in errors
    assert f"-o head={out}/head" in errors and read_stored_step(out) == step
    config = json.loads((out / "head" / "config.json").read_text())
    assert config["training"]["steps"] == step and config["training"]["step"] == 0, "measured before the training"
    head, stored = load_file(out / "head" / "model.safetensors"), load_file(out / "checkpoint" / "model.safetensors")
    assert torch.equal(head["fc.weight"], stored["head.fc.weight"].bfloat16())
    params = SamplingParams(temperature=0, max_new_tokens=6)
    engine = load(target, drafter="eagle", drafter_options={"head": str(out / "head")})
    (handle,) = engine.generate(["it was"], params)
    assert handle.tokens == load(target).generate(["it was"], params)[0].tokens and handle.stats.num_draft_tokens
    monkeypatch.setattr(trainer, "blocks", cut)
    eagle([text / "a.txt"], **how)
    assert json.loads((out / "head" / "config.json").read_text())["training"]["steps"] == 5
    assert not list(out.glob("head.*")), "nothing of the replacement is left"


def test_a_run_without_a_checkpoint_has_no_head(
    target: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no space left")

    monkeypatch.setattr(trainer, "blocks", failing)
    with pytest.raises(RuntimeError, match="no space left"):
        blockwise([text / "a.txt"], out=tmp_path / "out", model=target, **TINY)
    assert "training failed before the first checkpoint; there is no head yet" in capsys.readouterr().err
    assert not (tmp_path / "out" / "head").exists()


def test_a_head_that_cannot_be_written_does_not_replace_one(
    target: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_fast.heads import checkpoint_blockwise

    out, save = tmp_path / "out", checkpoint_blockwise.save_blockwise
    how: dict[str, Any] = {**TINY, "out": out, "model": target, "heads": 1}
    blockwise([text / "a.txt"], **how)
    before = {path.name: path.read_bytes() for path in (out / "head").iterdir()}

    def half(heads: Any, place: Path, **options: Any) -> None:
        save(heads, place, **options)
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint_blockwise, "save_blockwise", half)
    with pytest.raises(OSError, match="no space left"):
        blockwise([text / "a.txt"], **how)
    assert before == {path.name: path.read_bytes() for path in (out / "head").iterdir()}
