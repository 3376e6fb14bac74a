"""Mistakes with long texts, planted one at a time: pinned rotary frequencies, and chunks of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mutants.test_suite_mutants import cases, check_detected

import specdec_fast.draft_runners.draft_chain_runner as runner_module
import specdec_fast.targets.attention as attention_module
import specdec_fast.targets.rotary_pinning as rotary_module
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Slots
from specdec_fast.targets import mask_rules
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.rotary_pinning import RotaryPinning

Patch = pytest.MonkeyPatch


def the_longest_request_decides(patch: Patch) -> None:
    """All nodes of a pass have the frequencies of the longest request among them, as in transformers."""
    longest = RotaryPinning.longest

    def broken(self: Any, *given: Any) -> Any:
        found = longest(self, *given)
        return found if found is None else found.amax().expand_as(found)

    patch.setattr(RotaryPinning, "longest", broken)


def the_present_length_decides(patch: Patch) -> None:
    """A row is pinned to the length of its prompt, and a preempted one to the length that it has reached."""
    patch.setattr(DecodeState, "longest", DecodeState.length)


def the_switch_itself_is_long(patch: Patch) -> None:
    """A text that ends exactly at the switch counts as longer."""
    make = rotary_module._make_rule

    def broken(*given: Any) -> Any:
        rule = make(*given)
        return rotary_module._Rule(rule.switch - 1, rule.short, rule.long)

    patch.setattr(rotary_module, "_make_rule", broken)


def both_sides_share_pages(patch: Patch) -> None:
    """Page names do not say for what length keys were rotated."""
    patch.setattr(HuggingFaceTarget, "prefix_kind", lambda *_: "")


def drafts_are_long(patch: Patch) -> None:
    """Nobody says how long the texts of a draft model may become."""
    begin = runner_module.DraftChainRunner.begin

    def broken(self: Any, *given: Any) -> None:
        with patch.context() as inner:
            inner.setattr(HuggingFaceTarget, "begin_row", lambda *_: None)
            begin(self, *given)

    patch.setattr(runner_module.DraftChainRunner, "begin", broken)


def chunks_begin_one_token_late(patch: Patch) -> None:
    """The first token of a chunk counts to the chunk before it."""
    move = attention_module.ancestors_and_depth_of_chunks

    def broken(slots: Slots, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        ancestors, depth = move(slots, chunk)
        return ancestors, torch.where(slots.positions % chunk == 0, depth - chunk, depth)

    patch.setattr(attention_module, "ancestors_and_depth_of_chunks", broken)


def chunks_are_windows(patch: Patch) -> None:
    """A token sees as many tokens as a chunk has."""
    move = attention_module.ancestors_and_depth_of_chunks

    def broken(slots: Slots, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        ancestors, depth = move(slots, chunk)
        return ancestors, (depth - (chunk - 1 - slots.positions % chunk)).int()

    patch.setattr(attention_module, "ancestors_and_depth_of_chunks", broken)


def nodes_keep_their_places(patch: Patch) -> None:
    """Committed keys are cut at the chunk, and nodes of the pass see each other whatever their chunk."""
    move = attention_module.ancestors_and_depth_of_chunks

    def broken(slots: Slots, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        ancestors, depth = move(slots, chunk)
        first = slots.offsets[torch.searchsorted(slots.offsets, torch.arange(len(depth)), right=True) - 1]
        return ancestors, depth[first.long()]

    patch.setattr(attention_module, "ancestors_and_depth_of_chunks", broken)


def chunks_are_found_by_their_last_row(patch: Patch) -> None:
    """The size of a chunk is the number of keys that the last token sees."""

    def broken(rule: Any, length: int, device: Any) -> int:
        keys = torch.arange(length, device=device)
        return int(mask_rules._allowed(rule, keys[-1:], keys).sum())

    patch.setattr(mask_rules, "_chunk", broken)


ROTARY, CHUNKS = "targets/test_rotary_pinning.py", "targets/test_chunked_attention.py"
TEXTS, BITS = (
    "test_texts_depend_on_their_own_length_alone",
    "test_every_node_of_a_tree_has_the_bits_of_a_text_without_branches",
)
MUTANTS: list[tuple[Callable[[Patch], None], str, str, tuple[Any, ...]]] = [
    (the_longest_request_decides, ROTARY, "test_nodes_of_both_sides_share_a_pass", ("longrope",)),
    (the_present_length_decides, ROTARY, TEXTS, ("dynamic", 0.0)),
    (the_switch_itself_is_long, ROTARY, TEXTS, ("dynamic", 0.0)),
    (both_sides_share_pages, ROTARY, "test_beginnings_are_shared_on_one_side_only", ("dynamic",)),
    (drafts_are_long, ROTARY, "test_drafters_with_the_same_scaling", ("dynamic", "draft_model")),
    (chunks_begin_one_token_late, CHUNKS, BITS, (22, 16)),
    (chunks_are_windows, CHUNKS, BITS, (22, 16)),
    (nodes_keep_their_places, CHUNKS, BITS, (22, 16)),
    (chunks_are_found_by_their_last_row, CHUNKS, "test_chunks_of_a_mask_are_found", (255,)),
]


@cases(MUTANTS)
def test_the_test_fails(
    plant: Callable[[Patch], None], file: str, test: str, arguments: tuple[Any, ...], monkeypatch: Patch
) -> None:
    check_detected(plant, file, test, arguments, monkeypatch, (AssertionError, ValueError))
