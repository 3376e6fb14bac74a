"""Messages about unknown names: existing names, the closest one, and the new name of a former one."""

from __future__ import annotations

import re

import pytest

import specdec_kernels
from specdec_kernels import OPS, explain, use_backend
from specdec_kernels.unknown_names import RENAMED_OPERATORS, closest, hint, unknown_name

KNOWN = ["best", "block", "replay"]


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ("blok", "; did you mean 'block'?"),
        ("REPLAY", "; did you mean 'replay'?"),
        ("old", "; rule 'old' is now called 'best'"),
        ("older", ""),  # its new name does not exist
        ("something", ""),
        (3, ""),
    ],
)
def test_an_unknown_name_is_explained(got: object, words: str) -> None:
    message = unknown_name(
        "rule", got, KNOWN, or_else=", or a Rule", renamed={"old": "best", "older": "gone"}, kind="rule"
    )
    assert message == f"rule: got {got!r}; expected one of best, block, replay, or a Rule{words}"


def test_the_closest_name_is_far_enough_from_none() -> None:
    assert closest("draft-modle", ["draft_model", "draft_tree"]) == "draft_model"
    assert closest("demo", ["demo-target"], cutoff=0.8) is None
    assert hint("x", []) == ""


def test_operators_have_their_new_names_alone() -> None:
    functions = {name for name in specdec_kernels.__all__ if callable(getattr(specdec_kernels, name))}
    assert not functions & RENAMED_OPERATORS.keys()
    assert set(RENAMED_OPERATORS.values()) <= functions


@pytest.mark.parametrize("old", sorted(RENAMED_OPERATORS))
def test_an_operator_by_its_former_name(old: str) -> None:
    with pytest.raises(AttributeError, match=f"operator '{old}' is now called '{RENAMED_OPERATORS[old]}'"):
        getattr(specdec_kernels, old)
    if RENAMED_OPERATORS[old] in OPS:  # some are functions beside one
        words = f"operator: got '{old}'; expected one of .*; operator '{old}' is now called"
        with pytest.raises(ValueError, match=words), use_backend(**{old: "cpu"}):
            pass
        with pytest.raises(ValueError, match=words):
            explain(old)


def test_a_misspelt_operator_is_suggested() -> None:
    near = re.escape("did you mean 'kv_stage'?")
    with pytest.raises(ValueError, match=near), use_backend(kv_stgae="cpu"):
        pass
    with pytest.raises(ValueError, match=near):
        explain("kv_stgae")
    with pytest.raises(AttributeError, match=near):
        specdec_kernels.kv_stgae  # noqa: B018


def test_a_misspelt_backend_is_suggested() -> None:
    with pytest.raises(ValueError, match=re.escape("is not a backend of this operator; did you mean 'reference'?")):
        with use_backend("refrence"):
            OPS["kv_stage"].choose_backend()
