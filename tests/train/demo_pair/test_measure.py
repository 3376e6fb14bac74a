"""The measuring functions against cases computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specdec_fast.train.demo_pair.measure import (
    acceptance,
    bits_per_byte,
    continue_text,
    distinct,
    loop_length,
    overlap,
    windows,
)
from specdec_fast.train.demo_pair.model_shapes import Shape, build
from specdec_fast.train.demo_pair.unlikelihood import repeated, repetition_mask, unlikelihood

TINY = Shape(layers=1, hidden=16, heads=1, kv_heads=1, inner=16, vocabulary=8, context=64, head_dim=16)


def uniform_model():
    model = build(TINY, seed=1)
    model.model.embed_tokens.weight.data.zero_()
    return model.eval()


def test_distinct_counts_unique_grams():
    assert distinct([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(4 / 5)  # 1234 2341 3412 4123 1234
    assert distinct([5] * 10) == pytest.approx(1 / 7)
    assert distinct([1, 2]) == 1.0
    assert distinct([1, 2, 1, 2], n=2) == pytest.approx(2 / 3)


def test_overlap_is_the_sum_of_minima():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    assert overlap(p.log(), q.log()).item() == pytest.approx(0.7)
    assert overlap(p.log() + 3.0, p.log()).item() == pytest.approx(1.0)
    assert overlap(torch.tensor([0.0, -1e9]), torch.tensor([-1e9, 0.0])).item() == pytest.approx(0.0)


def test_a_uniform_model_needs_log2_of_the_vocabulary():
    # 11 predicted tokens of 3 bits over 4 + 6 bytes, in windows shorter than the documents
    documents = [
        ("code", np.array([0, 1, 2, 3, 4, 5], np.uint16), 4),
        ("kjv", np.array([0, 1, 2, 3, 4, 5, 6], np.uint16), 6),
    ]
    rows = acceptance(build(TINY, seed=1).eval(), uniform_model(), windows(documents, 4))
    assert rows["all"]["positions"] == 11
    bits = bits_per_byte(rows, documents, "draft")
    assert bits == pytest.approx({"code": 15 / 4, "kjv": 18 / 6, "all": 33 / 10})


def test_windows_predict_every_token_once():
    ids = np.arange(11, dtype=np.uint16)
    predicted = [int(t) for _, piece in windows([("docs", ids, 1)], 4) for t in piece[0, 1:]]
    assert predicted == list(range(1, 11))
    few = list(windows([("docs", ids, 1), ("docs", ids, 1)], 2, limit=4))
    assert [tuple(piece.shape) for _, piece in few] == [(1, 3), (1, 3)]


def test_acceptance_of_a_model_with_itself_is_one():
    model = build(TINY, seed=2).eval()
    rows = acceptance(model, model, [("kjv", torch.arange(8)[None])], skip=2)
    assert rows["kjv"]["alpha"] == pytest.approx(1.0, abs=1e-6)
    assert rows["kjv"]["greedy_agreement"] == 1.0
    assert rows["all"]["positions"] == 5


def test_acceptance_against_a_uniform_draft():
    model = build(TINY, seed=3).eval()
    piece = torch.tensor([[0, 3, 1, 4, 1, 5]])
    p = model(input_ids=piece[:, :-1]).logits.softmax(-1)
    expected = p.clamp(max=1 / 8).sum(-1).mean().item()
    assert acceptance(model, uniform_model(), [("code", piece)])["all"]["alpha"] == pytest.approx(expected, abs=1e-6)


def test_continuations_match_plain_argmax_and_depend_on_the_seed_only():
    model = build(TINY, seed=4).eval()
    prefix = torch.tensor([[0, 1, 2], [3, 4, 5]])
    text = continue_text(model, prefix, 6, 0.0)
    plain = prefix
    for _ in range(6):
        plain = torch.cat([plain, model(input_ids=plain, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(text, plain)
    sampled = [continue_text(model, prefix, 6, 1.0, torch.Generator().manual_seed(9)) for _ in range(2)]
    assert torch.equal(*sampled)


def test_padding_on_the_left_changes_nothing():
    model = build(TINY, seed=5).eval()
    short = continue_text(model, torch.tensor([[3, 1]]), 5, 0.0)[0, 2:]
    rows = torch.tensor([[0, 0, 3, 1], [4, 2, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert torch.equal(continue_text(model, rows, 5, 0.0, mask=mask)[0, 4:], short)


def test_repeats_are_marked_where_an_ngram_closes_again():
    assert repeated([1, 2, 3, 1, 2, 3], 0, n=2) == [False, False, False, False, True, True]
    assert repeated([1, 2, 1, 2, 9], 2, n=2) == [False] * 5  # the prefix does not count
    assert repetition_mask(torch.tensor([[7, 7, 7]]), 0, n=2).tolist() == [[False, False, True]]


def test_loops_are_found_at_the_end_only():
    assert loop_length([1, 2, 3] + [7, 8] * 10) == 18
    assert loop_length([1, 2, 3] + [7, 8] * 7) == 0, "too short to tell"
    assert loop_length([7] * 40 + list(range(40))) == 0
    assert loop_length(list(range(30)) * 2) == 0, "said twice is no loop"
    assert loop_length(list(range(30)) * 3) == 60


def test_unlikelihood_is_minus_log_of_the_rest():
    logits = torch.tensor([[[0.75, 0.25], [0.1, 0.9]]]).log()
    targets, mask = torch.tensor([[0, 1]]), torch.tensor([[True, False]])
    assert unlikelihood(logits, targets, mask).item() == pytest.approx(-math.log(0.25), rel=1e-5)
    assert unlikelihood(logits, targets, torch.zeros(1, 2, dtype=torch.bool)).item() == 0.0
    certain = unlikelihood(torch.tensor([[[100.0, 0.0]]]), torch.tensor([[0]]), torch.tensor([[True]]))
    assert torch.isfinite(certain)
