"""The whole script on a few kilobytes of synthetic text, and resumption."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
from pathlib import Path

import pytest
import torch
from oracles import forks

from specdec_fast.train.demo_pair import worker_processes
from specdec_fast.train.demo_pair.corpus import CorpusNotFound, Document, held_out, split_chapters
from specdec_fast.train.demo_pair.draft_stage import distillation_loss
from specdec_fast.train.demo_pair.model_shapes import Shape, build, grow
from specdec_fast.train.demo_pair.muon import orthogonalise
from specdec_fast.train.demo_pair.pipeline import Unfinished, install, make_tokens, refuse_another_recipe, run
from specdec_fast.train.demo_pair.recipe import Recipe, tokened
from specdec_fast.train.demo_pair.target_stage import next_token_loss, train_target, train_unlikelihood
from specdec_fast.train.demo_pair.training_loop import Budget, Schedule
from specdec_fast.train.demo_pair.worker_processes import together

SMALL = Recipe(
    target=Shape(layers=2, hidden=32, heads=2, kv_heads=1, inner=48, vocabulary=300, context=128, head_dim=16),
    draft=Shape(layers=1, hidden=16, heads=1, kv_heads=1, inner=16, vocabulary=300, context=128, head_dim=16),
    start_layers=1,
    start_budget=Budget(tokens=4 * 64),
    target_budget=Budget(tokens=4 * 64),
    unlikelihood_budget=Budget(tokens=2 * (2 * 12 + 64)),
    draft_budget=Budget(tokens=4 * 4 * 32),
    block=32,
    blocks_per_step=2,
    lengths=((0.0, 16), (0.5, 32)),
    repeat_rows=2,
    repeat_prefix=8,
    repeat_length=12,
    context=32,
    corpus_contexts=12,
    sampled_contexts=4,
    contexts_per_step=4,
    measured_tokens=200,
    continued_rows=2,
    continued_tokens=8,
    workload_tokens=6,
    compiled=False,
)


def corpus() -> list[Document]:
    texts = []
    for number in range(120):
        domain = ("code", "docs", "kjv")[number % 3]
        texts.append(
            Document(domain, f"text {number}", f"def f{number}(x):\n    return x + {number}\n\n" * (3 + number % 4))
        )
    return texts


def quiet(*_: object) -> None:
    """Take a report and say nothing."""


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["model"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("pair")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    numbers = run(SMALL, out, quiet, documents=corpus(), say=quiet)
    yield out, numbers
    torch.set_num_threads(threads)


def test_the_target_is_the_mean_of_its_rounds(finished):
    out, _ = finished
    first, second, mean = (weights(out / name) for name in ("round-1.pt", "round-2.pt", "final.pt"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], second[name])
    torch.testing.assert_close(mean[name], (first[name] + second[name]) / 2)


def test_the_script_ends_with_a_pair_and_its_numbers(finished, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, numbers = finished
    assert 0.0 < numbers["alpha_held_out"]["all"]["alpha"] <= 1.0
    assert math.isfinite(numbers["bits_per_byte"]["target"]["all"])
    assert numbers["training"]["target"]["tokens"] == 4 * 64
    install(out, tmp_path)
    for name, layers in (("demo-target", 2), ("demo-draft", 1)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.dtype == torch.bfloat16 and model.config.num_hidden_layers == layers
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        text = "for i in range(3):\n    print('ü', i)\n"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert tokenizer.eos_token_id == model.config.eos_token_id == 0
    card = (tmp_path / "demo-pair.md").read_text()
    assert numbers["target"]["sha256"] in card and "PSF" in card and "public domain" in card
    assert json.loads((tmp_path / "demo-pair.json").read_text()) == numbers


def test_an_interrupted_run_ends_with_the_same_weights(finished, tmp_path):
    out, _ = finished
    for _ in range(40):
        try:
            run(SMALL, tmp_path, quiet, documents=corpus(), stop_after=1, say=quiet)
            break
        except Unfinished:
            continue
    else:
        pytest.fail("the run never ended")
    for name in ("target-start.pt", "target.pt", "final.pt", "draft.pt"):
        whole, pieces = weights(out / name), weights(tmp_path / name)
        for key in whole:
            torch.testing.assert_close(pieces[key], whole[key], rtol=0, atol=0, msg=f"{name}: {key}")


def test_two_processes_end_with_the_weights_of_one(finished, tmp_path, monkeypatch):
    """The second of them is a new Python for one stage; for the other a fork, which need not import anything."""
    out, _ = finished
    make_tokens(SMALL, tmp_path, corpus())
    with monkeypatch.context() as patch:
        if forks.can_train():
            forking = multiprocessing.get_context("fork")
            patch.setattr(worker_processes.multiprocessing, "get_context", lambda _: forking)
        progress = together(train_target, SMALL, tmp_path, quiet, None, 2)
    assert progress.done and progress.tokens == 4 * 64
    whole, parts = weights(out / "target.pt"), weights(tmp_path / "target.pt")
    for key in whole:
        torch.testing.assert_close(parts[key], whole[key], rtol=1e-3, atol=1e-4, msg=key)
    rounds = together(train_unlikelihood, SMALL, tmp_path, quiet, None, 2)  # each begins where the one before ended
    assert rounds.done and rounds.step > 0
    assert (tmp_path / "final.pt").exists() and set(weights(tmp_path / "final.pt")) == set(whole)


def test_a_finished_run_is_not_trained_again(finished):
    out, numbers = finished
    before = (out / "final.pt").stat().st_mtime_ns
    make_tokens(SMALL, out)
    again = run(SMALL, out, quiet, say=quiet)
    assert (out / "final.pt").stat().st_mtime_ns == before
    assert again["target"]["sha256"] == numbers["target"]["sha256"]


def test_a_folder_of_another_recipe_is_refused(finished):
    out, _ = finished
    for change in ({"seed": 3}, {"draft_budget": Budget(tokens=5)}):
        with pytest.raises(ValueError, match=f"was begun with {next(iter(change))} .*or another --out"):
            run(dataclasses.replace(SMALL, **change), out, quiet, say=quiet)
    refuse_another_recipe(dataclasses.replace(SMALL, workers=2, compiled=True), out)  # these change no weights


def test_a_short_distillation_writes_few_contexts_and_the_usual_one_all():
    least, usual, full = tokened(1, 1), tokened(6_000_000, 40_000_000), Recipe()
    assert least.corpus_contexts == least.sampled_contexts == full.contexts_per_step
    assert (usual.corpus_contexts, usual.sampled_contexts) == (full.corpus_contexts, full.sampled_contexts)
    half = tokened(1, (full.corpus_contexts + full.sampled_contexts) * full.context // 2)
    assert half.corpus_contexts == full.corpus_contexts // 2


def test_chapters_are_documents():
    lines = ["Ge1:1 In the beginning.", "Ge1:2 And the earth.", "", "Ge2:1 Thus.", "Ex1:1 Now these."]
    found = list(split_chapters(lines))
    assert [d.name for d in found] == ["Genesis 1", "Genesis 2", "Exodus 1"]
    assert found[0].text == "Genesis 1\n\n1:1 In the beginning.\n1:2 And the earth.\n"


def test_one_document_in_33_is_held_out():
    share = sum(held_out(Document("code", f"{i}.py", "")) for i in range(20_000)) / 20_000
    assert share == pytest.approx(1 / 33, rel=0.15)


def test_a_missing_corpus_names_the_packages(monkeypatch):
    from specdec_fast.train.demo_pair import corpus as module

    monkeypatch.setattr(module, "find_documentation", lambda: None)
    monkeypatch.setattr(module.shutil, "which", lambda *a, **k: None)
    with pytest.raises(CorpusNotFound, match=r"python3-doc.*bible-kjv.*apt-get install"):
        module.read_corpus()


def test_a_grown_model_begins_near_the_shallow_one():
    small, large = build(SMALL.draft, 0), build(Shape(3, 16, 1, 1, 16, 300, 128, 16), 1)
    grow(small, large)
    first = small.model.layers[0].mlp
    for layer in large.model.layers:
        assert torch.equal(layer.mlp.up_proj.weight, first.up_proj.weight)
        assert torch.allclose(3 * layer.mlp.down_proj.weight, first.down_proj.weight)
    ids = torch.arange(20)[None]
    difference = (small(ids).logits.softmax(-1) - large(ids).logits.softmax(-1)).abs().max()
    assert difference < 0.01


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 6, 12), (2, 12, 6)])
def test_newton_schulz_brings_singular_values_near_one(shape, bfloat16):
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalise(stack, bfloat16=bfloat16)
    values = torch.linalg.svdvals(result)
    assert result.dtype == torch.float32 and values.min() > 0.3 and values.max() < 1.3


def test_bfloat16_products_give_nearly_the_same_loss_and_float32_gradients():
    ids = torch.randint(300, (2, 17), generator=torch.Generator().manual_seed(0))
    found = []
    for bfloat16 in (False, True):
        model = build(SMALL.target, seed=3)
        loss = next_token_loss(model, bfloat16)(ids)
        loss.backward()
        found.append((loss.item(), model.model.layers[0].mlp.up_proj.weight.grad))
    (exact, gradient), (rounded, rough) = found
    assert rounded != exact and rounded == pytest.approx(exact, rel=1e-2)
    assert rough.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(gradient.flatten(), rough.flatten(), dim=0) > 0.98


def test_distillation_loss_ends_at_the_entropy_and_the_distance():
    p = torch.tensor([[0.5, 0.25, 0.25]])
    entropy = 1.5 * math.log(2)
    assert distillation_loss(p.log(), p.log(), 0.0).item() == pytest.approx(entropy, rel=1e-5)
    assert distillation_loss(p.log(), p.log(), 1.0).item() == pytest.approx(0.0, abs=1e-6)
    q = torch.tensor([[0.25, 0.5, 0.25]])
    assert distillation_loss(q.log(), p.log(), 1.0).item() == pytest.approx(4 * 0.25, rel=1e-5)


def test_the_schedule_warms_up_and_ends_at_zero():
    schedule = Schedule(1.0, 0.0, 0.1)
    assert schedule(0.0) < 0.02 and schedule(0.1) == pytest.approx(1.0) and schedule(1.0) == 0.0
    assert Budget(tokens=10, seconds=100.0).progress(5, 80.0) == pytest.approx(0.8)
