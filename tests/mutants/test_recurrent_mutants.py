"""Faults in the code of recurrent layers, each found by the named check.

The checks are those of tests/targets/test_recurrent_layers.py and tests/cache/test_recurrent_states.py, on one family
of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import hybrid_models
from oracles.hybrid_models import Stepper, equal

from specdec_fast import Engine, HuggingFaceTarget, SamplingParams
from specdec_fast.cache import recurrent_states
from specdec_fast.cache.recurrent_states import RecurrentStates
from specdec_fast.drafters import make_drafter
from specdec_fast.targets import mixer_calls
from specdec_fast.targets.recurrent_layers import MixerPass
from specdec_fast.targets.tiny_models import tiny_model
from specdec_kernels import state_commit, tree_conv, window_commit

PROMPT, TREE = [9, 8, 7], ([4, 5, 6, 7, 8], [-1, 0, 0, 1, 2])


def agrees(name: str, plant: Callable[[], None] = lambda: None) -> bool:
    """Whether states and logits after two steps with trees, in two rows, are those of single tokens.

    A fault is planted after the load, whose own checks find some of them.
    """
    target = HuggingFaceTarget(hybrid_models.model(name), max_rows=4)
    steps = Stepper(target)
    try:
        plant()
        steps.start(0, PROMPT)
        steps.start(1, PROMPT[::-1])
        for _ in range(2):
            _, slots = steps.score([(0, *TREE), (1, [3], [-1])])
            steps.commit([0, 1], slots, [[0, 2, 4], [5]])
        kept = [TREE[0][at] for at in (0, 2, 4)] * 2
        steps.follow(2, PROMPT, kept)
        steps.follow(3, PROMPT[::-1], [3, 3])
        same = equal(steps.states(0), steps.states(2)) and equal(steps.states(1), steps.states(3))
        return same and torch.equal(steps.feed(0, [1]), steps.feed(2, [1]))
    finally:
        target.close()


def keep_rejected(patch: pytest.MonkeyPatch) -> None:
    """The state of all tokens of a tree stays."""

    def broken(state: Any, key: Any, value: Any, gate: Any, rows: Any, lengths: Any, path: Any, decay: Any) -> None:
        state_commit(state, key, value, gate, rows[:1], lengths[:1], torch.arange(5, dtype=torch.int32)[None], decay)
        state_commit(state, key, value, gate, rows[1:], lengths[1:], path[1:], decay)

    patch.setattr(recurrent_states, "state_commit", broken)


def latch_rollback(patch: pytest.MonkeyPatch) -> None:
    """Every path is cut to the length of the first one that was committed."""
    known: list[int] = []

    def broken(self: RecurrentStates, rows: Any, lengths: Any, path: Any) -> None:
        known.append(path.shape[1])
        commit(self, rows, lengths, path[:, : 1 if len(known) > 1 else None].contiguous())

    commit = RecurrentStates.commit
    patch.setattr(RecurrentStates, "commit", broken)


def swap_rows(patch: pytest.MonkeyPatch) -> None:
    """States are those of another row."""

    def broken(self: RecurrentStates, rows: Any, lengths: Any, path: Any) -> None:
        commit(self, rows.flip(0), lengths.flip(0), path)

    commit = RecurrentStates.commit
    patch.setattr(RecurrentStates, "commit", broken)


def forget_ancestors(patch: pytest.MonkeyPatch) -> None:
    """A convolution reads the nodes before it, not its ancestors."""

    def broken(inputs: Any, weight: Any, bias: Any, window: Any, rows: Any, lengths: Any, offsets: Any, parents: Any,
               activation: Any, advance: bool) -> Any:  # fmt: skip
        return tree_conv(inputs, weight, bias, window, rows, lengths, offsets, None, activation, advance)

    patch.setattr(mixer_calls, "tree_conv", broken)


def lose_window(patch: pytest.MonkeyPatch) -> None:
    """Windows are moved by one input less than tokens were accepted."""

    def broken(window: Any, inputs: Any, rows: Any, lengths: Any, path: Any) -> None:
        window_commit(window, inputs, rows, lengths, path[:, :-1].contiguous() if path.shape[1] > 1 else path)

    patch.setattr(recurrent_states, "window_commit", broken)


def share_start(patch: pytest.MonkeyPatch) -> None:
    """Nodes continue the committed state, not that of their parent."""

    def broken(self: MixerPass) -> Any:
        parents = None if self.parents is None else self.parents.clone().fill_(-1)
        return self.rows, self.lengths, self.offsets, parents

    patch.setattr(MixerPass, "tree", property(broken))


MUTANTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "state of rejected tokens": ("qwen3_next", keep_rejected),
    "latched rollback": ("bamba", latch_rollback),
    "state of another row": ("mamba", swap_rows),
    "convolution along the packed axis": ("lfm2", forget_ancestors),
    "window of fewer tokens": ("qwen3_next", lose_window),
    "state of the root for all nodes": ("bamba", share_start),
}


@pytest.mark.parametrize("name", sorted({family for family, _ in MUTANTS.values()}))
def test_the_check_passes_without_a_fault(name: str) -> None:
    assert agrees(name)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = MUTANTS[mutant]
    assert not agrees(name, lambda: plant(monkeypatch))


@pytest.mark.parametrize("name", ["qwen3_next", "mamba"])
def test_a_record_that_is_never_written_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of layer that passes its gates but leaves no records would replay zeros."""
    original = RecurrentStates.commit

    def dropping(self: RecurrentStates, *given: Any) -> None:
        self.records = {place: record for place, record in self.records.items() if record is not None}
        original(self, *given)

    def plant() -> None:
        monkeypatch.setattr(mixer_calls, "Record", lambda *_: None)
        monkeypatch.setattr(RecurrentStates, "commit", dropping)

    with pytest.raises(RuntimeError, match="no records of"):
        agrees(name, plant)


def drafts_for_itself(name: str, **options: Any) -> bool:
    """Whether the texts of a target that drafts for itself are those of plain decoding, and all drafts are accepted."""
    target = HuggingFaceTarget(hybrid_models.model("qwen3_next"), max_rows=2)
    try:
        twin = HuggingFaceTarget(tiny_model("qwen3_next"), max_rows=2) if name != "layer_skip" else None
        drafter = make_drafter(name, options, target=target, draft=lambda: twin)
        params = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
        want = [list(each.tokens) for each in Engine(target).generate([PROMPT, [1]], params)]
        engine = Engine(target, drafter)
        found = [list(each.tokens) for each in engine.generate([PROMPT, [1]], params)]
        return found == want and engine.stats.tau > 4
    finally:
        target.close()


LAYER_SKIP = {"skip_attention": [], "stop": "fixed", "num_draft_tokens": 5}


def test_states_of_drafts_that_stay_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted tokens of layer_skip leave their states in the target."""
    assert drafts_for_itself("layer_skip", **LAYER_SKIP)
    monkeypatch.setattr(RecurrentStates, "write", lambda *_: None)
    assert not drafts_for_itself("layer_skip", **LAYER_SKIP)


def test_a_draft_that_does_not_go_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model keeps the states of rejected tokens."""

    def lose_records(self: RecurrentStates, rows: Any, lengths: Any) -> None:
        self.forget(rows, lengths)

    assert steps_back()
    monkeypatch.setattr(RecurrentStates, "rollback", lose_records)
    assert not steps_back()


def steps_back() -> bool:
    """Whether a row that goes back three tokens has the states of its remaining text."""
    target = HuggingFaceTarget(hybrid_models.model("bamba"), max_rows=2)
    steps = Stepper(target)
    target.cache.keep_history()
    try:
        steps.follow(0, PROMPT, [4, 5, 6, 7])
        target.cache.rollback([0], [4])
        steps.follow(1, PROMPT, [4])
        return equal(steps.states(0), steps.states(1))
    finally:
        target.close()
