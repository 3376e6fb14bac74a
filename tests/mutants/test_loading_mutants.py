"""Mistakes of loading, planted one at a time: a named test of the suite must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants.test_suite_mutants import module_of

import specdec_fast.draft_runners.head_runner as runner_module
import specdec_fast.draft_runners.parallel_heads as parallel_module
import specdec_fast.heads.checkpoint_eagle as eagle_module
import specdec_fast.heads.own_tables as tables_module
import specdec_fast.loading.adapters as adapters_module
import specdec_fast.loading.gguf_config as gguf_module
import specdec_fast.loading.models as models_module
import specdec_fast.targets.huggingface as huggingface_module
import specdec_fast.targets.model_state as state_module
import specdec_fast.targets.model_support as support_module
import specdec_fast.targets.output_scaling as scaling_module
from specdec_fast.core.draft import Draft
from specdec_fast.targets import load_checks, mask_rules
from specdec_fast.targets.output_scaling import OutputScaling

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


def logits_are_not_compared(patch: Patch) -> None:
    """The logits of packed passes are taken for the model's own."""
    patch.setattr(load_checks, "check_logits", lambda *_: None)


def the_typical_token_is_compared(patch: Patch) -> None:
    """In float32 too, as where types of few bits round: one wrong token in eight is not seen."""
    compare = load_checks._error
    patch.setattr(load_checks, "_error", lambda *given, **_: compare(*given[:3], rounds=True))


def the_sample_has_no_branches(patch: Patch) -> None:
    """The sample is scored as a plain text."""

    def broken(target: Any, sample: torch.Tensor, names: Any = ()) -> Any:
        target.cache.reserve(0, len(sample))
        draft = Draft.chains([0], [sample.tolist()])
        with torch.inference_mode():
            output = target.score(draft, draft.get_plan(), names)[0]
        target.cache.release([0])
        half = len(sample) // 2
        return output.logits[half:].float(), {name: each[half:] for name, each in output.aux_hidden_states.items()}

    patch.setattr(load_checks, "packed_logits", broken)


def a_mask_is_known_by_its_last_row(patch: Patch) -> None:
    """The rule of a mask is evaluated for the last token alone."""

    def broken(rule: Any, length: int, device: Any) -> int:
        zero, keys = torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.arange(length).view(1, 1, 1, -1)
        window = int(torch.as_tensor(rule(zero, zero, zero + length - 1, keys)).sum())
        return window if window < length else 0

    patch.setattr(mask_rules, "_sliding_window", broken)


def windows_have_one_token_less(patch: Patch) -> None:
    """The token itself is not counted in the window of a mask."""
    find = mask_rules._sliding_window

    def broken(*given: Any) -> int | None:
        window = find(*given)
        return window and window - 1

    patch.setattr(mask_rules, "_sliding_window", broken)


def masks_of_layers_are_believed(patch: Patch) -> None:
    """A mask that a layer changes counts as the one that was made."""
    patch.setattr(mask_rules, "_is_same_mask", lambda *_: True)


def arguments_of_attention_are_ignored(patch: Patch) -> None:
    """Whatever a layer passes to its attention counts as harmless."""
    patch.setattr(load_checks, "_HARMLESS", {"position_bias", "indices"})


def tokens_keep_their_order(patch: Patch) -> None:
    """The second run has the text at the same places, so that a dependence on places is not seen."""
    check = load_checks.check_independence

    def broken(model: Any, sample: Any, calls: Any, last_position: int) -> None:
        with patch.context() as inner:
            inner.setattr(load_checks, "observe", lambda model, tokens, positions: mirrored(model, tokens, positions))
            check(model, sample, calls, last_position)

    observe = load_checks.observe

    def mirrored(model: Any, tokens: Any, positions: Any) -> Any:
        probe = observe(model, tokens.flip(0), positions.flip(0))
        for call in probe.calls:
            for what in ("query", "key", "value"):
                object.__setattr__(call, what, getattr(call, what).flip(2))
        return probe

    patch.setattr(load_checks, "check_independence", broken)


def found_scaling(patch: Patch, **changes: Any) -> None:
    """Changes the map from outputs of the projection to logits that targets find."""
    find = huggingface_module.find_output_scaling
    patch.setattr(huggingface_module, "find_output_scaling", lambda *given: replace(find(*given), **changes))


def heads_see_no_scale(patch: Patch) -> None:
    """Heads get the outputs of the projection without Cohere's and Granite's factor."""
    found_scaling(patch, scale=1.0)


def heads_see_no_cap(patch: Patch) -> None:
    """Heads get logits without Gemma's soft cap."""
    found_scaling(patch, cap=None)


def the_cap_comes_first(patch: Patch) -> None:
    """The soft cap applies to the outputs of the projection, and the scale to what it gives."""

    def broken(self: OutputScaling, projected: torch.Tensor) -> torch.Tensor:
        capped = projected if self.cap is None else self.cap * torch.tanh(projected / self.cap)
        return capped * self.scale

    patch.setattr(OutputScaling, "__call__", broken)


def any_map_is_taken(patch: Patch) -> None:
    """The best map counts, however bad it is."""
    patch.setattr(scaling_module, "_TOLERANCES", {torch.float32: 1e9})


def heads_without_a_projection_are_made(patch: Patch) -> None:
    """A head that needs the target's projection is made without one."""
    patch.setattr(runner_module, "check_projection", lambda *_: None)
    patch.setattr(parallel_module, "check_projection", lambda *_: None)


def own_tables_are_dropped(patch: Patch) -> None:
    """Tables of a head count as copies of the target's."""
    patch.setattr(tables_module, "same_values", lambda *_: True)


def copies_are_kept(patch: Patch) -> None:
    """Tables of a head always count as its own."""
    patch.setattr(tables_module, "same_values", lambda *_: False)


def the_first_rows_are_compared(patch: Patch) -> None:
    """Tables are equal if their first rows are."""
    patch.setattr(tables_module, "range", lambda *_: [0], raising=False)


def the_target_s_embedding_is_read(patch: Patch) -> None:
    """A head with an embedding of its own drafts with the target's."""
    patch.setattr(runner_module.PagedHead, "embed", lambda self, tokens: self.target.embed(tokens))


def own_tables_are_not_written(patch: Patch) -> None:
    """A head is saved without its embedding."""
    write = eagle_module.write_checkpoint
    patch.setattr(
        eagle_module,
        "write_checkpoint",
        lambda folder, fields, tensors, file: write(
            folder, fields, {name: each for name, each in tensors.items() if name != "embed_tokens.weight"}, file
        ),
    )


GGUF, ADAPTERS = "loading/test_gguf_config.py", "loading/test_adapters.py"
CHECKS, SCALES, TABLES = "targets/test_load_checks.py", "targets/test_output_scaling.py", "heads/test_own_tables.py"
WRONG = "test_attention_that_computes_something_else_is_refused"
ODD = "test_attention_that_gets_something_else_is_refused"
PROJECTED = "test_the_projection_for_heads_gives_the_target_s_logits"
DILATED = {"and_mask_function": lambda _, __, query, key: (query - key) % 3 != 2}


def with_own_mask(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "attention_mask": given["attention_mask"].clone()}


def with_bias(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "position_bias": torch.zeros(1)}


def by_place(hidden: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return hidden * torch.arange(1, hidden.shape[1] + 1)[:, None]


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
    (logits_are_not_compared, CHECKS, WRONG, {"wrong": {"scale": 0.5}, "dtype": torch.bfloat16}),
    (the_typical_token_is_compared, CHECKS, "test_one_wrong_token_is_seen_in_float32", {}),
    (the_sample_has_no_branches, CHECKS, "test_a_leak_between_branches_is_refused", {"dtype": torch.float32}),
    (a_mask_is_known_by_its_last_row, CHECKS, "test_other_masks_are_refused", {"rule": DILATED}),
    (windows_have_one_token_less, CHECKS, "test_a_window_that_only_the_mask_has_is_served", {"window": 24}),
    (masks_of_layers_are_believed, CHECKS, ODD, {"change": with_own_mask, "message": "layer 1 makes or changes its"}),
    (arguments_of_attention_are_ignored, CHECKS, ODD, {"change": with_bias, "message": "layer 1 passes position_bias"}),
    (
        tokens_keep_their_order,
        CHECKS,
        "test_models_that_mix_tokens_outside_of_attention_are_refused",
        {"mix": by_place, "dtype": torch.float32},
    ),
    (heads_see_no_scale, SCALES, PROJECTED, {"kind": "cohere", "dtype": torch.float32}),
    (heads_see_no_scale, SCALES, PROJECTED, {"kind": "granite", "dtype": torch.bfloat16}),
    (heads_see_no_cap, SCALES, PROJECTED, {"kind": "gemma2", "dtype": torch.float32}),
    (the_cap_comes_first, SCALES, "test_a_scale_comes_before_a_cap", {}),
    (any_map_is_taken, SCALES, "test_other_maps_are_not_found", {"change": lambda logits: logits**3}),
    (
        heads_without_a_projection_are_made,
        SCALES,
        "test_heads_that_need_the_target_s_projection_are_refused_when_they_are_made",
        {},
    ),
    (own_tables_are_dropped, TABLES, "test_a_head_over_an_embedding_of_its_own_drafts_the_same", {}),
    (own_tables_are_dropped, TABLES, "test_a_projection_of_its_own_is_used", {}),
    (the_target_s_embedding_is_read, TABLES, "test_a_head_over_an_embedding_of_its_own_drafts_the_same", {}),
    (
        copies_are_kept,
        TABLES,
        "test_copies_take_no_memory_in_any_dtype",
        {"dtype": torch.bfloat16, "kept": torch.float32},
    ),
    (the_first_rows_are_compared, TABLES, "test_a_difference_in_the_last_row_of_a_large_table_is_seen", {}),
    (own_tables_are_not_written, TABLES, "test_own_tables_are_written_and_read_back", {}),
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
