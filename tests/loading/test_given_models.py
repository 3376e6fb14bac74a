"""Models passed as objects: taken as they are, and given back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast import SamplingParams, load
from specdec_fast.targets.tiny_models import tiny_model


def test_loaded_models_are_taken_as_they_are() -> None:
    model, draft = models.own("llama"), models.kin("llama")
    engine = load(model, draft, max_length=64, eos_token_ids=())
    assert engine.target.model is model and engine.drafter.model.model is draft and engine.tokenizer is None
    handle = engine.generate([models.prompt(17)], SamplingParams(temperature=0, max_new_tokens=10))[0]
    assert handle.tokens == models.greedy_text("llama", 17, 10)


@pytest.mark.parametrize("wrong", [None, 3, models.own("llama").config])
def test_objects_that_are_not_models_are_refused(wrong: object) -> None:
    with pytest.raises(
        ValueError, match=r"model: got (NoneType|int|LlamaConfig); expected a .*or a loaded transformers"
    ):
        load(wrong)  # type: ignore[arg-type]


def test_the_target_cannot_be_its_own_draft() -> None:
    model = models.own("llama")
    with pytest.raises(ValueError, match="draft: got the target itself; expected another model"):
        load(model, model, max_length=64)


def test_a_model_that_load_made_is_not_prepared_for_a_return(tmp_path: Path) -> None:
    """Its weights would be stored again while it disappears. A closed engine still gives it back."""
    tiny_model("llama").save_pretrained(tmp_path)
    engine = load(tmp_path, max_length=64)
    model: Any = engine.target.model
    del engine
    assert model.config._attn_implementation == "specdec_paged"
    engine = load(tmp_path, max_length=64)
    engine.close()
    ids = torch.tensor([models.prompt(17)])
    assert engine.target.model.generate(ids, max_new_tokens=2, pad_token_id=0).shape[1] > ids.shape[1]


def test_a_model_may_be_saved_while_it_serves(tmp_path: Path) -> None:
    model = models.own("llama")
    engine = load(model, max_length=64, eos_token_ids=())
    model.save_pretrained(tmp_path)
    again = load(tmp_path, max_length=64, eos_token_ids=())
    params = SamplingParams(temperature=0, max_new_tokens=10)
    texts = [each.generate([models.prompt(17)], params)[0].tokens for each in (engine, again)]
    assert texts[0] == texts[1] == models.greedy_text("llama", 17, 10)


def test_weights_may_be_trained_between_engines() -> None:
    """Gradients flow, and the next engine has the new weights."""
    model = models.own("llama")
    params = SamplingParams(temperature=0, max_new_tokens=10)
    with load(model, max_length=64, eos_token_ids=()) as engine:
        before = engine.generate([models.prompt(17)], params)[0].tokens
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.tensor([models.prompt(17)])
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with load(model, max_length=64, eos_token_ids=()) as engine:
        after = engine.generate([models.prompt(17)], params)[0].tokens
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
    assert after == found != before
