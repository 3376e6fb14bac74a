"""What the trees of a draft model cost beside its chains (drafters draft_tree and draft_model): time of one `propose`.

python -m pytest benchmarks/test_draft_tree.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec_fast import HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.interfaces import Budget
from specdec_fast.state import DecodeState
from specdec_fast.targets.tiny import tiny_model

CASES: list[tuple[str, dict[str, Any]]] = [
    ("draft_model", {"pick": "drawn", "num_draft_tokens": 4}),
    ("draft_tree", {"how": "coupled", "widths": (3, 2, 1, 1)}),
    ("draft_tree", {"how": "hybrid", "widths": (3, 2, 1, 1)}),
    ("draft_tree", {"how": "without_replacement", "widths": (3, 2, 1, 1)}),
]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_propose(benchmark: Any, name: str, settings: dict[str, Any]) -> None:
    rows = 4
    made = get_drafter(name)(HuggingFaceTarget(tiny_model("llama"), max_rows=rows, max_length=128), **settings)
    state = DecodeState(rows, 128)
    joined = [state.join([1, 2, 3 + at], SamplingParams(seed=at), 3, ()) for at in range(rows)]
    made.begin(state, joined, None)

    @torch.inference_mode()
    def propose() -> int:
        return made.propose(state, joined, Budget([made.num_draft_tokens] * rows), state.rng(joined)).num_nodes

    benchmark.extra_info |= {"nodes": propose()}
    benchmark(propose)
