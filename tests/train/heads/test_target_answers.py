"""Answers to prompts: kept batch by batch, equal for all processes, and never generated twice."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
from oracles import models

from specdec_fast import Engine, loading
from specdec_fast.loading import load_tokenizer
from specdec_fast.targets import attention
from specdec_fast.train.heads import target_answers, training_curve
from specdec_fast.train.heads.parallel_command import blockwise
from specdec_fast.train.heads.target_answers import generate_answers, load_answers

PROMPTS = ["def main(", "", "In the beginning", "import sys", "And"]
HOW: dict[str, Any] = {"new_tokens": 5, "temperature": 0.7, "seed": 3}


class Letters:
    """A tokenizer for the tiny models."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) % 95 + 1 for letter in text]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(token + 31) for token in tokens)

    def __len__(self) -> int:
        return 96


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Two prompts are a batch; the prompts of every batch that an engine was asked."""
    found: list[list[str]] = []
    generate = Engine.generate

    def noted(self: Engine, prompts: Any, *args: Any) -> Any:
        found.append(list(prompts))
        return generate(self, prompts, *args)

    monkeypatch.setattr(Engine, "generate", noted)
    monkeypatch.setattr(target_answers, "BATCH", 2)
    return found


def test_prompts_and_answers_are_in_order_without_failed_prompts(tmp_path: Path, asked: list[list[str]]) -> None:
    model, reported = models.own("llama"), []
    row = load_answers(
        generate_answers(
            model, Letters(), PROMPTS, tmp_path / "a", **HOW, report=lambda count, left: reported.append(count)
        )
    )
    assert asked == [PROMPTS[:2], PROMPTS[2:4], PROMPTS[4:]] and reported == [2, 4, 6]
    assert model.config._attn_implementation != attention.NAME, "the model's attention is its own again"
    at = 0
    for prompt in filter(None, PROMPTS):
        ids = Letters().encode(prompt)
        assert row[at : at + len(ids)].tolist() == [~token for token in ids], "a prompt's tokens do not count"
        at += len(ids) + HOW["new_tokens"]
        assert (row[at - HOW["new_tokens"] : at] >= 0).all()
    assert at == len(row) and row.dtype == np.int32
    with pytest.raises(ValueError, match="got none that the target can answer"):
        load_answers(generate_answers(model, Letters(), ["", ""], tmp_path / "b", **HOW))


def test_a_killed_run_continues_and_gives_the_same_tokens(tmp_path: Path, asked: list[list[str]]) -> None:
    """What was asked before is not asked again; a file cut off in the middle of being written counts for nothing."""
    want = load_answers(generate_answers(models.own("llama"), Letters(), PROMPTS, tmp_path / "whole", **HOW))

    def stop(count: int, left: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_answers(models.own("llama"), Letters(), PROMPTS, tmp_path / "cut", **HOW, report=stop)
    (first,) = (tmp_path / "cut").iterdir()
    second = (tmp_path / "whole" / sorted(file.name for file in (tmp_path / "whole").iterdir())[1]).read_bytes()
    (tmp_path / "cut" / "000001-0.partial.npy").write_bytes(second[:40])
    stamp = first.stat().st_mtime_ns
    del asked[:]
    found = load_answers(generate_answers(models.own("llama"), Letters(), PROMPTS, tmp_path / "cut", **HOW))
    assert asked == [PROMPTS[2:4], PROMPTS[4:]] and first.stat().st_mtime_ns == stamp
    assert found.tolist() == want.tolist()
    del asked[:]
    generate_answers(models.own("llama"), Letters(), [*PROMPTS[:4], "Or"], tmp_path / "cut", **HOW)
    assert asked == [["Or"]], "a batch with another prompt is another batch"


def test_processes_share_the_batches(tmp_path: Path, asked: list[list[str]]) -> None:
    want = load_answers(generate_answers(models.own("llama"), Letters(), PROMPTS, tmp_path / "one", **HOW))
    del asked[:]
    for rank in (1, 0):
        files = generate_answers(models.own("llama"), Letters(), PROMPTS, tmp_path / "two", **HOW, rank=rank, size=2)
    assert asked == [PROMPTS[2:4], PROMPTS[:2], PROMPTS[4:]]
    assert load_answers(files).tolist() == want.tolist()


def test_a_head_is_trained_on_answers_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[list[str]]
) -> None:
    """By the command. The target is moved to its device before it generates, and no stored answers remain."""
    devices: list[Any] = []
    load_model = loading.load_model

    def noted(source: Any, dtype: Any = "float32", device: Any = "cpu", **more: Any) -> Any:
        devices.append(device)
        return load_model(source, dtype, device, **more)

    monkeypatch.setattr(loading, "load_model", noted)
    monkeypatch.setattr("specdec_fast.loading.model_targets.load_model", noted)
    monkeypatch.setattr(training_curve, "training_curve", lambda *history: None)  # it takes a while
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": f"def f{at}("}) + "\n" for at in range(4)))
    options: dict[str, Any] = {"steps": 2, "batch": 1, "length": 16, "heads": 2, "inner": 16}
    blockwise([tmp_path / "prompts.jsonl"], out=tmp_path / "out", answer=24, temperature=0.7, **options)
    from accelerate import PartialState

    assert devices == [PartialState().device] and len(asked) == 2
    (tokens,) = (np.load(place) for place in (tmp_path / "out").glob("tokens-*.npy"))
    tokenizer = load_tokenizer("demo-target")
    assert len(tokens) == sum(len(tokenizer.encode(f"def f{at}(")) + 24 for at in range(4))
    assert not list((tmp_path / "out").glob("answers-*"))
    history = json.loads((tmp_path / "out" / "history.json").read_text())
    assert history[-1]["step"] == 2 and history[-1]["held_loss"] < 20

    rmtree(tmp_path / "out" / "checkpoint")  # as if it had been killed before the first one
    options |= {"steps": 1, "dtype": "bfloat16"}
    blockwise([tmp_path / "prompts.jsonl"], out=tmp_path / "out", answer=24, temperature=0.7, **options)
    assert len(asked) == 4 and len(list((tmp_path / "out").glob("tokens-*.npy"))) == 2
