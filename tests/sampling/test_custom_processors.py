"""Custom logits processors: kinds of callables, what is refused, and what is said of wrong results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor as TransformersProcessor
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, SynthIDTextWatermarkLogitsProcessor
from transformers import TemperatureLogitsWarper as Warper

from specdec_fast import LogitsProcessor, SamplingParams
from specdec_fast.sampling.custom_processors import CustomProcessors

VOCAB = 5
SEEN: list[Any] = []


def whole_text(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    SEEN.append(token_ids)
    return logits + 1


def as_in_vllm(prompt_token_ids: list[int], output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    SEEN.append((prompt_token_ids, output_token_ids))
    return logits + 1


class Ours:
    def __call__(self, token_ids: list[int], logits: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        SEEN.append(token_ids)
        return logits + scale


class Theirs(TransformersProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.dtype == torch.int64 and scores.shape == (1, VOCAB)
        SEEN.append(input_ids.tolist())
        return scores + 1


TREE = ([9, 1, 2, 3], [-1, 0, 0, 2])


@pytest.mark.parametrize(
    ("processor", "seen"),
    [
        (whole_text, [[7, 8, 9], [7, 8, 9, 2, 3]]),
        (Ours(), [[7, 8, 9], [7, 8, 9, 2, 3]]),
        (as_in_vllm, [([7, 8], [9]), ([7, 8], [9, 2, 3])]),
        (Theirs(), [[[7, 8, 9]], [[7, 8, 9, 2, 3]]]),
    ],
    ids=["function", "object", "three arguments", "transformers"],
)
def test_every_kind_of_callable_gets_the_node_s_text(processor: Any, seen: list[Any]) -> None:
    assert isinstance(processor, LogitsProcessor)
    SEEN.clear()
    made = CustomProcessors(SamplingParams(logits_processors=[processor]).logits_processors, 2, [7, 8])
    made.append([9])
    logits = torch.zeros(3, VOCAB)
    assert made.apply(logits, {0: 2, 3: 0}, *TREE) == {}
    assert seen == SEEN
    assert logits.tolist() == [[1.0] * VOCAB, [0.0] * VOCAB, [1.0] * VOCAB]


def test_processors_run_in_order_each_on_a_copy_of_the_text() -> None:
    def halves(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        token_ids.clear()
        return (logits / 2).bfloat16()

    logits = torch.full((1, VOCAB), 3.0)
    CustomProcessors([whole_text, halves, whole_text], 1, [7]).apply(logits, {0: 0}, [7], [-1])
    assert logits.tolist() == [[3.0] * VOCAB] and SEEN[-1] == [7]


def test_lists_of_transformers_are_lists() -> None:
    params = SamplingParams(logits_processors=LogitsProcessorList([NoRepeatNGramLogitsProcessor(2), Warper(0.7)]))
    logits = torch.ones(1, VOCAB)
    CustomProcessors(params.logits_processors, 1, [3, 4, 3]).apply(logits, {0: 0}, [3], [-1])
    assert logits[0, 4] == -torch.inf and logits[0, 0] == pytest.approx(1 / 0.7)


WRONG = [
    (lambda token_ids, logits: None, "returned NoneType; expected the logits, a tensor [5]"),
    (lambda token_ids, logits: logits[None], "returned logits of shape [1, 5]; expected [5]"),
    (lambda token_ids, logits: logits[:3], "returned logits of shape [3]; expected [5]"),
    (lambda token_ids, logits: logits.long(), "returned logits of torch.int64; expected torch.float32"),
    (lambda token_ids, logits: logits * torch.nan, "returned nan; expected finite logits"),
    (lambda token_ids, logits: logits + torch.inf, "returned inf; expected finite logits"),
    (lambda token_ids, logits: logits - torch.inf, "forbids every token"),
    (lambda token_ids, logits: logits.fill_(9)[token_ids[0] + 100], "IndexError: "),
]


@pytest.mark.parametrize(("processor", "words"), WRONG)
def test_a_wrong_result_is_named_and_leaves_the_logits(processor: Any, words: str) -> None:
    logits = torch.arange(2.0 * VOCAB).reshape(2, VOCAB)

    def breaks_after_three(token_ids: list[int], given: torch.Tensor) -> torch.Tensor:
        given += 1
        return processor(token_ids, given) if token_ids[-1] == 3 else given  # type: ignore[no-any-return]

    made = CustomProcessors([breaks_after_three], 1, [7])
    failures = made.apply(logits, {0: 0, 3: 1}, *TREE)
    assert list(failures) == [3]
    assert failures[3].reason.startswith("logits processor ") and words in failures[3].reason
    assert logits.tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 6.0, 7.0, 8.0, 9.0]]


def test_logits_that_the_model_broke_are_not_the_processor_s() -> None:
    logits = torch.full((1, VOCAB), torch.nan)
    assert CustomProcessors([whole_text], 1, [7]).apply(logits, {0: 0}, [7], [-1]) == {}
    assert bool(logits.isnan().all())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (whole_text, "expected a sequence of callables; put a single one into a list"),
        ([3], r"expected callables \(token_ids, logits\)"),
        ([Ours], r"expected callables \(token_ids, logits\)"),
        ([lambda logits: logits], "or .prompt_token_ids, output_token_ids, logits. -> logits"),
        ([lambda a, b, c, d: a], "or .prompt_token_ids, output_token_ids, logits. -> logits"),
        (
            [SynthIDTextWatermarkLogitsProcessor(5, keys=[1], sampling_table_size=8, sampling_table_seed=0,
                                                 context_history_size=4, device="cpu")],
            "expected no SynthIDTextWatermarkLogitsProcessor, which keeps a state",
        ),
    ],
)  # fmt: skip
def test_what_is_no_processor_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(logits_processors=given)
