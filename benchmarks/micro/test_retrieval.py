"""Time of one `propose` of retrieval drafters per batch, and of their indexes alone.

To print the times: python -m pytest benchmarks/micro/test_retrieval.py. To write them to a file, per row:
python -m benchmarks.harness.run_and_record benchmarks/micro/test_retrieval.py -k propose --out proposals.json
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_fast import SamplingParams, get_drafter
from specdec_fast.core.draft import Draft
from specdec_fast.engine.state import DecodeState
from specdec_fast.interfaces import Acceptance, Budget, Rng, TargetOutput
from specdec_fast.retrieval.datastore import Datastore, build
from specdec_fast.retrieval.suffix_index import structures

LONG = 32768
COPIED = slice(8, 12)
"""Places of a text that its last tokens repeat."""


def copying_text(length: int, seed: int = 0) -> list[int]:
    """Text over 2,000 tokens, half of which was copied from earlier places."""
    source = random.Random(seed)
    text = [source.randrange(2000) for _ in range(64)]
    while len(text) < length:
        if source.random() < 0.5:
            start = source.randrange(len(text))
            text += text[start : start + source.randrange(4, 40)]
        else:
            text += [source.randrange(2000) for _ in range(20)]
    return text[: length - 4] + text[COPIED]


DRAFTERS: list[tuple[str, dict[str, Any]]] = [
    ("ngram", {}),
    ("ngram", {"match": "frequent"}),
    ("suffix", {"factor": 4.0}),
]


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("context", [1024, LONG])
@pytest.mark.parametrize(("drafter", "options"), DRAFTERS, ids=str)
def test_propose(benchmark: Any, drafter: str, options: dict[str, Any], context: int, rows: int) -> None:
    """One proposal for all rows, packing included. Before each, two more tokens of a copied run are committed to every
    row; learning them is timed too.
    """
    made, state = get_drafter(drafter)(**options), DecodeState(rows, context)
    texts = [copying_text(context, at) for at in range(rows)]
    joined = [state.join(text, SamplingParams(seed=at), context, ()) for at, text in enumerate(texts)]
    made.begin(state, joined, None)
    budget, ends = Budget([made.num_draft_tokens] * rows), itertools.count(COPIED.stop, 2)

    def commit() -> tuple[tuple[Rng], dict[str, Any]]:
        end = next(ends)
        state.append(joined, [text[end : end + 2] for text in texts])
        return (state.rng(joined),), {}

    def propose(rng: Rng) -> Draft:
        return made.propose(state, joined, budget, rng)

    with torch.inference_mode():  # which an engine enters once a step
        benchmark.extra_info |= {"nodes": propose(*commit()[0]).num_nodes}
        benchmark.pedantic(propose, setup=commit, rounds=200, warmup_rounds=10)


@pytest.mark.parametrize("length", [1024, LONG])
def test_suffix_look_up(benchmark: Any, length: int) -> None:
    """Growth of a tree of 16 nodes from the automaton of a text, without packing."""
    automaton = structures().Automaton()
    automaton.extend(copying_text(length))
    benchmark(automaton.grow, 16, 1, 4.0, 0.1)


@pytest.mark.parametrize("length", [1024, LONG])
def test_suffix_look_up_behind_a_hub(benchmark: Any, length: int) -> None:
    """The same where the text ends in a token that every second place holds, each time before another one."""
    automaton = structures().Automaton()
    automaton.extend([token for at in range(length // 2) for token in (0, 1 + at)][:-1])
    assert automaton.match() == 1
    benchmark(automaton.grow, 16, 1, 4.0, 0.1)


def test_suffix_append(benchmark: Any) -> None:
    """A text of 32,768 tokens from the first to the last; divide for the cost of a token."""
    text = copying_text(LONG)
    benchmark(lambda: structures().Automaton().extend(text))


def test_shared_tree_look_up(benchmark: Any) -> None:
    """Growth from the counted tree of 100 finished texts of 1,000 tokens."""
    tree = structures().CountedTree(48)
    for seed in range(100):
        tree.add(copying_text(1000, seed))
    benchmark(tree.grow, copying_text(1000, 7)[:500], 16, 16, 1, 4.0, 0.1)


@pytest.mark.parametrize("nodes", [12, 64])
@pytest.mark.parametrize("vocab", [8192, 131072])
def test_recycling_propose(benchmark: Any, vocab: int, nodes: int) -> None:
    """One proposal of a full tree; what a step learns is timed by test_recycling_observe."""
    made, state, joined = recycled(vocab, nodes)

    @torch.inference_mode()
    def propose() -> Draft:
        return made.propose(state, joined, Budget([nodes]), state.rng(joined))

    assert propose().num_nodes == 1 + nodes
    benchmark.extra_info |= {"drafter": "recycling", "rows": 1}
    benchmark(propose)


@pytest.mark.parametrize("vocab", [8192, 131072])
def test_recycling_observe(benchmark: Any, vocab: int) -> None:
    """The successors of 13 nodes out of their logits."""
    made, state, joined = recycled(vocab, 12)
    draft = made.propose(state, joined, Budget([12]), state.rng(joined))
    output = TargetOutput(torch.randn(draft.num_nodes, vocab))
    nothing = Acceptance(torch.zeros(0), torch.zeros(0), torch.zeros(0))
    with torch.inference_mode():
        benchmark(made.observe, state, draft, nothing, output)


def recycled(vocab: int, nodes: int) -> tuple[Any, DecodeState, list[int]]:
    """A drafter that has seen successors of every token."""
    made, state = get_drafter("recycling")(num_draft_tokens=nodes, shared=True, min_probability=0.0), DecodeState(1, 64)
    joined = [state.join([5], SamplingParams(seed=1), 1, ())]
    everything = Draft.chains([0], [list(range(1000))])
    logits = torch.full((1000, vocab), -9.0)
    logits[:, :1000] = torch.randn(1000, 1000)
    made.observe(state, everything, Acceptance(*[torch.zeros(0)] * 3), TargetOutput(logits))
    return made, state, joined


@pytest.mark.parametrize("size", [10**4, 10**5, 10**6, 10**7], ids=str)
def test_rest_propose(benchmark: Any, size: int, tmp_path: Path) -> None:
    """One proposal of 64 nodes from a datastore of a size; the file has just been written, so it lies in memory.

    The growth with size is that of two binary searches for each of about four suffix lengths.
    """
    pytest.importorskip("pydivsufsort")
    block = 10**4
    documents = (copying_text(block, seed) for seed in range(size // block))
    build(tmp_path / "store", documents, 2000)
    made = get_drafter("rest")(datastore=Datastore(tmp_path / "store"))
    state, source = DecodeState(8, 64), random.Random(1)
    texts = [copying_text(block, source.randrange(size // block))[at : at + 40] for at in range(100, 900, 100)]
    joined = [state.join(text, SamplingParams(seed=1), len(text), ()) for text in texts]

    @torch.inference_mode()
    def propose() -> Draft:
        return made.propose(state, joined, Budget([64] * 8), state.rng(joined))

    benchmark.extra_info |= {"drafter": "rest", "nodes": propose().num_nodes, "rows": 8}
    benchmark(propose)


@pytest.mark.parametrize("size", [10**5, 10**6], ids=str)
def test_rest_common(benchmark: Any, size: int, tmp_path: Path) -> None:
    """The dearest look-up: two tokens that are everywhere, of whose places 5,000 are looked at, and 64 nodes."""
    pytest.importorskip("pydivsufsort")
    source = random.Random(0)
    build(tmp_path / "store", [[source.randrange(4) for _ in range(size)]], 4)
    store = Datastore(tmp_path / "store")
    grown = benchmark(structures().look_up, [store.array], [1, 2], 2, 10, 5000, 64, 2, 0.0)
    assert len(grown[0]) == 64
