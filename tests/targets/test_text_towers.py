"""Text towers of vision-language models: text, layers and states, also beside a vision tower as deep as theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast.core.draft import Draft
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.skipped_layers import SkippedLayers
from specdec_fast.targets.tiny_models import SHAPE

TEXT = {**SHAPE, "num_hidden_layers": 4}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


def gemma3(layers: int) -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config={**TEXT, "sliding_window": 24, "query_pre_attn_scalar": 16},
        vision_config={**VISION, "num_hidden_layers": layers},
        mm_tokens_per_image=4, image_token_index=90, boi_token_index=91, eoi_token_index=92,
    )  # fmt: skip
    return Gemma3ForConditionalGeneration(config)


def qwen2_5_vl(layers: int) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {"depth": layers, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
              "patch_size": 14}  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope, "rope_scaling": rope}, vision_config=vision,
        image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


def llava(layers: int) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(**VISION, num_hidden_layers=layers, projection_dim=32)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_index=90)
    )


def build(make: Callable[[int], Any], layers: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(layers).float().eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.5 if "embed" in name else parameter.shape[-1] ** -0.5)
    return model


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("make", [gemma3, qwen2_5_vl, llava])
def test_text_layers_and_states_are_those_of_the_text_tower(make: Callable[[int], Any], layers: int) -> None:
    model, text = build(make, layers), models.prompt(40)
    with torch.no_grad():
        output = model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
    want, hidden = output.logits[0], [each[0] for each in output.hidden_states]
    target = HuggingFaceTarget(model, max_rows=1, max_length=64)
    assert len(target.layers) == target.num_layers == 4
    assert (
        next(name for name, module in model.named_modules() if module is target.layers) == "model.language_model.layers"
    )
    target.cache.reserve(0, 64)
    draft = Draft.chains([0], [text])
    names = ("entering:0", "entering:3", "final_norm")
    found, _ = target.score(draft, draft.get_plan(), names)
    assert found.logits is not None and torch.allclose(found.logits, want, atol=2e-4)
    for name, expected in zip(names, (hidden[0], hidden[3], hidden[4]), strict=True):
        assert torch.allclose(found.aux_hidden_states[name], expected, atol=2e-4), name
    assert torch.allclose(target.lm_head(found.aux_hidden_states["final_norm"]), want, atol=2e-4)
    with target.skip_layers(SkippedLayers.after(0, 4)):
        skipped = target.score(draft, draft.get_plan(), ("entering:3",))[0].aux_hidden_states["entering:3"]
    assert torch.allclose(skipped, hidden[0], atol=2e-4)


def test_a_model_whose_layers_are_in_no_list_has_no_states_but_texts() -> None:
    class Holder(torch.nn.Module):
        """Layers under names, which the model reads in order."""

        def __init__(self, layers: Any) -> None:
            super().__init__()
            for number, layer in enumerate(layers):
                self.add_module(f"layer{number}", layer)

        def __getitem__(self, at: slice) -> list[torch.nn.Module]:
            return list(self.children())[at]

    model = models.own("llama")
    with torch.no_grad():
        want = model(torch.tensor([models.prompt(12)])).logits[0]
    layers = model.model.layers
    del model.model.layers
    model.model.layers = Holder(layers)
    target = HuggingFaceTarget(model, max_rows=1, max_length=64)
    target.cache.reserve(0, 12)
    draft = Draft.chains([0], [models.prompt(12)])
    logits = target.score(draft, draft.get_plan())[0].logits
    assert logits is not None and torch.allclose(logits, want, atol=2e-4)
    with pytest.raises(
        ValueError, match=r"got no list of 2 layers that call attention; .*choose a drafter that needs none"
    ):
        target.score(draft, draft.get_plan(), ("final_norm",))
    assert target.why_no_lm_head is not None
