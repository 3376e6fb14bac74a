"""What is timed: copies larger than the cache, tensors made on the device, ceilings of random data, p10 and p90."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from specdec_kernels import simulated_gpu, use_backend  # noqa: E402
from specdec_kernels.inspection import timing  # noqa: E402
from specdec_kernels.testing.agreement import (  # noqa: E402
    SAMPLES,
    comparable_results,
    difference,
    make_sample,
    make_timed_sample,
    run_sample,
    tensors_in,
)
from specdec_kernels.testing.samples_attention import Sizes, attention_with_plan  # noqa: E402


def test_caches_of_a_cpu_are_left_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Copies exceed the largest cache four times, or there is one and the time says so."""
    cpu = torch.device("cpu")
    for at, size in enumerate(("32K", "1024K", "2M")):
        (tmp_path / f"index{at}").mkdir()
        (tmp_path / f"index{at}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(timing, "CPU_CACHES", tmp_path)
    assert timing.cache_size(cpu) == 2 << 20
    small, large = Sizes(rows=1, nodes=1, vocab=64), Sizes(vocab=20_000)
    one, many = (timing.copies("distribution_stats", sizes, cpu) for sizes in (small, large))
    assert len(one) == 1 and timing.in_cache(one, cpu)
    assert len(many) * many[0].bytes >= 8 << 20 and not timing.in_cache(many, cpu)
    monkeypatch.setattr(timing, "MAX_BYTES_CPU", 4 << 20)
    assert len(timing.copies("distribution_stats", large, cpu)) == 1
    limit = timing.Ceilings(10.0, 10.0, 0.1)
    rows = [row for each in (small, large) for row in timing.bench(["distribution_stats"], cpu, each, 1, limit)]
    assert {row.cached for row in rows if row.microseconds} == {True}
    monkeypatch.setattr(timing, "CPU_CACHES", tmp_path / "nowhere")
    assert timing.cache_size(cpu) == 0


def test_copies_exceed_the_cache_and_count_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(rows=1, layers=2)
    monkeypatch.setattr(timing, "cache_size", lambda device: 100_000)
    calls = timing.copies("kv_commit", sizes, torch.device("cpu"))
    slots = 2  # of the path 0, 1, 3, 7 two lie elsewhere than they go
    assert calls[0].bytes == 2 * slots * 4 * sizes.kv_heads * sizes.width * 4
    assert len(calls) * calls[0].bytes >= 400_000 and len(calls) <= timing.MAX_COPIES
    tables = [call.arguments[0] for call in calls]
    assert len({cache.data_ptr() for table in tables for cache in table}) == 4 * len(calls)
    assert all(call.writes[0] is call.arguments[0][0] for call in calls), "a call writes to its own tensors"


@pytest.mark.parametrize(
    "op", ["kv_stage", "distribution_stats", "rejection_verify_logits", "process_logits", "attention_plan"]
)
def test_tensors_are_made_on_the_device_that_is_timed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, which holds no numbers: none of its tensors can have been made elsewhere at full size."""
    largest = [0]
    original = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        largest.append(tensor.numel() if tensor.device.type == "cpu" else 0)
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    call = make_timed_sample("meta", op, Sizes(rows=64, nodes=6, vocab=128_256, length=300))
    tensors = list(tensors_in((call.arguments, tuple(call.options.values()))))
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert max(largest) <= 2**21 < max([2**22, *(tensor.numel() for tensor in tensors)]), "two million numbers repeat"


def test_a_call_made_on_a_device_has_the_numbers_of_the_sample() -> None:
    for op in ("tree_attention", "rejection_verify_logits", "process_logits"):
        one, other = (
            made(op) for made in (lambda op: make_timed_sample("cpu", op, Sizes()), lambda op: make_sample(op, Sizes()))
        )
        pairs = zip(*(tensors_in((call.arguments, tuple(call.options.values()))) for call in (one, other)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_ceilings_are_measured_on_random_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    original = timing.seconds_of

    def seconds_of(device: torch.device, calls: Any, rounds: int) -> timing.Spread:
        cells = [cell.cell_contents for cell in calls[0].__closure__]
        seen.extend(cell for cell in cells if isinstance(cell, torch.Tensor))
        return original(device, calls, rounds)

    monkeypatch.setattr(timing, "seconds_of", seconds_of)
    found = timing.measure_ceilings(torch.device("cpu"), 1)
    assert min(found.copy, found.read, found.multiply) > 0 and len(seen) >= 5
    read = [tensor for tensor in seen if tensor.shape[0] != 512 or bool(tensor.any())]
    assert all(len(tensor.flatten()[:4096].unique()) > 1000 for tensor in read)


def test_a_time_has_its_median_and_the_tenths_on_both_sides() -> None:
    spread = timing.Spread.of([float(number) for number in range(101)])
    assert (spread.p10, spread.median, spread.p90) == (10.0, 50.0, 90.0)
    assert timing.Spread.of([3.0]) == timing.Spread(3.0, 3.0, 3.0)
    times = timing.bench(["tree_plan"], torch.device("cpu"), Sizes(), 5, timing.Ceilings(10.0, 10.0, 0.1))
    (row,) = (row for row in times if row.backend == "reference")
    assert row.p10 is not None and row.p90 is not None and row.microseconds is not None
    assert 0 < row.p10 <= row.microseconds <= row.p90


def test_an_engine_s_calls_are_what_is_timed_on_a_gpu() -> None:
    assert SAMPLES["tree_attention"].timed is attention_with_plan
    for op in ("distribution_stats", "rejection_verify_logits", "replay_verify"):
        assert {sizes.top_p < 1 for sizes in SAMPLES[op].gpu} == {True, False}, "with filters and without"


def test_ancestor_words_without_a_bit_are_no_difference() -> None:
    """A kernel that knows no bound of its rows has words for all nodes of the batch."""
    call = make_sample("tree_plan", Sizes(rows=5, nodes=33))
    with use_backend("reference"):
        want = run_sample("tree_plan", call)
    wide = [*want[:2], torch.nn.functional.pad(want[2], (0, 4)), *want[3:]]
    for got, other in ((wide, want), (want, wide)):
        pairs = zip(*comparable_results("tree_plan", got, other), strict=True)
        assert [difference(one, two, 0.0)[1] for one, two in pairs] == [None] * 5
    wide[2][0, 5] = 1
    pairs = zip(*comparable_results("tree_plan", wide, want), strict=True)
    assert [difference(one, two, 0.0)[1] for one, two in pairs][2] == "1 of 990 integers differ"
    assert make_timed_sample("cpu", "tree_plan", Sizes(nodes=7)).options == {"max_nodes": 7}, "as engines call it"


@pytest.mark.parametrize("fault", ["waits", "raises"])
def test_a_call_that_cannot_be_captured_leaves_others_their_times(fault: str) -> None:
    """As a peer's may be: before the capture where it waits for the device, in it where it raises."""
    if reason := simulated_gpu.unavailable_reason():
        pytest.skip(reason)
    with simulated_gpu.gpu():
        numbers, runs = torch.ones(3, device="cuda"), []

        def call() -> None:
            runs.append(1)
            if fault == "waits":
                numbers.sum().item()
            elif torch.cuda.is_current_stream_capturing():
                raise RuntimeError("out of luck")

        before = torch.cuda.current_stream()
        with pytest.raises(RuntimeError, match="out of luck" if fault == "raises" else "waits for the device"):
            timing.graph_times({"one": [call]}, 1)
        assert torch.cuda.current_stream() == before and torch.cuda.get_sync_debug_mode() == 0
        assert timing.graph_times({"one": [lambda: numbers.add_(1)]}, 2)["one"].median > 0
        assert numbers.tolist() == [1 + 3 + 5] * 3, "twice before the capture, once in the simulated one, five replays"
