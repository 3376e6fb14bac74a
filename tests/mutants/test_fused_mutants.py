"""Mistakes in what the fused forward takes from a model, planted one at a time: a test of the suite must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from mutants.test_suite_mutants import module_of
from oracles import models

import specdec_fast.targets.fused_forward as fused_module
import specdec_fast.targets.huggingface as huggingface_module
from specdec_fast.targets import load_checks
from specdec_kernels.dispatch import extension

pytestmark = pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")
Patch = pytest.MonkeyPatch


def with_layers(patch: Patch, change: Callable[[Any], Any]) -> None:
    """Changes the weights that the fused forward gets of every layer."""
    make = fused_module._layer_weights
    patch.setattr(fused_module, "_layer_weights", lambda *given: change(make(*given)))


def with_numbers(patch: Patch, **changes: Any) -> None:
    """Changes the numbers of all layers."""
    make = fused_module.DecoderNumbers
    patch.setattr(fused_module, "DecoderNumbers", lambda **given: make(**{**given, **changes}))


def windows_have_one_token_more(patch: Patch) -> None:
    """A window of w tokens has the token itself and w tokens before it."""
    with_layers(patch, lambda layer: replace(layer, window=layer.window and layer.window + 1))


def windows_have_one_token_less(patch: Patch) -> None:
    """The token itself is not counted."""
    with_layers(patch, lambda layer: replace(layer, window=layer.window and layer.window - 1))


def windows_are_those_of_the_next_layer(patch: Patch) -> None:
    """Local and global layers change places."""
    build = fused_module.build_fused_forward

    def broken(model: Any, cache: Any, windows: Any) -> Any:
        return build(model, cache, [*windows[1:], *windows[:1]])

    patch.setattr(huggingface_module, "build_fused_forward", broken)


def queries_are_not_normalised(patch: Patch) -> None:
    """The norms of heads are left out, as in models that have none."""
    with_layers(patch, lambda layer: replace(layer, query_norm=None, key_norm=None))


def norms_of_queries_and_keys_are_swapped(patch: Patch) -> None:
    """Keys are normalised with the weights of queries."""
    with_layers(patch, lambda layer: replace(layer, query_norm=layer.key_norm, key_norm=layer.query_norm))


def all_layers_rotate_alike(patch: Patch) -> None:
    """Local layers rotate with the base of global ones."""
    with_layers(patch, lambda layer: replace(layer, rotary=0))


def rotary_scaling_is_left_out(patch: Patch) -> None:
    """Cosines and sines are those of plain positions, without the scaling of long contexts."""
    make = fused_module._rotary_tables

    def broken(model: Any, positions: int) -> Any:
        kinds, tables = make(model, positions)
        half = tables.shape[2] // 2
        steps = 1.0 / model.config.rope_parameters["rope_theta"] ** (torch.arange(half) / half)
        angles = torch.arange(positions)[:, None] * steps
        return kinds, torch.cat([angles.cos(), angles.sin()], 1)[None].expand_as(tables).contiguous()

    patch.setattr(fused_module, "_rotary_tables", broken)


def post_norms_are_left_out(patch: Patch) -> None:
    """Gemma's norms behind attention and MLP are missing."""
    with_layers(patch, lambda layer: replace(layer, post_norm=None, mlp_post_norm=None))


def biases_are_left_out(patch: Patch) -> None:
    """Biases of queries, keys and values are missing."""
    with_layers(patch, lambda layer: replace(layer, query_bias=None, key_bias=None, value_bias=None))


def the_output_bias_is_left_out(patch: Patch) -> None:
    """The bias behind attention is missing."""
    with_layers(patch, lambda layer: replace(layer, out_bias=None))


def embeddings_are_not_scaled(patch: Patch) -> None:
    """Gemma's factor sqrt(hidden) is missing."""
    with_numbers(patch, embedding_scale=1.0)


def norms_have_no_offset(patch: Patch) -> None:
    """Gemma's norms multiply by w, not by 1 + w."""
    with_numbers(patch, norm_offset=0.0)


def scores_are_not_capped(patch: Patch) -> None:
    """Attention has no soft cap."""
    with_numbers(patch, softcap=0.0)


def logits_are_not_capped(patch: Patch) -> None:
    """Logits have no soft cap."""
    with_numbers(patch, logits_softcap=0.0)


def the_epsilon_is_a_constant(patch: Patch) -> None:
    """Norms have the epsilon of most models."""
    with_numbers(patch, eps=1e-6)


def the_activation_is_silu(patch: Patch) -> None:
    """GELU is taken for SiLU."""
    patch.setattr(fused_module, "_activation_name", lambda config: "silu")


def with_states(patch: Patch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes the hidden states [S, M, hidden] of passes."""
    run = fused_module.FusedForward.run_with_states

    def broken(self: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, states = run(self, *given)
        return logits, change(states)

    patch.setattr(fused_module.FusedForward, "run_with_states", broken)


def with_numbered_states(patch: Patch, change: Callable[[int, int], int]) -> None:
    """Changes which hidden states fused passes return, given a number and the number of layers."""
    run = fused_module.FusedForward.run_with_states

    def broken(self: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *rest, numbers = given
        return run(self, *rest, [change(number, len(self.table.layers)) for number in numbers])

    patch.setattr(fused_module.FusedForward, "run_with_states", broken)


def states_leave_their_layer(patch: Patch) -> None:
    """The state that enters a layer is the one that leaves it."""
    with_numbered_states(patch, lambda number, layers: number + (number < layers))


def the_final_state_is_not_normalised(patch: Patch) -> None:
    """The state behind the final norm is the one before it."""
    with_numbered_states(patch, lambda number, layers: min(number, layers))


def the_last_state_is_normalised(patch: Patch) -> None:
    """The state behind the last layer is the one behind the final norm."""
    with_numbered_states(patch, lambda number, layers: number + (number == layers))


def states_are_of_the_node_before(patch: Patch) -> None:
    """Every node has the hidden states of the node before it."""
    with_states(patch, lambda states: states.roll(1, 1))


def states_are_in_another_order(patch: Patch) -> None:
    """States are returned in the order of layers, not in the order of the names."""
    with_states(patch, lambda states: states.flip(0))


def states_are_of_wanted_nodes_first(patch: Patch) -> None:
    """The first rows are those of the nodes whose logits are wanted."""
    run = fused_module.FusedForward.run_with_states

    def broken(self: Any, tokens: Any, positions: Any, wanted: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, states = run(self, tokens, positions, wanted, *given)
        return logits, states if wanted is None else torch.cat([states[:, wanted], states[:, len(wanted) :]], 1)

    patch.setattr(fused_module.FusedForward, "run_with_states", broken)


LOGITS = "test_logits_are_those_of_the_modules"
STATES = "test_hidden_states_are_those_of_the_modules"
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}
BASES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
}
BIASES = {"tie_word_embeddings": True, "num_key_value_heads": 4, "attention_bias": True}
LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}
WIDE = {"num_hidden_layers": 1, "intermediate_size": 50, "head_dim": 24, "rms_norm_eps": 0.1}


def scales_of_gate_and_up_are_swapped(patch: Patch) -> None:
    """Rows of int8 weights get scales of another matrix."""
    with_layers(patch, lambda layer: replace(layer, gate_scale=layer.up_scale, up_scale=layer.gate_scale))


def scales_are_those_of_the_row_above(patch: Patch) -> None:
    with_layers(patch, lambda layer: replace(layer, down_scale=layer.down_scale.roll(1)))


INT8 = "test_fused_passes_read_int8_weights"
MUTANTS: list[tuple[Callable[[Patch], None], str, dict[str, Any]]] = [
    (windows_have_one_token_more, LOGITS, {"family": "mistral", "changes": {}}),
    (windows_have_one_token_less, LOGITS, {"family": "mistral", "changes": {}}),
    (windows_are_those_of_the_next_layer, LOGITS, {"family": "gemma2", "changes": CAPS}),
    (queries_are_not_normalised, LOGITS, {"family": "qwen3", "changes": {}}),
    (norms_of_queries_and_keys_are_swapped, LOGITS, {"family": "qwen3", "changes": {}}),
    (all_layers_rotate_alike, LOGITS, {"family": "gemma3", "changes": BASES}),
    (rotary_scaling_is_left_out, LOGITS, {"family": "llama", "changes": LINEAR}),
    (post_norms_are_left_out, LOGITS, {"family": "gemma2", "changes": CAPS}),
    (biases_are_left_out, LOGITS, {"family": "qwen2", "changes": {}}),
    (the_output_bias_is_left_out, LOGITS, {"family": "llama", "changes": BIASES}),
    (scales_of_gate_and_up_are_swapped, INT8, {"family": "llama"}),
    (scales_are_those_of_the_row_above, INT8, {"family": "gemma3"}),
    (embeddings_are_not_scaled, LOGITS, {"family": "gemma3", "changes": {}}),
    (norms_have_no_offset, LOGITS, {"family": "gemma3", "changes": {}}),
    (scores_are_not_capped, LOGITS, {"family": "gemma2", "changes": CAPS}),
    (logits_are_not_capped, LOGITS, {"family": "gemma2", "changes": CAPS}),
    (the_epsilon_is_a_constant, LOGITS, {"family": "llama", "changes": WIDE}),
    (the_activation_is_silu, LOGITS, {"family": "gemma2", "changes": CAPS}),
    *(
        (plant, STATES, {"family": "llama", "dtype": torch.float32})
        for plant in (
            states_leave_their_layer,
            the_final_state_is_not_normalised,
            the_last_state_is_normalised,
            states_are_of_the_node_before,
            states_are_in_another_order,
            states_are_of_wanted_nodes_first,
        )
    ),
]


@pytest.mark.parametrize(("plant", "test", "arguments"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_test_fails(
    plant: Callable[[Patch], None], test: str, arguments: dict[str, Any], monkeypatch: Patch
) -> None:
    """Without the comparison of logits that targets make when they open, which refuses most of these mistakes."""
    place = "targets/test_int8_weights.py" if test == INT8 else "targets/test_fused_forward.py"
    run = getattr(module_of(place), test)
    run(**arguments)
    plant(monkeypatch)
    monkeypatch.setattr(load_checks, "check_logits", lambda *_: None)
    with pytest.raises(AssertionError):
        run(**arguments)


def test_a_target_does_not_open_with_a_mistake(monkeypatch: Patch) -> None:
    queries_are_not_normalised(monkeypatch)
    with pytest.raises(ValueError, match=r"fused_forward: got True, but .* differ from the model's own"):
        models.target("qwen3", fused_forward=True)
    target = models.target("qwen3", fused_forward=None)
    assert "differ from the model's own" in str(target.why_not_fused), "it serves by its modules otherwise"
