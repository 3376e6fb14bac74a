"""Probabilities in place of logits: debug mode warns, on every backend."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specdec_kernels import OPS, distribution_stats, use_backend
from specdec_kernels.dispatch import debug_mode

WORDS = "logits has rows of numbers from 0 to 1 that sum to 1; expected logits, not probabilities; pass probs.log"


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if OPS["distribution_stats"].backends[1].missing() is not None and request.param == "cpu":
        pytest.skip("CPU extension not built")
    monkeypatch.setattr(debug_mode, "ENABLED", True)
    for op in OPS.values():
        op.clear_choices()
    yield request.param
    for op in OPS.values():
        op.clear_choices()


def settings(rows: int) -> list[torch.Tensor]:
    zeros = torch.zeros(rows)
    return [torch.ones(rows), torch.zeros(rows, dtype=torch.int32), torch.ones(rows), zeros]


@pytest.mark.parametrize("named", [False, True])
def test_probabilities_cause_a_warning(backend: str, named: bool) -> None:
    probs = torch.randn(3, 50).softmax(1)
    with use_backend(backend):
        with pytest.warns(UserWarning, match=f"distribution_stats: {WORDS}"):
            wrong = distribution_stats(logits=probs, **_named(3)) if named else distribution_stats(probs, *settings(3))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            right = distribution_stats(probs.log(), *settings(3))
    assert right[1].abs().max() < 1e-4 < wrong[1].abs().min(), "the result is what it was"


def _named(rows: int) -> dict[str, Any]:
    return dict(zip(("temperature", "top_k", "top_p", "min_p"), settings(rows), strict=True))


def test_rows_that_only_resemble_probabilities_are_accepted(backend: str) -> None:
    probs = torch.randn(3, 50).softmax(1)
    off = probs.clone()
    off[1] *= 1.01
    masked = probs.clone()
    masked[:, 7] = -torch.inf
    for logits in (off, -probs, masked, probs - 0.02, torch.zeros(3, 50), torch.ones(3, 50), torch.empty(0, 50)):
        assert not debug_mode.are_probabilities(logits)
    assert debug_mode.are_probabilities(probs) and debug_mode.are_probabilities(probs.half())
    assert not debug_mode.are_probabilities(probs[0]) and not debug_mode.are_probabilities(None)


def test_every_operator_that_takes_logits_is_checked(backend: str) -> None:
    watched = {name for name, op in OPS.items() if debug_mode.with_logits_check(name, op.reference, print) is not print}
    assert watched >= {
        *("distribution_stats", "draft_sample", "replay_sample", "replay_verify", "process_logits", "tree_grow"),
        *("rejection_verify", "recursive_rejection_verify", "traversal_verify", "rejection_verify_logits"),
    }
    assert not watched & {"tree_attention", "kv_commit", "tree_plan", "ngram_match"}


def test_distributions_are_checked(backend: str) -> None:
    """A distribution is a tuple whose first part is its logits."""
    probs = torch.randn(2, 9).softmax(1)
    seen: list[Any] = []

    def takes(tokens: Any, target: Any) -> None:
        seen.append(target)

    run = debug_mode.with_logits_check("an_operator", takes, takes)
    with pytest.warns(UserWarning, match="an_operator: target has rows"):
        run(None, (probs, 1, 2, 3, 4))
    assert seen[0][0] is probs


def test_without_debug_mode_values_are_not_checked() -> None:
    code = (
        "import warnings, torch; warnings.simplefilter('error'); from specdec_kernels import replay_sample as r\n"
        "p = torch.randn(1, 50).softmax(1); z = torch.zeros(1, dtype=torch.int64)\n"
        "try:\n    r(p, torch.ones(1), torch.full((1,), -torch.inf), z.int(), z, z.int())\n    print('taken')\n"
        "except UserWarning as w:\n    print(w)\n"
    )
    for on, said in (("0", "taken"), ("1", f"replay_sample: {WORDS}")):
        environment = os.environ | {"SPECDEC_DEBUG": on}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.stdout.startswith(said), done.stdout + done.stderr
