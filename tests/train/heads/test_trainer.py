"""Training of heads: the loss by its definition, text in, a killed run goes on, loss falls and acceptance rises."""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import shutil
import signal
from itertools import count as count_up
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracles import models
from torch import nn

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.drafters import make_drafter
from specdec_fast.heads.blockwise import BlockwiseHeads
from specdec_fast.heads.checkpoint_medusa import save_medusa
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.loading import load_model, load_tokenizer
from specdec_fast.train.heads import trainer as loop
from specdec_fast.train.heads import training_curve
from specdec_fast.train.heads.parallel import AUX_HIDDEN_STATE, AheadTrainee, rank_rates
from specdec_fast.train.heads.parallel_command import blockwise as train_blockwise
from specdec_fast.train.heads.parallel_command import medusa as train_medusa
from specdec_fast.train.heads.trainer import Settings, TargetStates, fit
from specdec_fast.train.heads.training_texts import split, text_row, token_row

HEADS = 3


def tiny() -> tuple[Any, TargetStates]:
    model = models.own("llama")
    return model, TargetStates(model, (AUX_HIDDEN_STATE,))


def some_heads(model: Any, **options: Any) -> MedusaHeads:
    torch.manual_seed(0)
    weight = model.get_output_embeddings().weight
    heads = MedusaHeads(weight.shape[1], weight.shape[0], HEADS, **options)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.1)
    return heads


def row_of(length: int, seed: int = 0) -> np.ndarray:
    """Tokens that follow one another by a rule, so that there is something to learn."""
    source = np.random.default_rng(seed)
    found = [5]
    while len(found) < length:
        found.append((found[-1] * 7 + 3) % 90 + 1 if source.random() < 0.9 else int(source.integers(1, 91)))
    return np.asarray(found, dtype=np.int32)


@pytest.mark.parametrize("labels", ["text", "target"])
@pytest.mark.parametrize(("own", "prompt"), [(True, 0), (False, 0), (True, 5)])
def test_the_loss_is_that_of_its_definition(labels: str, own: bool, prompt: int) -> None:
    """Head k at place t against the token t + 2 + k, or the target's distribution at place t + 1 + k, place by place;
    where the first tokens of a text do not count they are no labels.
    """
    model, states = tiny()
    heads = some_heads(model, own_lm_head=own)
    trainee = AheadTrainee(heads, states, decay=0.8, labels=labels)
    tokens = torch.from_numpy(row_of(22).astype(np.int64)).reshape(2, 11)
    with torch.no_grad():
        found, measures = trainee(torch.cat([~tokens[:, :prompt], tokens[:, prompt:]], 1))
        output = model(tokens, output_hidden_states=True)
        hidden = output.hidden_states[-1]  # behind the last norm
        want, hits = 0.0, []
        for head in range(HEADS):
            parts, right = [], []
            for text in range(2):
                for place in range(max(prompt - 2 - head, 0), 11 - 2 - head):
                    x = hidden[text, place]
                    x = x + nn.functional.silu(heads.weight[0, head] @ x + heads.bias[0, head])
                    matrix = heads.lm_head[head] if own else model.get_output_embeddings().weight
                    scores = (matrix @ x).log_softmax(-1)
                    token = int(tokens[text, place + 2 + head])
                    dist = output.logits[text, place + 1 + head].softmax(-1)
                    parts.append(-scores[token] if labels == "text" else -(dist * scores).sum())
                    right.append((text, place, int(scores.argmax()) == token))
            want += 0.8**head * float(torch.stack(parts).mean())
            hits.append(right)
    assert float(found) == pytest.approx(want, rel=1e-4)
    for head in range(HEADS):
        share = sum(right for *_, right in hits[head]) / len(hits[head])
        assert float(measures[f"head_{head + 1}"]) == pytest.approx(share)
    walks = {(text, place) for text in range(2) for place in range(max(prompt - 2, 0), 11 - 1 - HEADS)}
    known = [{(text, place): right for text, place, right in each} for each in hits]
    chain = 1 + sum(
        sum(all(known[below][walk] for below in range(head + 1)) for walk in walks) / len(walks)
        for head in range(HEADS)
    )
    assert float(measures["tokens_per_step"]) == pytest.approx(chain)


@pytest.mark.parametrize("prompt", [0, 9])
def test_rates_by_rank_are_counts(prompt: int) -> None:
    model, states = tiny()
    trainee = AheadTrainee(some_heads(model), states)
    held = row_of(41)
    rates = rank_rates(trainee, np.concatenate([~held[:prompt], held[prompt:]]), 20, width=40)
    hits, places = np.zeros((HEADS, 40)), np.zeros((HEADS, 1))
    for start in (0, 20):
        tokens = torch.from_numpy(held[start : start + 21].astype(np.int64))[None]
        with torch.no_grad():
            logits, _ = trainee.logits(tokens)
        for head in range(HEADS):
            for place in range(max(prompt - 2 - head - start, 0), 21 - 1 - HEADS):
                places[head] += 1
                order = logits[head, 0, place].argsort(descending=True, stable=True).tolist()
                rank = order.index(int(tokens[0, place + 2 + head]))
                if rank < 40:
                    hits[head, rank] += 1
    assert np.allclose(rates, hits / places)


def test_states_are_those_that_the_engine_aux_hidden_states() -> None:
    places = ("entering:0", "entering:1", "final_norm")
    target = models.target("llama", max_rows=1)
    tokens = torch.tensor(models.prompt(17))
    offsets, rows = torch.tensor([0, 17], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    target.cache.reserve(0, 17)
    want = target.extend(rows, tokens, offsets, logits=False, aux_hidden_states=places).aux_hidden_states
    found = TargetStates(models.own("llama"), places)(tokens[None])
    for place in places:
        torch.testing.assert_close(found[place][0], want[place], rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match="auxiliary hidden state: got 'entering:9'; expected 'final_norm' or 'entering:i' with i <"
    ):
        TargetStates(models.own("llama"), ("entering:9",))


def run(
    folder: Path, stop_after: int | None = None, facts: dict[str, Any] | None = None, **changes: Any
) -> tuple[Any, MedusaHeads]:
    model, states = tiny()
    heads = some_heads(model)
    settings = Settings(**{"steps": 9, "batch": 2, "length": 24, "measure_every": 4, "saving": 1e-9, **changes})
    row, held = split(row_of(1500), 24)
    options: dict[str, Any] = {"facts": facts or {}, "stop_after": stop_after}
    return fit(AheadTrainee(heads, states), states, row, held, settings, folder, **options), heads


def test_a_run_that_was_cut_off_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole, want = run(tmp_path / "whole")
    for _ in range(2):
        progress, _ = run(tmp_path / "cut", stop_after=3)
        assert not (tmp_path / "cut" / "checkpoint.partial").exists()
    shutil.move(tmp_path / "cut" / "checkpoint", tmp_path / "cut" / "checkpoint.old")  # killed between two renames
    (tmp_path / "cut" / "checkpoint.partial").mkdir()
    assert progress.step == 6
    progress, found = run(tmp_path / "cut")
    assert progress.step == 9 and [each["step"] for each in progress.history] == [0, 4, 8, 9]
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), want.parameters(), strict=True))
    assert progress.history == whole.history
    again, same = run(tmp_path / "cut")
    assert again.step == 9 and torch.equal(same.weight, found.weight), "nothing is left to do"


@pytest.mark.parametrize(("seconds", "count"), [(0.0, 9), (0.4, 2)])
def test_cheap_checkpoints_are_written_behind_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    """Dear ones behind the first and the last. Time is counted here, so that no other program has a part in it."""
    written: list[int] = []
    ticks = count_up()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 1000 + seconds * len(written))
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(loop, "_save", lambda accelerator, folder, made_of: written.append(made_of["step"]))
    run(tmp_path, saving=None)
    assert len(written) == count and written[0] == 1 and written[-1] == 9


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_behind_a_whole_step(tmp_path: Path, number: int) -> None:
    """Nothing is lost, however seldom checkpoints are written."""
    before = signal.getsignal(number)
    model, states = tiny()
    row, held = split(row_of(1500), 24)
    settings = Settings(steps=9, batch=2, length=24, saving=1e-9)
    seen: list[float] = []

    def stop_at_three(share: float, found: Any, left: float) -> None:
        seen.append(share)
        if len(seen) == 3:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        fit(AheadTrainee(some_heads(model), states), states, row, held, settings, tmp_path, stop_at_three)
    assert len(seen) == 4, "the step that was under way is whole"
    progress = fit(AheadTrainee(some_heads(model), states), states, row, held, settings, tmp_path, stop_after=1)
    assert progress.step == 5 and signal.getsignal(number) == before


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    run(folder, stop_after=2, facts={"inputs": ["a.txt"]})
    return folder


@pytest.mark.parametrize(
    "changes",
    [{"length": 23}, {"batch": 3}, {"seed": 1}, {"steps": 8}, {"lr": 2e-3}, {"facts": {"inputs": ["b.txt"]}}],
    ids=str,
)
def test_a_run_does_not_go_on_with_other_settings(begun: Path, changes: dict[str, Any]) -> None:
    before = {path: path.read_bytes() for path in begun.rglob("*.*")}
    name, value = next(iter(changes.get("facts", changes).items()))
    words = rf"checkpoint: the run in it has another {name}: got {re.escape(repr(value))}; expected .*; go on with that"
    with pytest.raises(ValueError, match=words):
        run(begun, **{"facts": {"inputs": ["a.txt"]}, **changes})
    assert before and before == {path: path.read_bytes() for path in begun.rglob("*.*")}, "it can still go on"


def test_a_run_does_not_go_on_with_another_number_of_processes(tmp_path: Path) -> None:
    """Every process has its own blocks in each step, so that others would be another run."""
    run(tmp_path, stop_after=2)
    place = tmp_path / "checkpoint" / "run.json"
    made_of = json.loads(place.read_text())
    place.write_text(json.dumps({**made_of, "number of processes": 4}))
    with pytest.raises(ValueError, match="another number of processes: got 1; expected 4, with which it was begun"):
        run(tmp_path)
    place.write_text(json.dumps(made_of))
    progress, _ = run(tmp_path, measure_every=3, saving=0.5)
    assert progress.step == 9, "how often is measured and saved may change"


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    run(tmp_path, stop_after=1)
    weights = tmp_path / "checkpoint" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"checkpoint: it cannot be read, or is of other settings.*remove it to begin"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "training steps: got 0; expected at least 1"),
        ({"lr": 0.0}, "training lr, warm_up, saving: got 0.0"),
        ({"mixed_precision": "int4"}, "mixed_precision: got 'int4'; expected one of no, bf16, fp16"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**changes)


def test_the_rate_warms_up_and_falls_to_zero() -> None:
    settings = Settings(steps=100, lr=1.0, warm_up=0.1)
    rates = [settings.rate(step) for step in range(101)]
    assert rates[:10] == sorted(rates[:10]) and rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[100] == pytest.approx(0, abs=1e-9)


def test_text_from_files_and_columns(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    tokenizer = load_tokenizer("demo-target")
    (tmp_path / "a.txt").write_text("In the beginning")
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "was the word"}) + "\n\n")
    parquet.write_table(pyarrow.table({"body": ["and", None, "the end"]}), tmp_path / "c.parquet")
    found = text_row([tmp_path], "body", tokenizer)
    texts = ["In the beginning", "was the word", "and", "the end"]
    assert found.tolist() == [token for text in texts for token in [tokenizer.eos_token_id, *tokenizer.encode(text)]]
    with pytest.raises(ValueError, match=r"b\.jsonl:1: expected a JSON object with text in 'text'; see --field"):
        text_row([tmp_path / "b.jsonl"], "text", tokenizer)
    with pytest.raises(ValueError, match="got no documents"):
        token_row([], tokenizer)


def test_text_that_is_too_short_is_refused() -> None:
    row, held = split(np.arange(1000), 24)
    assert len(row) + len(held) == 1000 and held[0] == row[-1] + 1 and len(held) == 31
    with pytest.raises(ValueError, match="got 60 tokens; expected at least 99 for blocks of 24"):
        split(np.arange(60), 24)


@pytest.fixture(scope="module")
def python_text() -> np.ndarray:
    return token_row([Path(argparse.__file__).read_text(encoding="utf-8")], load_tokenizer("demo-target"))


def test_in_seconds_loss_falls_acceptance_rises_and_the_saved_head_drafts_the_same(
    tmp_path: Path, python_text: np.ndarray
) -> None:
    model = load_model("demo-target")
    states = TargetStates(model, (AUX_HIDDEN_STATE,))
    heads = MedusaHeads(256, 1024, HEADS, own_lm_head=False)
    settings = Settings(steps=80, batch=2, length=64, lr=6e-3, measure_every=80, saving=0.01)
    row, held = split(python_text, 64, blocks=8)
    untrained = MedusaHeads(256, 1024, HEADS, own_lm_head=False)
    progress = fit(AheadTrainee(heads, states, labels="target"), states, row, held, settings, tmp_path)
    first, last = progress.history[0], progress.history[-1]
    assert last["held_loss"] < 0.8 * first["held_loss"]
    assert last["tokens_per_step"] > first["tokens_per_step"] + 0.1
    training_curve.training_curve(progress.history, tmp_path / "training_curve.png", "heads")
    assert (tmp_path / "training_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    save_medusa(heads, tmp_path / "head", base_model="demo-target", dtype=torch.float32)

    target, told = HuggingFaceTarget(model, max_rows=2, max_length=256), {}
    prompts = ["def add_argument(self, name", "class Parser:\n    def __init__(self"]
    ids = [load_tokenizer("demo-target").encode(prompt) for prompt in prompts]
    params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    plain = [handle.tokens for handle in Engine(target).generate(ids, params)]
    for name, head in {"trained": heads.eval(), "saved": str(tmp_path / "head"), "untrained": untrained}.items():
        handles = Engine(target, make_drafter("medusa", {"head": head}, target=target)).generate(ids, params)
        assert [handle.tokens for handle in handles] == plain
        told[name] = [(handle.stats.steps, handle.stats.num_draft_tokens, handle.origins) for handle in handles]
    assert told["saved"] == told["trained"]
    assert sum(steps for steps, *_ in told["trained"]) < sum(steps for steps, *_ in told["untrained"])


def test_blockwise_learns_by_the_same_loop(tmp_path: Path, python_text: np.ndarray) -> None:
    model = load_model("demo-target")
    states = TargetStates(model, (AUX_HIDDEN_STATE,))
    row, held = split(python_text, 64, blocks=4)
    settings = Settings(steps=15, batch=2, length=64, lr=4e-3, measure_every=15, saving=0.01)
    trainee = AheadTrainee(BlockwiseHeads(256, 1024, 2), states, decay=1.0)
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
    prompt, told = load_tokenizer("demo-target").encode("def main("), []
    for made in (saved, make_drafter(name, {"head": rounded, **shape}, target=target)):
        handle = Engine(target, made).generate([prompt], SamplingParams(temperature=0.8, seed=1, max_new_tokens=16))[0]
        told.append((handle.tokens, handle.origins, handle.stats.num_draft_tokens))
    assert told[0] == told[1] and told[0][-1] > 0


def test_the_command_writes_head_tree_and_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, text = tmp_path / "out", tmp_path / "text.py"
    text.write_text(Path(argparse.__file__).read_text(encoding="utf-8")[:9000])
    options: dict[str, Any] = {"out": out, "steps": 6, "batch": 2, "length": 32, "heads": 2, "nodes": 5, "lr": 5e-3}
    train_medusa([text], layout="vllm", own_lm_head=False, **options)
    shown = capsys.readouterr().out
    assert f"specdec generate --model demo-target --drafter medusa -o head={out / 'head'}" in shown
    assert (out / "training_curve.png").exists() and len(json.loads((out / "history.json").read_text())) == 2
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
    with pytest.raises(ValueError, match="of other settings"):
        train_medusa([text], own_lm_head=False, **{**options, "heads": 4})
    with pytest.raises(ValueError, match="another length: got 16; expected 32"):
        train_medusa([text], own_lm_head=False, **{**options, "length": 16})
    (tmp_path / "other.py").write_text(text.read_text()[::-1])
    with pytest.raises(ValueError, match=r"another inputs: got .*other\.py"):
        train_medusa([tmp_path / "other.py"], own_lm_head=False, **options)
    shutil.rmtree(out / "checkpoint")
    train_medusa([tmp_path / "other.py"], own_lm_head=False, **{**options, "steps": 1})
    assert len(list(out.glob("tokens-*.npy"))) == 2, "text is read again where it is another"
