"""Foreign samplers, recorded and called: right ones pass, wrong ones do not, and bad files are explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec_fast.lab.foreign_samples import FIELDS, Recorded, checks_of, from_sampler, summary_of

P = np.random.default_rng(0).dirichlet(np.full(50, 0.4), size=3)
Q = np.random.default_rng(1).dirichlet(np.full(50, 0.4), size=3)


def speculative(p: np.ndarray, q: np.ndarray, count: int, seed: int, *, wrong: bool = False):
    """Speculative sampling of one token in numpy; wrong: redraws from p after a rejection."""
    source = np.random.default_rng(seed)
    drafted = source.choice(len(q), count, p=q)
    accepted = source.random(count) < np.minimum(1, p[drafted] / q[drafted])
    rest = p if wrong else np.maximum(p - q, 0)
    again = source.choice(len(p), count, p=rest / rest.sum())
    return np.where(accepted, drafted, again), np.where(accepted, 0, 1)


def smallest(recorded: Recorded) -> float:
    return min(test.p_value for test in checks_of(recorded))


def test_a_right_sampler_passes_and_a_wrong_one_does_not() -> None:
    good = from_sampler(speculative, P, Q, 20_000, seed=4)
    assert smallest(good) > 1e-4 and len(checks_of(good)) == 15
    assert all(row["certified_distance"] < 0.12 for row in summary_of(good))
    bad = from_sampler(lambda *a: speculative(*a, wrong=True), P, Q, 20_000, seed=4)
    worst = {test.name.partition(", ")[2]: test.p_value for test in checks_of(bad)}
    assert worst["chi-square"] < 1e-9 and worst["recovered tokens"] < 1e-9
    assert worst["acceptance rate"] > 1e-4, "this mistake does not show in the rate"
    plain = from_sampler(lambda p, q, n, s: np.random.default_rng(s).choice(len(p), n, p=p), P, Q, 5000)
    assert smallest(plain) > 1e-4 and len(checks_of(plain)) == 6


def test_a_second_token_is_tested_in_the_context_of_the_first() -> None:
    """Both tokens have the right marginal distribution; given the first, the second has not."""
    source = np.random.default_rng(5)
    first = source.integers(0, 2, 20_000)
    dists = np.array([[0.5, 0.5], [0.7, 0.3], [0.3, 0.7]])
    for follows, passes in ((1 + first, True), (1 + (1 - first), False)):
        second = (source.random(20_000) < dists[follows, 1]).astype(int)
        found = Recorded.make(np.concatenate([first, second]), dists, context=np.concatenate([first * 0, 1 + first]))
        assert (smallest(found) > 1e-4) == passes
        assert abs(second.mean() - 0.5) < 0.02


def test_files_are_read_with_distributions_or_with_logits(tmp_path: Path) -> None:
    tokens, branch = speculative(P[0], Q[0], 5000, 1)
    np.savez(tmp_path / "a.npz", tokens=tokens, p=P[0], q=Q[0], branch=branch)
    assert smallest(Recorded.load(tmp_path / "a.npz")) > 1e-4
    np.savez(tmp_path / "b.npz", tokens=tokens, logits=2 * np.log(P[:1]), temperature=2.0)
    found = Recorded.load(tmp_path / "b.npz")
    assert np.allclose(found.p, P[:1]) and smallest(found) > 1e-4
    np.savez(tmp_path / "c.npz", tokens=tokens, logits=np.log(P[:1]), temperature=0.5)
    assert smallest(Recorded.load(tmp_path / "c.npz")) < 1e-9


BAD = {
    "no sum": ({"tokens": [0], "p": [0.5, 0.6]}, "sums to 1.1"),
    "nan": ({"tokens": [0], "p": [0.5, np.nan]}, "NaN or infinite"),
    "nan logits": ({"tokens": [0], "logits": [[0.5, np.nan]]}, r"context 0: logits: got NaN"),
    "neither": ({"tokens": [0]}, "expected tokens: int"),
    "both": ({"tokens": [0], "p": [1.0], "logits": [[0.0]]}, "expected tokens: int"),
    "unknown": ({"tokens": [0], "p": [1.0], "weights": [1.0]}, "'weights'"),
    "range": ({"tokens": [0, 2], "p": [0.5, 0.5]}, r"tokens\[1\]: got 2; expected 0..1"),
    "float tokens": ({"tokens": [0.5], "p": [1.0]}, "expected integers"),
    "none": ({"tokens": np.zeros(0, int), "p": [1.0]}, "got no tokens"),
    "contexts": ({"tokens": [0], "p": [[1.0], [1.0]]}, "no `context`"),
    "context range": ({"tokens": [0], "p": [[1.0], [1.0]], "context": [2]}, r"context\[0\]: got 2"),
    "wide q": ({"tokens": [0], "p": [1.0], "q": [0.5, 0.5]}, "cut padding off"),
    "branch": ({"tokens": [0], "p": [1.0], "branch": [3]}, r"branch\[0\]: got 3"),
    "q of the draft": ({"tokens": [0], "p": [0.5, 0.5], "q": [1.0, 0.0], "drafted": [1]}, "which has q = 0"),
    "drafted alone": ({"tokens": [0], "p": [0.5, 0.5], "drafted": [1]}, "`drafted` without `q`"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_explained(tmp_path: Path, name: str) -> None:
    arrays, words = BAD[name]
    np.savez(tmp_path / "bad.npz", **{key: np.asarray(value) for key, value in arrays.items()})
    with pytest.raises(ValueError, match=words):
        Recorded.load(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -1.0, "0 .greedy. or a positive number"),
        ("top_k", 2.9, "a whole number, 0 or -1 for off"),
        ("top_k", -2, "a whole number, 0 or -1 for off"),
        ("top_p", 0.0, "a number above 0, up to 1"),
        ("min_p", 2.0, "a number from 0, which is off, to 1"),
        ("min_p", [0.1, 0.2], "a number from 0, which is off, to 1"),
    ],
)
def test_settings_that_no_sampler_has_are_refused(tmp_path: Path, name: str, value: Any, expected: str) -> None:
    path = tmp_path / "draws.npz"
    np.savez(path, tokens=np.array([0, 1]), logits=np.zeros(4), **{name: value})
    with pytest.raises(ValueError, match=rf"{name}: got .*; expected {expected}"):
        Recorded.load(path)


def test_top_k_of_minus_one_is_off(tmp_path: Path) -> None:
    """As vLLM writes it."""
    path = tmp_path / "draws.npz"
    np.savez(path, tokens=np.array([0, 1]), logits=np.zeros(4), top_k=-1)
    assert Recorded.load(path).p[0].tolist() == [0.25] * 4


def test_files_that_are_none_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        Recorded.load(tmp_path / "absent.npz")
    bad = [tmp_path / name for name in ("text.npz", "one.npy", "objects.npz", "cut.npz", "spoilt.npz")]
    bad[0].write_text("hello")
    np.save(bad[1], np.ones(3))
    np.savez(bad[2], tokens=np.array([{}], dtype=object))
    np.savez_compressed(bad[3], tokens=np.arange(1000))
    whole = bytearray(bad[3].read_bytes())
    bad[3].write_bytes(whole[:-100])
    whole[len(whole) // 2] ^= 255
    bad[4].write_bytes(whole)
    for path in bad:
        message = f"--recorded: {path} is no .npz of plain arrays, or a damaged one; expected what numpy.savez writes"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            Recorded.load(path)
    with pytest.raises(ValueError, match=r"expected \(7,\)"):
        from_sampler(lambda p, q, n, s: np.zeros(3, int), P, Q, 7)


def test_the_document_names_every_field() -> None:
    document = (Path(__file__).parents[2] / "docs" / "concepts" / "losslessness.md").read_text("utf-8")
    assert all(f"`{name}`" in document for name in FIELDS)
