"""Machine code of every Triton kernel, compiled without a GPU, against recorded ceilings: `make lane-compile`.

A usual run compiles pairs of variant and architecture marked `everyday`, at most 48. With SPECDEC_KERNELS_FULL=1
(`make kernels-full`) it compiles every variant for every architecture.
"""

from __future__ import annotations

import ast
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.kernels import compile_all
from specdec_kernels.inspection import machine_code
from specdec_kernels.inspection.machine_code import Cost, breaches, measure, variants
from specdec_kernels.triton_shared.aot_config import Variant

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(machine_code.unavailable_reason() is not None, reason=str(machine_code.unavailable_reason())),
]
FULL = os.environ.get("SPECDEC_KERNELS_FULL") == "1"
MOST_EVERYDAY = 48
VERSIONS = ("3.9", "3.7", "3.6")
"""Minor versions of Triton with which nothing may spill on sm_90."""
SPILLING = {"3.8": 8}
"""Those with which so many variants do, by a few instructions."""
VARIANTS = variants() if machine_code.unavailable_reason() is None else []
EVERYDAY = [(variant, each) for variant in VARIANTS for each in variant.everyday]
HERE = machine_code.version() if VARIANTS else ""
PAIRS = [(variant, each) for variant in VARIANTS for each in variant.architectures] if FULL else EVERYDAY


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled kernels of earlier runs are not results of this compiler."""
    import triton

    triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize(("variant", "architecture"), PAIRS, ids=lambda x: getattr(x, "name", x))
def test_no_kernel_costs_more_than_recorded(variant: Variant, architecture: str) -> None:
    cost = measure(variant, architecture)
    ceiling = machine_code.ceilings().get(variant.name, {}).get(architecture)
    assert breaches(cost, ceiling, architecture) == []


def test_everyday_variants_are_few_and_cover_every_kernel_on_hopper() -> None:
    assert len(EVERYDAY) <= MOST_EVERYDAY
    assert all(set(variant.everyday) <= set(variant.architectures) for variant in VARIANTS)
    covered = {variant.kernel for variant, architecture in EVERYDAY if architecture == "sm_90"}
    assert covered == {variant.kernel for variant in VARIANTS}


def test_kv_slots_writes_a_length_after_all_warps_have_read_it() -> None:
    """The last store of a program is to memory that each of its warps has read, so a barrier must come between."""
    (variant,) = (each for each in VARIANTS if each.name == "kv_slots/page 16")
    code = machine_code.compile_variant(variant, "sm_90").asm["ptx"]
    before = code[: code.rindex("st.global")]
    assert before.rindex("bar.sync") > before.rindex("ld.global")


@pytest.mark.parametrize("kernel", ["scan_blocks", "join_blocks"])
def test_inverse_temperatures_are_rounded_as_the_references_round_them(kernel: str) -> None:
    """`/` in float32 would be an approximate division."""
    (variant,) = (
        each for each in VARIANTS if each.kernel == f"distribution_stats.triton_kernel:{kernel}" and each.everyday
    )
    code = machine_code.compile_variant(variant, "sm_90").asm["ptx"]
    assert "div.rn.f32" in code and "div.full.f32" not in code


def test_every_operator_with_triton_kernels_lists_variants() -> None:
    folder = Path(machine_code.__file__).parents[1] / "ops"
    kernels = {path.parent.name for path in folder.glob("*/triton_kernel.py")}
    assert kernels and {variant.kernel.partition(".")[0] for variant in VARIANTS} == kernels
    assert {variant.name.partition("/")[0] for variant in VARIANTS} == kernels


@pytest.mark.parametrize("version", [*VERSIONS, *SPILLING])
def test_ceilings_are_recorded_for_all_that_exists_and_nothing_else(version: str) -> None:
    recorded = machine_code.recorded()[version]
    assert {n: set(each) for n, each in recorded.items()} == {v.name: set(v.architectures) for v in VARIANTS}
    spills = [each["sm_90"]["spills"] for each in recorded.values()]
    assert sum(map(bool, spills)) == SPILLING.get(version, 0) and max(spills) <= 6


def test_ceilings_are_those_of_the_triton_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(machine_code.recorded()) == {*VERSIONS, *SPILLING}
    for version in machine_code.recorded():
        monkeypatch.setattr("triton.__version__", f"{version}.1")
        assert machine_code.ceilings() == machine_code.recorded()[version]
    monkeypatch.setattr("triton.__version__", "3.77.0")
    assert machine_code.ceilings() == {}
    assert "no ceiling is recorded for Triton 3.77;" in breaches(GOOD, None, "sm_80")[0]


GOOD = Cost(registers=100, stack=0, spills=0, shared=4096, wgmma=8, mma=0, wide_loads=4, narrow_loads=10)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"registers": 111}, "registers 111; expected at most 110"),
        ({"shared": 5000}, "shared"),
        ({"spills": 1}, "spills"),
        ({"stack": 8}, "stack"),
        ({"wgmma": 0, "mma": 8}, "wgmma 0; expected 7 to 9, since 8 were recorded"),
        ({"mma": 2}, "mma 2; expected 0 to 1"),
        ({"wide_loads": 0}, "wide_loads"),
        ({"narrow_loads": 99}, "narrow_loads"),
    ],
)
def test_growth_is_a_breach(change: dict[str, int], word: str) -> None:
    ceiling = asdict(GOOD)
    assert breaches(GOOD, ceiling, "sm_80") == breaches(replace(GOOD, registers=110), ceiling, "sm_80") == []
    assert word in breaches(replace(GOOD, **change), ceiling, "sm_80")[0]


@pytest.mark.parametrize("name", ["wgmma", "mma", "wide_loads"])
@pytest.mark.parametrize(
    ("recorded", "allowed"), [(0, (0, 1)), (1, (1, 2)), (2, (1, 3)), (8, (7, 9)), (40, (36, 44)), (41, (36, 46))]
)
def test_counts_of_instructions_have_upper_and_lower_limits(name: str, recorded: int, allowed: tuple[int, int]) -> None:
    """Within a tenth, at least one; the last instruction must stay."""
    ceiling = asdict(replace(GOOD, **{name: recorded}))
    for got in range(60):
        found = breaches(replace(GOOD, **{name: got}), ceiling, "sm_90")
        assert bool(found) == (not allowed[0] <= got <= allowed[1]), (got, found)


def test_a_lost_pipeline_is_a_breach() -> None:
    """For example, if the page ids of a tile are not loaded one tile ahead, the compiler prefetches less."""
    piped = replace(GOOD, shared=90_000)
    assert breaches(replace(piped, shared=60_000), asdict(piped), "sm_90") == []
    assert "fewer tiles are prefetched" in breaches(replace(piped, shared=59_999), asdict(piped), "sm_90")[0]
    assert breaches(replace(GOOD, shared=16), asdict(GOOD), "sm_90") == []


def test_spills_on_hopper_and_missing_ceilings_are_breaches() -> None:
    spilling = replace(GOOD, spills=3)
    assert breaches(spilling, asdict(spilling), "sm_80") == []
    assert "expected none on sm_90" in breaches(spilling, asdict(GOOD), "sm_90")[0]
    assert "expected none on sm_90" in breaches(spilling, None, "sm_90")[0]
    assert breaches(spilling, asdict(spilling), "sm_90") == [], "recorded, which another test allows few versions"
    assert breaches(replace(GOOD, spills=4), asdict(spilling), "sm_90") == ["spills 4; expected at most 3"]
    assert "no ceiling is recorded" in breaches(GOOD, None, "sm_80")[0]


def test_arguments_that_do_not_fit_the_kernel_are_named() -> None:
    variant = VARIANTS[0]
    wrong = replace(variant, arguments={**variant.arguments, "nonsense": "i32"})
    with pytest.raises(ValueError, match=r"other arguments.*nonsense"):
        measure(wrong, "sm_90")


def test_recording_keeps_what_it_does_not_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_code, "CEILINGS", tmp_path / "ceilings.json")
    first, second = VARIANTS[0].name, VARIANTS[1].name
    machine_code.record({first: {"sm_80": GOOD, "sm_90": GOOD}, "gone": {"sm_90": GOOD}})
    machine_code.record({second: {"sm_90": replace(GOOD, registers=7)}})
    kept = machine_code.ceilings()
    assert set(kept) == {first, second} and kept[first]["sm_80"] == asdict(GOOD)
    assert kept[second]["sm_90"]["registers"] == 7
    monkeypatch.setattr("triton.__version__", "3.10.0")
    machine_code.record({second: {"sm_90": GOOD}})
    assert machine_code.recorded() == {"3.10": {second: {"sm_90": asdict(GOOD)}}, HERE: kept}
    assert list(machine_code.recorded()) == ["3.10", HERE], "the newest first"


def test_another_triton_fails_on_growth_and_spills(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_code, "variants", lambda: [VARIANTS[0]])
    monkeypatch.setattr(machine_code, "ceilings", lambda: {VARIANTS[0].name: {"sm_90": asdict(GOOD)}})
    monkeypatch.setattr(machine_code, "measure", lambda variant, architecture: GOOD)
    assert compile_all.main() == 0
    monkeypatch.setattr(machine_code, "measure", lambda variant, architecture: replace(GOOD, registers=200))
    assert compile_all.main() == 1 and "registers 200; expected at most 110" in capsys.readouterr().out
    monkeypatch.setattr(machine_code, "ceilings", dict)
    assert compile_all.main() == 0 and "no ceilings are recorded with this Triton" in capsys.readouterr().out
    monkeypatch.setattr(machine_code, "measure", lambda variant, architecture: replace(GOOD, spills=2))
    assert compile_all.main() == 1 and "2 spills; expected none on sm_90" in capsys.readouterr().out


def test_the_file_holds_plain_numbers() -> None:
    source = machine_code.CEILINGS.read_text(encoding="utf-8")
    assert list(ast.literal_eval(source)) == sorted([*VERSIONS, *SPILLING], reverse=True)
