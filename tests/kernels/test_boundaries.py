"""Invalid and extreme arguments: refused or served on every backend, without other effects."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from oracles.chain_cases import dist, int32
from torch import Tensor

from specdec_kernels import (
    CacheTable,
    distribution_stats,
    draft_sample,
    kv_commit,
    kv_commit_pages,
    kv_commit_scratch,
    kv_slots,
    kv_stage,
    recursive_rejection_verify,
    rejection_thresholds,
    rejection_verify,
    traversal_verify,
    tree_attention,
    tree_expand,
    typical_verify,
    use_backend,
)
from specdec_kernels.dispatch import extension
from specdec_kernels.dispatch.operator import first_tensor_key

BACKENDS = ["reference"] + ([] if extension.unavailable_reason() else ["cpu"])
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize("operator", [recursive_rejection_verify, traversal_verify, typical_verify])
def test_a_node_with_two_links(backend: str, operator: Any) -> None:
    """0 -> 1 -> 2 -> 4 and 0 -> 3 -> 4 -> 5: node 4 would have two depths."""
    links = int32([1, 2, 4, 4, 5, -1]), int32([-1, 3, -1, -1, -1, -1])
    target = dist(torch.zeros(6, 4))
    tree = (torch.zeros(6, dtype=torch.int64), int32([0, 6]), *links)
    proposals = () if operator is typical_verify else (torch.zeros(6, dtype=torch.int8), int32([-1] * 6))
    rest = () if operator is typical_verify else (None, None)
    extra = {"epsilon": 0.1, "delta": 0.1} if operator is typical_verify else {}
    keys = (None, torch.tensor([1]), int32([0]))
    with use_backend(backend), pytest.raises(ValueError, match=r"first_child.*tree_plan"):
        operator(*tree, *proposals, target, *rest, *keys, max_depth=5, **extra)


@pytest.mark.parametrize("length", [-1, -5, -40, -(2**31)])
def test_negative_lengths_have_no_slots(backend: str, length: int) -> None:
    with use_backend(backend), pytest.raises(ValueError, match="kv_slots: "):
        kv_slots(int32([[1, 2, 3, 4]]), int32([length]), int32([0]), int32([0, 3]), None, 3, 16)


def test_offsets_begin_at_the_first_node(backend: str) -> None:
    with use_backend(backend), pytest.raises(ValueError, match="kv_slots: "):
        kv_slots(int32([[1, 2, 3, 4]]), int32([3]), int32([0]), int32([2, 5]), None, 5, 16)


@pytest.mark.parametrize("shape", [(0, 16, 2, 64), (4, 0, 2, 64)])
def test_a_cache_without_slots_has_no_trash(backend: str, shape: tuple[int, ...]) -> None:
    key, caches = torch.zeros(2, 2, 64), (torch.zeros(shape), torch.zeros(shape))
    with use_backend(backend), pytest.raises(ValueError, match="kv_stage: "):
        kv_stage(key, key.clone(), *caches, torch.tensor([-1, -1]))


@pytest.mark.parametrize("length", [-7, 7, 1000])
def test_lengths_are_checked_even_if_no_slot_moves(backend: str, length: int) -> None:
    """A chain is accepted in place, but its length must fit."""
    cache, lengths = torch.zeros(8, 4, 2, 8), int32([9, 9])
    path = (int32([[0, 1, -1]]), int32([0, 2]), int32([1]))
    with use_backend(backend), pytest.raises(ValueError, match="kv_commit: "):
        kv_commit([cache], int32([[1, 2]]), int32([length]), *path, int32([0]), lengths)
    assert lengths.tolist() == [9, 9]


@pytest.mark.parametrize("bad", [-2, 11])
@pytest.mark.parametrize("operator", [kv_commit, kv_commit_scratch, kv_commit_pages])
def test_a_row_that_does_not_fit_leaves_the_others_unchanged(backend: str, operator: Any, bad: int) -> None:
    """(A reference could move the first row before it detects the second one.)"""
    cache, lengths = torch.arange(24.0)[:, None].reshape(6, 4, 1, 1).clone(), int32([9, 9])
    pages, table = int32([[0, 1, 2], [3, 4, 5]]), int32([[0, 1, 2], [3, 4, 5]])
    tree = (pages, int32([2, bad]), int32([[0, 2], [3, 5]]), int32([0, 3, 6]), int32([1, 1]), int32([0, 1]), lengths)
    memory = {kv_commit: ([cache],), kv_commit_scratch: ([cache], [torch.ones(6, 1, 1)]), kv_commit_pages: ()}[operator]
    kept = cache.clone()
    if operator is kv_commit_pages:  # their pages hold one slot each
        table = torch.arange(24, dtype=torch.int32).reshape(2, 12)
        tree = (table.clone(), *tree[1:], table)
    before = table.clone()
    with use_backend(backend), pytest.raises(ValueError, match=f"{operator.name}: "):
        operator(*memory, *tree)
    assert torch.equal(cache, kept) and lengths.tolist() == [9, 9] and torch.equal(table, before)


def test_a_query_without_heads(backend: str) -> None:
    key = torch.zeros(4, 16, 2, 64)
    with use_backend(backend), pytest.raises(ValueError, match="tree_attention: "):
        tree_attention(torch.zeros(3, 0, 64), key, key.clone(), int32([[1, 2]]), int32([5]), int32([0, 3]), scale=1.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))])
def test_a_copied_table_has_its_own_addresses(backend: str, copied: Any) -> None:
    first = CacheTable([torch.zeros(3, 4, 1, 2)])
    second = copied(first)
    second[0].copy_(torch.arange(24.0).view(3, 4, 1, 2))
    path = int32([[0, 2]]), int32([0, 3]), int32([1])
    with use_backend(backend):
        kv_commit(second, int32([[1]]), int32([0]), *path)
    assert first[0].abs().sum() == 0 and second[0][1, 1, 0].tolist() == [12.0, 13.0]


@pytest.mark.parametrize(("high", "temperature"), [(1e10, 1.0), (1.3e10, 1.0), (2000.0, 1e-6), (5000.0, 1e-6)])
def test_bounds_of_blocks_hold_for_large_logits(backend: str, high: float, temperature: float) -> None:
    torch.manual_seed(0)
    for token in torch.randint(0, 4000, (20,)).tolist():
        logits = torch.randn(1, 4000)
        logits[0, token] += high
        one = torch.ones(1)
        with use_backend(backend):
            inv_t, lse, cut, tie_id = distribution_stats(logits, temperature * one, int32([0]), one, 0 * one)
            found = draft_sample(logits, inv_t, lse, cut, tie_id, torch.tensor([token]), int32([0]), int32([0]))
        assert found.tolist() == [token]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("at", [0, 3, 70, 139])
def test_a_nan_key_is_not_hidden(backend: str, dtype: torch.dtype, at: int) -> None:
    torch.manual_seed(0)
    key = torch.randn(10, 16, 1, 32, dtype=dtype)
    pages, length = int32([list(range(1, 10))]), 140
    key[1 + at // 16, at % 16] = math.nan
    query, value = torch.randn(2, 2, 32, dtype=dtype), torch.randn_like(key)
    with use_backend(backend):
        out, lse = tree_attention(query, key, value, pages, int32([length]), int32([0, 2]), scale=0.2, return_lse=True)
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("score", [-math.inf, math.inf])
def test_scores_without_bounds(backend: str, softcap: float, score: float) -> None:
    """-inf has no weight; inf has the weight of the cap if there is one."""
    torch.manual_seed(0)
    key, value, query = torch.randn(10, 16, 1, 32), torch.randn(10, 16, 1, 32), torch.rand(2, 2, 32) + 0.1
    key[2, 3] = score
    pages = int32([list(range(1, 10))])
    with use_backend(backend):
        out = tree_attention(query, key, value, pages, int32([140]), int32([0, 2]), scale=0.2, softcap=softcap)
    scores = 0.2 * torch.einsum("nhd,sd->nhs", query, key[1:].flatten(0, 2)[:142])
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    scores[0, :, 141] = -math.inf  # the first node does not attend to the second
    wanted = torch.einsum("nhs,sd->nhd", scores.softmax(-1), value[1:].flatten(0, 2)[:142])
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("log_q", [-88.0, -200.0, -2000.0])
def test_a_token_of_almost_no_probability_is_rejected(backend: str, rule: str, log_q: float) -> None:
    """A draft with a wrong distribution: tokens that the target forbids stay forbidden."""
    forbidden = torch.zeros(3, 4)
    forbidden[0, 1] = -torch.inf
    rows = torch.zeros(2, 4)
    rows[1, 2] = log_q
    chain = (torch.tensor([0, 1, 2]), int32([0, 3]), torch.ones(3, dtype=torch.int8), int32([0, 0, 1]), dist(forbidden))
    with use_backend(backend):
        accept, residual = rejection_thresholds(*chain, dist(rows), None, rule=rule)
        assert accept[1:].tolist() == [0.0, 0.0] and not residual.isnan().any()
        for seed in range(20):
            keys: tuple[Tensor, ...] = (torch.tensor([seed]), int32([0]))
            assert rejection_verify(*chain, dist(rows), None, *keys, max_depth=2, rule=rule)[1].tolist() == [0]


@pytest.mark.parametrize("sharpness", [math.inf, math.nan, 0.0])
def test_a_sharpness_without_a_distribution(backend: str, sharpness: float) -> None:
    logits = torch.randn(2, 20)
    _, inv_t, _, cut, tie_id = dist(logits)
    with use_backend(backend), pytest.raises(ValueError, match="tree_expand: "):
        tree_expand(logits, inv_t, cut, tie_id, int32([0, 1, 2]), torch.zeros(2), width=2, keep=2, sharpness=sharpness)


@pytest.mark.parametrize("first", [[1.0, 2.0], None, 3])
def test_arguments_that_are_not_tensors_are_named(backend: str, first: Any) -> None:
    one = torch.ones(1)
    with use_backend(backend), pytest.raises(ValueError, match="distribution_stats: logits is "):
        distribution_stats(first, one, int32([0]), one, 0 * one)


def test_keywords_in_any_order(backend: str) -> None:
    one = torch.ones(1)
    with use_backend(backend):
        found = distribution_stats(
            masses=False, min_p=0 * one, top_p=one, top_k=int32([0]), temperature=one, logits=one[None]
        )
    torch.testing.assert_close(found[1], one)


def test_every_keyword_is_read_in_the_choice_of_a_backend(backend: str) -> None:
    one = torch.ones(1)
    keys = {
        first_tensor_key(temperature=one, logits=torch.ones(1, 1, dtype=dtype), top_k=None)
        for dtype in (torch.float32, torch.float64)
    }
    assert len(keys) == 2
