"""Models that accelerate has spread over disk and memory: the same logits, or a refusal in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast.core.draft import Draft
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.model_support import UnsupportedModelError

pytest.importorskip("accelerate")


def offloaded(folder: Path, **places: str) -> Any:
    """A Llama from disk, with parts on other places than the CPU."""
    from transformers import AutoModelForCausalLM

    models.untouched("llama").save_pretrained(folder / "model")
    rest = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0", "model.layers.1")
    places = dict.fromkeys(rest, "cpu") | places
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=places, offload_folder=folder / "weights", dtype=torch.float32
    )


@pytest.mark.parametrize(
    "places", [{"model.layers.1": "disk"}, {"model.layers.0": "disk", "model.layers.1": "disk", "lm_head": "disk"}]
)
def test_offloaded_layers_are_served(places: dict[str, str], tmp_path: Path) -> None:
    model, text = offloaded(tmp_path, **places), models.prompt(20)
    absent = [name for name, weight in model.named_parameters() if weight.is_meta]
    assert absent
    with torch.no_grad():
        want = model(torch.tensor([text])).logits[0]
    target = HuggingFaceTarget(model, max_rows=1, max_length=64)
    assert target.device == torch.device("cpu") and "forward of its own" in str(HuggingFaceTarget(
        model, max_rows=1, max_length=64, fused_forward=None
    ).why_not_fused)  # fmt: skip
    target.cache.reserve(0, 20)
    draft = Draft.chains([0], [text])
    output, _ = target.score(draft, draft.get_plan(), ("final_norm",))
    assert output.logits is not None and torch.allclose(output.logits, want, atol=1e-4)
    assert torch.allclose(target.lm_head(output.aux_hidden_states["final_norm"]), want, atol=1e-4)
    assert [name for name, weight in model.named_parameters() if weight.is_meta] == absent
    target.close()


def test_an_offloaded_embedding_is_refused_and_the_model_still_works(tmp_path: Path) -> None:
    model = offloaded(tmp_path, **{"model.embed_tokens": "disk"})
    text = torch.tensor([models.prompt(8)])
    with torch.no_grad():
        want = model(text).logits
    with pytest.raises(UnsupportedModelError, match=r"1 weights without memory \(for example model\.embed_tokens"):
        HuggingFaceTarget(model, max_rows=1, max_length=64)
    with torch.no_grad():
        assert torch.equal(model(text).logits, want)
