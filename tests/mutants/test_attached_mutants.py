"""Mistakes of attached models (`specdec_fast.integrations.transformers`), planted one at a time: a test must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mutants.test_suite_mutants import cases, check_detected
from mutants.test_text_mutants import custom_processors_read_the_text_of_the_root

import specdec_fast.integrations.transformers.model_record as record_module
import specdec_fast.integrations.transformers.row_processors as row_module
from specdec_fast.integrations.transformers.attachment import Attachment
from specdec_fast.integrations.transformers.calls import GenerateCall
from specdec_fast.integrations.transformers.decoding import Decoding
from specdec_fast.integrations.transformers.row_processors import RowLayout, RowProcessor

Patch = pytest.MonkeyPatch


def criteria_are_asked_once_per_step(patch: Patch) -> None:
    """Stopping criteria see only the last token of a step."""
    take = Decoding._take_row

    def broken(self: Decoding, index: int, row: Any, count: int) -> None:
        new = row.tokens[row.known : count - 1]
        start = self._start + row.known
        self._ids[index, start : start + len(new)] = torch.tensor(new, dtype=torch.int64)
        row.known += len(new)
        take(self, index, row, count)

    patch.setattr(Decoding, "_take_row", broken)


def rows_are_counted_from_one(patch: Patch) -> None:
    """`prefix_allowed_tokens_fn` gets the number of the next row."""
    patch.setattr(row_module, "_allowed_in_row", lambda allowed, row, _, text: allowed(row + 1, text))


def every_row_is_the_first(patch: Patch) -> None:
    """Processors that look up something by row are used as they are, for a batch of one."""
    patch.setattr(row_module, "processor_of_row", lambda processor, row: processor)


def padding_is_hidden_from_processors(patch: Patch) -> None:
    """Processors get the tokens that the model sees."""
    make = RowLayout.__init__

    def broken(self: RowLayout, index: int, rows: int, padded: Any, shown: Any) -> None:
        make(self, index, rows, padded, shown)
        self.padded = padded[shown]

    patch.setattr(RowLayout, "__init__", broken)


def penalties_count_padding_or_not(patch: Patch) -> None:
    """Penalties and n-grams become sampling parameters, whatever padding there is."""
    make = RowLayout.__init__

    def broken(self: RowLayout, *arguments: Any) -> None:
        make(self, *arguments)
        self.num_hidden = 0

    patch.setattr(RowLayout, "__init__", broken)


def rows_share_their_noise(patch: Patch) -> None:
    """Copies of a prompt get the same seed."""
    patch.setattr(GenerateCall, "_seeds", lambda self, count: [self._seed or 0] * count)


def scores_are_one_token_late(patch: Patch) -> None:
    """Scores are those behind a token, where they are known, and not those it was chosen from."""
    take = RowProcessor.take_scores

    def broken(self: RowProcessor, tokens: Any, known: int) -> Any:
        found = take(self, tokens, known)
        return [*found[1:], *found[-1:]]

    patch.setattr(RowProcessor, "take_scores", broken)


def raw_logits_are_processed(patch: Patch) -> None:
    """Logits are kept after the processors have written to them."""
    take = RowProcessor.take_scores
    patch.setattr(RowProcessor, "take_scores", lambda *given: [(scores, scores) for _, scores in take(*given)])


def ends_are_not_padded(patch: Patch) -> None:
    """Behind the end of a text there is the padding of another model."""
    make = Decoding.__init__

    def broken(self: Decoding, *arguments: Any) -> None:
        make(self, *arguments[:5], 0, *arguments[6:])

    patch.setattr(Decoding, "__init__", broken)


def the_engine_keeps_the_attention(patch: Patch) -> None:
    """A model has the attention of packed passes between calls too."""
    patch.setattr(Attachment, "lend_attention", lambda self: None)


def streams_of_failed_calls_stay_open(patch: Patch) -> None:
    """A call that fails does not end its stream."""

    def broken(self: Attachment, *args: Any, seed: Any = None, **kwargs: Any) -> Any:
        return self._generate({**dict(zip(self._names, args)), **kwargs}, seed)

    patch.setattr(Attachment, "__call__", broken)


def warpers_take_any_order(patch: Patch) -> None:
    """Warpers become sampling parameters, whatever their order."""

    def broken(processors: Any, row: Any, **_: Any) -> tuple[dict[str, Any], list[Any]]:
        fields: dict[str, Any] = {"temperature": 1.0}
        names = [row_module._EXACT.get(row_module._name(each)) for each in processors]
        names = [name if name in row_module._IN_ORDER else None for name in names]
        fields |= {name: row_module._warper_value(each) for each, name in zip(processors, names) if name}
        return fields, [each for each, name in zip(processors, names) if not name]

    patch.setattr(row_module, "split_processors", broken)


def filters_come_before_users_processors(patch: Patch) -> None:
    """Sampling parameters are taken from the front of the list, so they apply behind what came later."""
    split = row_module.split_processors

    def broken(processors: Any, row: Any, **more: Any) -> tuple[dict[str, Any], list[Any]]:
        own = [each for each in processors if not row_module._name(each)]
        fields, rest = split([each for each in processors if row_module._name(each)], row, **more)
        return fields, [*own, *rest]

    patch.setattr(row_module, "split_processors", broken)


def replaced_parts_are_not_looked_for(patch: Patch) -> None:
    """The engine goes on with the weights that it was built with."""
    patch.setattr(Attachment, "find_replaced_part", lambda self: None)


def memory_is_not_compared(patch: Patch) -> None:
    """A weight is the same if its object is."""
    patch.setattr(record_module, "_memory", lambda tensor: (tensor.dtype, tensor.device, tensor.shape))


TINY, LAW = "integrations/transformers/test_tiny_calls.py", "integrations/transformers/test_law.py"
REPLACED, NEVER_OLD = (
    "integrations/transformers/test_replaced_parts.py",
    "test_a_replaced_part_is_never_decoded_with_the_old_one",
)
SPLIT, LAW_OF = "integrations/transformers/test_row_processors.py", "test_sampled_texts_have_the_law_of_transformers"
MUTANTS: list[tuple[Callable[[Patch], None], str, str, tuple[Any, ...]]] = [
    (custom_processors_read_the_text_of_the_root, TINY, "test_processors_see_the_text_of_every_node", ()),
    (custom_processors_read_the_text_of_the_root, LAW, LAW_OF, ("rejection", "processor", 800)),
    (criteria_are_asked_once_per_step, TINY, "test_criteria_are_asked_for_every_token", ()),
    (rows_are_counted_from_one, TINY, "test_every_row_has_its_own_allowed_tokens", ()),
    (every_row_is_the_first, TINY, "test_every_row_has_its_own_allowed_tokens", ()),
    (padding_is_hidden_from_processors, TINY, "test_processors_see_padding_as_in_transformers", ()),
    (penalties_count_padding_or_not, TINY, "test_processors_see_padding_as_in_transformers", ()),
    (rows_share_their_noise, TINY, "test_rows_of_one_prompt_differ", ()),
    (scores_are_one_token_late, TINY, "test_scores_belong_to_their_tokens", ()),
    (raw_logits_are_processed, TINY, "test_scores_belong_to_their_tokens", ()),
    (ends_are_not_padded, TINY, "test_a_text_ends_behind_its_end_of_sequence", ()),
    (the_engine_keeps_the_attention, TINY, "test_the_model_s_forward_has_its_own_attention_between_calls", ()),
    (streams_of_failed_calls_stay_open, TINY, "test_a_stream_ends_though_the_call_fails", ()),
    (warpers_take_any_order, SPLIT, "test_the_engine_keeps_the_order", ()),
    (filters_come_before_users_processors, SPLIT, "test_the_engine_keeps_the_order", ()),
    (replaced_parts_are_not_looked_for, REPLACED, NEVER_OLD, ("weight",)),
    (replaced_parts_are_not_looked_for, REPLACED, NEVER_OLD, ("hook",)),
    (memory_is_not_compared, REPLACED, NEVER_OLD, ("data",)),
]


@cases(MUTANTS)
def test_the_test_fails(
    plant: Callable[[Patch], None], file: str, test: str, arguments: tuple[Any, ...], monkeypatch: Patch
) -> None:
    check_detected(plant, file, test, arguments, monkeypatch)
