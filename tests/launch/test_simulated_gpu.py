"""Simulated GPUs keep CUDA's rules for devices, streams, host memory, captures and replays."""

from __future__ import annotations

import threading

import pytest
import torch

from specdec_kernels import simulated_gpu
from specdec_kernels.simulated_gpu import HostRead


def test_outside_of_the_block_nothing_is_left() -> None:
    before = torch.cuda.is_available(), torch.cuda.Stream, torch.cuda.graphs.graph.default_capture_stream
    with simulated_gpu.gpu(devices=2) as gpu:
        tensor = torch.zeros(3, device="cuda")
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
        assert gpu.capability == torch.cuda.get_device_capability() == (9, 0)
    assert (torch.cuda.is_available(), torch.cuda.Stream, torch.cuda.graphs.graph.default_capture_stream) == before
    with pytest.raises(RuntimeError, match="outside of its block"):
        tensor + 1
    with simulated_gpu.gpu(), pytest.raises(RuntimeError, match="a GPU is simulated already"):
        with simulated_gpu.gpu():
            pass


@pytest.mark.parametrize(("options", "message"), [({"architecture": "sm_70"}, "sm_70"), ({"devices": 0}, "0 devices")])
def test_unknown_gpus_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with simulated_gpu.gpu(**options):  # type: ignore[arg-type]
            pass


def test_tensors_lie_where_they_were_asked_for(gpu: simulated_gpu.Gpu) -> None:
    made = torch.arange(6, device="cuda:1").view(2, 3)
    assert made.is_cuda and made.device == torch.device("cuda", 1) and made.stride() == (3, 1)
    assert (made[:, 1:] + 1).device == made.device
    assert made[1:].data_ptr() - made.data_ptr() == 3 * 8
    assert made.to("cuda:0").device.index == 0 and made.cpu().device.type == "cpu"
    assert torch.nn.Linear(2, 2).to("cuda:1").weight.device.index == 1
    with torch.inference_mode():
        assert torch.ones(2).to(device="cuda:1", dtype=torch.float16).device.index == 1
        assert made.float().sum(1).tolist() == [3.0, 12.0]


def test_views_share_memory_and_memory_that_nothing_wrote_is_no_number(gpu: simulated_gpu.Gpu) -> None:
    made = torch.zeros(4, device="cuda")
    part = made[1:3]
    part += 2
    part[0] = 5
    assert made.tolist() == [0, 5, 2, 0]
    made[torch.tensor([0, 3], device="cuda")] = 7
    assert made.tolist() == [7, 5, 2, 7]
    assert torch.empty(2, device="cuda").isnan().all() and torch.empty(2, dtype=torch.int32, device="cuda")[0] == -1


def test_devices_do_not_mix(gpu: simulated_gpu.Gpu) -> None:
    first, second = (torch.ones(2, device=f"cuda:{index}") for index in range(2))
    with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
        first + second
    with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
        first + torch.ones(2)
    assert (first + torch.tensor(1.0)).tolist() == [2, 2], "a scalar of the CPU is a number"


def test_what_waits_is_recorded_with_its_place(gpu: simulated_gpu.Gpu) -> None:
    made = torch.arange(4, device="cuda")
    mask = made > 1
    asks = {
        "tolist": lambda: made.tolist(),
        "item": lambda: made[0].item(),
        "__bool__": lambda: bool(mask.any()),
        "nonzero": lambda: mask.nonzero(),
        "indexing by a mask": lambda: made[mask],
        "_to_copy to the CPU": lambda: made.cpu(),
        "repeat_interleave without output_size": lambda: torch.repeat_interleave(made, made),
        "synchronize": lambda: torch.cuda.synchronize(),
    }
    for name, ask in asks.items():
        gpu.clear()
        ask()
        assert [read.operator for read in gpu.host_reads] == [name]
        assert isinstance(gpu.host_reads[0], HostRead) and gpu.host_reads[0].place.startswith(
            "launch/test_simulated_gpu.py:"
        )
    gpu.clear()
    torch.where(mask, made, 0).clamp(min=1).cumsum(0).view(2, 2)[:, 0].index_select(0, made[:1])
    assert gpu.host_reads == [] and gpu.uploads == []


def test_uploads_from_pageable_memory_are_recorded(gpu: simulated_gpu.Gpu) -> None:
    place = torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.tensor([1, 2], device="cuda")
    torch.tensor([1, 2]).to("cuda")
    place.copy_(torch.tensor([1, 2]), non_blocking=True)
    assert [upload.size for upload in gpu.uploads] == [16, 16, 16]
    gpu.clear()
    pinned = torch.tensor([3, 4], pin_memory=True)
    assert pinned.is_pinned() and not torch.tensor([1]).is_pinned()
    place.copy_(pinned, non_blocking=True)
    torch.zeros(2, pin_memory=True).to("cuda", non_blocking=True)
    assert gpu.uploads == [] and gpu.host_reads == []
    place.copy_(pinned)
    assert [read.operator for read in gpu.host_reads] == ["copy_ from pinned memory without non_blocking"]
    assert place.tolist() == [3, 4]


def test_sync_debug_mode_raises(gpu: simulated_gpu.Gpu) -> None:
    made = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    assert torch.cuda.get_sync_debug_mode() == 2
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        made.item()
    torch.cuda.set_sync_debug_mode("default")
    assert made.item() == 1


def test_streams_belong_to_devices(gpu: simulated_gpu.Gpu) -> None:
    side, side_tensor = torch.cuda.Stream(device="cuda:1"), torch.ones(2, device="cuda:1")
    with torch.cuda.stream(side):
        assert torch.cuda.current_device() == 1 and torch.cuda.current_stream() == side
    assert torch.cuda.current_device() == 0 and torch.cuda.current_stream(1) == torch.cuda.default_stream(1)
    with torch.cuda.device(1):
        assert torch.cuda.current_stream() != torch.cuda.default_stream(0)
    beyond = {
        "the current device": lambda: torch.cuda.set_device(7),
        "a new tensor": lambda: torch.ones(2, device="cuda:2"),
        "a copy": lambda: side_tensor.to("cuda:2"),
    }
    for reach in beyond.values():
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            reach()


def test_a_graph_replays_on_the_same_memory(gpu: simulated_gpu.Gpu) -> None:
    number, total = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        double = number * 2
        total += double
        total[0] = 9
    number.fill_(5)
    graph.replay()
    assert double.tolist() == [10, 10] and total.tolist() == [9, 12]
    assert graph.operators.total() == 3  # type: ignore[attr-defined]


def test_a_read_in_a_capture_invalidates_it_and_leaves_what_cuda_leaves(gpu: simulated_gpu.Gpu) -> None:
    made, pool = torch.ones(1, device="cuda"), torch.cuda.graph_pool_handle()
    with pytest.raises(RuntimeError, match="due to a previous error during capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
            made.item()
    assert torch.cuda.current_stream() != torch.cuda.default_stream(), "the stream of the capture stays the current one"
    torch.cuda.set_stream(torch.cuda.default_stream())
    with pytest.raises(RuntimeError, match="already recording to mempool_id"):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
            pass


def test_a_capture_needs_a_stream_of_its_own_device(gpu: simulated_gpu.Gpu) -> None:
    """torch keeps one default stream for captures, of the first device: work of another goes past the graph."""
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass
    with torch.cuda.device(1):
        graph, made = torch.cuda.CUDAGraph(), torch.ones(1, device="cuda:1")
        with torch.cuda.graph(graph):
            made += 1
    graph.replay()
    assert made.tolist() == [2.0], "once, when it was recorded nowhere"


def test_other_threads_use_the_same_gpu(gpu: simulated_gpu.Gpu) -> None:
    made, found = torch.ones(2, device="cuda"), []
    thread = threading.Thread(target=lambda: found.append((made + 1).device))
    thread.start()
    thread.join()
    assert found == [made.device]
