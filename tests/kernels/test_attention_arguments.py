"""tree_attention checks its arguments before it computes, with the same messages on every backend."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from specdec_kernels import tree_attention, use_backend
from specdec_kernels.dispatch import extension
from specdec_kernels.testing.agreement import make_sample
from specdec_kernels.testing.samples_attention import Sizes

BACKENDS = ["reference", None] + ([] if extension.unavailable_reason() else ["cpu"])
NAMES = ("query", "key_cache", "value_cache", "page_table", "lengths", "offsets", "ancestors", "depth")
HEADS, KV_HEADS = Sizes().heads, Sizes().kv_heads


def call(**changes: Any) -> Any:
    given = dict(zip(NAMES, make_sample("tree_attention", Sizes()).arguments, strict=True))
    for name, change in changes.items():
        if name in given:
            given[name] = change(given[name]) if callable(change) else change
    options = {name: value for name, value in changes.items() if name not in given}
    return tree_attention(*given.values(), **{"scale": 0.1} | options)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "negative softcap": ({"softcap": -2.0}, r"softcap is -2\.0, expected a finite number above 0, or 0 for none"),
    "softcap of NaN": ({"softcap": math.nan}, "softcap is nan"),
    "softcap without bounds": ({"softcap": math.inf}, "softcap is inf"),
    "negative window": ({"window": -3}, "window is -3, expected a number of positions, or 0"),
    "one scale of two": ({"value_scale": torch.ones(KV_HEADS)}, "key_scale and value_scale go together"),
    "the other scale": ({"key_scale": torch.ones(KV_HEADS)}, "key_scale and value_scale go together"),
    "scales of other heads": ({"key_scale": torch.ones(3), "value_scale": torch.ones(3)}, r"key_scale is .*\[3\]"),
    "sinks of other heads": ({"sinks": torch.zeros(3)}, rf"sinks .*\[3\].* expected .*\[{HEADS}\]"),
    "long lengths": ({"lengths": lambda each: each.long()}, "lengths is torch.int64"),
    "a table of floats": ({"page_table": lambda each: each.float()}, "page_table is torch.float32"),
    "a query of integers": ({"query": lambda each: each.int()}, "query is torch.int32"),
    "a query of another dtype": ({"query": lambda each: each.bfloat16()}, "key_cache has dtype torch.float32"),
    "a flat query": ({"query": lambda each: each[:, 0]}, r"query is torch.float32 \[16, 64\]"),
    "another width": (
        {"query": lambda each: each[:, :, :32].contiguous()},
        r"key_cache is .*\b64\], expected .*\b32\]",
    ),
    "too few words": ({"ancestors": lambda each: each[:, :0].contiguous()}, "words"),
    "a list": ({"lengths": [1, 2]}, "lengths is list, expected a tensor"),
    "no query": ({"query": [1.0]}, "query is no tensor"),
    "a window without depth": ({"window": 5, "depth": None}, "window with ancestors needs depth"),
    "offsets of more rows": ({"offsets": lambda each: torch.cat([each, each[-1:]])}, "offsets"),
}


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("name", BAD)
def test_misfits_are_named(backend: str | None, name: str) -> None:
    changes, message = BAD[name]
    with use_backend(backend), pytest.raises(ValueError, match="tree_attention: ") as caught:
        call(**changes)
    unserved = "backend 'cpu' cannot serve this call" in str(
        caught.value
    )  # requested explicitly, and it says why it cannot serve
    assert unserved or re.search(message, str(caught.value)), caught.value


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_valid_arguments_are_served(backend: str | None) -> None:
    with use_backend(backend):
        for changes in ({}, {"softcap": 2.0}, {"window": 3}, {"sinks": torch.zeros(HEADS)}):
            assert bool(call(**changes).isfinite().all())
