"""Mistakes of prompts, texts, streams and processors that read texts, planted one at a time: a named test must fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from mutants.test_suite_mutants import cases, check_detected

import specdec_fast.engine.engine as engine_module
import specdec_fast.engine.prompts as prompts_module
import specdec_fast.engine.scheduler as scheduler_module
import specdec_fast.engine.special_tokens as special_module
import specdec_fast.engine.stop_conditions as stop_module
import specdec_fast.engine.streaming as streaming_module
import specdec_fast.engine.text_stream as stream_module
from specdec_fast.sampling.banned_continuations import BannedContinuations
from specdec_fast.sampling.custom_processors import CustomProcessors
from specdec_fast.targets.attention import OutsideTargetError

Patch = pytest.MonkeyPatch


def custom_processors_read_the_text_of_the_root(patch: Patch) -> None:
    """A custom processor sees the committed text at every node."""
    apply = CustomProcessors.apply

    def broken(self: CustomProcessors, logits: Any, row_of: Any, tokens: Any, parents: Sequence[int]) -> Any:
        failures: dict[int, Any] = {}
        for node, row in row_of.items():
            found = apply(self, logits, {0: row}, tokens[:1], parents[:1])
            failures |= dict.fromkeys([node] if found else [], found.get(0))
        return failures

    patch.setattr(CustomProcessors, "apply", broken)


def ngrams_on_the_path_are_forgotten(patch: Patch) -> None:
    """N-grams that draft tokens complete may be repeated below them."""
    find = BannedContinuations.find

    def broken(self: BannedContinuations, tokens: Any, parents: Any, wanted: Any) -> Any:
        end = find(self, tokens, parents, [0])[0]
        own, self._size = self._size, 0
        found = find(self, tokens, parents, wanted)
        self._size = own
        return [[*ids, *end] if node == 0 else ids for node, ids in zip(wanted, found)]

    patch.setattr(BannedContinuations, "find", broken)


def scored_prompts_share_pages(patch: Patch) -> None:
    """A request that asks for log-probabilities of its prompt takes over pages, which have no logits."""
    patch.setattr(scheduler_module, "needs_scoring", lambda handle: False)


def text_begins_twice(patch: Patch) -> None:
    """A text that begins with the beginning of sequence gets a second one."""
    patch.setattr(prompts_module, "_encode_text", lambda text, tokenizer, _: list(tokenizer.encode(text)))


def whatever_is_doubled_is_dropped(patch: Patch) -> None:
    """Equal tokens at the beginning count as one, also those that the text itself has twice."""

    def broken(text: str, tokenizer: Any, _: Any) -> list[int]:
        tokens = list(tokenizer.encode(text))
        return tokens[1:] if tokens[:1] == tokens[1:2] != [] else tokens

    patch.setattr(prompts_module, "_encode_text", broken)


def a_part_of_the_beginning_counts(patch: Patch) -> None:
    """A text that begins with the first of two special tokens gets none of them."""
    count = prompts_module._count_added

    def broken(text: str, tokenizer: Any, _: Any) -> list[int]:
        tokens, bare = list(tokenizer.encode(text)), list(tokenizer.encode(text, add_special_tokens=False))
        added = count(tokens, bare)
        return tokens[added:] if added and bare[:1] == tokens[:1] else tokens

    patch.setattr(prompts_module, "_encode_text", broken)


def padding_is_text(patch: Patch) -> None:
    """The attention mask of a tokenizer is not read."""
    patch.setattr(prompts_module, "_without_padding", lambda row, mask: row)


def special_tokens_end_no_text(patch: Patch) -> None:
    """Stop strings are searched in the shown text alone, which lacks special tokens."""
    patch.setattr(stop_module, "find_special_tokens", lambda *_: (frozenset(), ()))


def a_name_must_be_decoded(patch: Patch) -> None:
    """The name of a special token does not stand for the token: the text must have it."""
    find = stop_module.find_special_tokens
    patch.setattr(stop_module, "find_special_tokens", lambda tokenizer, stop: (frozenset(), find(tokenizer, stop)[1]))


def the_cut_counts_hidden_characters(patch: Patch) -> None:
    """The text is cut where the stop string begins in the text with special tokens."""
    patch.setattr(special_module.FullText, "shown_length", lambda self, length, shown: min(length, len(shown)))


def beginnings_of_stop_strings_are_shown(patch: Patch) -> None:
    """Text that may become a stop string is released at once."""
    patch.setattr(stop_module._Search, "held_back", lambda self, text: 0)


def stop_strings_are_searched_in_new_text(patch: Patch) -> None:
    """A stop string that begins in an earlier token is not found."""

    def broken(self: Any, text: str) -> tuple[int, int] | None:
        found = [(at, len(each)) for each in self._strings if (at := text.find(each, self.searched)) >= 0]
        return min(((at + length, at) for at, length in found), default=None)

    patch.setattr(stop_module._Search, "find", broken)


def parts_of_characters_are_shown(patch: Patch) -> None:
    """Bytes of an incomplete character are decoded at once."""
    patch.setattr(stream_module, "_INCOMPLETE", "\0")


def a_text_is_decoded_without_its_prompt(patch: Patch) -> None:
    """The end of the prompt is no context, so a character across the border is lost."""
    make = stream_module.TextStream.__init__
    patch.setattr(
        stream_module.TextStream, "__init__", lambda self, tokenizer, prompt, *rest: make(self, tokenizer, (), *rest)
    )


def closed_streams_go_on(patch: Patch) -> None:
    """A stream that is closed leaves its request running."""
    patch.setattr(streaming_module.TextPieces, "_leave", lambda self, wait: setattr(self, "_entry", None))


def the_first_closed_stream_cancels(patch: Patch) -> None:
    """A stream that is closed cancels its request, though another one is open."""
    leave = streaming_module.TextPieces._leave

    def broken(self: Any, wait: bool) -> None:
        self._handle.streams.clear()
        leave(self, wait)

    patch.setattr(streaming_module.TextPieces, "_leave", broken)


def abandoned_requests_keep_their_rows(patch: Patch) -> None:
    """The request of a closed stream is marked as ended, and its row and pages stay taken."""
    patch.setattr(
        engine_module.Engine, "_cancel_abandoned", lambda self: [each.finish("cancelled") for each in self._abandoned]
    )


def requests_survive_their_engine(patch: Patch) -> None:
    """A closed engine leaves its requests as they are."""
    patch.setattr(engine_module.Engine, "_unfinished", lambda self: [])


def draft_models_are_kept(patch: Patch) -> None:
    """A closed engine makes none of the calls that give models back."""
    patch.setattr(engine_module.Engine, "on_close", lambda self, call: None)


NODES = "sampling/test_text_processors.py", "test_every_node_is_processed_with_its_own_text", (torch.float32, False)
LAW = (
    "engine/test_tree_distribution.py",
    "test_the_joint_distribution_with_processors_that_read_texts",
    ("recursive_rejection", "mixed"),
)
PROMPTS, STREAM, STREAMS = "engine/test_prompts.py", "engine/test_text_stream.py", "engine/test_streaming.py"
STOPS = "engine/test_stop_conditions.py"
BEGINNING, NAMES = "test_text_never_gets_the_beginning_that_it_has", "test_stop_strings_may_name_special_tokens"
MUTANTS: list[tuple[Callable[[Patch], None], str, str, tuple[Any, ...]]] = [
    (custom_processors_read_the_text_of_the_root, *NODES),
    (custom_processors_read_the_text_of_the_root, *LAW),
    (ngrams_on_the_path_are_forgotten, *NODES),
    (
        scored_prompts_share_pages,
        "engine/test_prompt_logprobs.py",
        "test_a_shared_prefix_is_computed_again_for_them",
        (),
    ),
    (text_begins_twice, PROMPTS, BEGINNING, ("<s> $A", "<s> hello world", [0, 4, 5])),
    (whatever_is_doubled_is_dropped, PROMPTS, BEGINNING, ("$A", "hello hello", [4, 4])),
    (a_part_of_the_beginning_counts, PROMPTS, BEGINNING, ("<s> <de> $A", "<s> hello", [0, 3, 0, 4])),
    (text_begins_twice, PROMPTS, "test_the_engine_passes_the_choice_on", ()),
    (padding_is_text, PROMPTS, "test_ids_come_in_every_form", ("padded on the left",)),
    (special_tokens_end_no_text, STOPS, NAMES, ("x\n<|turn|>", {}, "ma")),
    (special_tokens_end_no_text, STOPS, "test_several_special_tokens_with_text_between_them", ()),
    (a_name_must_be_decoded, STOPS, "test_the_name_of_a_special_token_counts_though_it_decodes_to_other_text", ()),
    (the_cut_counts_hidden_characters, STOPS, "test_min_new_tokens_counts_for_special_tokens_too", ()),
    (beginnings_of_stop_strings_are_shown, STOPS, "test_text_that_could_become_a_stop_string_is_held_back", ()),
    (stop_strings_are_searched_in_new_text, STOPS, "test_a_stop_string_across_token_borders_is_cut", ()),
    (parts_of_characters_are_shown, STREAM, "test_a_character_of_several_tokens_appears_when_it_is_complete", ()),
    (a_text_is_decoded_without_its_prompt, STREAM, "test_a_prompt_that_ends_inside_a_character_loses_nothing", ()),
    (closed_streams_go_on, STREAMS, "test_leaving_the_loop_cancels_the_request", ()),
    (closed_streams_go_on, STREAMS, "test_a_stream_in_a_cycle_is_collected", ()),
    (the_first_closed_stream_cancels, STREAMS, "test_the_last_of_several_streams_cancels", ()),
    (abandoned_requests_keep_their_rows, STREAMS, "test_leaving_the_loop_cancels_the_request", ()),
    (requests_survive_their_engine, "engine/test_closing.py", "test_requests_of_a_closed_engine_end", ()),
    (draft_models_are_kept, "engine/test_closing.py", "test_every_draft_model_is_given_back", ("draft_tree",)),
]


@cases(MUTANTS)
def test_the_test_fails(
    plant: Callable[[Patch], None], file: str, test: str, arguments: tuple[Any, ...], monkeypatch: Patch
) -> None:
    check_detected(plant, file, test, arguments, monkeypatch, (AssertionError, OutsideTargetError))
