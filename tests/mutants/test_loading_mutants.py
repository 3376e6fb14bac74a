"""Mistakes of loading, planted one at a time: a named test of the suite must fail."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants.test_suite_mutants import module_of

import specdec_fast.loading.adapters as adapters_module
import specdec_fast.loading.gguf_config as gguf_module
import specdec_fast.loading.models as models_module
import specdec_fast.targets.model_state as state_module
import specdec_fast.targets.model_support as support_module

Patch = pytest.MonkeyPatch


def rotary_scaling_is_left_out(patch: Patch) -> None:
    """The header's rotary scaling is not read, as in transformers' loader."""
    patch.setattr(gguf_module, "_complete_rope", lambda *_: None)


def unused_weights_are_dropped(patch: Patch) -> None:
    """Weights of a file that have no place in the model are dropped without a word."""
    patch.setattr(models_module, "check_all_weights_used", lambda *_: None)


def the_adapter_is_unloaded(patch: Patch) -> None:
    """The adapter is taken off in place of being merged."""
    peft = pytest.importorskip("peft")
    patch.setattr(peft.LoraModel, "merge_and_unload", lambda self, **_: self.unload())


def missing_weights_of_an_adapter_are_random(patch: Patch) -> None:
    """An adapter that lacks weights is taken as it is."""
    patch.setattr(adapters_module, "_check_weights", lambda *_: None)


def a_peft_model_is_served_whole(patch: Patch) -> None:
    """Nothing compares a PeftModel with the model inside of it."""
    patch.setattr(torch, "equal", lambda *_: True)


def the_layout_stays(patch: Patch) -> None:
    """A model that is given back keeps the engine's layout of weights."""
    patch.setattr(state_module, "_has_strides", lambda *_: False)


def shared_scales_are_served(patch: Patch) -> None:
    """Layers that quantize the activations of all tokens with one scale are not recognised."""
    patch.setattr(support_module, "why_tokens_depend", lambda *_: None)


GGUF, ADAPTERS = "loading/test_gguf_config.py", "loading/test_adapters.py"
MUTANTS: list[tuple[Callable[[Patch], None], str, str, dict[str, Any]]] = [
    (rotary_scaling_is_left_out, GGUF, "test_the_rotary_factors_of_llama_3", {"factor": 8.0}),
    (unused_weights_are_dropped, GGUF, "test_weights_without_a_place_are_refused", {}),
    (the_adapter_is_unloaded, ADAPTERS, "test_an_adapter_is_merged", {"kind": "lora"}),
    (
        missing_weights_of_an_adapter_are_random,
        ADAPTERS,
        "test_an_adapter_of_another_model_is_refused",
        {"other": {"num_hidden_layers": 4}, "words": "it lacks 8 weights"},
    ),
    (a_peft_model_is_served_whole, ADAPTERS, "test_a_peft_model_that_does_more_is_refused", {}),
    (
        the_layout_stays,
        "targets/test_model_lease.py",
        "test_a_closed_target_gives_the_model_back",
        {"family": "llama", "own": "sdpa"},
    ),
    (shared_scales_are_served, "loading/test_quantized.py", "test_torchao_may_share_a_scale_too", {}),
]


@pytest.mark.parametrize(
    ("plant", "file", "test", "arguments"), MUTANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_test_fails(
    plant: Callable[[Patch], None], file: str, test: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    module = module_of(file)
    run, wanted = getattr(module, test), signature(getattr(module, test)).parameters
    if "folder" in wanted:
        arguments = arguments | {"folder": tmp_path / "base"}
        module.base().save_pretrained(tmp_path / "base")
        module.TOKENIZER.save_pretrained(tmp_path / "base")

    def attempt(name: str, patch: Patch) -> None:
        given: dict[str, Any] = {"monkeypatch": patch, "tmp_path": tmp_path / name}
        (tmp_path / name).mkdir()
        run(**arguments, **{name: value for name, value in given.items() if name in wanted})

    with Patch.context() as patch:
        attempt("without", patch)
    with Patch.context() as patch:
        plant(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            attempt("with", patch)
