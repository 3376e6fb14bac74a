"""Which processors become sampling parameters, and that these make the same distributions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.distributions import dist
from transformers import (
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import specdec_fast.integrations.transformers.row_processors as row_module
from specdec_fast.integrations.transformers.row_processors import RowLayout, RowProcessor

V = 12


class Custom:
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class HalfTemperature(TemperatureLogitsWarper):
    """A class of a user's, whose code differs from its base."""


CUSTOM, TEMPERATURE, K, P = Custom(), TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.8)
MIN_P, TYPICAL, REPEAT = MinPLogitsWarper(0.1), TypicalLogitsWarper(0.5), RepetitionPenaltyLogitsProcessor(1.3)
NGRAM, BAN, NORMAL = NoRepeatNGramLogitsProcessor(2), SuppressTokensLogitsProcessor([3, 4]), LogitNormalization()
HALF = HalfTemperature(0.5)
SPLITS: list[tuple[list[Any], dict[str, Any], list[Any]]] = [
    ([], {"temperature": 1.0}, []),
    ([TEMPERATURE, K, P, MIN_P], {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.1}, []),
    ([CUSTOM, TEMPERATURE, P], {"temperature": 0.7, "top_p": 0.8}, [CUSTOM]),
    ([REPEAT, NGRAM, BAN, K], {"temperature": 1.0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2,
                               "banned_token_ids": (3, 4), "top_k": 5}, []),
    # another order than that of the engine, and what follows a processor that is none of its parameters
    ([P, K], {"temperature": 1.0, "top_k": 5}, [P]),
    ([K, TEMPERATURE], {"temperature": 0.7}, [K]),
    ([TEMPERATURE, K, TYPICAL], {"temperature": 1.0}, [TEMPERATURE, K, TYPICAL]),
    ([TEMPERATURE, CUSTOM, K], {"temperature": 1.0, "top_k": 5}, [TEMPERATURE, CUSTOM]),
    ([REPEAT, CUSTOM, K], {"temperature": 1.0, "top_k": 5}, [REPEAT, CUSTOM]),
    ([TEMPERATURE, TEMPERATURE], {"temperature": 0.7}, [TEMPERATURE]),
    ([REPEAT, REPEAT], {"temperature": 1.0, "repetition_penalty": 1.3}, [REPEAT]),
    ([HALF, K], {"temperature": 1.0, "top_k": 5}, [HALF]),
    ([TEMPERATURE, NORMAL], {"temperature": 0.7}, []),
    ([NORMAL, K], {"temperature": 1.0, "top_k": 5}, [NORMAL]),
    # values that the engine has not
    ([TopPLogitsWarper(0.0)], {"temperature": 1.0}, ["same"]),
    ([TopKLogitsWarper(2, min_tokens_to_keep=3)], {"temperature": 1.0}, ["same"]),
    ([TopKLogitsWarper(2, filter_value=-5.0)], {"temperature": 1.0}, ["same"]),
    ([TemperatureLogitsWarper(1e-4)], {"temperature": 1.0}, ["same"]),
    ([RepetitionPenaltyLogitsProcessor(500.0)], {"temperature": 1.0}, ["same"]),
    ([SuppressTokensLogitsProcessor(range(V))], {"temperature": 1.0}, ["same"]),
    ([RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=2)], {"temperature": 1.0}, ["same"]),
]  # fmt: skip


def row_of(hidden: int = 0, index: int = 0, rows: int = 1) -> RowLayout:
    shown = torch.ones(6, dtype=torch.bool)
    shown[:hidden] = False
    return RowLayout(index, rows, torch.tensor([0, 0, 7, 8, 7, 9]), shown)


def split(processors: list[Any], row: RowLayout, do_sample: bool = True) -> tuple[dict[str, Any], list[Any]]:
    return row_module.split_processors(processors, row, do_sample=do_sample, stop_ids=[1], max_new_tokens=8, vocab=V)


def check_split(processors: list[Any], fields: dict[str, Any], rest: list[Any]) -> None:
    found, left = split(processors, row_of())
    assert found == fields, processors
    assert left == (processors if rest == ["same"] else rest)


def test_the_engine_keeps_the_order() -> None:
    for processors, fields, rest in SPLITS:
        check_split(processors, fields, rest)


def test_greedy_texts_keep_the_warpers_of_users() -> None:
    """transformers applies those in `logits_processor` at temperature 0 too."""
    assert split([REPEAT, K], row_of(), do_sample=False) == ({"temperature": 0.0}, [REPEAT, K])


def test_padding_counts_as_in_transformers() -> None:
    """Its n-grams have padding in them; its penalty leaves out what it is asked to, which must be the padding."""
    ignoring = RepetitionPenaltyLogitsProcessor(1.3)
    ignoring.prompt_ignore_length = torch.tensor([0, 2])  # as `generate` does; older versions check the argument
    assert split([ignoring], row_of(2, 1, 2)) == ({"temperature": 1.0, "repetition_penalty": 1.3}, [])
    for processor, row in ((ignoring, row_of(2, 0, 2)), (REPEAT, row_of(2)), (NGRAM, row_of(2))):
        assert split([processor], row) == ({"temperature": 1.0}, [processor])


LAWS = [each for each in SPLITS if not each[2] and all(each is not REPEAT and each is not NGRAM for each in each[0])]
LAWS += [([TEMPERATURE, K, MIN_P], {}, []), ([K, P], {}, []), ([P, MIN_P], {}, []), ([TopPLogitsWarper(0.35)], {}, [])]


@pytest.mark.parametrize("at", range(len(LAWS)))
def test_the_law_is_that_of_the_processors(at: int) -> None:
    """The oracle of this project's filters against transformers' own code, on random logits without ties."""
    processors, logits = LAWS[at][0], torch.randn(50, V, generator=torch.Generator().manual_seed(at)) * 3
    fields, rest = split(processors, row_of())
    assert not rest
    banned = list(fields.pop("banned_token_ids", ()))
    theirs = LogitsProcessorList(processors)(torch.zeros(50, 1, dtype=torch.int64), logits.clone()).softmax(-1)
    logits[:, banned] = -torch.inf
    ours = torch.stack([torch.as_tensor(dist(each, **fields)) for each in logits])
    torch.testing.assert_close(ours.float(), theirs, atol=1e-5, rtol=1e-4)


def test_a_smaller_draft_model_does_not_confuse_processors() -> None:
    """Some remember the width of the scores of their first call."""
    from transformers import SequenceBiasLogitsProcessor

    row = row_of()
    processor = RowProcessor([SequenceBiasLogitsProcessor({(2,): 5.0, (V - 1,): 3.0})], row, V)
    text = [*row.prompt, 4]
    assert processor(text, torch.zeros(V - 2)).tolist() == [5.0 if at == 2 else 0.0 for at in range(V - 2)]
    assert processor(text, torch.zeros(V)).tolist() == [{2: 5.0, V - 1: 3.0}.get(at, 0.0) for at in range(V)]


def test_scores_are_kept_until_they_are_taken() -> None:
    row = row_of()
    processor = RowProcessor([lambda ids, scores: scores * 2], row, V, keeps_scores=True)
    for text in ([], [4], [5], [4, 6]):
        processor([*row.prompt, *text], torch.full((V,), float(len(text) + sum(text))))
    taken = processor.take_scores([4, 6, 1], 1)
    assert [(raw[0].item(), scores[0].item()) for raw, scores in taken] == [(5.0, 10.0), (12.0, 24.0)]
    with pytest.raises(KeyError):
        processor.take_scores([4, 6, 1], 1)
