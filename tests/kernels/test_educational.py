"""The ladder to tree attention: PyTorch steps against the operator, programs, costs, and kernels compiled for sm_90.

tests/interpreter/test_educational.py runs the Triton steps.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.educational_ladder import LADDER, ROOT, SOURCES, module, on_path  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from specdec_kernels import AttentionPlan, simulated_gpu, tree_attention, use_backend
from specdec_kernels.inspection import machine_code

pytest.importorskip("triton")
PAGE = ROOT / "docs" / "kernels" / "tree-attention-ladder.md"
STEPS = [name for name, source in SOURCES.items() if "\ndef tree_attention(" in source]
"""The ladder, and variants that are put beside it."""
TRITON_STEPS = [name for name in STEPS if "import triton\n" in SOURCES[name]]
PYTORCH_STEPS = [name for name in STEPS if name not in TRITON_STEPS]
LOOP, MATMUL, ONLINE = "step1_loop", "step2_masked_matmul", "step3_online_softmax"
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-13}


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Draws parents of a chain, a star, a binary tree or any tree; sometimes of none."""
    nodes = draw(st.sampled_from([0, 1, 2, 5, 17, 40]))
    kind = draw(st.sampled_from(["chain", "star", "binary", "any"]))
    if kind == "any":
        return [draw(st.integers(0, node - 1)) if node else -1 for node in range(nodes)]
    parents = {"chain": lambda node: node - 1, "star": lambda node: 0, "binary": lambda node: (node - 1) // 2}
    return [parents[kind](node) if node else -1 for node in range(nodes)]


@st.composite
def batches(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)) -> Any:
    """Draws ragged batches: head groups, page sizes, rows without nodes, nodes after the last request."""
    found = draw(st.lists(trees(), min_size=1, max_size=3).filter(any))
    lengths = [draw(st.sampled_from([0, 1, 15, 64, 70])) for _ in found]
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]))
    batch = module("worked_example").pack(
        found, lengths, heads=heads, kv_heads=kv_heads, width=draw(st.sampled_from([8, 20, 32])),
        page_size=draw(st.sampled_from([1, 4, 16])), dtype=draw(st.sampled_from(dtypes)),
        tail=draw(st.sampled_from([0, 2])),
    )  # fmt: skip
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    noise = {
        name: torch.randn(getattr(batch, name).shape, generator=seed).to(batch.query.dtype)
        for name in ("query", "key_cache", "value_cache")
    }
    return batch._replace(**noise)


@pytest.mark.parametrize("name", PYTORCH_STEPS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_step_in_pytorch_equals_the_operator(name: str, data: st.DataObject) -> None:
    batch = data.draw(batches())
    want = module("worked_example").operator(batch)
    got = module(name).tree_attention(*batch, scale=module("worked_example").scale_of(batch))
    assert got.dtype == want.dtype and not got.isnan().any()
    assert (got - want).abs().max() <= TOLERANCE[want.dtype]


@pytest.mark.parametrize("block_n", [1, 7, 64])
def test_the_running_numbers_are_the_softmax_of_the_keys_so_far(block_n: int) -> None:
    """After the last tile, maximum and sum are the operator's log-sum; before it, those of a shorter request."""
    example, step = module("worked_example"), module(ONLINE)
    batch = example.pack([example.binary_tree(40)], [70], heads=4, kv_heads=2, width=16, page_size=16)
    scale = example.scale_of(batch)
    mask = module(MATMUL).tree_mask(batch.ancestors, 70)
    pages = batch.page_table[0]
    states = list(step.tiles(batch.query, batch.key_cache, batch.value_cache, pages, mask, scale, block_n))
    assert len(states) == -(-110 // block_n)
    with use_backend("reference"):
        _, lse = tree_attention(*batch, scale=scale, return_lse=True)
    found = states[-1].running_max + states[-1].running_sum.log()
    torch.testing.assert_close(found.transpose(0, 1).flatten(1, 2), lse, rtol=1e-5, atol=1e-5)
    seen = min(block_n, 110)
    scores = torch.einsum("nkgd,lkd->kngl", batch.query.unflatten(1, (2, 2)), gathered(batch, seen)) * scale
    first = torch.where(mask[:, None, :seen], scores, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(states[0].running_max + states[0].running_sum.log(), first, rtol=1e-5, atol=1e-5)


def gathered(batch: Any, count: int) -> torch.Tensor:
    at = torch.arange(count)
    return batch.key_cache[batch.page_table[0].long()[at // 16], at % 16]


class Traffic(TorchDispatchMode):
    """Counts bytes read from the caches, and passes over tensors of the size of the scores."""

    def __init__(self, caches: tuple[torch.Tensor, ...], scores: int) -> None:
        super().__init__()
        self.storages = {cache.untyped_storage().data_ptr() for cache in caches}
        self.scores, self.taken, self.passes = scores, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "index" and args[0].untyped_storage().data_ptr() in self.storages:
            self.taken += out.numel() * out.element_size()
        if not func.is_view and name != "_unsafe_view":
            given = [each for each in (*args, out) if isinstance(each, torch.Tensor)]
            self.passes += sum(each.numel() == self.scores and each.is_floating_point() for each in given)
        return out


def measured() -> tuple[Any, Any]:
    """A batch and its shapes."""
    example, traffic = module("worked_example"), module("traffic")
    parents, length = example.binary_tree(11), 70
    batch = example.pack([parents], [length], heads=4, kv_heads=2, width=32, page_size=16)
    return batch, [traffic.Request(parents, length, heads=4, kv_heads=2, width=32, itemsize=4)]


def test_the_cost_of_the_loop_equals_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, shapes = measured()
    step, cost, loads = module(LOOP), module("traffic").loop(shapes), []
    attend = step.attend

    def watched(query: torch.Tensor, keys: Any, values: Any, scale: float) -> torch.Tensor:
        loads.extend([*keys, *values])
        return attend(query, keys, values, scale)

    monkeypatch.setattr(step, "attend", watched)
    step.tree_attention(*batch, scale=1.0)
    assert cost.cache_bytes == sum(each.numel() * each.element_size() for each in loads)
    assert cost.flops == 2 * sum(each.numel() for each in loads), "a product and a sum for every number"


@pytest.mark.parametrize("name", [MATMUL, ONLINE])
def test_costs_of_the_pytorch_steps_equal_their_counts(name: str) -> None:
    batch, shapes = measured()
    traffic, scores = module("traffic"), 4 * 11 * 81
    cost = traffic.masked_matmul(shapes) if name == MATMUL else traffic.online_softmax(shapes)
    with FlopCounterMode(display=False) as counter, Traffic((batch.key_cache, batch.value_cache), scores) as found:
        module(name).tree_attention(*batch, scale=1.0)
    assert (counter.get_total_flops(), found.taken) == (cost.flops, cost.cache_bytes)
    assert found.passes == (6 if name == MATMUL else 0)
    assert cost.scratch_bytes == (2 * cost.cache_bytes + found.passes * 4 * scores if found.passes else 0)


@pytest.mark.parametrize("name", [LOOP, MATMUL, ONLINE])
def test_programs_print_what_the_page_shows(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module(name).main()
    printed = capsys.readouterr().out.splitlines()
    differences = [line for line in printed if line.startswith("max difference")]
    assert len(differences) == 2 and all(float(line.rpartition(" ")[2]) < 1e-6 for line in differences)
    shown = "\n".join(line for line in printed if line not in differences)
    assert shown in PAGE.read_text(encoding="utf-8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the program does not use the interpreter")
def test_the_last_step_runs_alone_without_a_gpu(tmp_path: Path) -> None:
    """It restarts itself in Triton's interpreter, and imports the step before."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(LADDER / "step5_split_k.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *shown, small, ragged = done.stdout.splitlines()
    assert float(small.rpartition(" ")[2]) < 1e-6 and float(ragged.rpartition(" ")[2]) < 1e-6
    assert "\n".join(shown) in PAGE.read_text(encoding="utf-8")


@pytest.mark.aot
@pytest.mark.skipif(simulated_gpu.unavailable_reason() is not None, reason=str(simulated_gpu.unavailable_reason()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRITON_STEPS)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_kernels_compile_and_launch_for_hopper(name: str, dtype: torch.dtype) -> None:
    """A launch on the simulated GPU binds, compiles for sm_90 and is checked; it does not run."""
    example = module("worked_example")
    batch = example.pack([example.binary_tree(20)], [200], heads=8, kv_heads=2, width=128, page_size=16, dtype=dtype)
    with simulated_gpu.gpu("sm_90") as gpu:
        module(name).tree_attention(*example.to(batch, "cuda"), scale=0.1)
    assert gpu.launches and all(launch.compiled for launch in gpu.launches)
    assert all(launch.shared <= simulated_gpu.SHARED_MEMORY["sm_90"] for launch in gpu.launches)


@pytest.mark.skipif(simulated_gpu.unavailable_reason() is not None, reason=str(simulated_gpu.unavailable_reason()))
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_grids_of_the_triton_steps() -> None:
    """At most three blocks for each of four heads and three requests; times the number of pieces."""
    example = module("worked_example")
    with simulated_gpu.gpu("sm_90") as gpu:
        inputs = example.to(example.ragged(), "cuda")
        module("step4_triton").tree_attention(*inputs, scale=0.1)
        module("step5_split_k").tree_attention(*inputs, scale=0.1, pieces=5)
    grids = {launch.kernel.rpartition(":")[2]: launch.grid for launch in gpu.launches}
    assert grids == {"tree_attention_kernel": (3, 4, 3), "attend_kernel": (3, 4, 15), "combine_kernel": (47, 4)}


@pytest.mark.aot
@pytest.mark.skipif(machine_code.unavailable_reason() is not None, reason=str(machine_code.unavailable_reason()))
def test_the_page_shows_the_computed_tables() -> None:
    traffic, page = module("traffic"), PAGE.read_text(encoding="utf-8")
    for title, batch in traffic.EXAMPLES.items():
        assert traffic.table(batch) in page, title


def test_the_page_names_functions_that_exist() -> None:
    """`function` in `file`: parts of the shipped kernel, in the folder of the operator."""
    folder = Path(str(import_module(AttentionPlan.__module__).__file__)).parent
    named = re.findall(r"`(\w+)` in `(\w+\.py)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) >= 12
    for function, name in named:
        assert re.search(rf"^def {function}\(", (folder / name).read_text(encoding="utf-8"), flags=re.MULTILINE), (
            function
        )


def test_the_sections_that_the_page_includes_exist() -> None:
    included = re.findall(r'^ *--8<-- "([^":]+):(\w+)"', PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {Path(path).stem for path, _ in included} >= {name for name in STEPS if name.startswith("step")}
    for path, section in included:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f"--8<-- [start:{section}]" in source and f"--8<-- [end:{section}]" in source, (path, section)
