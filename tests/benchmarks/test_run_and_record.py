"""Benchmarks that are recorded: one row each, machine by machine."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.interleave import cpu_name
from benchmarks.harness.run_and_record import joined, rows_of


def found(median: float) -> dict[str, Any]:
    each = {
        "name": "test_look_up[8-ngram]",
        "params": {"rows": 8, "dtype": "UNSERIALIZABLE[torch.float32]"},
        "extra_info": {"nodes": 5},
    }
    return {"benchmarks": [each | {"stats": {"median": median, "min": median / 2, "max": 9.0}}]}


def test_a_row_says_what_was_measured() -> None:
    (row,) = rows_of(found(2e-6))
    assert row == {
        "benchmark": "look_up", "rows": 8, "dtype": "torch.float32", "nodes": 5, "median_us": 2.0, "min_us": 1.0,
        "median_us_per_row": 0.25,
    }  # fmt: skip


def test_a_machine_replaces_its_own_rows_only() -> None:
    one, other = {"cpu": "A", "isa": "AVX2"}, {"cpu": "A", "isa": "AVX512"}
    both = joined(joined({}, one, rows_of(found(2e-6))), other, rows_of(found(4e-6)))
    again = joined(both, one, rows_of(found(8e-6)))
    assert {each["environment"]["isa"]: each["rows"][0]["median_us"] for each in again["machines"]} == {
        "AVX512": 4.0,
        "AVX2": 8.0,
    }


def test_processors_of_one_name_are_told_apart() -> None:
    amd = "processor\t: 0\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n"
    assert cpu_name(amd.format(25, 17)) == "AMD EPYC (family 25, model 17)"
    assert cpu_name(amd.format(26, 2)) == "AMD EPYC (family 26, model 2)"
    assert cpu_name("processor\t: 0\nmodel name\t: Somebody's\n") == "Somebody's"
    assert cpu_name("processor\t: 0\nCPU part\t: 0xd40\n") == ""
