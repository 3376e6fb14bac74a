"""Choice of backends: order, reasons, requests, warnings, the missing extension, and the cost of a call."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import OPS, Backend, FallbackWarning, Op, UnsupportedError, explain, use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.dispatch.backend_request import parse_request
from specdec_kernels.dispatch.operator import lazy_import

CALLS: list[str] = []


def plain(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """The reference."""
    CALLS.append("reference")
    return x * scale


def fast(x: Tensor, *, scale: float = 1.0) -> Tensor:
    CALLS.append("fast")
    return x * scale


def small_only(x: Tensor, **kwargs: Any) -> str | None:
    return None if x.numel() < 8 else f"{x.numel()} elements are too many"


def by_size(x: Tensor, **kwargs: Any) -> tuple[torch.dtype, bool]:
    return x.dtype, x.numel() < 8


@pytest.fixture
def op() -> Iterator[Op]:
    CALLS.clear()
    yield Op("test_scale", plain, [Backend("fast", lambda: fast, small_only)], key=by_size)
    del OPS["test_scale"]


SMALL, LARGE = torch.ones(4), torch.ones(9)


def test_the_first_backend_that_can_serve_is_used(op: Op) -> None:
    assert torch.equal(op(SMALL, scale=2.0), SMALL * 2)
    assert CALLS == ["fast"] and op.last_backend == "fast"
    assert op.choose_backend(SMALL) == "fast"


def test_the_reference_is_the_fallback_and_warns_once(op: Op) -> None:
    with pytest.warns(FallbackWarning, match="fast: 9 elements are too many"):
        op(LARGE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(LARGE)
    assert CALLS == ["reference"] * 2 and op.last_backend == "reference"


def test_the_choice_is_made_once_per_signature(op: Op) -> None:
    asked = 0

    def count(x: Tensor, **kwargs: Any) -> str | None:
        nonlocal asked
        asked += 1
        return None

    op.backends.insert(0, Backend("counting", lambda: fast, count))
    for _ in range(5):
        op(SMALL)
    assert asked == 1
    op(SMALL.double())
    assert asked == 2
    op.clear_choices()
    op(SMALL)
    assert asked == 3


def test_a_request_is_met_or_refused_with_every_reason(op: Op) -> None:
    with use_backend("reference"):
        op(SMALL)
    assert op.last_backend == "reference"
    with use_backend("fast"), pytest.raises(UnsupportedError) as refusal:
        op(LARGE)
    assert "fast: 9 elements are too many" in str(refusal.value)
    assert "reference: can serve this call" in str(refusal.value)
    with use_backend("triton"), pytest.raises(UnsupportedError, match="not a backend of this operator"):
        op(SMALL)


def test_requests_nest_and_may_name_one_operator(op: Op) -> None:
    with use_backend("reference"):
        with use_backend(test_scale="fast"):
            assert op.choose_backend(SMALL) == "fast"
        with use_backend():
            assert op.choose_backend(SMALL) == "fast"
        assert op.choose_backend(SMALL) == "reference"
    assert op.choose_backend(SMALL) == "fast"
    with pytest.raises(ValueError, match="operator: got 'nonsense'"), use_backend(nonsense="cpu"):
        pass


def test_a_request_holds_for_its_own_thread(op: Op) -> None:
    seen = []
    with use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(op.choose_backend(SMALL)))
        thread.start()
        thread.join()
    assert seen == ["fast"]


def test_a_slow_backend_serves_explicit_requests_only(op: Op) -> None:
    op.backends.insert(0, Backend("odd", lambda: fast, not_worth=lambda *a, **k: "never pays"))
    assert op.choose_backend(SMALL) == "fast"
    assert op.explain(SMALL)[0].reason == "never pays"
    with use_backend("odd"):
        assert op.choose_backend(SMALL) == "odd"


def test_explain_is_a_table_with_reasons(op: Op) -> None:
    rows = op.explain(LARGE)
    assert [(r.backend, r.chosen) for r in rows] == [("fast", False), ("reference", True)]
    table = explain("test_scale", LARGE)
    assert "no: 9 elements are too many" in table and table.splitlines()[1].endswith("chosen")
    everything = explain()
    assert all(name in everything for name in OPS)
    with pytest.raises(ValueError, match="operator: got 'nonsense'"):
        explain("nonsense")


def test_an_operator_shows_its_references_documentation(op: Op) -> None:
    assert op.__doc__ == "The reference."
    assert list(inspect.signature(op).parameters) == ["x", "scale"]
    with pytest.raises(ValueError, match="registered twice"):
        Op("test_scale", plain, [])


def test_torch_compile_takes_the_backend_into_the_graph(op: Op) -> None:
    op.backends[0] = Backend("fast", lambda: fast_in_graph, graph_devices={"cpu": "fast"})
    compiled = torch.compile(lambda x: op(x, scale=3.0) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(SMALL), SMALL * 3 + 1)


def fast_in_graph(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


STAGE = """
import torch
new, cache = torch.ones(1, 1, 4), torch.zeros(2, 2, 1, 4)
x = new, new, cache, cache.clone(), torch.tensor([3])
specdec_kernels.kv_stage(*x)
assert x[2][1, 1].sum() == 4
print(specdec_kernels.kv_stage.last_backend)
"""


def test_without_the_extension_references_serve_and_say_why() -> None:
    code = "import sys; sys.modules['specdec_kernels._C'] = None\nimport specdec_kernels\n"
    out = run_python(code + STAGE + "print(specdec_kernels.explain('kv_stage'))")
    assert out.splitlines()[0] == "reference"
    assert "extension specdec_kernels._C not built; build it with `pip install -e .`" in out


def test_the_environment_requests_backends_and_the_import_is_light() -> None:
    light = "import sys\nimport specdec_kernels\nheavy = {'triton', 'specdec_kernels._C'} & set(sys.modules)\n"
    out = run_python(light + "print(len(heavy))" + STAGE, SPECDEC_BACKEND="cpu,kv_stage=reference")
    assert out.split() == ["0", "reference"]


def test_a_misspelt_operator_in_the_environment_is_reported() -> None:
    program = "try:\n    {}\nexcept ValueError as error:\n    print(error)\n"
    ways = [program.format(way) for way in ("specdec_kernels.kv_stage(*x)", "specdec_kernels.explain()")]
    code = "import specdec_kernels\n" + STAGE.partition("specdec_kernels.kv_stage(*x)")[0] + "".join(ways)
    out = run_python(code, SPECDEC_BACKEND="kv_stgae=reference").splitlines()
    want = "SPECDEC_BACKEND operator: got 'kv_stgae'; expected one of attention_plan, "
    assert [line.startswith(want) and line.endswith("; did you mean 'kv_stage'?") for line in out] == [True, True]


@pytest.mark.parametrize(
    ("text", "name"),
    [("", None), ("auto", None), ("reference", "reference"), ("cpu,kv_stage=b", "cpu"), (" cpu , tree_plan = x ", "x")],
)
def test_a_request_is_parsed(text: str, name: str | None) -> None:
    request = parse_request(text)
    assert (request.name_for("tree_plan") if request else None) == name


def test_the_page_of_operators_lists_each_with_its_backends() -> None:
    text = (Path(__file__).parents[2] / "docs" / "kernels" / "operators.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", text, re.MULTILINE)
    table = {name: backends.split(", ") for names, backends in rows for name in re.findall(r"`(\w+)`", names)}
    assert table == {name: [each.name for each in op.backends[:-1]] for name, op in OPS.items()}


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason=str(extension.unavailable_reason()))
def test_every_operator_runs_on_its_extension_by_default() -> None:
    ops = set(OPS) - {"attention_plan", "process_logits_overlay"}  # kernels on a CPU need no plan, and process in place
    assert [row for name in ops for row in OPS[name].explain() if row.chosen and row.backend == "reference"] == []


def test_dispatch_costs_little(op: Op) -> None:
    """At most 2 us on an idle machine, measured in cheap torch calls (1 us) so that load cancels out."""
    nothing = Op("test_nothing", lambda x: None, [])
    del OPS["test_nothing"]
    with use_backend("reference"):
        nothing(SMALL)

    def best_of(call: Any, repeats: int = 9, count: int = 1000) -> float:
        times = []
        for _ in range(repeats):
            begin = time.process_time()
            for _ in range(count):
                call(SMALL)
            times.append((time.process_time() - begin) / count)
        return min(times)

    assert best_of(nothing) < 2 * best_of(lambda x: torch.add(x, x))


def test_a_lazy_import_imports_when_it_is_called() -> None:
    assert lazy_import("specdec_kernels.ops.kv_slots", "reference:kv_slots")() is OPS["kv_slots"].reference
    absent = lazy_import("specdec_kernels.ops.kv_slots", "no_such_module:kv_slots")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        absent()
