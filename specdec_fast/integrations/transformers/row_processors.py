"""From transformers' logits processors to sampling parameters and to callables that one request takes along.

transformers calls its processors once per step, on the batch. Here every row has its own, which are called for every
node of its draft, with the text of that node. Tests: tests/integrations/transformers/test_row_processors.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_fast.integrations.transformers.processor_checks import why_no_scores
from specdec_fast.integrations.transformers.refusals import is_of_transformers
from specdec_fast.sampling.custom_processors import name_of

Fields = dict[str, Any]
"""Fields of `SamplingParams`."""
_IN_ORDER = ("temperature", "top_k", "top_p", "min_p")
_EXACT: dict[str, str] = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "MinLengthLogitsProcessor": "min_new_tokens",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "SuppressTokensLogitsProcessor": "banned_token_ids",
}
"""Classes of transformers -> the field that does the same."""


class RowLayout:
    """One row of the batch that `generate` was called with.

    Args:
        index: The row, counted as transformers does after `num_return_sequences` copies of each prompt.
        rows: Rows of the batch.
        padded: The row as given, int64 [n].
        shown: Which of its tokens the model sees, bool [n].
    """

    def __init__(self, index: int, rows: int, padded: Tensor, shown: Tensor) -> None:
        self.index, self.rows, self.padded = index, rows, padded
        self.prompt: list[int] = padded[shown].tolist()
        self.num_hidden = padded.shape[0] - len(self.prompt)
        self.padded_left = not bool((~shown[self.num_hidden :]).any())


def split_processors(
    processors: Sequence[Any],
    row: RowLayout,
    *,
    do_sample: bool,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    vocab: int,
) -> tuple[Fields, list[Any]]:
    """Splits processors into sampling parameters and those that run as they are.

    Parameters apply behind all others, in an order of their own. So only the last processors become parameters, as
    long as the order of transformers means the same.

    Args:
        processors: The processors of a call, in order.
        row: The row that they are split for.
        do_sample: Whether tokens are sampled.
        stop_ids: Token ids that end the text.
        max_new_tokens: Most tokens of the text.
        vocab: V.

    Returns:
        Fields of `SamplingParams`, and the processors that come before, in order.
    """
    left, fields = list(processors), Fields()
    if do_sample:
        if left and _name(left[-1]) == "LogitNormalization":  # it shifts all scores alike
            left.pop()
        later = len(_IN_ORDER)
        while left and (field := _EXACT.get(_name(left[-1]))) in _IN_ORDER[:later]:
            value = _warper_value(left[-1])
            if value is None:
                break
            later, fields[field] = _IN_ORDER.index(field), value
            left.pop()
    while left:  # penalties and bans: each leaves what the others do as it is
        found = _read_ban_or_penalty(left[-1], row, stop_ids, max_new_tokens, vocab)
        if found is None or (found[0] in fields and found[0] != "min_new_tokens"):
            break
        fields[found[0]] = max(fields.get(found[0], found[1]), found[1])
        left.pop()
    fields.setdefault("temperature", 1.0 if do_sample else 0.0)
    return fields, left


def _name(processor: Any) -> str:
    """Name of a class of transformers; "" for others, derived ones included."""
    kind = type(processor)
    return kind.__name__ if is_of_transformers(kind) else ""


def _warper_value(warper: Any) -> Any:
    """The value of a warper as a sampling parameter takes it, or None if none does."""
    if getattr(warper, "min_tokens_to_keep", 1) > 1 or getattr(warper, "filter_value", -torch.inf) != -torch.inf:
        return None
    name = _EXACT[_name(warper)]
    value = getattr(warper, name)
    ranges = {"temperature": (1e-3, 1e6), "top_k": (1, 2**31 - 1), "top_p": (1e-30, 1.0), "min_p": (0.0, 1.0)}
    least, most = ranges[name]
    if not least <= value <= most:
        return None
    return int(value) if name == "top_k" else float(value)


def _read_ban_or_penalty(
    processor: Any, row: RowLayout, stop_ids: Sequence[int], max_new_tokens: int, vocab: int
) -> tuple[str, Any] | None:
    """The field and value of a processor that penalises or bans tokens, or None if none does the same."""
    name = _name(processor)
    if name == "RepetitionPenaltyLogitsProcessor":
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, Tensor):
            ignored = int(ignored[row.index]) if ignored.shape[0] == row.rows else None
        same = row.padded_left and (ignored or 0) == row.num_hidden
        return ("repetition_penalty", processor.penalty) if same and 0.01 <= processor.penalty <= 100 else None
    if name == "NoRepeatNGramLogitsProcessor":
        in_range = not row.num_hidden and processor.ngram_size <= 1024  # padding is text to transformers
        return ("no_repeat_ngram_size", processor.ngram_size) if in_range else None
    if name in ("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"):
        least = (
            processor.min_length - row.padded.shape[0]
            if name == "MinLengthLogitsProcessor"
            else processor.min_new_tokens + processor.prompt_length_to_skip - row.padded.shape[0]
        )
        same = set(processor.eos_token_id.tolist()) == set(stop_ids)
        return ("min_new_tokens", max(least, 0)) if same and least <= max_new_tokens else None
    if name == "SuppressTokensLogitsProcessor":
        banned = tuple(token for token in processor.suppress_tokens.tolist() if 0 <= token < vocab)
        return ("banned_token_ids", banned) if len(set(banned)) < vocab else None
    return None


def processor_of_row(processor: Any, row: RowLayout) -> Any:
    """Returns a processor for one row of the batch.

    Those of transformers that look up something by row get a copy that looks up this one.

    Args:
        processor: The processor.
        row: The row.
    """
    name = _name(processor)
    if name == "PrefixConstrainedLogitsProcessor":
        own = copy.copy(processor)
        allowed = processor._prefix_allowed_tokens_fn
        own._prefix_allowed_tokens_fn = partial(_allowed_in_row, allowed, row.index)
        return own
    if name == "RepetitionPenaltyLogitsProcessor" and isinstance(processor.prompt_ignore_length, Tensor):
        own = copy.copy(processor)
        own.prompt_ignore_length = processor.prompt_ignore_length[row.index : row.index + 1]
        return own
    if name == "EncoderRepetitionPenaltyLogitsProcessor":
        own = copy.copy(processor)
        at = row.index // (row.rows // processor.encoder_input_ids.shape[0])
        own.encoder_input_ids = processor.encoder_input_ids[at : at + 1]
        return own
    if name == "EncoderNoRepeatNGramLogitsProcessor":
        own = copy.copy(processor)
        at = row.index // (row.rows // processor.batch_size)
        own.generated_ngrams, own.batch_size = [processor.generated_ngrams[at]], 1
        return own
    return processor


def _allowed_in_row(allowed: Callable[[int, Tensor], list[int]], row: int, _: int, text: Tensor) -> list[int]:
    """Asks for the allowed tokens of a row, whatever the number of the row in this call."""
    return allowed(row, text)


class RowProcessor:
    """A logits processor of one request that calls processors of transformers, in order.

    Args:
        processors: The processors, for this row.
        row: The row. Its processors see its padding, as in transformers.
        vocab_size: Columns of the scores that processors get. A draft model may have fewer.
        keeps_scores: Whether scores and logits of every text are kept, for `take_scores`.

    Attributes:
        failures: Exceptions by generated text.
    """

    def __init__(self, processors: Sequence[Any], row: RowLayout, vocab_size: int, keeps_scores: bool = False) -> None:
        self._processors = [processor_of_row(each, row) for each in processors]
        self._given, self._prompt_length, self._vocab = row.padded[None], len(row.prompt), vocab_size
        self._kept: dict[tuple[int, ...], tuple[Tensor, Tensor]] | None = {} if keeps_scores else None
        self.failures: dict[tuple[int, ...], Exception] = {}
        self.__qualname__ = " and ".join(name_of(each) for each in processors)  # for messages

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        """Returns the scores [V] of the next token.

        Args:
            token_ids: Prompt without padding, and text.
            logits: Logits [V].
        """
        text, width = token_ids[self._prompt_length :], logits.shape[0]
        scores = logits[None].float()
        if width < self._vocab:  # a smaller draft model: processors remember the width of their first call
            scores = torch.nn.functional.pad(scores, (0, self._vocab - width), value=-torch.inf)
        raw = scores.clone() if self._kept is not None else scores
        grown = torch.tensor([text], dtype=torch.int64)
        ids = torch.cat((self._given, grown.to(self._given.device)), 1).to(logits.device)
        try:
            for processor in self._processors:
                given, scores = scores, processor(ids, scores)
                _check_scores(processor, scores, given)
        except Exception as error:
            self.failures[tuple(text)] = error
            raise
        if self._kept is not None:
            self._kept[tuple(text)] = (raw[0], scores[0].clone())
        return scores[0, :width]

    @property
    def keeps_scores(self) -> bool:
        """Whether scores and logits of every text are kept."""
        return self._kept is not None

    def take_scores(self, tokens: Sequence[int], known: int) -> list[tuple[Tensor, Tensor]]:
        """Returns logits and scores [V] from which tokens were chosen, and forgets those of other texts.

        Call it between steps.

        Args:
            tokens: The tokens of the text.
            known: Number of tokens whose scores were taken before.
        """
        assert self._kept is not None
        found = [self._kept[tuple(tokens[:at])] for at in range(known, len(tokens))]
        self._kept.clear()
        return found


def _check_scores(processor: Any, found: Any, given: Tensor) -> None:
    """Raises ValueError, with the name of the processor, for what are no scores of this row."""
    reason = why_no_scores(found, given)
    if reason is not None:
        raise ValueError(f"{name_of(processor)} {reason}")
