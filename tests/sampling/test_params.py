"""SamplingParams: errors name the value and what is expected; good values are normalised."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from specdec_fast.sampling.params import SamplingParams

BAD = [
    ("temperature", -0.1),
    ("temperature", 1e-4),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 1e39),
    ("temperature", "1"),
    ("temperature", True),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 2**31),
    ("top_k", True),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", 1e-50),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("max_new_tokens", -1),
    ("max_new_tokens", 2.0),
    ("min_new_tokens", -1),
    ("min_new_tokens", 129),
    ("stop", ("",)),
    ("stop", ("a", 3)),
    ("stop", 7),
    ("stop_token_ids", (1, -2)),
    ("stop_token_ids", ("a",)),
    ("stop_token_ids", 5),
    ("stop_token_ids", "12"),
    ("stop_token_ids", (True,)),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 101),
    ("repetition_penalty", math.nan),
    ("presence_penalty", math.inf),
    ("presence_penalty", "1"),
    ("frequency_penalty", -100.5),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", {1: "a"}),
    ("logit_bias", [(1, 2.0)]),
    ("logit_bias", {1: 1e5}),
    ("banned_token_ids", (-1,)),
    ("banned_token_ids", 3),
    ("banned_token_ids", (2**31,)),
    ("allowed_token_ids", ()),
    ("allowed_token_ids", (1.0,)),
    ("forced_tokens", {-1: 2}),
    ("forced_tokens", {0: -2}),
    ("forced_tokens", (1, "a")),
    ("logprobs", -1),
    ("logprobs", 1001),
    ("logprobs", True),
    ("grammar", "[a-z]+"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_errors_name_the_value_and_what_is_expected(name: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert f"SamplingParams.{name}: got" in message and "expected" in message
    assert repr(value) in message


def test_good_parameters_are_normalised() -> None:
    made = SamplingParams(stop="END", stop_token_ids=[3, 4], temperature=0)
    assert made.stop == ("END",) and made.stop_token_ids == (3, 4)
    assert SamplingParams(min_new_tokens=5, max_new_tokens=5).min_new_tokens == 5
    assert SamplingParams(top_p=1.0, min_p=1.0, top_k=0, seed=2**63 - 1).seed == 2**63 - 1


def test_logits_processors_are_normalised() -> None:
    made = SamplingParams(
        logit_bias={3: 1}, banned_token_ids=[1], allowed_token_ids=range(3), forced_tokens=[7, 8], logprobs=0
    )
    assert made.logit_bias == {3: 1} and made.banned_token_ids == (1,) and made.allowed_token_ids == (0, 1, 2)
    assert made.forced_tokens == made.forced == {0: 7, 1: 8} and made.logprobs == 0
    assert hash(made) == hash(made.with_seed().__class__(**{f: getattr(made, f) for f in made.__slots__}))
    with pytest.raises(ValueError, match=r"forced_tokens: got 5; expected an index below 5"):
        SamplingParams(max_new_tokens=5, forced_tokens={5: 1})


@pytest.mark.parametrize("wanted", [{"min_new_tokens": 2**30}, {"forced_tokens": {2**30: 3}}], ids=str)
def test_positions_stay_int32(wanted: dict[str, object]) -> None:
    """A position beyond int32 would otherwise fail inside a batch."""
    with pytest.raises(ValueError, match=str(2**30)):
        SamplingParams(max_new_tokens=2**40, **wanted)


def test_limits_are_checked_against_a_vocabulary() -> None:
    """The limits themselves; tests/engine/test_public_interface.py tests the engine's errors."""
    SamplingParams(banned_token_ids=range(9)).check(10)
    SamplingParams(banned_token_ids=(9,), logit_bias={9: 1.0}, stop_token_ids=(9,)).check(10, (9,))
    SamplingParams(min_new_tokens=3).check(10, range(9))
    SamplingParams(min_new_tokens=3, forced_tokens={3: 4}).check(10, (4,))
    with pytest.raises(ValueError, match="forced_tokens: got 4, which ends the text, at 2"):
        SamplingParams(min_new_tokens=3, forced_tokens={2: 4}).check(10, (4,))
    with pytest.raises(ValueError, match="min_new_tokens: got only end-of-sequence ids left"):
        SamplingParams(min_new_tokens=3, banned_token_ids=range(4)).check(10, range(4, 10))
    with pytest.raises(ValueError, match="min_new_tokens: got only end-of-sequence ids left"):
        SamplingParams(min_new_tokens=3).check(10, range(10))


def test_a_seed_is_drawn_once_and_kept() -> None:
    params = SamplingParams()
    one, two = params.with_seed(), params.with_seed()
    assert params.seed is None and one.seed is not None and one.seed != two.seed and 0 <= one.seed < 2**63
    assert one.with_seed() is one


def test_minus_one_is_off_as_in_vllm() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) and replace(SamplingParams(), top_k=-1).top_k == 0
