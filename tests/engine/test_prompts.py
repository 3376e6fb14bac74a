"""Prompts as people bring them: text of chat templates, ids in every form, what tokenizers return, and refusals."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits
from oracles.toy_tokenizer import byte_tokenizer
from transformers import BatchEncoding

from specdec_fast import Engine, SamplingParams
from specdec_fast.engine.prompts import encode_prompt, split_prompts

WORDS = ["<s>", "</s>", "<unk>", "<de>", "hello", "world"]


@cache
def word_tokenizer(single: str = "<s> $A") -> Any:
    """Returns a tokenizer that puts special tokens around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [(word, at) for at, word in enumerate(WORDS) if word in single.split()]
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize(
    ("single", "text", "ids"),
    [
        ("<s> $A", "hello world", [0, 4, 5]),
        ("<s> $A", "<s> hello world", [0, 4, 5]),
        ("<s> $A", "<s><s> hello", [0, 0, 4]),  # written twice on purpose
        ("<s> $A", "<s>", [0]),
        ("<s> $A", "hello hello", [0, 4, 4]),
        ("$A", "hello hello", [4, 4]),
        ("$A", "<s> <s> hello", [0, 0, 4]),
        ("<s> $A </s>", "<s> hello", [0, 4, 1]),
        ("<s> $A </s>", "hello", [0, 4, 1]),
        ("<s> <de> $A", "<s> <de> hello", [0, 3, 4]),
        ("<s> <de> $A", "<s> hello", [0, 3, 0, 4]),  # it begins with a part only
        ("$A </s>", "hello </s>", [4, 1, 1]),
    ],
)
def test_text_never_gets_the_beginning_that_it_has(single: str, text: str, ids: list[int]) -> None:
    assert encode_prompt(text, word_tokenizer(single), 300) == ids


def test_special_tokens_can_be_added_or_left_out() -> None:
    tokenizer = word_tokenizer()
    assert encode_prompt("<s> hello", tokenizer, 300, True) == [0, 0, 4]
    assert encode_prompt("hello", tokenizer, 300, False) == [4]
    assert encode_prompt([4], tokenizer, 300, True) == [4], "ids stay as they are"
    with pytest.raises(ValueError, match="add_special_tokens: got 'no'; expected True, False or None"):
        encode_prompt("hello", tokenizer, 300, "no")  # type: ignore[arg-type]


def test_the_engine_passes_the_choice_on() -> None:
    engine = Engine(AutomatonTarget(random_logits(23, 6, seed=2)), tokenizer=word_tokenizer())
    short = SamplingParams(max_new_tokens=1, seed=1)
    for choice, ids in ((None, [0, 4]), (True, [0, 0, 4]), (False, [0, 4])):
        handles = [
            engine.submit("<s> hello", short, add_special_tokens=choice),
            *engine.generate(["<s> hello"], short, add_special_tokens=choice),
        ]
        assert [list(handle.prompt) for handle in handles] == [ids, ids]
        assert engine.encode("<s> hello", add_special_tokens=choice) == ids


def mask(ids: Any, hidden: Any) -> BatchEncoding:
    return BatchEncoding({"input_ids": ids, "attention_mask": hidden, "token_type_ids": ids})


ONE = {
    "list": [1, 2],
    "tuple": (1, 2),
    "tensor": torch.tensor([1, 2]),
    "int32 tensor": torch.tensor([1, 2], dtype=torch.int32),
    "array": np.array([1, 2], dtype=np.uint16),
    "list of scalars": [torch.tensor(1), np.int64(2)],
    "generator": iter([1, 2]),
    "range": range(1, 3),
    "one row": [[1, 2]],
    "tensor of one row": torch.tensor([[1, 2]]),
    "array of one row": np.array([[1, 2]]),
    "list of a tensor": [torch.tensor([1, 2])],
    "mapping": {"input_ids": [1, 2]},
    "encoding": mask(torch.tensor([[1, 2]]), torch.tensor([[1, 1]])),
    "padded on the left": mask([[9, 9, 1, 2]], [[0, 0, 1, 1]]),
    "padded on the right": {"input_ids": np.array([1, 2, 9]), "attention_mask": np.array([True, True, False]) * 1},
    "padded on both sides": mask(torch.tensor([[9, 1, 2, 9]]), torch.tensor([[0, 1, 1, 0]])),
}


@pytest.mark.parametrize("form", ONE)
def test_ids_come_in_every_form(form: str) -> None:
    assert encode_prompt(ONE[form], None, 10) == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"abc", "prompt: got b'abc'; expected text or a sequence of token ids"),
        ([True, 2], "expected text or a sequence of token ids"),
        ([1.5], "expected text or a sequence of token ids"),
        (torch.tensor([0.5]), "expected text or a sequence of token ids"),
        (torch.zeros(1, 1, 2, dtype=torch.int64), "expected text or a sequence of token ids"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "expected text or a sequence of token ids"),
        (torch.tensor(3), "expected text or a sequence of token ids"),
        (7, "expected text or a sequence of token ids"),
        (None, "expected text or a sequence of token ids"),
        (["hello"], "expected text or a sequence of token ids"),
        ([[1, 2], 3], "expected text or a sequence of token ids"),
        ([[1, 2], [3, 4]], "got 2 rows of token ids; expected one; generate takes several prompts"),
        (torch.ones(3, 2, dtype=torch.int64), "got 3 rows of token ids; expected one"),
        ([[]], "got no tokens"),
        ([], "got no tokens"),
        (torch.zeros(0, dtype=torch.int64), "got no tokens"),
        (torch.zeros(0, 2, dtype=torch.int64), "got no tokens"),
        (mask([[1, 2]], [[0, 0]]), "got no tokens"),
        ({"ids": [1]}, "got a mapping of ids; expected input_ids, as a tokenizer returns them"),
        (mask([[1, 2]], [[1]]), "got an attention_mask of another shape than input_ids"),
        (mask([[1, 2, 3]], [[1, 0, 1]]), "got an attention_mask with gaps; expected padding before or behind"),
        ({"input_ids": [1], "pixel_values": 0}, "got pixel_values beside input_ids; expected token ids of text alone"),
        ([11], r"got token id 11; expected 0\.\.9"),
    ],
)
def test_what_is_no_prompt_is_refused_in_words(prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_prompt(prompt, None, 10)


def test_text_that_the_tokenizer_refuses_is_a_bad_prompt() -> None:
    assert encode_prompt("a b", byte_tokenizer(), 300)
    message = r"prompt: got 'a.ud83d b', which the tokenizer cannot encode .*expected Unicode"
    with pytest.raises(ValueError, match=message):
        encode_prompt("a\ud83d b", byte_tokenizer(), 300)


@pytest.mark.parametrize(
    "batch",
    [
        [[1, 2], [3]],
        ([1, 2], torch.tensor([3])),
        {"input_ids": [[1, 2], [3]]},
        mask([[1, 2], [0, 3]], [[1, 1], [0, 1]]),
        mask(torch.tensor([[1, 2], [0, 3]]), torch.tensor([[1, 1], [0, 1]])),
    ],
)
def test_a_batch_has_several_prompts(batch: Any) -> None:
    engine = Engine(AutomatonTarget(random_logits(23, 6, seed=2)))
    handles = engine.generate(batch, SamplingParams(max_new_tokens=1, seed=1))
    assert [list(handle.prompt) for handle in handles] == [[1, 2], [3]]


def test_a_tensor_of_rows_is_a_batch() -> None:
    rows = [encode_prompt(row, None, 10) for row in split_prompts(torch.tensor([[1, 2], [3, 4]]))]
    assert rows == [[1, 2], [3, 4]]


@pytest.mark.parametrize("prompts", [[1, 2], torch.tensor([1, 2]), (np.int64(3),)])
def test_the_ids_of_one_prompt_are_no_batch(prompts: Any) -> None:
    with pytest.raises(
        ValueError, match="prompts: got the token ids of one prompt; expected a list of prompts; put it"
    ):
        split_prompts(prompts)


def test_a_number_is_no_batch() -> None:
    with pytest.raises(ValueError, match="prompts: got 7; expected a list of prompts"):
        split_prompts(7)


def test_a_bad_prompt_of_a_batch_is_refused_alone() -> None:
    engine = Engine(AutomatonTarget(random_logits(23, 6, seed=2)))
    batch: Any = [[1], [[1], [2]], mask([[1, 2, 3]], [[1, 0, 1]]), {"input_ids": [2]}]
    handles = engine.generate(batch, SamplingParams(max_new_tokens=1, seed=1))
    assert [handle.finish_reason for handle in handles] == ["length", "error", "error", "length"]


class Recording:
    """A tokenizer that records how much text it encodes."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.sizes = inner, list[int]()

    def encode(self, text: str, **options: Any) -> list[int]:
        self.sizes.append(len(text))
        found: list[int] = self.inner.encode(text, **options)
        return found


def test_of_a_text_that_cannot_fit_the_beginning_alone_is_encoded() -> None:
    target = AutomatonTarget(random_logits(23, 300, seed=2), max_length=8)
    tokenizer = Recording(byte_tokenizer())
    engine = Engine(target, tokenizer=tokenizer)
    words = (
        r"prompt: got 1000000 characters, the first 128 of which are 128 tokens; expected fewer than the context lim"
    )
    with pytest.raises(ValueError, match=words):
        engine.submit("x" * 1_000_000)
    assert tokenizer.sizes == [128]
    assert len(engine.encode("x" * 1000)) == 1000, "texts may be encoded without being submitted"


def test_a_text_of_many_characters_and_few_tokens_is_served() -> None:
    """This tokenizer drops blanks, and a long word is a single token."""
    target = AutomatonTarget(random_logits(23, 300, seed=2), max_length=8)
    engine = Engine(target, tokenizer=word_tokenizer())
    long = " " * 3000 + "x" * 3000 + " world" + " " * 3000
    assert engine.submit(long).prompt == [0, 2, 5]


def test_text_that_cannot_be_encoded_keeps_its_reason() -> None:
    engine = Engine(AutomatonTarget(random_logits(23, 300, seed=2), max_length=8), tokenizer=byte_tokenizer())
    with pytest.raises(ValueError, match="lone surrogates"):
        engine.submit("\ud800" * 1000)
