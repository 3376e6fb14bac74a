"""CUDA-graph steps: the same texts as `sync` steps, while requests join and leave, wherever texts end.

Without a GPU, step_mode="graph" runs the program that would be captured.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from oracles import models
from oracles.arrivals import requests, texts
from oracles.automaton import AutomatonTarget, random_logits, scripted
from oracles.rollbacks import RollbackWatch

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams, get_drafter
from specdec_fast.core.cuda_graph_packing import pack_nodes
from specdec_fast.engine.cuda_graph import runner

VOCAB = 9


def automaton(**shape: int) -> AutomatonTarget:
    return AutomatonTarget(random_logits(31, VOCAB, seed=4), **shape)


def kin(**shape: int) -> AutomatonTarget:
    """A draft that is often right."""
    return AutomatonTarget(random_logits(31, VOCAB, seed=4) + 0.5 * random_logits(31, VOCAB, seed=5), **shape)


def drafter_of(kind: str, rows: int) -> Any:
    return None if kind == "none" else get_drafter("draft_model")(kin(max_rows=rows), num_draft_tokens=3, pick=kind)


def test_rollbacks_by_tensors_never_lengthen_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = RollbackWatch(monkeypatch)
    engine = Engine(automaton(max_rows=3), drafter_of("coupled", 3), eos_token_ids=(3,), step_mode="graph")
    texts(engine, requests(12, (0.0, 1.0)), random.Random(1))
    watch.check(40)


@pytest.mark.parametrize(
    ("kind", "rule", "temperatures"),
    [
        ("none", "replay", (0.0, 0.7, 1.0)),
        ("coupled", "replay", (0.0, 0.7, 1.5)),
        ("greedy", "replay", (0.5, 1.0)),
        ("none", "greedy", (0.0,)),
        ("greedy", "greedy", (0.0,)),
    ],
)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_texts_are_those_of_sync_steps(kind: str, rule: str, temperatures: tuple[float, ...], rows: int) -> None:
    wanted, ends = requests(24, temperatures), (3,)
    made = {}
    for mode in ("sync", "graph"):
        drafter = drafter_of(kind, rows)
        engine = Engine(automaton(max_rows=rows), drafter, rule=rule, eos_token_ids=ends, step_mode=mode)
        made[mode] = texts(engine, wanted, random.Random(rows))
        if drafter is not None:
            assert engine.stats.alpha > 0.3
            assert drafter.model.cache.pages.num_used == 0
    assert made["graph"] == made["sync"]
    assert {reason for _, reason in made["graph"]} == {"eos", "length"}
    for (_, params), (tokens, reason) in zip(wanted, made["graph"], strict=True):
        assert reason == ("eos" if tokens[-1] in ends else "length")
        assert len(tokens) == params.max_new_tokens or reason == "eos"


def test_an_end_inside_an_accepted_run_cuts_the_text_there() -> None:
    script = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    for end in (4, 6):
        drafter = get_drafter("draft_model")(scripted(script, VOCAB), num_draft_tokens=6)
        engine = Engine(scripted(script, VOCAB), drafter, step_mode="graph")
        handle = engine.generate([[1]], SamplingParams(temperature=0, stop_token_ids=(end,), max_new_tokens=9))[0]
        assert handle.tokens == script[1 : script.index(end) + 1] and handle.finish_reason == "eos"
        assert handle.stats.steps == 1, "everything was accepted in one step"


@pytest.mark.parametrize("new", [1, 2, 5, 6])
def test_the_limit_is_exact(new: int) -> None:
    script = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    drafter = get_drafter("draft_model")(scripted(script, VOCAB), num_draft_tokens=3)
    target = scripted(script, VOCAB)
    handle = Engine(target, drafter, step_mode="graph").generate(
        [[1]], SamplingParams(temperature=0, max_new_tokens=new)
    )[0]
    assert handle.tokens == script[1 : new + 1] and handle.finish_reason == "length"


def test_transformers_models_and_a_ragged_batch() -> None:
    prompts = [models.prompt(length) for length in (1, 5, 17, 40)]
    wanted = [
        SamplingParams(temperature=t, seed=7 + at, max_new_tokens=10) for at, t in enumerate((0.0, 0.7, 1.0, 1.5))
    ]
    made = []
    for mode in ("sync", "graph"):
        small = HuggingFaceTarget(models.kin("llama"), max_length=96, max_rows=4)
        drafter = get_drafter("draft_model")(small, num_draft_tokens=3)
        engine = Engine(models.target("llama", max_rows=4, max_length=96), drafter, step_mode=mode)
        made.append([handle.tokens for handle in engine.generate(prompts, wanted)])
        assert engine.stats.tau > 1.2
    assert made[0] == made[1]


def test_an_empty_pool_evicts_without_losing_a_token() -> None:
    wanted = [([1, 2, 3], SamplingParams(seed=at, max_new_tokens=20)) for at in range(6)]
    made = {}
    for mode, pages in (("sync", None), ("graph", 9)):
        target = automaton(max_rows=4, page_size=4, **({} if pages is None else {"num_pages": pages}))
        engine = Engine(target, drafter_of("coupled", 4), step_mode=mode)
        made[mode] = [h.tokens for h in engine.generate([p for p, _ in wanted], [s for _, s in wanted])]
    assert made["graph"] == made["sync"]
    assert engine.stats.preemptions > 0


def test_steps_change_their_mode_when_requests_need_it() -> None:
    """Requests with a bias join and leave; the texts of the others do not change."""
    plain = Engine(automaton(max_rows=4))
    wanted = [SamplingParams(seed=at, max_new_tokens=24) for at in range(3)]
    want = [handle.tokens for handle in plain.generate([[1], [2], [3]], wanted)]
    engine = Engine(automaton(max_rows=4), drafter_of("coupled", 4), step_mode="graph")
    handles = [engine.submit([at + 1], params) for at, params in enumerate(wanted)]
    modes = []
    for turn in range(40):
        if turn in (1, 4):
            engine.submit([4, 5], SamplingParams(seed=turn, max_new_tokens=3, logit_bias={2: 3.0}))
        engine.step()
        modes.append(engine.step_mode)
    assert engine.idle and [handle.tokens for handle in handles] == want
    assert modes.count("sync") > 1 and "graph" in modes[: modes.index("sync")] and modes[-1] == "graph"


def test_cancelled_requests_leave_at_once() -> None:
    engine = Engine(automaton(max_rows=2), drafter_of("coupled", 2), step_mode="graph")
    want = Engine(automaton(max_rows=2)).generate([[3]], SamplingParams(seed=5, max_new_tokens=9))[0].tokens
    first = engine.submit([1, 2], SamplingParams(seed=1, max_new_tokens=40))
    for _ in range(3):
        engine.step()
    engine.cancel(first)
    second = engine.submit([3], SamplingParams(seed=5, max_new_tokens=9))
    while not second.finished:
        engine.step()
    assert second.tokens == want and first.finish_reason == "cancelled" and len(first.tokens) < 40


def test_a_distribution_of_nan_ends_its_request_with_an_error() -> None:
    made = {}
    for mode in ("sync", "graph"):
        target = scripted([1, 2, 3, 4, 5, 6], VOCAB)
        target.table[3] = torch.nan
        drafter = get_drafter("draft_model")(scripted([1, 2, 3, 4, 5, 6], VOCAB), num_draft_tokens=4)
        engine = Engine(target, drafter, step_mode=mode)
        handles = engine.generate([[1], [1, 2]], SamplingParams(temperature=0, max_new_tokens=5))
        made[mode] = [(handle.tokens, handle.finish_reason, str(handle.error)) for handle in handles]
    assert made["graph"] == made["sync"] and made["graph"][0][:2] == ([2, 3], "error")


def test_a_step_that_fails_falls_back_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    target, fails = automaton(), [True]
    engine = Engine(target, step_mode="graph")
    want = Engine(automaton()).generate([[1, 2]], SamplingParams(seed=1, max_new_tokens=6))[0].tokens

    def once() -> None:
        if engine.num_running and engine._graph_runner.active and fails:
            fails.clear()
            raise RuntimeError("cannot be captured")

    target.before_pass = once
    assert engine.generate([[1, 2]], SamplingParams(seed=1, max_new_tokens=6))[0].tokens == want
    assert engine.step_mode == "sync" and "a CUDA-graph step failed: RuntimeError" in engine.explain()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Engine(automaton()), "device is cpu"),
        (lambda: Engine(automaton(), step_mode="sync"), "step_mode is sync"),
        (lambda: Engine(automaton(), get_drafter("ngram")(), step_mode="graph"), "reads committed tokens on the host"),
        (lambda: Engine(automaton(), rule="rejection", step_mode="graph"), "rule rejection is not captured"),
        (lambda: Engine(automaton(), drafter_of("coupled", 2), step_mode="graph"), "room for 2 rows"),
        (lambda: Engine(automaton(), drafter_of("sampled", 8), step_mode="graph"), "carry distributions"),
        (lambda: Engine(automaton(), drafter_of("coupled", 8), budget="goodput", step_mode="graph"), "goodput"),
    ],
)
def test_engines_that_cannot_be_captured_say_why(make: Any, reason: str) -> None:
    engine = make()
    assert engine.step_mode == "sync" and reason in engine.explain()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": 2}, "logprobs"),
        ({"min_new_tokens": 2, "stop_token_ids": (3,)}, "minimum length"),
        ({"presence_penalty": 1.0}, "penalties"),
        ({"stop_token_ids": tuple(range(17))}, "more than 16 ids"),
    ],
)
def test_requests_that_cannot_be_captured_say_why(changes: dict[str, Any], reason: str) -> None:
    engine = Engine(AutomatonTarget(random_logits(31, 400, seed=4)), step_mode="graph")
    engine.submit([1, 2], SamplingParams(max_new_tokens=8, seed=2, **changes))
    engine.step()
    assert engine.step_mode == "sync" and reason in engine.explain()


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="step_mode: got 'fast'; expected one of auto, sync, graph"):
        Engine(automaton(), step_mode="fast")


def test_packing_gives_the_places_of_nodes() -> None:
    packing = pack_nodes(torch.tensor([2, 0, 3], dtype=torch.int32), 3)
    assert packing.offsets.tolist() == [0, 2, 2, 5] and packing.inside.sum() == 5
    assert packing.row_of[:5].tolist() == [0, 0, 2, 2, 2] and packing.place[:5].tolist() == [0, 1, 0, 1, 2]
    assert packing.last.tolist() == [1, 1, 4]


@pytest.mark.parametrize("verb", ["observe", "propose"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_step_that_fails_half_way_costs_no_token(verb: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the commit, the target's cache is ahead of the host. Before it, the draft model's cache is ahead."""
    params = SamplingParams(seed=1, max_new_tokens=20)
    want = [handle.tokens for handle in Engine(automaton()).generate([[1, 2], [3]], params)]
    drafter = drafter_of("coupled", 8)
    engine = Engine(automaton(), drafter, step_mode="graph")
    proposals, count = engine._graph_runner._proposals, [0]
    whole, leave = getattr(proposals, verb), proposals.leave

    def left(view: Any, rows: Any) -> None:
        leave(view, rows)
        assert all(drafter._runner._stored[row][0] <= view.length(row) for row in rows), (
            "the draft's cache is behind the text"
        )

    monkeypatch.setattr(proposals, "leave", left)

    def failing(*args: Any) -> Any:
        found, count[0] = whole(*args), count[0] + 1
        if count[0] == call:
            raise RuntimeError("half-way")
        return found

    monkeypatch.setattr(proposals, verb, failing)
    assert [handle.tokens for handle in engine.generate([[1, 2], [3]], params)] == want
    assert count[0] == call and "a CUDA-graph step failed: RuntimeError: half-way" in engine.explain()
    assert engine.stats.alpha > 0.5, "the draft went on from the text"


def test_an_interruption_while_results_are_read_costs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(seed=1, max_new_tokens=20)
    want = Engine(automaton()).generate([[1, 2]], params)[0].tokens
    engine = Engine(automaton(), drafter_of("coupled", 8), step_mode="graph")
    handle, count = engine.submit([1, 2], params), [0]
    run = runner.StepProgram.__call__

    def interrupted(program: Any) -> None:
        run(program)
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(runner.StepProgram, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(40):
            engine.step()
    for _ in range(40):
        engine.step()
    assert handle.tokens == want and engine.why_not_graph() == []


def test_drafts_are_no_longer_than_texts() -> None:
    """Programs, draft passes and results follow the space left in a text, not the requested length. A program does not
    become smaller towards the end of a text, because a smaller one would have to be captured.
    """
    for mode in ("sync", "graph"):
        drafter = drafter_of("coupled", 8)
        engine = Engine(automaton(), drafter, step_mode=mode)
        handle = engine.submit([1, 2], SamplingParams(seed=1, max_new_tokens=4), num_draft_tokens=150)
        while not engine.idle:
            engine.step()
        assert handle.num_draft_tokens == 3 and len(handle.tokens) == 4
        most = 3 * (handle.stats.steps + (mode == "graph")) + 1
        assert drafter.model.passes <= most, "one step more than needed is under way"
    assert [capacity.nodes for capacity in engine._graph_runner.capacities] == [4]
    assert engine.submit([1] * 60, SamplingParams(max_new_tokens=90), num_draft_tokens=150).num_draft_tokens == 3


def test_programs_are_few_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_PROGRAMS", 3)
    engine = Engine(automaton(), drafter_of("coupled", 8), step_mode="graph")
    plain = Engine(automaton())
    widths = set()
    for asked in (9, 7, 6, 5, 3, 2, 1, 0):
        params = SamplingParams(seed=asked, max_new_tokens=20)
        assert (
            engine.generate([[1]], params, num_draft_tokens=asked)[0].tokens == plain.generate([[1]], params)[0].tokens
        )
        assert len(engine._graph_runner.capacities) <= 3
        widths |= {capacity.nodes - 1 for capacity in engine._graph_runner.capacities}
    assert widths <= {9, 8, 7, 6, 5, 4, 3, 2, 1, 0} and engine._graph_runner.capacities[-1].nodes == 1


def test_a_row_without_draft_memory_drafts_again_when_some_is_free() -> None:
    """A perfect draft whose pool is too small for two texts at once. After the first has left, the other is as fast as
    it is alone.
    """
    tau = {}
    for mode in ("sync", "graph"):
        small = automaton(max_rows=2, page_size=4, num_pages=17)
        engine = Engine(automaton(max_rows=2), get_drafter("draft_model")(small, num_draft_tokens=3), step_mode=mode)
        first = engine.submit([1, 2] * 22, SamplingParams(seed=1, max_new_tokens=16))
        long = engine.submit([4], SamplingParams(seed=2, max_new_tokens=60))
        while not first.finished:
            engine.step()
        steps, tokens = long.stats.steps, len(long.tokens)
        while not long.finished:
            engine.step()
        tau[mode] = (len(long.tokens) - tokens) / (long.stats.steps - steps)
        assert long.tokens == Engine(automaton()).generate([[4]], long.params)[0].tokens
    assert tau["graph"] > 0.8 * tau["sync"]


@pytest.mark.parametrize("verb", ["reserve", "enter", "leave"])
@pytest.mark.parametrize("bad", [0, None])
def test_a_drafter_that_raises_costs_its_rows_their_drafts(
    verb: str, bad: int | None, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises always for one row, or once for any row."""
    params = [SamplingParams(seed=at, max_new_tokens=20) for at in range(2)]
    want = [handle.tokens for handle in Engine(automaton()).generate([[1, 2], [3]], params)]
    engine = Engine(automaton(), drafter_of("coupled", 8), step_mode="graph")
    proposals, raised = engine._graph_runner._proposals, [0]
    whole = getattr(proposals, verb)

    def failing(*args: Any) -> Any:
        rows = [args[0]] if verb == "reserve" else args[1]
        if bad in rows or (bad is None and not raised[0]):
            raised[0] += 1
            raise RuntimeError("no")
        return whole(*args)

    monkeypatch.setattr(proposals, verb, failing)
    handles = [engine.submit(prompt, own) for prompt, own in zip([[1, 2], [3]], params, strict=True)]
    while not engine.idle:
        engine.step()
        if verb == "leave" and not raised[0]:
            engine._drain_pending()
    assert [handle.tokens for handle in handles] == want and engine.why_not_graph() == []
    assert raised[0] and engine.stats.faults == sum(handle.stats.faults for handle in handles) > 0
    assert len(faults) == 1 and f"drafter draft_model raised in {verb}: RuntimeError: no" in faults[0]
    assert handles[1].stats.tau > 1.3, "the other row drafts"


def test_a_step_returns_all_requests_that_took_part() -> None:
    """This includes requests whose last tokens came from a pending step when the mode changed to `sync`."""
    engine = Engine(automaton(max_rows=2), step_mode="graph")
    first = engine.submit([1], SamplingParams(seed=1, max_new_tokens=2))
    engine.step()
    engine.step()
    engine.submit([2], SamplingParams(seed=1, max_new_tokens=2, logit_bias={2: 3.0}))
    assert first in engine.step() and first.finished


def test_no_data_of_ended_requests_is_kept() -> None:
    engine = Engine(automaton(), step_mode="graph")
    handle = engine.submit([1], SamplingParams(seed=1, max_new_tokens=30))
    engine.step()
    engine.step()
    engine.cancel(handle)
    assert engine._graph_runner.pending == 0 and not engine._graph_runner.active


def test_inputs_are_written_when_rows_change_and_not_before_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text near its end has space for fewer draft tokens in every step. The device computes this itself."""
    writes: list[int] = []
    monkeypatch.setattr(
        runner, "upload_values", lambda values, place: (writes.append(1), place.copy_(torch.tensor(values)))
    )
    engine = Engine(automaton(), get_drafter("draft_model")(kin(), num_draft_tokens=16), step_mode="graph")
    engine.generate([[1]], SamplingParams(seed=1, max_new_tokens=16))
    assert len(writes) == 3 * len(engine._graph_runner.capacities)
