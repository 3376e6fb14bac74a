"""Seeds, and what a call returns besides texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec_fast import SamplingParams
from specdec_fast.integrations.transformers import attached
from specdec_fast.integrations.transformers.calls import GenerateCall

SAMPLED = {"max_new_tokens": 16, "do_sample": True, "top_k": 0}


def test_the_global_generator_makes_texts_reproducible(drafted: Any, plain: Any, batch: Any) -> None:
    found = []
    for model in (drafted, drafted, plain):
        torch.manual_seed(5)
        found.append([model.generate(**batch, **SAMPLED) for _ in range(2)])
    for other in found[1:]:
        assert all(torch.equal(*each) for each in zip(found[0], other, strict=True))
    assert not torch.equal(*found[0]), "every call has noise of its own"


def test_a_seed_leaves_the_global_generator_alone(drafted: Any, one: Any) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (drafted.generate(**one, **SAMPLED, seed=seed) for seed in (7, 7, 8))
    drafted.generate(**one, max_new_tokens=4, do_sample=False)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_ranks_draw_the_seeds_of_rank_0() -> None:
    """Processes that compute one model have torch generators of their own."""

    class SecondOfTwo:
        def gather(self, numbers: list[int]) -> list[list[int]]:
            return [[7 + at for at in range(len(numbers))], numbers]

    target = SimpleNamespace(ranks=SecondOfTwo())
    attachment: Any = SimpleNamespace(engine=SimpleNamespace(target=target))
    assert GenerateCall(attachment, None)._seeds(3) == [7, 8, 9]
    assert GenerateCall(attachment, 40)._seeds(2) == [40, 41]


def test_seeds_are_those_of_the_engine(drafted: Any, one: Any) -> None:
    engine, prompt = attached(drafted).engine, one.input_ids[0].tolist()
    copies = drafted.generate(**one, **SAMPLED, num_return_sequences=3, seed=40)
    listed = drafted.generate(**one, **SAMPLED, num_return_sequences=3, seed=[42, 41, 40])
    assert torch.equal(copies, listed.flip(0))
    for row in range(3):
        handle = engine.generate([prompt], SamplingParams(seed=40 + row, max_new_tokens=16))[0]
        assert copies[row, len(prompt) :].tolist() == handle.tokens
    assert len({tuple(row) for row in copies.tolist()}) == 3


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, [1], "seven"])
def test_what_is_no_seed_is_refused(seed: Any, drafted: Any, batch: Any) -> None:
    with pytest.raises(ValueError, match=r"got seed .*; expected a number from 0 to"):
        drafted.generate(**batch, **SAMPLED, seed=seed)


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}, {"eos_token_id": [276, 608]}])
def test_scores_and_logits_of_what_was_emitted(settings: dict[str, Any], stock: Any, drafted: Any, batch: Any) -> None:
    more = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **settings}
    theirs, ours = (model.generate(**batch, max_new_tokens=12, do_sample=False, **more) for model in (stock, drafted))
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    ends = torch.isin(ours.sequences[:, batch.input_ids.shape[1] :], torch.tensor([0, 276, 608]))
    ended = (ends.cumsum(1) - ends.long()) > 0
    for name in ("scores", "logits"):
        found, expected = getattr(ours, name), getattr(theirs, name)
        assert len(found) == len(expected)
        for column, pair in enumerate(zip(found, expected, strict=True)):
            inside = ~ended[:, column] if "eos_token_id" in settings else slice(None)
            torch.testing.assert_close(pair[0][inside], pair[1][inside], rtol=1e-4, atol=1e-4)
            if "eos_token_id" in settings:
                assert not pair[0][ended[:, column]].any(), "behind the end of a text there are no scores"
    for name in ("attentions", "hidden_states", "past_key_values"):
        assert getattr(ours, name) is None


def test_scores_of_sampled_texts_are_those_they_were_drawn_from(plain: Any, drafted: Any, batch: Any) -> None:
    more = {"return_dict_in_generate": True, "output_scores": True, "seed": 3, **SAMPLED, "top_k": 20, "top_p": 0.9}
    first, second = (model.generate(**batch, **more) for model in (plain, drafted))
    assert torch.equal(first.sequences, second.sequences)
    for ours, theirs in zip(first.scores, second.scores, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert all(int((scores > -torch.inf).sum()) <= 20 or not scores.any() for scores in ours)
    transitions = drafted.compute_transition_scores(second.sequences, second.scores, normalize_logits=True)
    assert bool(transitions.isfinite().all())
    assert first.logits is None


def test_statistics_of_the_last_call(drafted: Any, batch: Any) -> None:
    drafted.generate(**batch, max_new_tokens=16, do_sample=False)
    last = attached(drafted).last
    assert [len(handle.tokens) for handle in last] == [16] * 3
    assert last[0].stats.tau > 1


def test_the_generation_config_counts(stock: Any, drafted: Any, one: Any) -> None:
    """As an argument, as the model's own, and below keyword arguments."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=9, do_sample=False, repetition_penalty=1.4, eos_token_id=276, pad_token_id=3
    )
    assert torch.equal(
        drafted.generate(**one, generation_config=config), stock.generate(**one, generation_config=config)
    )
    own = {name: getattr(drafted.generation_config, name) for name in ("max_new_tokens", "repetition_penalty")}
    for model in (stock, drafted):
        model.generation_config.max_new_tokens, model.generation_config.repetition_penalty = 7, 1.5
    try:
        for more in ({}, {"repetition_penalty": 1.0}, {"max_new_tokens": 3}):
            assert torch.equal(drafted.generate(**one, **more), stock.generate(**one, **more))
    finally:
        for model in (stock, drafted):
            for name, value in own.items():
                setattr(model.generation_config, name, value)


def test_prompts_in_every_form(stock: Any, drafted: Any, one: Any, batch: Any) -> None:
    greedy: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    unmasked = batch.input_ids[:, -6:]
    holes = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.clone()}
    holes["attention_mask"][:, -3] = 0
    for args, more in (
        ((one.input_ids,), {}),
        ((), {"inputs": one.input_ids}),
        ((), {"input_ids": unmasked}),
        ((batch.input_ids,), {"attention_mask": batch.attention_mask}),
        ((batch.input_ids,), {"attention_mask": batch.attention_mask.bool()}),
        ((), holes),
        ((), {**holes, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2}),
        ((), {}),  # the beginning of sequence alone
    ):
        assert torch.equal(drafted.generate(*args, **more, **greedy), stock.generate(*args, **more, **greedy)), more
