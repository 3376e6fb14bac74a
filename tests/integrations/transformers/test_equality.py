"""Attached models generate what plain decoding does, at temperature 0 and 1, and what transformers does at 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_fast.integrations.transformers import attached


class LastTokenPenalty:
    """A logits processor of a user: what follows depends on the last token of the text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, text in enumerate(input_ids):
            scores[row, int(text[-1]) % 7 :: 7] -= 3.0
        return scores


def ends_after(length: int) -> Callable[..., Any]:
    def criterion(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] % 5 == 0 if input_ids.shape[1] > length else torch.zeros(len(input_ids)).bool()

    return criterion


def odd_or_even(row: int, text: torch.Tensor) -> list[int]:
    """Rows have other tokens, so a wrong row shows."""
    return list(range(200 + row % 2, 700, 2))


SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[276], [12, 304]]},
    "min_new_tokens": {"min_new_tokens": 8, "eos_token_id": [0, 276, 12]},
    "several_eos": {"eos_token_id": [276, 12, 608]},
    "suppress": {"suppress_tokens": [12, 335], "begin_suppress_tokens": [270]},
    "forced": {"forced_eos_token_id": 7, "forced_bos_token_id": 3},
    "sequence_bias": {"sequence_bias": {(12,): -9.0, (270, 199): -5.0}},
    "penalty_behind_bias": {"sequence_bias": {(12,): 5.0}, "repetition_penalty": 1.5, "no_repeat_ngram_size": 3},
    "allowed_by_row": {"prefix_allowed_tokens_fn": odd_or_even},
    "encoder": {"encoder_repetition_penalty": 1.4, "encoder_no_repeat_ngram_size": 2},
    "decay": {"exponential_decay_length_penalty": (4, 1.5)},
    "custom": {"logits_processor": [LastTokenPenalty()]},
    "custom_and_penalty": {"logits_processor": [LastTokenPenalty()], "repetition_penalty": 1.2},
    "criterion": {"stopping_criteria": [ends_after(18)]},
    "max_length": {"max_length": 25, "max_new_tokens": None},
    "watermark": {"watermarking_config": {"greenlist_ratio": 0.3, "bias": 2.5}},
    "normalised": {"renormalize_logits": True, "remove_invalid_values": True},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "filters": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "typical": {"typical_p": 0.8, "top_k": 20},
    "cutoffs": {"epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    "entropy": {"top_h": 0.4},
    "three_texts": {"num_return_sequences": 3},
}
OTHERS = {"custom": "ngram", "repetition_penalty": "auto", "several_eos": "eagle3", "allowed_by_row": "suffix"}
"""Settings at which another drafter than a draft model is tried too."""


def generate(model: Any, inputs: Any, settings: dict[str, Any], **more: Any) -> torch.Tensor:
    given = {"max_new_tokens": 16, **settings, **more}
    if "logits_processor" in given or "stopping_criteria" in given:
        from transformers import LogitsProcessorList, StoppingCriteriaList

        kinds = {"logits_processor": LogitsProcessorList, "stopping_criteria": StoppingCriteriaList}
        given |= {name: kind(given[name]) for name, kind in kinds.items() if name in given}
    return model.generate(**inputs, **given)


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_texts_are_those_of_transformers(
    name: str, stock: Any, plain: Any, attached_by: Callable[[str], Any], batch: Any
) -> None:
    expected = generate(stock, batch, SETTINGS[name], do_sample=False)
    if name not in ("nothing", "normalised"):  # else one text would be compared with itself
        assert not torch.equal(expected, generate(plain, batch, {}, do_sample=False))
    assert torch.equal(generate(plain, batch, SETTINGS[name], do_sample=False), expected)
    for drafter in ("draft_model", *filter(None, [OTHERS.get(name)])):
        model = attached_by(drafter)
        assert torch.equal(generate(model, batch, SETTINGS[name], do_sample=False), expected), drafter


@pytest.mark.parametrize("name", [*SETTINGS, *SAMPLED])
def test_sampled_texts_do_not_depend_on_drafts(
    name: str, plain: Any, attached_by: Callable[[str], Any], batch: Any
) -> None:
    settings = {"temperature": 1.0, "top_k": 0, "do_sample": True, **SETTINGS.get(name, {}), **SAMPLED.get(name, {})}
    expected = generate(plain, batch, settings, seed=11)
    for drafter in ("draft_model", *filter(None, [OTHERS.get(name)])):
        model = attached_by(drafter)
        assert torch.equal(generate(model, batch, settings, seed=11), expected), drafter
    assert not torch.equal(generate(plain, batch, settings, seed=12), expected), "texts are not sampled"


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3"])
def test_drafts_are_accepted(drafter: str, attached_by: Callable[[str], Any], batch: Any) -> None:
    """Else the tables above compare plain decoding with itself."""
    model = attached_by(drafter)
    model.generate(**batch, max_new_tokens=16, do_sample=False)
    assert all(handle.stats.tau > 1.2 for handle in attached(model).last)
