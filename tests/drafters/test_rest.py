"""REST: what a datastore proposes, several of them, and datastores that do not fit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.automaton import AutomatonTarget, random_logits

from specdec_fast import Engine, SamplingParams, get_drafter
from specdec_fast.drafters import make_drafter
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Budget
from specdec_fast.retrieval import file_format
from specdec_fast.retrieval.datastore import Datastore, build

VOCAB = 30


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(documents: list[list[int]], vocabulary: str = "", vocab_size: int = VOCAB) -> str:
        place = tmp_path / f"store{len(list(tmp_path.iterdir()))}"
        build(place, documents, vocab_size, vocabulary)
        return str(place)

    return written


@torch.inference_mode()
def trees(drafter: Any, texts: list[list[int]], limits: list[int]) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents below the roots."""
    state = DecodeState(len(texts), 200)
    rows = [state.join(text, SamplingParams(seed=1), len(text), ()) for text in texts]
    drafter.begin(state, rows, None)
    draft = drafter.propose(state, rows, Budget(limits), state.rng(rows))
    draft.check(VOCAB)
    bounds, tokens, parents = draft.offsets.tolist(), draft.tokens.tolist(), draft.parents.tolist()
    assert [tokens[start] for start in bounds[:-1]] == [text[-1] for text in texts]
    return [(tokens[a + 1 : b], parents[a + 1 : b]) for a, b in zip(bounds, bounds[1:])]


def rest(**options: Any) -> Any:
    return get_drafter("rest")(**options)


def test_the_most_frequent_continuations_of_the_longest_suffix(write: Any) -> None:
    store = write([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [9, 2, 7, 7, 7, 7, 8]])
    made = rest(datastore=store, min_match=1)
    want = [([3, 6, 4, 5], [0, 0, 1, 1]), ([], []), ([7, 7, 7, 7], [0, 1, 2, 3])]
    assert trees(made, [[0, 1, 2], [0, 0], [9, 2]], [8, 8, 4]) == want, "a third each: elder parents first"
    assert trees(made, [[1, 2]], [2]) == [([3, 6], [0, 0])] and trees(made, [[1, 2]], [0]) == [([], [])]
    assert trees(rest(datastore=store, min_match=3), [[0, 1, 2]], [8]) == [([], [])]
    assert trees(rest(datastore=store, min_match=1, depth=1), [[9, 2]], [8]) == [([7], [0])]
    assert trees(rest(datastore=store, min_match=1, max_match=1), [[9, 2]], [2]) == [([3, 6], [0, 0])]
    assert trees(rest(datastore=store, min_probability=0.5), [[0, 1, 2]], [8]) == [([3], [0])]


def test_several_datastores_are_one(write: Any) -> None:
    first, second = [[1, 2, 3], [1, 2, 4]], [[1, 2, 4, 4], [5, 1, 2, 6]]
    apart = rest(datastore=[write(first), Datastore(write(second))])
    texts = [[1, 2], [5, 1, 2], [0, 1, 2], [8, 9]]
    assert trees(apart, texts, [8] * 4) == trees(rest(datastore=write(first + second)), texts, [8] * 4)
    assert trees(apart, [[5, 1, 2]], [8]) == [([6], [0])], "the longest match of any datastore"


@pytest.mark.parametrize("seed", range(4))
def test_trees_are_within_budget_and_the_same_every_time(write: Any, seed: int) -> None:
    source = random.Random(seed)
    store = write([[source.randrange(3) for _ in range(40)] for _ in range(20)])
    texts = [[source.randrange(3) for _ in range(source.randrange(1, 30))] for _ in range(6)]
    limits = [source.randrange(70) for _ in texts]
    made = trees(rest(datastore=store), texts, limits)
    assert made == trees(rest(datastore=store), texts, limits)
    assert made == [trees(rest(datastore=store), [text], [limit])[0] for text, limit in zip(texts, limits, strict=True)]
    for (tokens, parents), limit in zip(made, limits, strict=True):
        assert len(tokens) <= min(limit, 64) and all(parent <= at for at, parent in enumerate(parents))


def test_a_datastore_of_the_target_s_text_is_accepted_to_its_depth(write: Any) -> None:
    logits = random_logits(61, VOCAB, seed=3)
    params = SamplingParams(temperature=0, max_new_tokens=55)
    plain = Engine(AutomatonTarget(logits)).generate([[1, 2]], params)[0].tokens
    drafter = rest(datastore=write([[1, 2, *plain]]), num_draft_tokens=10, depth=10)
    handle = Engine(AutomatonTarget(logits), drafter).generate([[1, 2]], params)[0]
    assert handle.tokens == plain and handle.stats.steps == 5, "ten drafted tokens and one more a pass"


def test_a_datastore_of_noise_keeps_texts_and_costs_no_extra_pass(write: Any) -> None:
    logits, source = random_logits(9, VOCAB, seed=4), random.Random(2)
    drafter = rest(datastore=write([[source.randrange(VOCAB) for _ in range(5000)]]), min_match=1)
    params = SamplingParams(temperature=1.0, seed=5, max_new_tokens=40)
    plain = Engine(AutomatonTarget(logits)).generate([[1], [2, 3]], params)
    misled = Engine(AutomatonTarget(logits), drafter).generate([[1], [2, 3]], params)
    assert [handle.tokens for handle in misled] == [handle.tokens for handle in plain]
    assert all(a.stats.steps <= b.stats.steps for a, b in zip(misled, plain, strict=True))


class Letters:
    def __init__(self, shift: int) -> None:
        self.shift = shift

    def get_vocab(self) -> dict[str, int]:
        return {chr(97 + at): (at + self.shift) % 8 for at in range(8)}


def test_datastores_that_do_not_fit_are_refused(write: Any, tmp_path: Path) -> None:
    from specdec_fast.retrieval.tokenizer_fingerprint import fingerprint

    def made(store: str, shift: int) -> Any:
        target = AutomatonTarget(random_logits(5, 8))
        return make_drafter("rest", {"datastore": store}, target=target, tokenizer=Letters(shift))

    store = write([[1, 2, 3]], fingerprint(Letters(0)), 8)
    assert made(store, 0).datastores[0].num_tokens == 3
    with pytest.raises(ValueError, match="its tokens are those of another tokenizer"):
        made(store, 1)
    with pytest.raises(ValueError, match="its tokens go up to 29; expected ids below 8"):
        made(write([[1, 2, 3]]), 0)
    with pytest.raises(ValueError, match="rest: got no datastore; expected datastore=PATH"):
        rest()
    with pytest.raises(ValueError, match=r"rest datastore: got '.*gone': No such file or directory; expected a file"):
        rest(datastore=str(tmp_path / "gone"))


@pytest.fixture
def unsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns a place that opening a datastore does not check."""
    monkeypatch.setattr("specdec_fast.retrieval.datastore.find_disorder", lambda *arrays: None)


def test_a_damaged_suffix_array_is_reported(write: Any, unsampled: None) -> None:
    store = write([[1, 2, 3, 1, 2]])
    header, arrays = file_format.read(store, "datastore")
    wrong = arrays["suffixes"] + 1000
    plain = {name: header[name] for name in ("vocabulary", "vocab_size", "documents", "tokens")}
    file_format.write(store, "datastore", plain, {"tokens": arrays["tokens"], "suffixes": wrong})
    with pytest.raises(ValueError, match=r"rest: a datastore of .* is damaged: its suffix array points outside"):
        trees(rest(datastore=store), [[1, 2]], [4])


def test_a_damaged_token_ends_a_continuation_and_is_never_drafted(write: Any, unsampled: None) -> None:
    """Ids beyond the vocabulary, in a file of the right size. Checksums are compared on demand only."""
    store = write([[1, 2, 3, 4, 1, 2, 5, 1]], vocab_size=8)
    header, arrays = file_format.read(store, "datastore")
    plain = {name: header[name] for name in ("vocabulary", "vocab_size", "documents", "tokens")}
    tokens = arrays["tokens"].copy()
    tokens[[3, 6]] = 29
    file_format.write(store, "datastore", plain, {"tokens": tokens, "suffixes": arrays["suffixes"]})
    assert trees(rest(datastore=store), [[1, 2]], [8]) == [([3], [0])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens, depth, samples: got 0, 10, 5000; expected at least 1"),
        ({"depth": 0}, "num_draft_tokens, depth, samples: got 64, 0"),
        ({"samples": 0}, "num_draft_tokens, depth, samples: got 64, 10, 0"),
        ({"min_match": 0}, "min_match, max_match: got 0, 16; expected 1 <= min_match <= max_match"),
        ({"max_match": 1}, "min_match, max_match: got 2, 1"),
        ({"min_probability": -0.1}, "min_probability: got -0.1; expected 0 to 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"rest {message}"):
        rest(**options)
