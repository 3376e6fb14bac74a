"""Modules that are no causal language model on one device are refused in words, and stay as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import models
from oracles.tiny_architectures import tiny_architecture

from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.model_support import UnsupportedModelError


def built(auto: str) -> Any:
    """A Llama of another class."""
    import transformers

    return getattr(transformers, auto).from_config(models.own("llama").config)


def masked() -> Any:
    from transformers import AutoConfig, AutoModelForMaskedLM

    shape = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **shape, intermediate_size=96))


class Inner(torch.nn.Module):
    """A wrapper of unknown kind."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.own("llama")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: built("AutoModel"), "LlamaModel: got a model without a projection to logits; .*AutoModelForCausalLM"),
        (lambda: built("AutoModelForSequenceClassification"), "without a projection to logits"),
        (lambda: built("AutoModelForTokenClassification"), "without a projection to logits"),
        (lambda: built("AutoModelForQuestionAnswering"), "without a projection to logits"),
        (masked, "BertForMaskedLM"),
        (lambda: torch.nn.Linear(4, 4), "Linear: got no model of transformers; .*AutoModelForCausalLM"),
        (Inner, "Inner: got no model of transformers"),
        (lambda: torch.nn.DataParallel(models.own("llama")), r"DataParallel: .*pass model\.module"),
        (lambda: torch.nn.Sequential(models.own("llama")), "Sequential: .*pass the model inside of it"),
        (lambda: torch.compile(models.own("llama")), r"OptimizedModule: .*pass model\._orig_mod, and compile=True"),
        (lambda: models.own("llama").to("meta"), "23 weights without memory .*device_map"),
    ],
)
def test_what_is_no_causal_model_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as error:
        HuggingFaceTarget(make(), max_rows=1, max_length=32)
    assert "expected" in str(error.value)


def test_adapters_are_refused_until_they_are_merged() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        models.own("llama"), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    with pytest.raises(UnsupportedModelError, match=r"PeftModel: .*pass model\.merge_and_unload\(\)"):
        HuggingFaceTarget(adapted, max_rows=1, max_length=32)
    merged = adapted.merge_and_unload()
    with torch.no_grad():
        want = merged(torch.tensor([models.prompt(8)])).logits[0, -1]
    target = HuggingFaceTarget(merged, max_rows=1, max_length=32)
    target.cache.reserve(0, 8)
    rows, bounds = torch.tensor([0], dtype=torch.int32), torch.tensor([0, 8], dtype=torch.int32)
    got = target.extend(rows, torch.tensor(models.prompt(8)), bounds, logits=True).logits
    assert got is not None and torch.allclose(got[0], want, atol=1e-4)


def test_sharded_weights_are_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        model = models.own("llama")
        head = model.lm_head
        head.weight = torch.nn.Parameter(distribute_tensor(head.weight.data, init_device_mesh("cpu", (1,))))
        with pytest.raises(UnsupportedModelError, match=r"sharded over processes \(for example lm_head\.weight\)"):
            HuggingFaceTarget(model, max_rows=1, max_length=32)
    finally:
        torch.distributed.destroy_process_group()


def test_layers_that_run_on_other_devices_are_refused() -> None:
    """As accelerate places them; its hooks bring inputs to the device of each layer."""

    class Hook:
        execution_device = 1

    model = models.own("llama")
    model.model.layers[1]._hf_hook = Hook()
    with pytest.raises(UnsupportedModelError, match=r"layers on cpu, cuda:1; .*device_map=\{'': 'cuda:1'\}"):
        HuggingFaceTarget(model, max_rows=1, max_length=32)


def test_a_model_whose_attention_is_not_the_interface_s_is_refused_before_it_runs() -> None:
    model = tiny_architecture("bloom")
    model.forward = None  # it would fail in another way
    with pytest.raises(UnsupportedModelError, match="does not support transformers' attention interface"):
        HuggingFaceTarget(model, max_rows=1, max_length=32)
