"""Parts of an attached model that are replaced: its engine has the old ones, so a call is refused or handed on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.peft import MIN_PEFT_VERSION, check_peft_version

from specdec_fast.integrations.transformers import RefusedCallError, attach, attached, detach
from specdec_fast.integrations.transformers.model_record import ModelRecord
from specdec_fast.targets.tiny_models import tiny_model

IDS = torch.tensor([[5, 6, 7, 8]])
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def add_adapter(model: Any) -> None:
    peft = pytest.importorskip("peft")
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:
        pytest.skip(f"transformers does not take this peft: {error}")
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))


def replace_weight(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach().clone())


def load_by_assignment(model: Any) -> None:
    model.load_state_dict({name: -each.clone() for name, each in model.state_dict().items()}, assign=True)


def point_to_other_memory(model: Any) -> None:
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data * -9


def transpose_in_place(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.weight.data.t_()
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.t()


def replace_module(model: Any) -> None:
    model.model.layers[0].mlp = nn.Identity()


def remove_layer(model: Any) -> None:
    del model.model.layers[-1]
    model.config.num_hidden_layers -= 1


def add_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, given, found: _scaled(found))


def add_early_hook(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, given: (given[0].flip(-1),))


def replace_forward(model: Any) -> None:
    model.model.layers[0].mlp.forward = lambda states: states * 9


def replace_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.3


def _scaled(found: Any) -> Any:
    return (found[0].flip(-1), *found[1:]) if isinstance(found, tuple) else found.flip(-1)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "adapter": (add_adapter, r"other modules or weights in"),
    "weight": (replace_weight, r"lm_head\.weight in other memory; expected its values to change in place"),
    "assigned": (load_by_assignment, r"embed_tokens\.weight in other memory"),
    "data": (point_to_other_memory, r"layers\.0\.mlp\.down_proj\.weight in other memory"),
    "strides": (transpose_in_place, r"layers\.0\.self_attn\.o_proj\.weight"),
    "module": (replace_module, r"other modules or weights in model\.layers\.0;"),
    "layer": (remove_layer, r"other modules or weights in model\.layers;"),
    "hook": (add_hook, r"other forward hooks of model\.layers\.0; expected those with which it was attached"),
    "early hook": (add_early_hook, r"other forward hooks of model\.norm;"),
    "forward": (replace_forward, r"other modules or weights in model\.layers\.0\.mlp;"),
    "buffer": (replace_buffer, r"rotary_emb\.inv_freq in other memory"),
    "float64": (lambda model: model.to(torch.float64), r"of torch\.float64 on cpu .*; expected torch\.float32 on cpu"),
    "bfloat16": (lambda model: model.to(torch.bfloat16), r"of torch\.bfloat16 on cpu .*; expected torch\.float32"),
    "float16": (lambda model: model.half(), r"of torch\.float16 on cpu .*; expected torch\.float32 on cpu"),
    "vocabulary": (lambda model: model.resize_token_embeddings(64), r"with shape \[64, \d+\]; expected .* with shape"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_replaced_part_is_never_decoded_with_the_old_one(name: str) -> None:
    change, words = CHANGES[name]
    model = tiny_model("llama")
    attach(model, drafter="ngram", fallback="transformers")
    stale = model.generate(IDS, **GREEDY)
    steps = attached(model).engine.stats.steps
    change(model)
    torch.manual_seed(0)
    own = copy.deepcopy(model)
    del own.generate
    expected = own.generate(IDS, **GREEDY)
    assert torch.equal(model.generate(IDS, **GREEDY), expected), "transformers runs the call"
    assert attached(model).engine.stats.steps == steps
    kept = name in ("strides", "float64", "bfloat16", "float16")  # these change values by rounding, or not at all
    assert kept or not torch.equal(stale, expected), "a change that changes nothing tests nothing"
    model.generate.fallback = None
    with pytest.raises(RefusedCallError, match=f"got a model with .*{words}.*call detach.model., then attach"):
        model.generate(IDS, **GREEDY)
    detach(model)
    attach(model, drafter="none")  # the remedy
    assert torch.equal(model.generate(IDS, **GREEDY), expected)


def test_values_that_change_in_place_are_followed_while_attached() -> None:
    model = attach(tiny_model("llama"), drafter="ngram")
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    texts = []
    for _ in range(3):
        own = copy.deepcopy(model)
        del own.generate
        expected = own.generate(IDS, **GREEDY)
        assert torch.equal(model.generate(IDS, **GREEDY), expected)
        texts.append(expected.tolist())
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    other = tiny_model("llama", seed=3)
    model.load_state_dict(other.state_dict())
    texts.append(other.generate(IDS, **GREEDY).tolist())
    assert model.generate(IDS, **GREEDY).tolist() == texts[3]
    assert all(texts[at] != texts[at + 1] for at in (0, 2))
    assert attached(model).engine.stats.steps > 4


def test_what_comes_and_goes_is_no_change() -> None:
    """Modes, gradients, hooks of transformers, and conversions that convert nothing."""
    model = tiny_model("llama")
    record = ModelRecord(model)
    model.train().requires_grad_(False)
    model(IDS, output_hidden_states=True)
    model.to("cpu").float().tie_weights()
    assert record.find_change() is None
