"""What the trees of a draft model cost beside its chains (drafters draft_tree and draft_model): time of one `propose`.

python -m pytest benchmarks/micro/test_draft_tree.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec_fast import HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Budget, TargetOutput
from specdec_fast.targets.tiny_models import tiny_model

CASES: list[tuple[str, dict[str, Any]]] = [
    ("draft_model", {"pick": "sampled", "num_draft_tokens": 4}),
    ("draft_tree", {"how": "coupled", "widths": (3, 2, 1, 1)}),
    ("draft_tree", {"how": "hybrid", "widths": (3, 2, 1, 1)}),
    ("draft_tree", {"how": "without_replacement", "widths": (3, 2, 1, 1)}),
    ("draft_tree", {"how": "coupled", "depth": 5, "num_draft_tokens": 16}),
    ("draft_tree", {"how": "top_k", "depth": 6, "num_draft_tokens": 64}),
]


class Instant:
    """A draft model that answers at once, with the same logits: what is left is growing."""

    def __init__(self, vocab: int) -> None:
        self.inner = HuggingFaceTarget(tiny_model("llama", vocab_size=vocab), max_rows=1, max_length=256)
        self.cache, self.device, self.vocab_size = self.inner.cache, self.inner.device, vocab
        self.max_length = self.inner.max_length
        source = torch.Generator().manual_seed(0)
        self.logits = torch.randn(512, vocab, generator=source) * 2.5
        self.seconds = 0.0

    def extend(self, *args: Any, **more: Any) -> Any:
        return self.inner.extend(*args, **more)

    def score(self, draft: Any, plan: Any) -> tuple[TargetOutput, None]:
        return TargetOutput(self.logits[: draft.num_nodes]), None


@pytest.mark.parametrize("vocab", [1024, 32_000])
@pytest.mark.parametrize("how", ["top_k", "coupled"])
def test_growing_64_nodes_outside_the_model(benchmark: Any, how: str, vocab: int) -> None:
    """Six levels of eight nodes each, the 64 best kept, one row: all of `propose` but the passes of the model, whose
    logits are there at once. Bringing its cache up to date, staging, picking, the trees and their plans are part of it.
    """
    model: Any = Instant(vocab)
    made = get_drafter("draft_tree")(model, depth=6, width=8, num_draft_tokens=64, how=how)
    state = DecodeState(1, 256)
    row = state.join([1, 2, 3], SamplingParams(seed=5), 3, ())
    made.begin(state, [row], None)

    @torch.inference_mode()
    def propose() -> int:
        return made.propose(state, [row], Budget([64]), state.rng([row])).num_nodes

    benchmark.extra_info |= {"drafter": "draft_tree", "nodes": propose(), "rows": 1}
    benchmark(propose)


def test_joining_two_drafts(benchmark: Any) -> None:
    """The drafter forest over two prompt lookups: what joining costs, for the look-ups cost little."""
    rows = 4
    made = get_drafter("forest")([get_drafter("ngram")(n_min=1), get_drafter("ngram")(n_max=2, n_min=1)])
    state = DecodeState(rows, 128)
    joined = [state.join([1, 2, 3, 4, 5, 6] * 5, SamplingParams(seed=at), 30, ()) for at in range(rows)]
    made.begin(state, joined, None)

    def propose() -> int:
        return made.propose(state, joined, Budget([16] * rows), state.rng(joined)).num_nodes

    benchmark.extra_info |= {"nodes": propose()}
    benchmark(propose)


@pytest.mark.parametrize(("drafter", "settings"), CASES, ids=str)
def test_propose_of_a_model(benchmark: Any, drafter: str, settings: dict[str, Any]) -> None:
    rows = 4
    made = get_drafter(drafter)(HuggingFaceTarget(tiny_model("llama"), max_rows=rows, max_length=128), **settings)
    state = DecodeState(rows, 128)
    joined = [state.join([1, 2, 3 + at], SamplingParams(seed=at), 3, ()) for at in range(rows)]
    made.begin(state, joined, None)

    @torch.inference_mode()
    def propose() -> int:
        return made.propose(state, joined, Budget([made.num_draft_tokens] * rows), state.rng(joined)).num_nodes

    benchmark.extra_info |= {"nodes": propose(), "rows": rows}
    benchmark(propose)
