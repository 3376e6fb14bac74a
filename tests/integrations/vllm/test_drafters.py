"""The project's drafters behind vLLM's interface, on fakes of its batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracles.fake_vllm import sampling_metadata

from specdec_fast.integrations.vllm.drafter_view import BatchView
from specdec_fast.integrations.vllm.drafters import NgramDrafter, RecyclingDrafter, SuffixDrafter, chain_of
from specdec_fast.integrations.vllm.request_batch import make_batch
from specdec_kernels import distribution_stats, replay_sample


def config(rule: str | None = "replay", count: int = 4, length: int = 64, **options: Any) -> Any:
    asked = {"drafter": options, **({"rule": rule} if rule else {})} if options or rule else {}
    return SimpleNamespace(
        additional_config={"specdec": asked} if asked else {},
        speculative_config=SimpleNamespace(num_speculative_tokens=count),
        model_config=SimpleNamespace(max_model_len=length),
    )


def propose(drafter: Any, texts: list[list[int]], new: list[bool] | None = None) -> list[list[int]]:
    """Drafts for texts in vLLM's arrays."""
    token_ids = np.zeros((8, 64), dtype=np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = text
    sampled = [[1] if new is None or new[row] else [] for row in range(len(texts))]
    return drafter.propose(sampled, np.array([len(text) for text in texts] + [0] * 3), token_ids, slot_mappings=None)


@pytest.mark.parametrize("made", [SuffixDrafter, NgramDrafter])
def test_repeated_texts_are_continued(made: Any) -> None:
    drafter = made(config(None))
    text = [5, 6, 7, 8, 9, 1, 5, 6, 7]
    assert propose(drafter, [text, [1, 2, 3], text], [True, True, False]) == [[8, 9, 1, 5], [], []]
    assert propose(drafter, [[*text, 8], [1, 2, 3, 4]])[0][:3] == [9, 1, 5]
    drafter.load_model(object())


def test_requests_that_move_are_found_again() -> None:
    drafter = SuffixDrafter(config(None))
    first, second = [5, 6, 7, 8, 5, 6], [1, 2, 3, 1, 2]
    assert [each[0] for each in propose(drafter, [first, second])] == [7, 3]
    assert [each[0] for each in propose(drafter, [[*second, 3], [*first, 7]])] == [1, 8]
    assert len(drafter._view._texts) == 2


def test_drafts_end_at_the_longest_text() -> None:
    drafter = NgramDrafter(config(None, length=10))
    assert propose(drafter, [[5, 6, 7, 5, 6, 7, 5, 6]]) == [[7]]
    assert propose(drafter, [[5, 6, 7, 5, 6, 7, 5, 6, 7]]) == [[]]


def test_finished_requests_are_forgotten_and_their_texts_shared() -> None:
    drafter = SuffixDrafter(config("replay"))
    assert drafter.cross_request and not SuffixDrafter(config("rejection")).cross_request
    live = {"a"}
    drafter.join_runner(SimpleNamespace(requests=live))
    one = sampling_metadata([0.0])
    logits = torch.zeros(1, 50)
    drafter.observe_step(make_batch(one, ["a"], [1], torch.device("cpu")), [1], torch.tensor([1]), logits)
    for end in range(3, 9):
        propose(drafter, [[31, 32, 33, 34, 35, 36, 37, 38][:end]])
    live.clear()
    live.add("b")
    drafter.observe_step(make_batch(one, ["b"], [1], torch.device("cpu")), [1], torch.tensor([1]), logits)
    assert propose(drafter, [[31, 32, 33, 34]])[0][:2] == [35, 36]
    assert list(drafter._view._rows) == ["b"] and len(drafter._view._texts) == 1


class Row(np.ndarray):
    """A text that counts how many of its tokens are read."""

    read = 0

    def tolist(self) -> Any:
        Row.read += self.size
        return super().tolist()


def test_a_known_request_costs_what_is_new() -> None:
    """Its text is neither read nor compared as a whole, and another text under its id starts anew."""
    started: list[int] = []
    view = BatchView(lambda _, rows, __: started.extend(rows), lambda rows: None)
    view.batch = make_batch(sampling_metadata([0.0]), ["a"], [1], torch.device("cpu"))
    text = np.arange(4096, dtype=np.int32)[None].view(Row)
    (row,) = view.follow([0], [3000], text)
    Row.read = 0
    for length in (3001, 3005, 3005):
        assert view.follow([0], [length], text) == [row] and view.tokens(row) == list(range(length))
    assert Row.read == 5 + 3 * 16
    text[0, 3004] = 7
    (again,) = view.follow([0], [3006], text)
    assert started == [row, again] and again != row and view.tokens(again)[3003:] == [3003, 7, 3005]
    assert view.follow([0], [10], text) != [again], "a shorter one"


def test_recycling_learns_from_logits_and_couples() -> None:
    drafter = RecyclingDrafter(config("replay"))
    drafter.join_runner(SimpleNamespace(requests={"a", "b"}))
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)) * 3
    batch = make_batch(sampling_metadata([1.0, 0.0]), ["a", "b"], [7, 8], torch.device("cpu"))
    drafter.observe_step(batch, [2, 1], torch.tensor([10, 11, 12], dtype=torch.int32), logits)
    sampled, greedy = propose(drafter, [[1, 2, 11], [1, 12]])
    one = torch.ones(1)
    inv_t, _, cut, tie_id = distribution_stats(logits[1:2], one, one.int() * 0, one, one * 0)
    position = torch.tensor([3], dtype=torch.int32)
    assert sampled[0] == int(replay_sample(logits[1:2], inv_t, cut, tie_id, torch.tensor([7]), position))
    assert greedy[0] == int(logits[2].argmax())


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="drafter recycling: got no rule; expected one"):
        RecyclingDrafter(config(None))
    with pytest.raises(ValueError, match=r"drafter suffix: got option 'min_mach'.*did you mean 'min_match'"):
        SuffixDrafter(config(min_mach=2))
    with pytest.raises(ValueError, match="min_match: got 'two'; expected a whole number"):
        SuffixDrafter(config(min_match="two"))


def test_a_chain_is_the_likeliest_path_of_a_tree() -> None:
    assert chain_of([9, 1, 2, 3, 4], [-1, 0, 0, 1, 2]) == [1, 3]
    assert chain_of([9], [-1]) == []
