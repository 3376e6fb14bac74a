"""SamplingParams, the table of rows, and `process`, the one owner of the target's distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracles.distributions import dist

from specdec_fast.core.draft import Draft
from specdec_fast.sampling.pipeline import SamplingParams, SamplingTable, target_distributions
from specdec_kernels import replay_sample, tree_plan

BAD = [
    ("temperature", -0.1),
    ("temperature", 1e-4),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 1e39),
    ("temperature", "1"),
    ("temperature", True),
    ("top_k", -1),
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
    ("max_new_tokens", 0),
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


@pytest.mark.parametrize(
    "rows", [[{"temperature": 0.7}, {}], [{"temperature": 0.0}] * 2, [{"top_k": 3}, {"temperature": 0.0}]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_choose_is_the_replayed_choice_of_the_distributions(rows: list[dict[str, float]], dtype: torch.dtype) -> None:
    table = SamplingTable(torch.device("cpu"))
    for row, options in enumerate(rows):
        table.set(row, SamplingParams(seed=row + 5, **options), 3, ())
    sampling = table.pack(range(len(rows)))
    for position in range(40):
        logits = 3 * torch.randn(2, 50, generator=torch.Generator().manual_seed(position))
        positions = torch.full((2,), position, dtype=torch.int32)
        dists = sampling.dists(logits.to(dtype))
        want = replay_sample(dists.logits, dists.inv_t, dists.cut, dists.tie_id, sampling.seeds, positions)
        assert torch.equal(sampling.choose(logits.to(dtype), positions), want)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_parameters_say_what_was_got_and_expected(name: str, value: object) -> None:
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


def test_edits_are_normalised() -> None:
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
    """A number that no text reaches would otherwise fail in the middle of a batch."""
    with pytest.raises(ValueError, match=str(2**30)):
        SamplingParams(max_new_tokens=2**40, **wanted)


def test_limits_are_checked_against_a_vocabulary() -> None:
    """The engine's refusals are tested in tests/engine/test_public_interface.py; these are the borders."""
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


def table(*rows: SamplingParams, prompt: int = 4, stop_ids: tuple[int, ...] = ()) -> SamplingTable:
    made = SamplingTable(torch.device("cpu"))
    for row, params in enumerate(rows):
        made.set(row, params.with_seed(), prompt, (*stop_ids, *params.stop_token_ids))
    return made


def test_packed_rows_follow_changes() -> None:
    made = table(SamplingParams(temperature=0.5, seed=1), SamplingParams(temperature=1.5, top_k=4, seed=2))
    packed = made.pack([1, 0])
    assert packed.temperature.tolist() == [1.5, 0.5] and packed.seeds.tolist() == [2, 1]
    assert made.pack([1, 0]) is packed
    made.set(0, SamplingParams(temperature=0.25, seed=9), 4, ())
    assert made.pack([1, 0]).temperature.tolist() == [1.5, 0.25]
    with pytest.raises(ValueError, match="with_seed"):
        made.set(0, SamplingParams(), 4, ())


def test_every_node_gets_the_distribution_of_its_row() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=2.0, top_p=0.75),
        SamplingParams(temperature=1.0, min_p=0.25),
    ]
    made = table(*params).pack([2, 0, 3, 1])
    draft = Draft.trees(
        [2, 0, 3, 1], [([1, 2, 3], [-1, 0, 0]), ([1], [-1]), ([1, 2], [-1, 0]), ([1, 2, 3, 4], [-1, 0, 1, 1])]
    )
    logits = torch.randn(10, 9, generator=torch.Generator().manual_seed(3)) * 2
    dists = target_distributions(
        draft,
        tree_plan(draft.parents, draft.offsets),
        logits.clone(),
        made,
        torch.zeros(4, dtype=torch.int32),
    )
    of_node = [2, 2, 2, 0, 3, 3, 1, 1, 1, 1]
    for node, row in enumerate(of_node):
        own = params[row]
        want = dist(logits[node].numpy(), own.temperature, own.top_k, own.top_p, own.min_p)
        assert np.allclose(dists.probs()[node].numpy(), want, atol=1e-6), (node, row)


@pytest.mark.parametrize("minimum", [0, 1, 3])
def test_ends_are_forbidden_before_the_minimum_at_each_node_s_own_depth(minimum: int) -> None:
    """Prompt of 4 tokens, root at position 4: one new token is there, a node at depth d decides new token d +
    2.
    """
    made = table(SamplingParams(min_new_tokens=minimum), SamplingParams(), stop_ids=(2, 5)).pack([0, 1])
    draft = Draft.trees([0, 1], [([1, 1, 1, 1], [-1, 0, 1, 0]), ([1], [-1])])
    logits = torch.zeros(5, 8)
    dists = target_distributions(
        draft, tree_plan(draft.parents, draft.offsets), logits, made, torch.tensor([4, 4], dtype=torch.int32)
    )
    weights = dists.probs()
    for node, depth in enumerate([0, 1, 2, 1]):
        free = depth + 2 > minimum
        assert (weights[node, [2, 5]] > 0).all() == free, (node, minimum)
        assert abs(float(weights[node].sum()) - 1) < 1e-6
    assert (weights[4] > 0).all()


def test_ends_beyond_the_vocabulary_of_the_logits_are_no_problem() -> None:
    made = table(SamplingParams(min_new_tokens=2), stop_ids=(3, 99)).pack([0])
    draft = Draft.chains([0], [[1]])
    plan = tree_plan(draft.parents, draft.offsets)
    weights = target_distributions(draft, plan, torch.zeros(1, 8), made, torch.tensor([3], dtype=torch.int32)).probs()
    assert float(weights[0, 3]) == 0 and int((weights > 0).sum()) == 7


def test_a_minimum_without_end_ids_changes_nothing() -> None:
    assert table(SamplingParams(min_new_tokens=5)).pack([0]).edits is None
    assert table(SamplingParams(min_new_tokens=5, stop_token_ids=(3,))).pack([0]).edits is not None
