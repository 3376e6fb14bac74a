"""The benchmark of the plugin for vLLM: every part is measured, and the recorded shares are within the limit."""

from __future__ import annotations

import json

from benchmarks import vllm_plugin


def test_parts_are_measured_beside_their_operators() -> None:
    rows = vllm_plugin.measure(rounds=1, turns=2)
    assert [row["case"] for row in rows] == [*vllm_plugin.CASES, *vllm_plugin.DRAFTING.values()]
    for row in rows:
        assert row["kernels_us"] > 0 and row["call_us"] > 0, row


def test_recorded_shares_are_within_the_limit() -> None:
    """At most 300 us of a step beside the kernels, for 8 requests, 4 draft tokens and 32,000 tokens.

    A step is a verification, and the draft passes before it where the plugin samples them.
    """
    found = json.loads(vllm_plugin.RESULTS.read_text())
    assert (found["batch"], found["draft_tokens"], found["vocabulary"]) == (8, 4, 32_000)
    shares = {row["case"]: row["share_us"] for row in found["rows"]}
    assert list(shares) == [*vllm_plugin.CASES, *vllm_plugin.DRAFTING.values()]
    assert all(0 < share <= 300 for share in shares.values()), shares
    assert all(shares[case] + shares[drafting] <= 300 for case, drafting in vllm_plugin.DRAFTING.items()), shares
