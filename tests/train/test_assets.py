"""The bundled demo pair and hybrid: their facts, that they load, and that dependent files still fit them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

import specdec_fast
from specdec_fast.train.demo_pair.export import workload_texts
from specdec_fast.train.demo_pair.measure import overlap

ASSETS = Path(specdec_fast.__file__).parent / "assets"
TARGET_SHA256 = "2b1ada08a6cbfdd647090ab33ebb3e1f512c2f982b404ea6c8886b4356c89a11"


@pytest.fixture(scope="module")
def pair():
    from transformers import AutoModelForCausalLM

    return tuple(
        AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype=torch.float32).eval()
        for name in ("demo-target", "demo-draft")
    )


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ASSETS / "demo-target")


def test_the_target_is_the_one_that_drafters_are_trained_for():
    weights = (ASSETS / "demo-target" / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == TARGET_SHA256


def test_all_assets_stay_under_34_megabytes():
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) < 34e6


def test_shapes_and_formats(pair):
    target, draft = pair
    assert target.config.model_type == draft.config.model_type == "llama"
    assert target.config.num_hidden_layers >= 8
    assert target.config.max_position_embeddings >= 1024
    assert 6e6 < sum(p.numel() for p in target.parameters()) < 8e6
    assert 0.3e6 < sum(p.numel() for p in draft.parameters()) < 0.8e6
    assert target.config.vocab_size == draft.config.vocab_size
    for name in ("demo-target", "demo-draft"):
        assert json.loads((ASSETS / name / "config.json").read_text())["dtype"] == "bfloat16"


def test_both_have_one_lossless_tokenizer(tokenizer):
    first, second = ((ASSETS / n / "tokenizer.json").read_bytes() for n in ("demo-target", "demo-draft"))
    assert first == second
    texts = ("def f(x):\n    return {'ä': [1, 22]}\n\n\n", " \t 日本 🙂\r\n", "3:16 For God so loved")
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id is not None


def test_alpha_on_held_out_text(pair, tokenizer):
    target, draft = pair
    rows = []
    for part in (ASSETS / "heldout.txt").read_text(encoding="utf-8").split("\f"):
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(part)["input_ids"]]])
        with torch.no_grad():
            rows.append(overlap(target(input_ids=ids).logits, draft(input_ids=ids).logits)[0])
    alpha = torch.cat(rows).mean().item()
    assert alpha >= 0.7, f"alpha is {alpha:.3f} on the bundled held-out excerpt"


def test_the_card_and_its_numbers():
    numbers = json.loads((ASSETS / "demo-pair.json").read_text())
    assert numbers["alpha_held_out"]["all"]["alpha"] >= 0.7
    assert numbers["target"]["sha256"] == TARGET_SHA256
    assert numbers["workload"]["greedy"]["distinct_4_mean"] >= 0.65
    assert numbers["workload"]["greedy"]["loops"] == []
    card = (ASSETS / "demo-pair.md").read_text(encoding="utf-8")
    for word in (TARGET_SHA256, "PSF", "public domain", "Bits per byte", "alpha", "distinct-4", "Limits"):
        assert word in card


def test_the_workload_has_every_kind(tokenizer):
    prompts = json.loads((ASSETS / "workload.json").read_text(encoding="utf-8"))
    assert {p["kind"] for p in prompts} == {"prose", "code", "copy", "list"}
    assert len({p["id"] for p in prompts}) == len(prompts) >= 16
    for prompt in prompts:
        assert 20 <= len(tokenizer(prompt["prompt"])["input_ids"]) <= 300, prompt["id"]


def test_greedy_text_does_not_loop(pair, tokenizer):
    """Every prompt of the workload, 200 tokens: no period that repeats to the end, and no long stretch of repeats."""
    prompts = json.loads((ASSETS / "workload.json").read_text(encoding="utf-8"))
    for row in workload_texts(pair[0], tokenizer, prompts, 0.0):
        assert row["loop"] == 0, row["id"]
        assert row["distinct_4"] > 0.4, row["id"]


@pytest.fixture(scope="module")
def hybrid():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ASSETS / "demo-hybrid", dtype=torch.float32).eval()


def test_the_hybrid_is_small_and_mostly_recurrent(hybrid, pair):
    kinds = hybrid.config.layer_types
    assert kinds == (["linear_attention"] * 3 + ["full_attention"]) * 3
    assert (ASSETS / "demo-hybrid" / "model.safetensors").stat().st_size < 14e6
    assert 6.5e6 < sum(p.numel() for p in hybrid.parameters()) < 7e6
    assert hybrid.config.vocab_size == pair[1].config.vocab_size
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (ASSETS / "demo-hybrid" / name).read_bytes() == (ASSETS / "demo-target" / name).read_bytes()
    assert json.loads((ASSETS / "demo-hybrid" / "config.json").read_text())["dtype"] == "bfloat16"


def test_alpha_of_the_hybrid_on_held_out_text(hybrid, pair, tokenizer):
    rows = {"draft": [], "llama": []}
    for part in (ASSETS / "heldout.txt").read_text(encoding="utf-8").split("\f"):
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(part)["input_ids"]]])
        with torch.no_grad():
            logits = hybrid(input_ids=ids).logits
            for name, model in zip(("llama", "draft"), pair, strict=True):
                rows[name].append(overlap(logits, model(input_ids=ids).logits)[0])
    alpha = {name: torch.cat(found).mean().item() for name, found in rows.items()}
    assert alpha["draft"] >= 0.7 and alpha["llama"] >= 0.75, alpha


def test_the_card_of_the_hybrid_and_its_numbers():
    numbers = json.loads((ASSETS / "demo-hybrid.json").read_text())
    weights = (ASSETS / "demo-hybrid" / "model.safetensors").read_bytes()
    assert numbers["target"]["sha256"] == hashlib.sha256(weights).hexdigest()
    assert numbers["made_from"] == TARGET_SHA256
    card = (ASSETS / "demo-hybrid.md").read_text(encoding="utf-8")
    for word in (numbers["target"]["sha256"], TARGET_SHA256, "Bits per byte", "alpha", "demo-pair.md", "Limits"):
        assert word in card
