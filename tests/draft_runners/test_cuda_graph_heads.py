"""CUDA-graph steps with trained heads: texts and drafts equal those of sync steps, and nothing prevents capture."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models
from oracles.arrivals import requests, texts
from oracles.automaton import AutomatonTarget, random_logits, scripted
from oracles.automaton_head import AutomatonHead, blockwise_over
from oracles.capture_guard import check_repeats, guard_programs
from oracles.rollbacks import RollbackWatch

from specdec_fast import Engine, SamplingParams, get_drafter, load
from specdec_fast.core.draft import Draft
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.interfaces import CudaGraphRows, CudaGraphTrees

VOCAB = 9
WIDE = (-1, 0, 1, 0, 1, 3, 0, 2)  # neither level by level nor depth first


def automaton(**shape: int) -> AutomatonTarget:
    """A target whose state mostly increases by one, so that heads often predict it."""
    transitions = (torch.arange(61)[:, None] + 1 + (torch.arange(VOCAB) % 4 == 0)) % 61
    return AutomatonTarget(random_logits(61, VOCAB, seed=4), transitions, **shape)


def medusa(target: Any, shape: Any = WIDE, **options: Any) -> Any:
    """Medusa heads that predict the token k + 2 ahead of a target whose state does not depend on tokens."""
    states = len(target.table)
    heads = MedusaHeads(states, target.vocab_size, 3, num_layers=0)
    assert heads.lm_head is not None
    with torch.no_grad():
        for head in range(3):
            heads.lm_head[head] = target.table[(torch.arange(states) + 1 + head).clamp(max=states - 1)].T
    return get_drafter("medusa")(target, heads, shape=shape, **options)


def blockwise(target: Any) -> Any:
    """Blockwise heads with the same predictions."""
    return get_drafter("blockwise")(target, blockwise_over(target))


def tree(name: str, **options: Any) -> Callable[[Any], Any]:
    """A drafter with a head that is nearly right: its features are the target's states, one-hot."""

    def make(target: AutomatonTarget) -> Any:
        noise, rows = 0.5 * random_logits(*target.table.shape, seed=5), target.cache.max_rows
        believed = AutomatonTarget(target.table + noise, target.transitions, max_rows=rows)
        kept = [0, 1, 2, 4, 5, 6, 7] if name == "eagle3" else None
        return get_drafter(name)(target, AutomatonHead(believed, kept), **options)

    return make


MADE: dict[str, Callable[[Any], Any]] = {
    "medusa": medusa,
    "blockwise": blockwise,
    "eagle": tree("eagle", depth=0, shape=WIDE),
    "eagle published": tree("eagle", depth=0, how="top_k"),
    "eagle dynamic": tree("eagle", depth=3, width=4),
    "eagle3 dynamic": tree("eagle3", depth=5, width=3, num_draft_tokens=7),
    "eagle3 dynamic top_k": tree("eagle3", depth=2, width=8, how="top_k"),
    "eagle3": tree("eagle3", depth=0, shape=(-1, 0, 0, 1, 2, 2, 3)),
    "mtp": tree("mtp"),
}


def right(name: str, **options: Any) -> Callable[[Any], Any]:
    """A drafter with a head that is the target."""

    def make(target: AutomatonTarget) -> Any:
        same = AutomatonTarget(target.table, target.transitions, max_rows=target.cache.max_rows)
        return get_drafter(name)(target, AutomatonHead(same), **options)

    return make


RIGHT: dict[str, Callable[[Any], Any]] = {
    "medusa": lambda target: medusa(target, (-1, 0, 1, 2)),
    "blockwise": blockwise,
    "eagle": right("eagle", depth=0, shape=(-1, 0, 1, 2)),
    "eagle tree": right("eagle", depth=0, shape=(-1, 0, 1, 2, 0, 1, 4, 2)),
    "eagle dynamic": right("eagle", depth=3, width=2, num_draft_tokens=5),
    "mtp": right("mtp"),
}

Paths = frozenset[tuple[int, ...]]


def paths(tokens: list[int], parents: list[int]) -> Paths:
    """Returns the texts of a tree, without its root."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    assert len(set(found)) == len(found), "two siblings hold one token"
    return frozenset(found[1:])


class Watch:
    """What an engine drafts from now on, by seed and length of the text. It reads nothing while a step runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._drafts, self._trees = engine, {}, []
        drafter, proposals = engine.drafter, engine._graph_runner._proposals
        assert drafter is not None
        self._plain, drafter.propose = drafter.propose, self._propose  # type: ignore[method-assign]
        if proposals is not None:
            self._captured, proposals.propose = proposals.propose, self._propose_captured  # type: ignore[method-assign]

    def _propose(self, view: Any, rows: Any, budget: Any, rng: Any) -> Draft:
        draft: Draft = self._plain(view, rows, budget, rng)
        tokens, parents, bounds = draft.tokens.tolist(), draft.parents.tolist(), draft.offsets.tolist()
        for row, start, stop in zip(rows, bounds, bounds[1:], strict=False):
            key = self._engine._running[row].params.seed, view.length(row)
            self._drafts[key] = paths(tokens[start:stop], parents[start:stop])
        return draft

    def _propose_captured(self, batch: CudaGraphRows) -> CudaGraphTrees:
        trees = self._captured(batch)
        chains = torch.arange(trees.tokens.shape[1], dtype=torch.int32).expand_as(trees.tokens)
        parents = chains if trees.parents is None else trees.parents
        parts = batch.sampling.seeds, batch.lengths, batch.drafts, trees.counts, trees.tokens, parents
        self._trees.append([part.clone() for part in parts])
        return trees

    def drafts(self) -> dict[tuple[int, int], Paths]:
        """The texts that trees hold, of rows that could draft."""
        found = dict(self._drafts)
        for parts in self._trees:
            for seed, length, most, count, tokens, parents in zip(*(part.tolist() for part in parts), strict=True):
                assert 0 <= count <= most
                if most:
                    found[seed, length] = paths([0, *tokens[:count]], [-1, *parents[:count]])
        return found


def check_drafts(sync: Watch, graph: Watch, least: int) -> None:
    """Checks that both drafted the same tokens where both could draft."""
    one, other = sync.drafts(), graph.drafts()
    both = one.keys() & other.keys()
    assert sum(bool(one[key]) for key in both) > least
    assert {key: one[key] for key in both} == {key: other[key] for key in both}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize(
    ("rows", "rule", "temperatures"),
    [(3, "replay", (0.0, 0.7, 1.0)), (8, "replay", (0.0, 1.0)), (1, "greedy", (0.0,))],
)
def test_texts_and_drafts_equal_those_of_sync_steps(
    kind: str, rows: int, rule: str, temperatures: tuple[float, ...]
) -> None:
    wanted, watch, made, observed = requests(20, temperatures), {}, {}, {}
    for mode in ("sync", "graph"):
        target = automaton(max_rows=rows)
        engine = Engine(target, MADE[kind](target), rule=rule, eos_token_ids=(3,), step_mode=mode)
        watch[mode] = Watch(engine)
        made[mode] = texts(engine, wanted, random.Random(rows))
        stats = engine.stats
        observed[mode] = stats.steps, stats.num_draft_tokens, stats.tested, stats.accepted_per_position
        assert stats.faults == 0
    assert made["graph"] == made["sync"] and observed["graph"] == observed["sync"]
    check_drafts(watch["sync"], watch["graph"], 20)
    assert engine.stats.alpha > 0.3
    plain = Engine(automaton(max_rows=8), rule=rule, eos_token_ids=(3,), step_mode="sync")
    assert texts(plain, wanted, random.Random(rows)) == made["graph"]


@pytest.mark.parametrize("kind", ["eagle", "eagle3 dynamic", "mtp"])
def test_rollbacks_by_tensors_never_lengthen_a_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, target = RollbackWatch(monkeypatch), automaton(max_rows=3)
    engine = Engine(target, MADE[kind](target), eos_token_ids=(3,), step_mode="graph")
    texts(engine, requests(8, (0.0, 1.0)), random.Random(1))
    watch.check(20)


def script(length: int) -> list[int]:
    source = random.Random(0)
    return [source.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("kind", RIGHT)
def test_drafts_of_a_head_that_knows_the_text_are_accepted_whole(kind: str) -> None:
    """From the second step on where the prompt is one token: before it no hidden state is known."""
    target = scripted(script(60), VOCAB)
    engine = Engine(target, RIGHT[kind](target), step_mode="graph")
    handles = engine.generate([script(4), script(1)], SamplingParams(temperature=0, max_new_tokens=33))
    assert [handle.tokens for handle in handles] == [script(60)[4:37], script(60)[1:34]]
    assert [handle.stats.steps for handle in handles] == [9, 9] and engine.step_mode == "graph"
    assert all(handle.stats.num_draft_tokens >= 8 * 3 for handle in handles)


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("end", [1, 2, 3])
def test_an_end_inside_an_accepted_run_cuts_the_text_there(kind: str, end: int) -> None:
    words = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    target = scripted(words, VOCAB)
    engine = Engine(target, RIGHT[kind](target), step_mode="graph")
    params = SamplingParams(temperature=0, stop_token_ids=(words[1 + end],), max_new_tokens=9)
    handle = engine.generate([words[:2]], params)[0]
    assert handle.tokens == words[2 : 2 + end] and handle.finish_reason == "eos" and handle.stats.steps == 1


@pytest.mark.parametrize("kind", RIGHT)
def test_rows_that_change_their_mode_continue_to_draft(kind: str) -> None:
    """A request with a bias comes and goes. The state of the other rows follows them from mode to mode."""
    target = scripted(script(62), VOCAB)
    engine = Engine(target, RIGHT[kind](target), step_mode="graph")
    handle = engine.submit(script(4), SamplingParams(temperature=0, max_new_tokens=48))
    modes = []
    for turn in range(20):
        if turn in (2, 6):
            engine.submit([4, 5], SamplingParams(temperature=0, max_new_tokens=9, logit_bias={2: 3.0}))
        engine.step()
        modes.append(engine.step_mode)
    assert engine.idle and handle.tokens == script(62)[4:52]
    assert modes.count("sync") > 1 and "graph" in modes[: modes.index("sync")] and modes[-1] == "graph"
    assert handle.stats.steps == 12, "every draft was right"


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("verb", ["observe", "propose"])
@pytest.mark.parametrize("call", [1, 3])
def test_a_step_that_fails_half_way_costs_no_token(
    kind: str, verb: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other verbs go on: a row that knows more than its text tells drafts again as soon as it may."""
    target = scripted(script(60), VOCAB)
    engine = Engine(target, RIGHT[kind](target), step_mode="graph")
    proposals, count = engine._graph_runner._proposals, [0]
    whole = getattr(proposals, verb)

    def failing(*args: Any) -> Any:
        found, count[0] = whole(*args), count[0] + 1
        if count[0] == call:
            raise RuntimeError("half-way")
        return found

    monkeypatch.setattr(proposals, verb, failing)
    handle = engine.generate([script(4)], SamplingParams(temperature=0, max_new_tokens=40))[0]
    assert handle.tokens == script(60)[4:44] and count[0] == call
    assert "a CUDA-graph step failed: RuntimeError: half-way" in engine.explain()
    assert handle.stats.steps <= 11, "one step without a draft at most"


class Stopping:
    """A tensor that refuses to be written once."""

    def __init__(self, inner: torch.Tensor, write: int) -> None:
        self._inner, self._left = inner, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __getitem__(self, at: Any) -> torch.Tensor:
        return self._inner[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self._left -= 1
        if not self._left:
            raise RuntimeError("between two writes")
        self._inner[at] = value


@pytest.mark.parametrize(
    ("kind", "part", "write"),
    [("medusa", part, 1) for part in ("_lengths", "_states")]
    + [("eagle dynamic", part, write) for part, write in (("_known", 1), ("_window", 1), ("_first", 1), ("_known", 2))],
)
def test_an_incomplete_update_is_not_used(kind: str, part: str, write: int) -> None:
    """A step stops while it is observed. Heads that know the text must never draft a wrong token afterwards."""
    target = scripted(script(60), VOCAB)
    engine = Engine(target, RIGHT[kind](target), step_mode="graph")
    handle = engine.submit(script(4), SamplingParams(temperature=0, max_new_tokens=40))
    engine.step()
    proposals = engine._graph_runner._proposals
    setattr(proposals, part, Stopping(getattr(proposals, part), write))
    while not engine.idle:
        engine.step()
    assert handle.tokens == script(60)[4:44] and "between two writes" in engine.explain()
    assert engine.stats.accepted_per_position == engine.stats.tested and engine.stats.num_draft_tokens > 0
    assert kind != "medusa" or handle.stats.steps <= 12, "a recurrent head has missed features, the others nothing"


def test_a_row_that_never_began_leaves_quietly(monkeypatch: pytest.MonkeyPatch, faults: list[str]) -> None:
    target = scripted(script(60), VOCAB)
    engine = Engine(target, RIGHT["eagle dynamic"](target), step_mode="graph")

    def failing(*args: Any) -> None:
        raise RuntimeError("no features")

    monkeypatch.setattr(engine.drafter.source, "begin", failing)  # type: ignore[union-attr]
    handle = engine.submit(script(4), SamplingParams(temperature=0, max_new_tokens=30))
    engine.step()
    engine.submit([4, 5], SamplingParams(temperature=0, max_new_tokens=4, logit_bias={2: 3.0}))
    while not engine.idle:
        engine.step()
    assert handle.tokens == script(60)[4:34] and "leave" not in str(faults)


@pytest.mark.parametrize("kind", ["medusa", "eagle published", "eagle dynamic", "eagle3 dynamic"])
def test_a_dry_pool_and_the_end_of_the_context(kind: str) -> None:
    """Rows are evicted and start again. Texts run until the context is full, where trees cannot grow."""
    wanted = [SamplingParams(temperature=0.8, seed=at, max_new_tokens=99) for at in range(1, 6)]
    prompts, made, watch = [[at] * 3 * at for at in range(1, 6)], {}, {}
    for mode in ("sync", "graph"):
        target = automaton(max_rows=4, max_length=40, page_size=4, num_pages=18)
        engine = Engine(target, MADE[kind](target), step_mode=mode)
        watch[mode] = Watch(engine)
        made[mode] = [handle.tokens for handle in engine.generate(prompts, wanted)]
        assert engine.stats.preemptions > 0 and engine.stats.faults == 0 and engine.step_mode == mode
    assert made["graph"] == made["sync"] and len(made["graph"][0]) == 40 - 3
    one, other = watch["sync"].drafts(), watch["graph"].drafts()
    both = {key for key in one.keys() & other.keys() if one[key] and other[key]}
    assert len(both) > 20 and all(one[key] == other[key] for key in both)
    assert max(length for _, length in both) == max(length for (_, length), tree in one.items() if tree)


def of_model(kind: str, target: Any, folder: Path) -> Any:
    """A drafter with a tiny head for a tiny model."""
    if kind in models.HEADS:
        return get_drafter(kind)(target, models.HEADS[kind](target))
    name, _, dynamic = kind.partition(" ")
    options = {"depth": 3, "width": 4} if dynamic else {"depth": 0}
    return get_drafter(name)(target, **heads.options(name, folder), **options)


@pytest.mark.parametrize("kind", [*models.HEADS, "eagle", "eagle dynamic", "eagle3", "eagle3 dynamic", "mtp"])
def test_a_step_can_be_captured_and_uses_the_same_tensors_every_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over transformers models too, a head drafts what it drafts in sync steps."""
    prompts = [models.prompt(length) for length in (1, 5, 17)]
    kinds = enumerate([(0, 4), (1.5, 15), (0.7, 20)])
    wanted = [SamplingParams(temperature=t, seed=s, max_new_tokens=n, top_p=0.9) for s, (t, n) in kinds]
    target, made, watch = models.target("llama", max_rows=4, max_length=64), {}, {}
    runs = guard_programs(monkeypatch)
    for mode in ("sync", "graph"):
        engine = Engine(target, of_model(kind, target, tmp_path), step_mode=mode)
        watch[mode] = Watch(engine)
        made[mode] = [handle.tokens for handle in engine.generate(prompts, wanted)]
        assert engine.step_mode == mode, engine.explain()
    assert made["graph"] == made["sync"]
    check_drafts(watch["sync"], watch["graph"], 20)
    assert engine.stats.faults == 0 and "specdec.kv_commit_table.default" in check_repeats(runs)


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3"])
def test_trained_heads_draft_as_in_sync_steps(name: str) -> None:
    """Those of the bundled target, whose drafts are accepted more often than not."""
    observed = []
    for mode in ("sync", "graph"):
        engine = load("demo-target", drafter=name, max_rows=2, max_length=128, step_mode=mode)
        params = [SamplingParams(temperature=t, seed=3, max_new_tokens=40, ignore_eos=True) for t in (0.0, 1.0)]
        handles = engine.generate(["def main(", "And it came to pass"], params)
        assert engine.step_mode == mode and engine.stats.faults == 0
        observed.append([(handle.tokens, handle.stats.steps, handle.stats.num_draft_tokens) for handle in handles])
    assert observed[0] == observed[1] and engine.stats.tau > 1.3


def test_engines_that_cannot_be_captured_say_why() -> None:
    small = AutomatonHead(automaton(max_rows=2))
    for made, reason in (
        (get_drafter("eagle")(automaton(), small), "the head has room for 2 rows, the target for 8"),
        (
            get_drafter("eagle")(automaton(), small, depth=0, how="sampled"),
            "carry distributions (how=coupled or top_k has none)",
        ),
    ):
        engine = Engine(automaton(), made, step_mode="graph")
        assert engine.step_mode == "sync" and reason in engine.explain()

    made = medusa(automaton())
    made.__class__ = type("Own", (type(made),), {"propose": type(made).propose})
    engine = Engine(automaton(), made, step_mode="graph")
    assert engine.step_mode == "sync" and "proposes in a way of its own (Own)" in engine.explain()


def test_a_target_needs_no_device_of_its_own() -> None:
    class Bare:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            if name in ("device", "dtype"):
                raise AttributeError(name)
            return getattr(self._inner, name)

    target: Any = Bare(scripted(script(30), VOCAB))
    engine = Engine(target, RIGHT["medusa"](target), step_mode="graph")
    handle = engine.generate([script(4)], SamplingParams(temperature=0, max_new_tokens=20))[0]
    assert handle.tokens == script(30)[4:24] and engine.step_mode == "graph"
