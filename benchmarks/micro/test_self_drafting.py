"""What drafters that need no draft model cost: one `propose` and one `observe`.

jacobi and lookahead need the host alone; layer_skip runs a part of the target.

python -m pytest benchmarks/micro/test_self_drafting.py
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from benchmarks.drafters import measure
from specdec_fast import SamplingParams, get_drafter
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Acceptance, Budget, TargetOutput

VOCAB, LENGTH = 1024, 512
CASES: list[tuple[str, dict[str, Any]]] = [
    ("jacobi", {}),
    ("jacobi", {"block": 4}),
    ("lookahead", {"window": 7, "ngram": 5, "guesses": 7}),
    ("lookahead", {"window": 15, "ngram": 5, "guesses": 15}),
]


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_propose_and_observe(benchmark: Any, name: str, settings: dict[str, Any], rows: int) -> None:
    made, source = get_drafter(name)(**settings), random.Random(0)
    state = DecodeState(rows, LENGTH + 64)
    text = [source.randrange(VOCAB // 8) for _ in range(LENGTH)]
    joined = [state.join(text[at:], SamplingParams(seed=at), LENGTH - at, ()) for at in range(rows)]
    made.begin(state, joined, None)
    budget, rng = Budget([made.num_draft_tokens] * rows), state.rng(joined)
    output = TargetOutput(None)

    @torch.inference_mode()
    def step() -> int:
        draft = made.propose(state, joined, budget, rng)
        roots = draft.offsets[:-1].to(torch.int32)
        choice = (draft.tokens * 7 + 1) % VOCAB
        nothing = torch.zeros(rows, dtype=torch.int32)
        made.observe(state, draft, Acceptance(roots[:, None], nothing, choice[roots.long()], choice), output)
        return draft.num_nodes

    for _ in range(settings.get("ngram", 2)):
        benchmark.extra_info["nodes"] = step()
    benchmark(step)


@pytest.mark.parametrize("stop", ["adaptive", "fixed"])
@pytest.mark.parametrize("exit_after", [2, 6])
def test_layer_skip_propose(benchmark: Any, exit_after: int, stop: str) -> None:
    """Four drafted tokens; beside it, what the passes of the reduced model take without the drafter."""
    from specdec_fast import load

    torch.set_num_threads(1)
    options = {"exit_after": exit_after, "stop": stop, "threshold": 0.0, "num_draft_tokens": 4}
    engine = load("demo-target", drafter="layer_skip", drafter_options=options, max_rows=1, max_length=256)
    made: Any = engine.drafter
    state = DecodeState(1, 256)
    row = state.join(list(range(20, 60)), SamplingParams(seed=1), 40, ())
    made.begin(state, [row], None)

    @torch.inference_mode()
    def propose() -> int:
        return made.propose(state, [row], Budget([4]), state.rng([row])).num_nodes

    benchmark.extra_info["nodes"] = propose()
    benchmark(propose)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["jacobi", "lookahead W3 N3 G3", "layer_skip, middle half"])
def test_parallel_end_to_end(benchmark: Any, name: str, temperature: float) -> None:
    rows, runs = measure([name], temperature, rounds=2, prompts=2, new_tokens=40)
    benchmark.extra_info.update(rows[0])
    benchmark.pedantic(runs[name], rounds=2)
    assert rows[0]["identical"], "speculation changed the text: no speed-up is reported on a red test"
