"""`specdec train eagle | eagle3`: published layouts, curves, and a killed run that ends as one that was not."""

from __future__ import annotations

import argparse
import copy
import io
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import forks
from safetensors.torch import load_file

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.draft_runners.head_runner import PagedHead
from specdec_fast.drafters import make_drafter
from specdec_fast.loading import load_model, load_tokenizer
from specdec_fast.train.heads import trainer, training_curve
from specdec_fast.train.heads.eagle_command import eagle, eagle3
from specdec_fast.train.heads.run_checkpoint import read_stored_step
from specdec_fast.train.heads.settings import Settings

TINY: dict[str, Any] = {"steps": 6, "batch": 2, "length": 32, "lr": 3e-3, "measure_every": 3, "threads": 1}
LAYER: dict[str, Any] = {"attention_heads": 2, "kv_heads": 1, "inner": 64}
TRAIN: dict[str, Callable[..., None]] = {"eagle": eagle, "eagle3": eagle3}
EXTRA: dict[str, dict[str, Any]] = {"eagle": {}, "eagle3": {"vocab": 300, "ahead": 3, "layers": "1,5,9"}}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("text") / "text.py"
    place.write_text(Path(argparse.__file__).read_text(encoding="utf-8")[:9000])
    return place


@dataclass(frozen=True)
class Run:
    """A run without interruption: kind of head, folder, trainee and output."""

    name: str
    out: Path
    trainee: Any
    shown: str


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def whole(request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    name, out, trained, fit = request.param, tmp_path_factory.mktemp("whole"), [], trainer.fit

    def keep(trainee: Any, *args: Any, **options: Any) -> Any:
        trained.append(trainee)
        return fit(trainee, *args, **options)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as shown:
        patch.setattr(trainer, "fit", keep)
        TRAIN[name]([text], out=out, **TINY, **LAYER, **EXTRA[name])
    return Run(name, out, trained[0], shown.getvalue())


def test_the_command_writes_a_head_as_published(whole: Run) -> None:
    """The saved bfloat16 head drafts like the trained head rounded to bfloat16."""
    name, out = whole.name, whole.out
    assert (
        f"specdec generate 'Once upon a time' --model demo-target --drafter {name} -o head={out / 'head'}"
        in whole.shown
    )
    assert (out / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    history = json.loads((out / "history.json").read_text())
    assert [each["step"] for each in history] == [0, 3, 6]
    assert history[-1]["held_loss"] < history[0]["held_loss"]
    assert all(0 <= history[-1]["accepted_1"] <= 1 for each in history)
    config = json.loads((out / "head" / "config.json").read_text())
    tensors = load_file(out / "head" / "model.safetensors")
    assert config["base_model_name_or_path"] == "demo-target" and config["dtype"] == "bfloat16"
    assert config["num_attention_heads"] == 2 and config["training"]["steps"] == 6
    assert all(value.dtype == torch.bfloat16 for value in tensors.values() if value.is_floating_point())
    if name == "eagle":
        assert config["bias"] is True and tensors["embed_tokens.weight"].shape == (1024, 256)
        assert "layers.0.self_attn.q_proj.weight" in tensors and "layers.0.input_layernorm.weight" not in tensors
    else:
        assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 300
        assert config["eagle_aux_hidden_state_layer_ids"] == [1, 5, 9]
        assert "midlayer.hidden_norm.weight" in tensors and tensors["t2d"].sum() == 300
        assert not tensors["d2t"].is_floating_point() and "embed_tokens.weight" not in tensors
    target = HuggingFaceTarget(load_model("demo-target"), max_rows=1, max_length=64)
    rounded = copy.deepcopy(whole.trainee.head).bfloat16().float()
    prompt, results = load_tokenizer("demo-target").encode("def main("), []
    params = SamplingParams(temperature=0.8, seed=1, max_new_tokens=16)
    for head in (str(out / "head"), PagedHead(rounded, target)):
        made: Any = make_drafter(name, {"head": head, "num_draft_tokens": 8}, target=target)
        assert made.model.head.hidden_size == 256
        handle = Engine(target, made).generate([prompt], params)[0]
        results.append((handle.tokens, handle.origins, handle.stats.steps, handle.stats.num_draft_tokens))
        state = {key: value.float() for key, value in made.model.head.state_dict().items()}
        assert all(torch.equal(value.float(), state[key]) for key, value in rounded.state_dict().items())
    assert results[0] == results[1] and results[0][-1] > 0


def test_a_killed_run_loses_no_step_and_ends_with_the_weights_of_one_that_was_not(
    whole: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL with step 4 under way, and the same command again. EAGLE draws noise: its generator goes on too."""
    options = {**TINY, **LAYER, **EXTRA[whole.name], "saving": 1.0}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    cut, errors = tmp_path / "cut", tmp_path / "errors"
    if not forks.can_train():
        pytest.skip("autograd has threads for a device here, and what is forked from such a process cannot train")
    died = multiprocessing.get_context("fork").Process(
        target=run_until, args=(4, [whole.name, str(text), f"--out={cut}", *flags], errors), daemon=True
    )
    died.start()
    died.join(300)
    assert died.exitcode == -signal.SIGKILL, errors.read_text()
    assert read_stored_step(cut) == 4 and not (cut / "head").exists(), "four steps were whole"
    assert [each["step"] for each in json.loads((cut / "history.json").read_text())] == [0, 3], "as soon as measured"
    assert (cut / "curve.png").read_bytes()[-8:-4] == b"IEND" and not list(cut.glob("*.partial"))

    begun: list[int] = []
    blocks = trainer.blocks

    def noted(row: Any, step: int, *sizes: int) -> Any:
        begun.append(step)
        return blocks(row, step, *sizes)

    monkeypatch.setattr(trainer, "blocks", noted)
    monkeypatch.setattr(training_curve, "training_curve", lambda *history: None)  # it takes a while
    TRAIN[whole.name]([text], out=cut, **options)
    assert begun == [4, 5], "it begins anew, or leaves a step out"
    assert f"{cut / 'checkpoint'}: continues after step 4 of 6" in capsys.readouterr().err
    found, want = (load_file(folder / "head" / "model.safetensors") for folder in (cut, whole.out))
    assert found.keys() == want.keys() and all(torch.equal(found[key], want[key]) for key in want)
    first, second = (json.loads((folder / "history.json").read_text()) for folder in (cut, whole.out))
    assert first == second


def test_when_a_checkpoint_is_due() -> None:
    """By default behind every step that takes as long as writing one; else as the share says."""
    usual = Settings()
    assert usual.checkpoint_due(step_seconds=0.0, seconds_since=0.0, checkpoint_seconds=0.0), "the first step"
    assert usual.checkpoint_due(step_seconds=2.0, seconds_since=2.0, checkpoint_seconds=1.9)
    assert not usual.checkpoint_due(step_seconds=2.0, seconds_since=18.0, checkpoint_seconds=2.1)
    assert usual.checkpoint_due(step_seconds=2.0, seconds_since=40.0, checkpoint_seconds=2.1)
    assert Settings(saving=1.0).checkpoint_due(step_seconds=0.1, seconds_since=0.1, checkpoint_seconds=100.0)
    half = Settings(saving=0.5)
    assert half.checkpoint_due(step_seconds=1.0, seconds_since=3.0, checkpoint_seconds=3.0)
    assert not half.checkpoint_due(step_seconds=3.0, seconds_since=3.0, checkpoint_seconds=3.1)
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match="training lr, warm_up, saving: got"):
            Settings(saving=share)


def test_bad_options_are_named(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--layers: got '2;6'; expected numbers with commas between them"):
        eagle3([text], out=tmp_path, layers="2;6")
    with pytest.raises(ValueError, match="--vocab: got 0; expected at least 1"):
        eagle3([text], out=tmp_path, vocab=0)
    with pytest.raises(
        ValueError, match="--attention-heads, --kv-heads, --inner: got None, 0, None; expected at least"
    ):
        eagle([text], out=tmp_path, kv_heads=0, **TINY)
    with pytest.raises(ValueError, match=r"layers: got .2, 6, 12.; expected numbers from 0 to 11"):
        eagle3([text], out=tmp_path, layers="2,6,12", **TINY)
    with pytest.raises(ValueError, match="training schedule: got 'step'; expected one of cosine, linear"):
        Settings(schedule="step")


def test_a_linear_schedule_falls_along_a_line() -> None:
    settings = Settings(steps=100, lr=1.0, warm_up=0.0, schedule="linear")
    assert [settings.rate(step) for step in (0, 25, 50, 100)] == pytest.approx([1.0, 0.75, 0.5, 0.0])


def run_until(last: int, arguments: list[str], errors: Path) -> None:
    """The command line, in a process that kills itself."""
    from specdec_fast.cli import main

    blocks = trainer.blocks

    def dying(row: Any, step: int, *sizes: int) -> Any:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return blocks(row, step, *sizes)

    trainer.blocks = dying
    with errors.open("w", buffering=1) as sys.stderr:
        try:
            main(["train", *arguments])
        except BaseException:
            traceback.print_exc()
            raise
