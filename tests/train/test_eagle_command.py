"""`specdec train eagle | eagle3`: published layouts, curves, and a killed run that ends as one that was not."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec_fast import HuggingFaceTarget
from specdec_fast.drafters import make_drafter
from specdec_fast.loading import load_model
from specdec_fast.train.eagle_command import eagle, eagle3
from specdec_fast.train.heads import Settings

TINY: dict[str, Any] = {"steps": 6, "batch": 2, "length": 32, "lr": 3e-3, "measure_every": 3, "threads": 1}
LAYER: dict[str, Any] = {"attention_heads": 2, "kv_heads": 1, "inner": 64}
TRAIN: dict[str, Callable[..., None]] = {"eagle": eagle, "eagle3": eagle3}
EXTRA: dict[str, dict[str, Any]] = {"eagle": {}, "eagle3": {"vocab": 300, "ahead": 3, "layers": "1,5,9"}}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("text") / "text.py"
    place.write_text(Path(argparse.__file__).read_text(encoding="utf-8")[:9000])
    return place


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_the_command_writes_a_head_as_published(
    name: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    TRAIN[name]([text], out=out, **TINY, **LAYER, **EXTRA[name])
    assert f"specdec generate --model demo-target --drafter {name} -o head={out / 'head'}" in capsys.readouterr().out
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
    made: Any = make_drafter(name, {"head": str(out / "head")}, target=target)
    assert made.model.head.hidden_size == 256


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(name: str, text: Path, tmp_path: Path) -> None:
    """SIGKILL behind some checkpoint, and the same command again. EAGLE draws noise: its generator goes on too."""
    options = {**TINY, **LAYER, **EXTRA[name], "steps": 40, "measure_every": 20}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", "specdec_fast.cli", "train", name, str(text), f"--out={tmp_path / 'cut'}", *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as program:
        limit = time.monotonic() + 120
        while not (tmp_path / "cut" / "checkpoint").exists():
            assert time.monotonic() < limit and program.poll() is None, "no checkpoint, or done before the kill"
            time.sleep(0.01)
        program.kill()
    assert not (tmp_path / "cut" / "head").exists(), "it was killed before its end"
    for folder in ("cut", "whole"):
        TRAIN[name]([text], out=tmp_path / folder, **options)
    found, want = (load_file(tmp_path / folder / "head" / "model.safetensors") for folder in ("cut", "whole"))
    assert found.keys() == want.keys() and all(torch.equal(found[key], want[key]) for key in want)
    first, second = (json.loads((tmp_path / folder / "history.json").read_text()) for folder in ("cut", "whole"))
    assert first == second


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
    with pytest.raises(ValueError, match="training schedule: got 'step'; expected cosine or linear"):
        Settings(schedule="step")


def test_a_linear_schedule_falls_along_a_line() -> None:
    settings = Settings(steps=100, lr=1.0, warm_up=0.0, schedule="linear")
    assert [settings.rate(step) for step in (0, 25, 50, 100)] == pytest.approx([1.0, 0.75, 0.5, 0.0])
