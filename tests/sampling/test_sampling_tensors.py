"""Packed sampling parameters, and the table of rows behind them."""

from __future__ import annotations

import pytest
import torch

from specdec_fast.sampling.params import SamplingParams
from specdec_fast.sampling.sampling_tensors import SamplingTable
from specdec_kernels import replay_sample


@pytest.mark.parametrize(
    "rows", [[{"temperature": 0.7}, {}], [{"temperature": 0.0}] * 2, [{"top_k": 3}, {"temperature": 0.0}]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sample_replay_equals_replay_sample_of_the_distributions(
    rows: list[dict[str, float]], dtype: torch.dtype
) -> None:
    table = SamplingTable(torch.device("cpu"))
    for row, options in enumerate(rows):
        table.set(row, SamplingParams(seed=row + 5, **options), 3, ())
    sampling = table.pack(range(len(rows)))
    for position in range(40):
        logits = 3 * torch.randn(2, 50, generator=torch.Generator().manual_seed(position))
        positions = torch.full((2,), position, dtype=torch.int32)
        dists = sampling.distributions(logits.to(dtype))
        want = replay_sample(dists.logits, dists.inv_t, dists.cut, dists.tie_id, sampling.seeds, positions)
        assert torch.equal(sampling.sample_replay(logits.to(dtype), positions), want)


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


def test_a_minimum_without_end_ids_changes_nothing() -> None:
    assert table(SamplingParams(min_new_tokens=5)).pack([0]).logits_processors is None
    assert table(SamplingParams(min_new_tokens=5, stop_token_ids=(3,))).pack([0]).logits_processors is not None
