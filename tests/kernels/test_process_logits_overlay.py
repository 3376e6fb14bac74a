"""process_logits_overlay: reading logits through an overlay equals reading logits that were processed in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.logits_processor_cases import Request, arguments, batches, check_nodes, int32, words_of
from torch import Tensor

from specdec_kernels import Overlay, TokenMasks, distribution_stats, process_logits_overlay, use_backend
from specdec_kernels.overlay import PLANES, num_words


def through_an_overlay(logits: Tensor, **processors: Any) -> Tensor:
    """Applies an overlay in place, for the tests of `process_logits`."""
    with use_backend("reference"):
        return logits.copy_(process_logits_overlay(logits, **processors).apply(logits))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches(), seed=st.integers(0, 1000))
def test_every_node_is_read_as_processed_for_its_own_prefix(batch: Any, seed: int) -> None:
    check_nodes(through_an_overlay, torch.float32, batch, seed)


def listed() -> tuple[Tensor, Overlay]:
    """Returns two rows of 70 logits in bfloat16, the second with a penalty, a bias, a ban and a mask."""
    request = Request([3], [9, 65], [9, 40], [-1, 0], (2.0, 0.0, 0.0), {5: 0.001}, {7: 100}, {})
    processors = arguments([request], 0, [1, 1])
    processors["penalties"].factors[:] = torch.tensor([2.0, 0.0, 0.0])
    masks = TokenMasks(words_of([[token != 11 for token in range(70)]]), int32([0, -1]))
    logits = torch.full((2, 70), 20.0, dtype=torch.bfloat16)
    with use_backend("reference"):
        return logits, process_logits_overlay(logits, masks=masks, **processors)


def test_cells_are_bits_ranks_and_logits_in_order_of_ids() -> None:
    _, overlay = listed()
    planes = overlay.words[:, : PLANES * num_words(70)].view(2, 3, PLANES)
    moved = 1 << 3 | 1 << 5 | 1 << 9
    assert planes[:, :, 0].tolist() == [[moved, 1 << 8, 1 << 1]] * 2
    assert planes[:, :, 1].tolist() == [[0, 3, 4]] * 2
    assert planes[:, :, 2].tolist() == [[1 << 7 | 1 << 11, 0, 0], [1 << 7, 0, 0]]
    values = overlay.words[:, PLANES * 3 :].contiguous().view(torch.float32)
    assert torch.equal(values[:, :5], torch.tensor([[10.0, 20.001, 10.0, 10.0, 10.0]] * 2))


def test_a_small_bias_is_not_rounded_away_and_the_logits_stay() -> None:
    logits, overlay = listed()
    processed = overlay.apply(logits)
    assert processed.dtype == torch.float32 and bool((logits == 20).all())
    assert processed[1, [3, 5, 7, 9, 11, 40, 65]].tolist() == [10, pytest.approx(20.001), -torch.inf, 10, 20, 10, 10]
    assert torch.equal(overlay.select_rows(torch.tensor([1])).apply(logits[1:]), processed[1:])


def test_backends_without_overlays_get_processed_logits() -> None:
    """Also inside torch.compile, and with the caller's memory."""
    logits, overlay = listed()
    one, none = torch.ones(2), torch.zeros(2)
    asked = (one, none.int(), one, none)
    want = distribution_stats(overlay.apply(logits), *asked)
    for backend in (None, "reference"):
        with use_backend(backend):
            got = distribution_stats(logits, *asked, overlay=overlay)
            out = tuple(torch.empty_like(each) for each in want)
            given_back = distribution_stats(logits, *asked, overlay=overlay, out=out)
        for one_of, other, third in zip(want, got, given_back, strict=True):
            assert torch.allclose(one_of, other) and torch.allclose(one_of, third)
    program = torch.compile(lambda *args: distribution_stats(*args, overlay=overlay), backend="eager", fullgraph=True)
    assert all(torch.allclose(a, b) for a, b in zip(program(logits, *asked), want, strict=True))
    assert not torch.allclose(distribution_stats(logits, *asked)[1], want[1])
