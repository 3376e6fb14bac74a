"""The recipe of the hybrid target on a few kilobytes of synthetic text, and resumption."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from train.demo_pair.test_pipeline import corpus, quiet, weights

from specdec_fast.train.demo_pair.export import save_model
from specdec_fast.train.demo_pair.hybrid_pipeline import install_hybrid, run_hybrid
from specdec_fast.train.demo_pair.hybrid_stage import mixers_of, train_mixers
from specdec_fast.train.demo_pair.model_shapes import Shape, build
from specdec_fast.train.demo_pair.pipeline import Unfinished, make_tokens
from specdec_fast.train.demo_pair.recipe import HybridRecipe, Recipe, hybrid_timed, hybrid_tokened
from specdec_fast.train.demo_pair.training_loop import Budget

SIZES = {"vocabulary": 300, "context": 128, "head_dim": 16}
SMALL = HybridRecipe(
    target=Shape(layers=4, hidden=32, heads=2, kv_heads=1, inner=48, **SIZES),
    draft=Shape(layers=1, hidden=16, heads=1, kv_heads=1, inner=16, **SIZES),
    mixers_budget=Budget(tokens=4 * 2 * 32),
    mixers_blocks=2,
    hybrid_budget=Budget(tokens=4 * 4 * 32),
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A Llama target and its draft, with the tokenizer that the corpus gives."""
    out = tmp_path_factory.mktemp("pair")
    make_tokens(Recipe(target=SMALL.target, draft=SMALL.draft), out, corpus())
    for name, shape in (("demo-target", SMALL.target), ("demo-draft", SMALL.draft)):
        save_model(build(shape, 1), out / "tokenizer", out / name)
    return out


@pytest.fixture(scope="module")
def finished(pair, tmp_path_factory):
    out = tmp_path_factory.mktemp("hybrid")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    numbers = run_hybrid(SMALL, out, quiet, pair, corpus(), say=quiet)
    yield out, numbers
    torch.set_num_threads(threads)


def test_the_recipe_ends_with_a_hybrid_target_and_its_numbers(finished, pair, tmp_path):
    from transformers import AutoModelForCausalLM

    out, numbers = finished
    assert 0.0 < numbers["alpha_held_out"]["all"]["alpha"] <= 1.0
    assert 0.0 < numbers["llama_held_out"]["all"]["alpha"] <= 1.0
    assert math.isfinite(numbers["bits_per_byte"]["hybrid"]["all"])
    assert numbers["training"]["mixers"]["tokens"] == 4 * 2 * 32
    assert numbers["training"]["hybrid"]["tokens"] == 4 * 4 * 32
    (tmp_path / "demo-pair.json").write_text(json.dumps({"target": {"sha256": numbers["made_from"]}}))
    install_hybrid(out, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "demo-hybrid")
    assert model.dtype == torch.bfloat16 and model.config.layer_types.count("full_attention") == 1
    assert (tmp_path / "demo-hybrid" / "tokenizer.json").read_bytes() == (
        pair / "demo-target" / "tokenizer.json"
    ).read_bytes()
    card = (tmp_path / "demo-hybrid.md").read_text()
    assert numbers["target"]["sha256"] in card and numbers["made_from"] in card
    assert json.loads((tmp_path / "demo-hybrid.json").read_text()) == numbers


def test_a_hybrid_of_another_target_is_not_installed(finished, tmp_path):
    (tmp_path / "demo-pair.json").write_text(json.dumps({"target": {"sha256": "another"}}))
    with pytest.raises(ValueError, match=r"was made from a target with sha256 .*; expected that of .*another"):
        install_hybrid(finished[0], tmp_path)
    assert not (tmp_path / "demo-hybrid").exists()


def test_the_first_stage_trains_mixers_alone(finished):
    out, _ = finished
    mixers, hybrid = weights(out / "mixers.pt"), weights(out / "hybrid.pt")
    llama = build(SMALL.target, 1).bfloat16().float().state_dict()
    for name in ("model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"):
        assert torch.equal(mixers[name], llama[name]), name
        assert not torch.equal(hybrid[name], llama[name]), name
    name = "model.layers.3.self_attn.k_proj.weight"
    assert not torch.equal(mixers[name], llama[name])


def test_mixers_come_closer_to_attention(finished, tmp_path):
    slow = {"mixers_muon_lr": 1e-3, "mixers_adam_lr": 1e-3}  # attention of a random model is small
    longer = dataclasses.replace(SMALL, mixers_budget=Budget(tokens=60 * 2 * 32), **slow)
    out, losses = finished[0], []
    for name in ("tokens.npz", "demo-target"):
        (tmp_path / name).symlink_to(out / name)

    def note(_stage: str, _share: float, loss: float, *_: object) -> None:
        losses.append(loss)

    train_mixers(longer, tmp_path, note)
    assert losses[-1] < 0.8 * losses[0]


def test_an_interrupted_run_ends_with_the_same_weights(finished, pair, tmp_path):
    out, _ = finished
    for _ in range(20):
        try:
            run_hybrid(SMALL, tmp_path, quiet, pair, corpus(), stop_after=1, say=quiet)
            break
        except Unfinished:
            continue
    else:
        pytest.fail("the run never ended")
    for name in ("mixers.pt", "hybrid.pt"):
        whole, pieces = weights(out / name), weights(tmp_path / name)
        for key in whole:
            torch.testing.assert_close(pieces[key], whole[key], rtol=0, atol=0, msg=f"{name}: {key}")


def test_a_folder_of_another_recipe_is_refused(finished, pair):
    with pytest.raises(ValueError, match=r"was begun with seed .*or another --out"):
        run_hybrid(dataclasses.replace(SMALL, seed=3), finished[0], quiet, pair, say=quiet)


def test_a_folder_that_was_begun_from_another_target_is_refused(finished, pair, tmp_path):
    other = tmp_path / "pair"
    save_model(build(SMALL.target, 2), pair / "tokenizer", other / "demo-target")
    with pytest.raises(ValueError, match=r"was begun from another target than that of .*another --out"):
        run_hybrid(SMALL, finished[0], quiet, other, say=quiet)


def test_budgets_of_the_command():
    full, short = HybridRecipe(), hybrid_tokened(1)
    assert short.corpus_contexts == short.sampled_contexts == full.contexts_per_step
    usual = hybrid_tokened(3_000_000)
    assert (usual.corpus_contexts, usual.sampled_contexts) == (full.corpus_contexts, full.sampled_contexts)
    assert usual.mixers_budget.tokens + usual.hybrid_budget.tokens == 3_000_000
    hour = hybrid_timed(60.0)
    assert hour.mixers_budget.seconds + hour.hybrid_budget.seconds == pytest.approx(3600.0)


def test_a_mixer_of_every_layer_is_found(finished):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(finished[0] / "export" / "demo-hybrid")
    assert len(mixers_of(model)) == 4
