"""Speed of the verification operators on the CPU, beside one plain read of the same logits (read_once.c) and beside
transformers' speculative sampling.

The read is one pass over the target's logits [8, V] of the step. A draft that is the target's equal ("same") has all of
its tokens accepted, and then both rules read just these rows: there the ratio says what the arithmetic costs. With a
draft like most ("near") the rejection rule stops at the first rejection and reads fewer rows than the yardstick; the
block rule reads all of them and, for its thresholds, some of the draft's: a second yardstick reads both.

    python -m pytest benchmarks/kernels/test_verify_ops.py -s

Machines share caches and ports with other work: trust ratios of one run and minima, not absolute times.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import (
    distribution_stats,
    draft_sample,
    exact_match_verify,
    rejection_verify_logits,
    replay_sample,
    replay_verify,
    tree_plan,
)
from specdec_kernels.dispatch import extension

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built"),
]

VOCAB, SMALL = 151_936, 1024
MEMORY = 192 << 20  # bytes of target logits that sides go round through, six times 32 MiB of cache
PARAMETERS = [
    {},
    {"t": 0.0},
    {"k": 50},
    {"k": 20_000},
    {"p": 0.95},
    {"m": 0.05},
    {"k": 50, "p": 0.95},
]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def parameters(rows: int, t: float = 1.0, k: int = 0, p: float = 1.0, m: float = 0.0) -> tuple[Tensor, ...]:
    return (
        torch.full((rows,), t),
        torch.full((rows,), k, dtype=torch.int32),
        torch.full((rows,), p),
        torch.full((rows,), m),
    )


def step(
    vocab: int, rows: int, nodes: int, dtype: torch.dtype, rule: str = "rejection", seed: int = 0, apart: float = 0.5
) -> tuple[Callable[..., Any], Tensor, tuple[Tensor, Tensor]]:
    """rejection_verify_logits of one step with sampled drafts, the target's logits, the draft's tokens and logits.

    apart: standard deviation of the draft's logits from the target's; at 0.5 about 0.8 of the tokens are accepted.
    Every call is another step, with new uniforms and draft tokens. bare=True calls the C++ without the choice of
    a backend, which costs more here than elsewhere: the logits have driven the interpreter out of the caches.
    """
    torch.manual_seed(seed)
    count = rows * nodes
    target = (torch.randn(count, vocab) * 2).to(dtype)
    draft = (target.float() + apart * torch.randn(count, vocab)).to(dtype)
    settings = parameters(count)
    draft_dist = (draft, *distribution_stats(draft, *settings))
    order = torch.arange(count, dtype=torch.int32)
    drafted = [draft_sample(*draft_dist, order.long() + 1000 * at + seed, order, order).roll(1) for at in range(64)]
    offsets = torch.arange(0, count + 1, nodes, dtype=torch.int32)
    proposal_kinds, dist_index = torch.ones(count, dtype=torch.int8), (order - 1).clamp(min=0)
    seeds = [torch.arange(rows) + 100 * at + seed for at in range(64)]
    positions = torch.arange(rows, dtype=torch.int32)
    turn = itertools.count()

    def run(bare: bool = False) -> Any:
        at = next(turn) % 64
        if bare:
            chain = (
                drafted[at],
                offsets,
                proposal_kinds,
                dist_index,
                target,
                *settings,
                *draft_dist,
                None,
                seeds[at],
                positions,
            )
            return torch.ops.specdec.rejection_verify_logits.default(*chain, nodes - 1, rule == "block")
        return rejection_verify_logits(
            drafted[at],
            offsets,
            proposal_kinds,
            dist_index,
            target,
            settings,
            draft_dist,
            None,
            seeds[at],
            positions,
            max_depth=nodes - 1,
            rule=rule,
        )

    return run, target, (drafted[0], draft)


@pytest.fixture(scope="session")
def read(tmp_path_factory: Any) -> Callable[[Tensor], int]:
    """One pass over a tensor by as many threads as torch has, compiled for this machine."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the yardstick")
    library = tmp_path_factory.mktemp("yardstick") / "read_once.so"
    source = Path(__file__).with_name("read_once.c")
    options = ["-O3", "-march=native", "-fopenmp", "-Wno-psabi", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, "-o", library, source], check=True)
    function = ctypes.CDLL(str(library)).read_once
    function.restype, function.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def once(tensor: Tensor) -> int:
        return int(function(tensor.data_ptr(), tensor.numel() * tensor.element_size(), torch.get_num_threads()))

    return once


def times(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of every side in every round; they take turns, so that a busy moment hits all of them."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            found[name].append((time.perf_counter() - start) * 1e6)
    return found


def ratios(found: dict[str, list[float]], yardstick: str) -> dict[str, tuple[float, float]]:
    """Of every side to the yardstick: quotient of the minima, and median of the quotients round by round."""
    base = found[yardstick]
    return {name: (min(t) / min(base), median(a / b for a, b in zip(t, base))) for name, t in found.items()}


@pytest.mark.parametrize("where", ["cached", "memory"])
@pytest.mark.parametrize("draft", ["near", "same"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_costs_little_more_than_reading_the_logits(
    benchmark: Any, read: Callable[[Tensor], int], threads: int, dtype: torch.dtype, rule: str, draft: str, where: str
) -> None:
    """A chain of seven draft tokens. memory: the sides go round through more logits than the caches hold."""
    torch.set_num_threads(threads)
    apart = 0.5 if draft == "near" else 0.0
    sets = 1 if where == "cached" else MEMORY // (8 * VOCAB * dtype.itemsize)
    steps = [step(VOCAB, 1, 8, dtype, rule, seed, apart) for seed in range(sets)]
    turn = itertools.count()

    def each(work: Callable[[Callable[..., Any], Tensor, Tensor], Any]) -> Callable[[], Any]:
        def side() -> Any:
            run, target, (_, drafted) = steps[next(turn) % len(steps)]
            return work(run, target, drafted)

        return side

    sides = {
        "read": each(lambda run, target, drafted: read(target)),
        "both": each(lambda run, target, drafted: read(target) + read(drafted[:7])),
        "verify": each(lambda run, target, drafted: run()),
        "bare": each(lambda run, target, drafted: run(bare=True)),
        "torch.sum": each(lambda run, target, drafted: target.sum()),
    }
    found = times(sides, 512)
    mean, usual = sum(found["verify"]) / sum(found["read"]), ratios(found, "read")["verify"][1]
    bare = ratios(found, "read")["bare"][1]
    plain_sum = ratios(found, "torch.sum")["verify"][1]
    both = {name: round(ratios(found, "both")[name][1], 2) for name in ("verify", "bare")}
    kept = sum(float(steps[0][0]()[1].float().mean()) for _ in range(64)) / 64
    benchmark.extra_info |= {
        "mean_ratio": round(mean, 2),
        "median_ratio": round(usual, 2),
        "median_ratio_of_the_extension": round(bare, 2),
        "median_ratio_to_reading_the_draft_too": both["verify"],
        "median_ratio_of_the_extension_to_reading_the_draft_too": both["bare"],
        "median_ratio_to_torch_sum": round(plain_sum, 2),
        "mean_accepted": round(kept, 2),
    }
    print(
        f"\n{threads} threads {dtype} {rule} {draft} {where}: rejection_verify_logits / read: mean {mean:.2f}, "
        f"median {usual:.2f}, the extension alone {bare:.2f}; / read of both: {both['bare']}; "
        f"/ torch.sum: {plain_sum:.2f}; accepted {kept:.2f} of 7"
    )
    benchmark(sides["verify"])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_replayed_step_beside_reading_the_logits(
    benchmark: Any, read: Callable[[Tensor], int], temperature: float, threads: int
) -> None:
    """A chain of seven draft tokens that are all accepted: noise for every token, or at T = 0 the largest of a row."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    logits, settings = torch.randn(8, VOCAB) * 2, parameters(8, t=temperature)
    offsets, roots = int32([0, 8]), int32([7])
    plan = tree_plan(int32(list(range(-1, 7))), offsets)
    inv_t, _, cut, tie_id = distribution_stats(logits, *settings)
    steps = []
    for seed in range(64):
        seeds = torch.tensor([seed])
        choice = replay_sample(logits, inv_t, cut, tie_id, seeds.expand(8), roots + plan.depth + 1)
        steps.append((torch.cat([choice[:1], choice[:7]]), seeds))
    turn = itertools.count()

    def run() -> Any:
        tokens, seeds = steps[next(turn) % 64]
        links = plan.first_child, plan.next_sibling
        return replay_verify(tokens, offsets, *links, None, logits, settings, seeds, roots, max_depth=7)

    assert all(run()[1].tolist() == [7] for _ in steps)
    found = times({"read": lambda: read(logits), "verify": run}, 256)
    usual = ratios(found, "read")["verify"][1]
    benchmark.extra_info |= {"rule": "replay", "temperature": temperature, "median_ratio": round(usual, 2)}
    print(f"\n{threads} threads, replay, T = {temperature}: replay_verify / read: median {usual:.2f}")
    benchmark(run)


def test_a_step_against_transformers(benchmark: Any) -> None:
    """The same rows of logits, one chain of seven sampled tokens; both give tokens and their number."""
    generation = pytest.importorskip("transformers.generation.utils")
    run, target, (tokens, draft) = step(VOCAB, 1, 8, torch.float32)
    ids, length = tokens[None], 7

    def peer() -> Any:
        return generation._speculative_sampling(ids, draft[None, :length], length, target[None])

    found = times({"peer": peer, "verify": run}, 40)
    faster = median(a / b for a, b in zip(found["peer"], found["verify"]))
    benchmark.extra_info |= {"times_faster": round(faster, 1)}
    print(f"\ntransformers {min(found['peer']):.0f} us, ours {min(found['verify']):.0f} us: {faster:.1f} times faster")
    assert faster > 5
    benchmark(run)


def test_reading_the_logits(benchmark: Any) -> None:
    benchmark(step(VOCAB, rows=2, nodes=4, dtype=torch.float32)[1].sum)


def test_small_step(benchmark: Any) -> None:
    run, target, _ = step(SMALL, rows=1, nodes=5, dtype=torch.float32)
    found = times({"neg": target[0, :1].neg, "verify": run}, 2000)
    benchmark.extra_info |= {f"{name}_us": round(min(own), 2) for name, own in found.items()}
    benchmark(run)


@pytest.mark.parametrize("options", PARAMETERS, ids=str)
def test_distribution_stats(benchmark: Any, options: dict[str, Any]) -> None:
    logits = torch.randn(8, VOCAB) * 2
    settings = parameters(8, **options)
    benchmark(lambda: distribution_stats(logits, *settings, masses=True))


@pytest.mark.parametrize("vocab", [SMALL, VOCAB])
@pytest.mark.parametrize("options", [{}, {"k": 50}], ids=str)
def test_replay_sample(benchmark: Any, vocab: int, options: dict[str, Any]) -> None:
    logits = torch.randn(8, vocab) * 2
    inv_t, _, cut, tie_id = distribution_stats(logits, *parameters(8, **options))
    seeds, positions = torch.arange(8), torch.arange(8, dtype=torch.int32)
    benchmark(lambda: replay_sample(logits, inv_t, cut, tie_id, seeds, positions))


@pytest.mark.parametrize("vocab", [SMALL, VOCAB])
def test_replay_verify(benchmark: Any, vocab: int) -> None:
    """A tree of 16 nodes whose path has 4: one call beside distribution_stats, replay_sample and exact_match_verify
    of all nodes.
    """
    nodes = 16
    logits, settings = torch.randn(nodes, vocab) * 2, parameters(nodes)
    plan = tree_plan(int32([-1, 0, 0, 0, 1, 1, 2, 2, 4, 4, 5, 6, 8, 8, 9, 10]), int32([0, nodes]))
    seeds, roots = torch.tensor([3]), int32([7])
    inv_t, _, cut, tie_id = distribution_stats(logits, *settings)
    choice = replay_sample(logits, inv_t, cut, tie_id, seeds.expand(nodes), roots + plan.depth + 1)
    tokens = torch.zeros(nodes, dtype=torch.int64)
    tokens[1], tokens[4], tokens[8] = choice[0], choice[1], choice[4]
    links = (tokens, int32([0, nodes]), plan.first_child, plan.next_sibling)

    def apart() -> Any:
        inv_t, _, cut, tie_id, _ = distribution_stats(logits, *settings, masses=True)
        choice = replay_sample(logits, inv_t, cut, tie_id, seeds.expand(nodes), roots + plan.depth + 1)
        return exact_match_verify(*links, choice, max_depth=4)

    def one() -> Any:
        return replay_verify(*links, None, logits, settings, seeds, roots, max_depth=4)

    assert one()[1].tolist() == apart()[1].tolist() == [3]
    found = times({"apart": apart, "one": one}, 200 if vocab == SMALL else 40)
    faster = median(a / b for a, b in zip(found["apart"], found["one"]))
    benchmark.extra_info |= {"times_faster_than_its_parts": round(faster, 2)}
    print(
        f"\nreplay_verify, V = {vocab}: {min(found['one']):.0f} us, its parts {min(found['apart']):.0f} us: "
        f"{faster:.2f} times faster"
    )
    benchmark(one)


@pytest.mark.parametrize("vocab", [SMALL, VOCAB])
def test_draft_sample(benchmark: Any, vocab: int) -> None:
    logits = torch.randn(2, vocab) * 2
    *dist, mass = distribution_stats(logits, *parameters(2), masses=True)
    seeds, index = torch.arange(2), torch.arange(2, dtype=torch.int32)
    benchmark(lambda: draft_sample(logits, *dist, seeds, index, index, mass=mass))


def test_tree_plan_and_verify(benchmark: Any) -> None:
    parents = int32([-1, 0, 0, 1, 1, 2, 3, 5] * 4)
    offsets = int32([0, 8, 16, 24, 32])
    tokens, choice = torch.arange(32), torch.arange(1, 33)

    def run() -> Any:
        plan = tree_plan(parents, offsets)
        return exact_match_verify(tokens, offsets, plan.first_child, plan.next_sibling, choice, max_depth=4)

    benchmark(run)
