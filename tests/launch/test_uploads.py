"""Host numbers reach a simulated GPU by pinned copies, without a wait, and are copied once."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_kernels import simulated_gpu
from specdec_kernels.dispatch import torch_ops
from specdec_kernels.dispatch.torch_ops import LAUNCHES, MAX_TABLES, _find_table
from specdec_kernels.testing.agreement import make_sample
from specdec_kernels.testing.samples_attention import Sizes

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore::specdec_kernels.FallbackWarning"),  # results are computed on the CPU
]
ROWS, LENGTH = 3, 64


@pytest.fixture(autouse=True)
def _own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has tables of its own: caches of other tests may have had the same addresses."""
    monkeypatch.setattr(torch_ops, "_TABLES", OrderedDict())
    monkeypatch.setattr(torch_ops, "_CAPTURED", {})


def small(device: str = "cuda") -> HuggingFaceTarget:
    return HuggingFaceTarget(models.kin("llama").to(device), max_length=LENGTH, max_rows=ROWS)


def drafter(kind: str, target: HuggingFaceTarget, folder: Path) -> Any:
    name, _, pick = kind.partition(" ")
    if name == "none":
        return None
    if name == "medusa":
        return get_drafter(name)(target, models.medusa_heads(target).cuda(), pick=pick or "coupled")
    if name == "eagle":
        return get_drafter(name)(target, **heads.options(name, folder), depth=2 if pick == "dynamic" else 0)
    if name == "draft_model":
        return get_drafter(name)(small(), num_draft_tokens=3, pick=pick)
    if name == "draft_tree":
        return get_drafter(name)(small(), how=pick, num_draft_tokens=5)
    if name == "layer_skip":
        return get_drafter(name)(target, num_draft_tokens=3)
    return get_drafter(name)()


KINDS = [
    *(
        ("none", "replay"),
        ("none", "rejection"),
        ("draft_model coupled", "replay"),
        ("draft_model sampled", "rejection"),
    ),
    *(("draft_tree top_k", "replay"), ("draft_tree without_replacement", "recursive_rejection"), ("medusa", "replay")),
    *(
        ("medusa greedy", "recursive_rejection"),
        ("eagle", "replay"),
        ("eagle dynamic", "replay"),
        ("ngram", "rejection"),
    ),
    *(("recycling", "replay"), ("layer_skip", "replay")),
]


@pytest.mark.parametrize(("kind", "rule"), KINDS)
def test_nothing_is_copied_from_pageable_memory(kind: str, rule: str, tmp_path: Path) -> None:
    """Joins, chunked prefill, rows that draft more and less, preemption, step modes, logits processors, logprobs."""
    with simulated_gpu.gpu("sm_90") as gpu:
        target = HuggingFaceTarget(models.own("llama").cuda(), max_length=LENGTH, max_rows=ROWS)
        engine = Engine(target, drafter(kind, target, tmp_path), rule=rule, prefill_chunk=8)
        gpu.clear()
        handles = [
            engine.submit(
                models.prompt(4 + 9 * at),
                SamplingParams(temperature=0.9 * (at % 2), top_p=0.9, seed=at, max_new_tokens=8),
                num_draft_tokens=None if at != 1 else 1,
            )
            for at in range(3)
        ]
        handles.append(engine.submit([1, 2], SamplingParams(seed=1, max_new_tokens=3, logit_bias={2: 3.0}, logprobs=1)))
        handles.append(
            engine.submit(
                [3], SamplingParams(seed=1, max_new_tokens=3, presence_penalty=0.5, allowed_token_ids=(1, 2, 5))
            )
        )
        for _ in range(3):
            engine.step()
        with torch.inference_mode():  # as where the pool is dry
            engine._prepare_for_warmup()
            engine._requeue([*engine._running.values()][-1])
        while not engine.idle:
            engine.step()
        assert all(handle.finish_reason == "length" for handle in handles) and engine.stats.faults == 0
        assert gpu.uploads == []


def test_the_dispatcher_copies_addresses_of_caches_once() -> None:
    with simulated_gpu.gpu("sm_90") as gpu, torch.inference_mode():
        call = make_sample(
            "kv_commit", Sizes(rows=2, nodes=3, length=20, heads=2, kv_heads=1, width=16, layers=2), "cuda"
        )
        caches = [*call.arguments[0]]
        LAUNCHES["kv_commit"](caches, *call.arguments[1:])
        gpu.clear()
        for _ in range(3):
            LAUNCHES["kv_commit"](caches, *call.arguments[1:])
        assert len(gpu.launches) == 3 and gpu.uploads == [] and gpu.host_reads == []


def caches_of(*pages: int) -> list[torch.Tensor]:
    return [torch.zeros(each, 4, 2, 8) for each in pages]


def test_a_remembered_table_says_what_a_new_one_says() -> None:
    from specdec_kernels import CacheTable

    for caches in (caches_of(3, 3), caches_of(3), [caches_of(3)[0].transpose(1, 2)], caches_of(3, 3)):
        for _ in range(2):
            found, want = _find_table(caches), CacheTable(caches)
            assert torch.equal(found.layout, want.layout) and torch.equal(found.device_layout, want.layout)
            assert (found.slot_bytes, found.pages, found.page_size) == (want.slot_bytes, want.pages, want.page_size)
            assert all(one is other for one, other in zip(found, caches, strict=True))
    assert _find_table(caches).device_layout is _find_table(caches).device_layout


def test_a_remembered_table_keeps_no_cache_alive() -> None:
    caches = caches_of(3)
    _find_table(caches)
    alive = weakref.ref(caches[0])
    del caches
    gc.collect()
    assert alive() is None


def test_other_caches_at_the_same_address_have_tables_of_their_own() -> None:
    memory = torch.zeros(4096)
    for shape in ((4, 4, 2, 8), (2, 4, 4, 8), (4, 4, 2, 8)):
        cache = memory[: torch.Size(shape).numel()].view(shape)
        table = _find_table([cache])
        assert table.pages == shape[0] and table[0] is cache and table.layout[0, 0] == memory.data_ptr()


def test_a_freed_cache_leaves_its_address_to_one_with_another_layout() -> None:
    from specdec_kernels import CacheTable

    memory = bytearray(4 * 256)
    addresses = set()
    for shape in ((4, 4, 2, 8), (2, 4, 4, 8), (4, 4, 2, 8)):
        cache = torch.frombuffer(memory, dtype=torch.float32).view(shape)  # with a storage of its own
        table = _find_table([cache])
        assert torch.equal(table.layout, CacheTable([cache]).layout) and table.pages == shape[0]
        assert table.slot_bytes == [4 * shape[2] * shape[3]]
        addresses.add(cache.data_ptr())
        freed = weakref.ref(cache)
        del cache, table
        gc.collect()
        assert freed() is None
    assert len(addresses) == 1


def test_few_tables_are_remembered() -> None:

    first = caches_of(1)
    forgotten = weakref.ref(_find_table(first).device_layout)
    kept = [caches_of(pages) for pages in range(2, MAX_TABLES + 10)]
    for each in kept:
        _find_table(each)
    assert len(torch_ops._TABLES) == MAX_TABLES
    gc.collect()
    assert forgotten() is None
    assert _find_table(kept[-1]).device_layout is _find_table(kept[-1]).device_layout
    assert _find_table(first).pages == 1, "a forgotten table is made again"


def test_each_stream_has_a_table_of_its_own(gpu: simulated_gpu.Gpu) -> None:
    caches = [cache.cuda() for cache in caches_of(3)]
    other = torch.cuda.Stream()
    own = _find_table(caches).device_layout
    with torch.cuda.stream(other):
        second = _find_table(caches).device_layout
        assert second is not own and _find_table(caches).device_layout is second
    assert _find_table(caches).device_layout is own and torch.equal(own, second)


def test_the_stream_is_that_of_the_device_of_the_caches(gpu: simulated_gpu.Gpu) -> None:
    caches = [cache.to("cuda:1") for cache in caches_of(3)]
    own = _find_table(caches).device_layout
    with torch.cuda.stream(torch.cuda.Stream(device="cuda:0")):
        assert _find_table(caches).device_layout is own
    with torch.cuda.stream(torch.cuda.Stream(device="cuda:1")):
        assert _find_table(caches).device_layout is not own


def test_a_capture_on_a_new_stream_copies_nothing_and_its_table_is_never_forgotten(gpu: simulated_gpu.Gpu) -> None:
    caches = [cache.cuda() for cache in caches_of(3)]
    own, graph = _find_table(caches).device_layout, torch.cuda.CUDAGraph()
    gpu.clear()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        captured = weakref.ref(_find_table(caches).device_layout)
    assert captured() is own and gpu.uploads == []
    del own
    for pages in range(1, MAX_TABLES + 2):
        _find_table(caches_of(pages))
    gc.collect()
    assert captured() is not None


def test_a_second_capture_keeps_the_table_of_the_first(gpu: simulated_gpu.Gpu) -> None:
    caches, stream = [cache.cuda() for cache in caches_of(3)], torch.cuda.Stream()
    tables = []
    for _ in range(2):
        with torch.cuda.stream(stream):
            _find_table(caches)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            tables.append(weakref.ref(_find_table(caches).device_layout))
        for pages in range(1, MAX_TABLES + 2):
            _find_table(caches_of(pages))
        gc.collect()
    assert tables[0]() is not None and tables[1]() is tables[0]()


def test_a_table_of_no_caches_is_refused() -> None:
    with pytest.raises(ValueError, match="the list of caches is empty"):
        _find_table([])
