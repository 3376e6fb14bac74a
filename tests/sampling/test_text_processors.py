"""Processors that read texts, on trees of a batch: rows, formats, drafts, failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.toy_chat import chat_tokenizer

from specdec_fast.core.draft import Draft
from specdec_fast.sampling import target_distributions as sampling_module
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.sampling.sampling_tensors import SamplingTable
from specdec_fast.sampling.target_distributions import (
    chain_distributions,
    find_invalid_distributions,
    target_distributions,
)
from specdec_kernels import tree_plan

VOCAB = 6


def forbids_the_sum(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[sum(token_ids) % VOCAB] = -torch.inf
    return logits


def fails_after_four(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    if token_ids[-1] == 4:
        raise KeyError("four")
    return logits


def batch(*rows: dict[str, Any]) -> Any:
    table = SamplingTable(torch.device("cpu"))
    for row, changes in enumerate(rows):
        table.set(row, SamplingParams(seed=1, **changes), 2, (), [1, 2])
    return table.pack(range(len(rows)))


TREE = ([2, 1, 4, 3, 5], [-1, 0, 0, 2, 3])
TEXTS = [[1, 2], [1, 2, 1], [1, 2, 4], [1, 2, 4, 3], [1, 2, 4, 3, 5]]


def distributions(draft: Draft, logits: torch.Tensor, sampling: Any, folds: bool = False) -> Any:
    roots = torch.ones(len(draft.counts), dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampling_module, "uses_overlay", lambda logits: folds)
        return target_distributions(draft, tree_plan(draft.parents, draft.offsets), logits, sampling, roots)


@pytest.mark.filterwarnings("ignore:process_logits_overlay runs on its slow PyTorch reference")
@pytest.mark.parametrize("folds", [False, True], ids=["in place", "overlay"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_node_is_processed_with_its_own_text(dtype: torch.dtype, folds: bool) -> None:
    """A custom processor in one request, bigrams in another, a third without any."""
    sampling = batch({"logits_processors": [forbids_the_sum]}, {"no_repeat_ngram_size": 2, "logit_bias": {0: 1.0}}, {})
    draft = Draft.trees([0, 1, 2], [TREE, ([2, 1, 2], [-1, 0, 1]), TREE])
    logits = torch.randn(draft.num_nodes, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    probs = distributions(draft, logits.clone(), sampling, folds).probs()
    for node, text in enumerate(TEXTS):
        row = logits[node].float()
        row[sum(text) % VOCAB] = -torch.inf
        assert torch.allclose(probs[node].float(), row.softmax(0), atol=1e-6), text
        assert torch.allclose(probs[8 + node].float(), logits[8 + node].float().softmax(0), atol=1e-6)
    for node, banned in ((5, []), (6, [2]), (7, [1])):  # after [1, 2], [1, 2, 1] and [1, 2, 1, 2]
        row = logits[node].float()
        row[0] += 1
        row[banned] = -torch.inf
        assert torch.allclose(probs[node].float(), row.softmax(0), atol=1e-6), node


def test_only_failures_on_the_accepted_path_count() -> None:
    sampling = batch({"logits_processors": [fails_after_four]}, {"logits_processors": [fails_after_four]})
    draft = Draft.trees([0, 1], [TREE, TREE])
    dists = distributions(draft, torch.zeros(draft.num_nodes, VOCAB), sampling)
    assert not dists.lse.isnan().any(), "rules meet a distribution at every node"
    path = torch.tensor([[0, 1, -1], [5, 7, 8]], dtype=torch.int32)
    found = find_invalid_distributions(path, dists, sampling)
    assert found == {1: (1, "logits processor fails_after_four: KeyError: 'four'")}
    whole = Draft.trees([0, 1], [([2], [-1])] * 2)
    again = distributions(whole, torch.zeros(2, VOCAB), sampling)
    assert find_invalid_distributions(torch.tensor([[0], [1]]).int(), again, sampling) == {}, "failures of another step"


def test_a_draft_whose_processor_fails_keeps_its_distribution() -> None:
    sampling = batch({"logits_processors": [fails_after_four]}, {"logits_processors": [forbids_the_sum]})
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(2))  # a draft with a smaller vocabulary
    dists = chain_distributions(logits, sampling, torch.ones(2, dtype=torch.int32), [[2, 4], [2, 2]])
    assert torch.allclose(dists.probs(), logits.softmax(1)), "token 5 is forbidden, which the draft does not know"
    assert find_invalid_distributions(torch.tensor([[0], [1]]).int(), dists, sampling) == {}


class Letters:
    """A tokenizer of single letters, in which a space before a letter makes another token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        spaced = text.startswith(" ")
        return [ord(each) - 97 + 10 * (spaced and not at) for at, each in enumerate(text.strip(" "))]


def test_texts_stand_for_their_tokens_with_and_without_a_space() -> None:
    params = SamplingParams(bad_words=["ab", " c", (3, 4)])
    assert params.with_bad_word_ids(Letters()).bad_word_ids == ((0, 1), (10, 1), (2,), (12,), (3, 4))
    plain = SamplingParams(bad_words=[[3, 4]])
    assert plain.with_bad_word_ids(None) is plain
    with pytest.raises(ValueError, match="bad_words: got texts and an engine without a tokenizer"):
        params.with_bad_word_ids(None)
    with pytest.raises(ValueError, match="which has no tokens"):
        SamplingParams(bad_words=["  "]).with_bad_word_ids(Letters())
    with pytest.raises(ValueError, match=r"bad_words: got '.ud800'; expected text that the tokenizer encodes"):
        SamplingParams(bad_words=["\ud800"]).with_bad_word_ids(chat_tokenizer())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size: got -1; expected a positive integer up to 1024, or 0"),
        ({"no_repeat_ngram_size": 2.0}, "no_repeat_ngram_size: got 2.0"),
        ({"no_repeat_ngram_size": 1025}, "no_repeat_ngram_size: got 1025; expected a positive integer up to 1024"),
        ({"bad_words": [[1] * 1025]}, "bad_words: got '1025 tokens'; expected words of at most 1024 tokens"),
        ({"bad_words": "word"}, "bad_words: got 'word'; expected a sequence of texts"),
        ({"bad_words": [""]}, "bad_words: got .*; expected words that are not empty"),
        ({"bad_words": [()]}, "bad_words: got .*; expected words that are not empty"),
        ({"bad_words": [(1, -2)]}, "bad_words: got .*; expected a sequence of token ids"),
        ({"bad_words": [5]}, "bad_words: got 5; expected a sequence of token ids"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**changes)


def test_ids_are_checked_against_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="bad_words: got 6; expected ids below 6"):
        SamplingParams(bad_words=[(1, 6)]).check(VOCAB)


def test_iterators_are_read_once() -> None:
    processors = [forbids_the_sum]
    params = SamplingParams(logits_processors=iter(processors), bad_words=iter(["a"]), stop=iter(["b"]))  # type: ignore[arg-type]
    assert (params.logits_processors, params.bad_words, params.stop) == ((forbids_the_sum,), ("a",), ("b",))
