"""`specdec info`: complete, and the same in both forms."""

from __future__ import annotations

import json
from typing import Any

from specdec_fast.drafters import drafter_names
from specdec_fast.rules import rule_names
from specdec_kernels import OPS


def test_json(run: Any) -> None:
    found = json.loads(run("info", "--json").stdout)
    assert found["versions"]["torch"]
    assert found["cpu"]["threads"] >= 1
    assert found["rules"] == rule_names()
    assert found["drafters"] == drafter_names()
    assert {row["op"] for row in found["ops"]} == set(OPS)
    for op in OPS:
        assert sum(row["chosen"] for row in found["ops"] if row["op"] == op) == 1
    assert found["extension"]["built"] == (found["extension"]["reason"] is None)
    bundled = {asset["name"] for asset in found["assets"]}
    assert {"demo-target", "demo-draft", "demo-medusa"} <= bundled and "workload.json" not in bundled


def test_text(run: Any) -> None:
    result = run("info")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert [line for line in result.stdout.splitlines() if line != line.rstrip()] == []
    for op in OPS:
        assert op in result.stdout


def test_a_reason_is_printed_once(run: Any) -> None:
    """Not once per operator."""
    shown = " ".join(run("info").stdout.split())
    ops = json.loads(run("info", "--json").stdout)["ops"]
    for backend, reason in {(row["backend"], row["reason"]) for row in ops if row["reason"] is not None}:
        assert shown.count(f"{backend} {reason[:12]}") == 1, (backend, reason)
