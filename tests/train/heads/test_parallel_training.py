"""Trained parallel heads: the loss falls, acceptance rises, and saved heads draft like those in memory."""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.small_heads import HEADS

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.drafters import make_drafter
from specdec_fast.heads.blockwise import BlockwiseHeads
from specdec_fast.heads.checkpoint_medusa import save_medusa
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.loading import load_model, load_tokenizer
from specdec_fast.train.heads import trainer as loop
from specdec_fast.train.heads import training_curve
from specdec_fast.train.heads.parallel import AUX_HIDDEN_STATE, ParallelHeadsTrainee
from specdec_fast.train.heads.parallel_command import blockwise as train_blockwise
from specdec_fast.train.heads.parallel_command import medusa as train_medusa
from specdec_fast.train.heads.trainer import Settings, TargetStates, fit
from specdec_fast.train.heads.training_texts import make_token_row, split


@pytest.fixture(scope="module")
def python_text() -> np.ndarray:
    return make_token_row([Path(argparse.__file__).read_text(encoding="utf-8")], load_tokenizer("demo-target"))


def test_in_seconds_loss_falls_acceptance_rises_and_the_saved_head_drafts_the_same(
    tmp_path: Path, python_text: np.ndarray
) -> None:
    model = load_model("demo-target")
    states = TargetStates(model, (AUX_HIDDEN_STATE,))
    heads = MedusaHeads(256, 1024, HEADS, own_lm_head=False)
    settings = Settings(steps=80, batch=2, length=64, lr=6e-3, measure_every=80, saving=0.01)
    row, held = split(python_text, 64, blocks=8)
    untrained = MedusaHeads(256, 1024, HEADS, own_lm_head=False)
    progress = fit(ParallelHeadsTrainee(heads, states, labels="target"), states, row, held, settings, tmp_path)
    first, last = progress.history[0], progress.history[-1]
    assert last["held_loss"] < 0.8 * first["held_loss"]
    assert last["tokens_per_step"] > first["tokens_per_step"] + 0.1
    training_curve.training_curve(progress.history, tmp_path / "curve.png", "heads")
    assert (tmp_path / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    save_medusa(heads, tmp_path / "head", base_model="demo-target", dtype=torch.float32)

    target, found = HuggingFaceTarget(model, max_rows=2, max_length=256), {}
    prompts = ["def add_argument(self, name", "class Parser:\n    def __init__(self"]
    ids = [load_tokenizer("demo-target").encode(prompt) for prompt in prompts]
    params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    plain = [handle.tokens for handle in Engine(target).generate(ids, params)]
    for name, head in {"trained": heads.eval(), "saved": str(tmp_path / "head"), "untrained": untrained}.items():
        handles = Engine(target, make_drafter("medusa", {"head": head}, target=target)).generate(ids, params)
        assert [handle.tokens for handle in handles] == plain
        found[name] = [(handle.stats.steps, handle.stats.num_draft_tokens, handle.origins) for handle in handles]
    assert found["saved"] == found["trained"]
    assert sum(steps for steps, *_ in found["trained"]) < sum(steps for steps, *_ in found["untrained"])


def test_blockwise_learns_by_the_same_loop(tmp_path: Path, python_text: np.ndarray) -> None:
    model = load_model("demo-target")
    states = TargetStates(model, (AUX_HIDDEN_STATE,))
    row, held = split(python_text, 64, blocks=4)
    settings = Settings(steps=15, batch=2, length=64, lr=4e-3, measure_every=15, saving=0.01)
    trainee = ParallelHeadsTrainee(BlockwiseHeads(256, 1024, 2), states, decay=1.0)
    first, last = fit(trainee, states, row, held, settings, tmp_path).history
    assert last["held_loss"] < 0.9 * first["held_loss"]
    assert last["tokens_per_step"] > first["tokens_per_step"] + 0.02


COMMANDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "medusa": (train_medusa, {"own_lm_head": False, "layers": 2}),
    "blockwise": (train_blockwise, {"inner": 32}),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_the_command_wrote_drafts_as_the_trained_head_does_in_bfloat16(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.py").write_text(Path(argparse.__file__).read_text(encoding="utf-8")[:6000])
    trained: list[Any] = []

    def keep(trainee: Any, *args: Any, **options: Any) -> Any:
        trained.append(trainee)
        return fit(trainee, *args, **options)

    monkeypatch.setattr(loop, "fit", keep)
    monkeypatch.setattr(training_curve, "training_curve", lambda *history: None)  # it takes a while
    command, own = COMMANDS[name]
    out = tmp_path / "out"
    command([tmp_path / "text.py"], out=out, steps=4, batch=2, length=32, heads=2, lr=5e-3, **own)
    rounded = copy.deepcopy(trained[0].heads).bfloat16().float()
    target = HuggingFaceTarget(load_model("demo-target"), max_rows=1, max_length=64)
    saved: Any = make_drafter(name, {"head": str(out / "head")}, target=target)
    want = rounded(torch.ones(1, 256), target.lm_head)
    assert torch.equal(saved.heads(torch.ones(1, 256), target.lm_head), want)
    assert not torch.equal(want[0], want[1]), "nothing was learnt"
    shape = {"shape": str(out / "head" / "tree.json")} if name == "medusa" else {}
    prompt, found = load_tokenizer("demo-target").encode("def main("), []
    for made in (saved, make_drafter(name, {"head": rounded, **shape}, target=target)):
        handle = Engine(target, made).generate([prompt], SamplingParams(temperature=0.8, seed=1, max_new_tokens=16))[0]
        found.append((handle.tokens, handle.origins, handle.stats.num_draft_tokens))
    assert found[0] == found[1] and found[0][-1] > 0


def test_the_command_writes_head_tree_and_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, text = tmp_path / "out", tmp_path / "text.py"
    text.write_text(Path(argparse.__file__).read_text(encoding="utf-8")[:9000])
    options: dict[str, Any] = {"out": out, "steps": 6, "batch": 2, "length": 32, "heads": 2, "nodes": 5, "lr": 5e-3}
    train_medusa([text], layout="vllm", own_lm_head=False, **options)
    shown = capsys.readouterr().out
    assert f"specdec generate 'Once upon a time' --model demo-target --drafter medusa -o head={out / 'head'}" in shown
    assert (out / "curve.png").exists() and len(json.loads((out / "history.json").read_text())) == 2
    config = json.loads((out / "head" / "config.json").read_text())
    assert config["num_heads"] == 2 and config["original_lm_head"] and config["training"]["steps"] == 6
    target = HuggingFaceTarget(load_model("demo-target"), max_rows=1, max_length=64)
    made: Any = make_drafter("medusa", {"head": str(out / "head")}, target=target)
    assert made.num_draft_tokens <= 5, "the tree beside the head"
    monkeypatch.setattr(training_curve, "training_curve", lambda *history: None)  # it takes a while
    train_medusa([text], own_lm_head=False, **{**options, "layout": "fasterdecoding"})
    assert json.loads((out / "head" / "config.json").read_text())["version"] == "2"
    with pytest.raises(ValueError, match="--layout: got 'gguf'; expected one of fasterdecoding, vllm"):
        train_medusa([text], **{**options, "layout": "gguf"})
    with pytest.raises(ValueError, match="has other settings"):
        train_medusa([text], own_lm_head=False, **{**options, "heads": 4})
    with pytest.raises(ValueError, match="length differs from the run in it: got 16; expected 32"):
        train_medusa([text], own_lm_head=False, **{**options, "length": 16})
    (tmp_path / "other.py").write_text(text.read_text()[::-1])
    with pytest.raises(ValueError, match=r"inputs differs from the run in it: got .*other\.py"):
        train_medusa([tmp_path / "other.py"], own_lm_head=False, **options)
    shutil.rmtree(out / "checkpoint")
    train_medusa([tmp_path / "other.py"], own_lm_head=False, **{**options, "steps": 1})
    assert len(list(out.glob("tokens-*.npy"))) == 2, "text is read again where it is another"
