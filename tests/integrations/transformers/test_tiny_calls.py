"""What must hold of every call, on tiny models: processors, criteria, rows, seeds, scores, streams.

tests/mutants/test_attached_mutants.py plants a mistake for each of these tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec_fast.integrations.transformers import attach, detach
from specdec_fast.targets.tiny_models import tiny_model

V = 24
PROMPTS = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 7], [0, 9, 3, 4]])
PADDED = {"input_ids": PROMPTS, "attention_mask": (PROMPTS != 0).long()}
SHAPE = {"vocab_size": V, "num_hidden_layers": 1, "eos_token_id": 1, "pad_token_id": 0}
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def pair() -> tuple[Any, Any]:
    """A model, and the same one attached, with a draft model that is often right."""
    draft = tiny_model("llama", **SHAPE)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return tiny_model("llama", **SHAPE), attach(tiny_model("llama", **SHAPE), draft, num_draft_tokens=4)


def last_two(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor of a user: what it likes depends on the last two tokens and on the length of the text."""
    liked = (input_ids[:, -1] * 3 + input_ids[:, -2] + input_ids.shape[1]) % V
    return scores.scatter_add(1, liked[:, None], torch.full((len(scores), 1), 6.0))


def test_processors_see_the_text_of_every_node() -> None:
    stock, model = pair()
    given = {**PADDED, **GREEDY, "logits_processor": [last_two]}
    assert torch.equal(model.generate(**given), stock.generate(**given))
    assert model.specdec.engine.stats.alpha > 0.05


def test_processors_see_padding_as_in_transformers() -> None:
    stock, model = pair()
    prompts = torch.tensor([[7, 7, 7, 7, 7, 5, 6, 7], [3, 4, 5, 7, 3, 9, 8, 4]])  # 7 is padding here, and a token
    mask = torch.ones_like(prompts)
    mask[0, :5] = 0
    likes = {"sequence_bias": {(5,): 30.0, (7,): 25.0}}
    for more in ({"logits_processor": [last_two]}, {"no_repeat_ngram_size": 2, **likes}, {"repetition_penalty": 3.0}):
        given = {"input_ids": prompts, "attention_mask": mask, **GREEDY, **more, "pad_token_id": 7}
        assert torch.equal(model.generate(**given), stock.generate(**given)), more


def test_every_row_has_its_own_allowed_tokens() -> None:
    stock, model = pair()

    def allowed(row: int, text: torch.Tensor) -> list[int]:
        return [2 + 5 * row + at for at in range(5)]

    given = {**PADDED, **GREEDY, "prefix_allowed_tokens_fn": allowed}
    found = model.generate(**given)
    assert torch.equal(found, stock.generate(**given))
    assert ((found[:, 4:] - 2) // 5 == torch.arange(3)[:, None]).all()


def test_criteria_are_asked_for_every_token() -> None:
    stock, model = pair()
    for ends in range(2, 12):
        given = {"input_ids": PROMPTS[1:2], **GREEDY}

        def stops(input_ids: torch.Tensor, scores: Any, ends: int = ends, **_: Any) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] == 4 + ends])  # at this length alone, which a step may pass

        expected = stock.generate(**given, stopping_criteria=[stops])
        assert torch.equal(model.generate(**given, stopping_criteria=[stops]), expected)


def test_rows_of_one_prompt_differ() -> None:
    _, model = pair()
    found = model.generate(PROMPTS[1:2], max_new_tokens=12, do_sample=True, num_return_sequences=4, seed=3)
    assert len({tuple(row) for row in found.tolist()}) == 4


def test_scores_belong_to_their_tokens() -> None:
    stock, model = pair()
    given = {**PADDED, **GREEDY, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    given |= {"logits_processor": [last_two], "eos_token_id": None}
    theirs, ours = stock.generate(**given), model.generate(**given)
    for name in ("scores", "logits"):
        found, expected = torch.stack(getattr(ours, name)), torch.stack(getattr(theirs, name))
        assert torch.allclose(found, expected, atol=1e-4), name


def test_a_text_ends_behind_its_end_of_sequence() -> None:
    """With padding, of the length of the longest."""
    stock, model = pair()
    for token in range(2, V):
        given = {**PADDED, **GREEDY, "eos_token_id": [token, (token + 9) % V], "pad_token_id": 1}
        assert torch.equal(model.generate(**given), stock.generate(**given))


def test_the_model_s_forward_has_its_own_attention_between_calls() -> None:
    stock, model = pair()
    model.generate(**PADDED, **GREEDY)
    assert model.config._attn_implementation == stock.config._attn_implementation
    model.specdec.engine.generate([[3, 4]])
    model.generate(**PADDED, **GREEDY)
    assert torch.allclose(model(**PADDED).logits, stock(**PADDED).logits, atol=1e-4)


def test_a_stream_ends_though_the_call_fails() -> None:
    _, model = pair()

    class Counts:
        ends = 0

        def put(self, value: torch.Tensor) -> None:
            pass

        def end(self) -> None:
            self.ends += 1

    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("broken")

    for more in ({"logits_processor": [broken]}, {"nonsense": 1}):
        counts = Counts()
        with pytest.raises((KeyError, ValueError)):
            model.generate(PROMPTS[1:2], **GREEDY, streamer=counts, **more)
        assert counts.ends == 1
    assert model.specdec.engine.idle


@pytest.mark.parametrize("rows", [1, 3])
def test_a_call_ends_with_an_error_if_the_model_is_detached_meanwhile(rows: int) -> None:
    stock, model = pair()

    class Detaches:
        got: list[Any]

        def __init__(self) -> None:
            self.got = []

        def put(self, value: torch.Tensor) -> None:
            self.got.append(value)
            if len(self.got) == 3:
                detach(model)

        def end(self) -> None:
            self.got.append("end")

    streamer = Detaches()
    with pytest.raises(RuntimeError, match=r"got detach\(model\) while it ran"):
        model.generate(PROMPTS[-rows:], **GREEDY, eos_token_id=None, streamer=streamer)
    assert streamer.got[-1] == "end"
    assert torch.equal(model.generate(**PADDED, **GREEDY), stock.generate(**PADDED, **GREEDY))
