"""Mistakes in what takes part in a step, sources that pause, requests that wait or want no token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from mutants.test_suite_mutants import cases, check_detected

from specdec_fast.adaptive.cost_model import Lengths, Nodes, TimeTable
from specdec_fast.adaptive.rest import FIRST, LONGEST, Rest
from specdec_fast.drafters.auto import AutoDrafter
from specdec_fast.drafters.suffix import SuffixDrafter
from specdec_fast.engine.prefill import Prefill
from specdec_fast.engine.prefix_sharing import PrefixSharing
from specdec_fast.engine.request import Handle
from specdec_fast.engine.scheduler import Scheduler

Patch = pytest.MonkeyPatch


def with_sums(patch: Patch, change: Callable[[Any, float, float], tuple[float, float]]) -> None:
    """Changes cost and gain of a step before they are added."""
    add = Rest.add
    patch.setattr(Rest, "add", lambda self, cost, gain, step: add(self, *change(self, cost, gain), step))


def parts_never_pause(patch: Patch) -> None:
    """Cost is not counted."""
    with_sums(patch, lambda rest, cost, gain: (0.0, gain))


def parts_always_pause(patch: Patch) -> None:
    """A pause follows every window, whatever it gained."""
    with_sums(patch, lambda rest, cost, gain: (cost, 0.0))


def pauses_never_end(patch: Patch) -> None:
    """The steps of a pause are not counted."""
    patch.setattr(Rest, "takes_part", lambda self: not self._left)


def the_last_step_of_a_window_decides(patch: Patch) -> None:
    """Cost and gain of earlier steps are forgotten."""

    def alone(rest: Any, cost: float, gain: float) -> tuple[float, float]:
        rest._balance = 0.0
        return cost, gain

    with_sums(patch, alone)


def pauses_stay_long(patch: Patch) -> None:
    """A gain does not make the next pause short."""

    def kept(rest: Any, cost: float, gain: float) -> tuple[float, float]:
        rest.longest = max(getattr(rest, "longest", 0), rest._next)
        rest._next = rest.longest
        return cost, gain

    with_sums(patch, kept)


def pauses_depend_on_other_parts(patch: Patch) -> None:
    """The length of the next pause is shared, so equal costs and gains do not give equal pauses."""
    shared = Counter(pauses=FIRST)

    def of_all(self: Any, value: int) -> None:
        shared["pauses"] = min(max(shared["pauses"], value), LONGEST)

    patch.setattr(Rest, "_next", property(lambda self: shared["pauses"], of_all), raising=False)


def pauses_outlive_requests(patch: Patch) -> None:
    """A request that begins alone does not end the pauses of earlier ones."""
    patch.setattr(Rest, "end", lambda self: None)


def losses_do_not_prolong_pauses(patch: Patch) -> None:
    """Pauses are as short on a model whose steps take a millisecond as on any other."""
    add = Rest.add
    patch.setattr(Rest, "add", lambda self, cost, gain, step: add(self, cost, gain, 1e9))


def ended_pauses_are_forgotten(patch: Patch) -> None:
    """What never gains is tried as often in the next request as in the first."""
    end = Rest.end

    def broken(self: Any) -> None:
        end(self)
        self._next = FIRST

    patch.setattr(Rest, "end", broken)


def losses_are_forgotten_between_requests(patch: Patch) -> None:
    """Each short request tries again what costs too much."""
    end = Rest.end

    def broken(self: Any) -> None:
        self._owed = 0
        end(self)

    patch.setattr(Rest, "end", broken)


def failed_steps_are_learned(patch: Patch) -> None:
    """Proposals of a step that was never observed are compared with the tokens of the next one."""
    patch.setattr(AutoDrafter, "_forget_step", lambda self: None)


def a_pausing_source_proposes(patch: Patch) -> None:
    """A pause saves nothing, since the source is called all the same."""
    propose = AutoDrafter._propose_all

    def broken(self: Any, at: int, *given: Any) -> Any:
        self._resting.discard(at)
        return propose(self, at, *given)

    patch.setattr(AutoDrafter, "_propose_all", broken)


def a_pausing_source_is_not_asked(patch: Patch) -> None:
    """A source that rests misses the beginning of what it could copy."""
    patch.setattr(AutoDrafter, "_woken", lambda self, *given: False)


def missed_tokens_are_not_seen(patch: Patch) -> None:
    """The automaton ends where the pause began."""
    patch.setattr(SuffixDrafter, "ends_rest", lambda self, view, rows: self._rows[rows[0]].automaton.match() >= 4)


def what_a_budget_left_out_was_rejected(patch: Patch) -> None:
    """Nodes beyond a small budget count as tried."""
    add = Nodes.add
    patch.setattr(Nodes, "add", lambda self, budget, path: add(self, max(budget, len(self.budgets) - 1), path))


def drafts_that_fill_their_budget_ended(patch: Patch) -> None:
    """A larger budget looks useless before it was tried."""
    add = Lengths.add
    patch.setattr(Lengths, "add", lambda self, length, cut: add(self, length, False))


def drafts_that_ended_were_cut(patch: Patch) -> None:
    """A larger budget promises tokens that the drafter does not propose."""
    add = Lengths.add
    patch.setattr(Lengths, "add", lambda self, length, cut: add(self, length, True))


def one_pass_tells_the_speed_of_the_machine(patch: Patch) -> None:
    """A slow pass makes all numbers look slow."""
    patch.setattr("specdec_fast.adaptive.cost_model.median", lambda latest: latest[0])


def new_numbers_start_from_the_prior(patch: Patch) -> None:
    """What was measured beside a number is forgotten with its first measurement."""
    interpolate = TimeTable._interpolate
    patch.setattr(
        TimeTable, "_interpolate", lambda self, number: interpolate(self, number) if number in self.seconds else 1.0
    )


def running_requests_go_on(patch: Patch) -> None:
    """A step of some requests keeps the others that run."""
    patch.setattr(Scheduler, "_keep_only", lambda self, only: None)


def queued_requests_join(patch: Patch) -> None:
    """A step of some requests admits all that wait."""
    patch.setattr(Scheduler, "_next_queued", lambda self, only: next(iter(self._queue), None))


def requests_left_out_are_lost(patch: Patch) -> None:
    """A request that is left out leaves its row and does not return to the queue."""
    keep = Scheduler._keep_only

    def broken(self: Any, only: Collection[Handle]) -> None:
        waiting = list(self._queue)
        keep(self, only)
        self._queue.clear()
        self._queue.extend(waiting)

    patch.setattr(Scheduler, "_keep_only", broken)


def requests_left_out_lose_a_token(patch: Patch) -> None:
    """A request that is left out returns to the queue without its newest token."""
    requeue = Scheduler._requeue

    def broken(self: Any, handle: Handle) -> None:
        requeue(self, handle)
        del handle.tokens[-1:]

    patch.setattr(Scheduler, "_requeue", broken)


def pending_steps_are_forgotten(patch: Patch) -> None:
    """A step of some requests does not read the steps that a device still runs."""
    keep = Scheduler._keep_only

    def broken(self: Any, only: Collection[Handle]) -> None:
        self._graph_runner._pending.clear()
        keep(self, only)

    patch.setattr(Scheduler, "_keep_only", broken)


def requests_of_no_tokens_decode(patch: Patch) -> None:
    """A request that wants no token takes part in a step."""
    patch.setattr(Scheduler, "_end_without_text", lambda self, clock: [])


def requests_of_no_tokens_keep_their_rows(patch: Patch) -> None:
    """A request that wants no token ends and holds its row until the next step."""

    def broken(self: Any, clock: Any) -> list[Handle]:
        ended = [handle for handle in self._running.values() if not handle.params.max_new_tokens]
        for handle in ended:
            handle.finish("length")
        return ended

    patch.setattr(Scheduler, "_end_without_text", broken)


def a_step_prefills_whole_prompts(patch: Patch) -> None:
    """Running texts wait for a long prompt."""
    run = Prefill.run
    patch.setattr(Prefill, "run", lambda self, most: run(self, 10**6))


def rows_decode_between_slices(patch: Patch) -> None:
    """A row decodes after the first slice of its prompt."""
    patch.setattr(Scheduler, "_ready", lambda self: dict(self._running))


def rows_that_leave_are_prefilled(patch: Patch) -> None:
    """The slices of a request go on after it was cancelled."""
    retire = Scheduler._retire

    def broken(self: Any, handle: Handle) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Prefill, "discard", lambda *arguments: None)
            retire(self, handle)

    patch.setattr(Scheduler, "_retire", broken)


def hidden_states_of_slices_change_places(patch: Patch) -> None:
    """A drafter gets the hidden states of the last slice first."""
    collect = Prefill.collect

    def broken(self: Prefill, rows: Sequence[int]) -> Any:
        for row in rows:
            self._parts[row].reverse()
        return collect(self, rows)

    patch.setattr(Prefill, "collect", broken)


def a_reset_forgets_rows_in_their_prefill(patch: Patch) -> None:
    """Pages that a slice stored before a reset of the prefix cache get names after it."""

    def broken(self: PrefixSharing) -> None:
        self._stored.clear()
        self._cache.pages.forget()

    patch.setattr(PrefixSharing, "forget", broken)


COSTS, TIMES = "adaptive/test_cost_model.py", "adaptive/test_pass_times.py"
REST, AUTO, SUFFIX = "adaptive/test_rest.py", "drafters/test_auto.py", "drafters/test_suffix.py"
SLICES = "engine/test_prefill.py"
BETWEEN = "test_running_texts_get_tokens_between_the_slices_of_a_long_prompt"
LEAVES = "test_a_request_that_leaves_between_slices_frees_everything_at_once"
SOME = "engine/test_pressure.py", "test_steps_of_some_requests_leave_the_others_waiting"
NONE = "engine/test_prompt_logprobs.py", "test_requests_of_no_tokens_end_after_their_prefill"
MUTANTS: list[tuple[Callable[[Patch], None], str, str, tuple[Any, ...]]] = [
    (parts_never_pause, REST, "test_pauses_double_up_to_the_longest", ()),
    (parts_never_pause, AUTO, "test_a_source_that_may_rest_pauses_while_it_saves_nothing", ()),
    (parts_always_pause, REST, "test_a_part_that_gains_never_pauses", ()),
    (pauses_never_end, REST, "test_pauses_double_up_to_the_longest", ()),
    (the_last_step_of_a_window_decides, REST, "test_the_sum_over_a_window_decides", ()),
    (pauses_stay_long, REST, "test_a_gain_makes_the_next_pause_short_again", ()),
    (pauses_depend_on_other_parts, REST, "test_equal_costs_and_gains_give_equal_pauses", ()),
    (pauses_outlive_requests, AUTO, "test_pauses_end_with_the_last_request", ()),
    (losses_do_not_prolong_pauses, REST, "test_a_pause_is_prolonged_until_the_loss_is_a_small_share", ()),
    (ended_pauses_are_forgotten, REST, "test_a_pause_that_is_ended_leaves_the_next_one_as_long", ()),
    (
        losses_are_forgotten_between_requests,
        REST,
        "test_a_pause_that_is_ended_goes_on_until_its_window_is_made_up_for",
        (),
    ),
    (failed_steps_are_learned, AUTO, "test_what_a_failed_step_left_is_not_learned", ()),
    (a_pausing_source_proposes, AUTO, "test_a_source_that_may_rest_pauses_while_it_saves_nothing", ()),
    (a_pausing_source_is_not_asked, AUTO, "test_a_pausing_source_is_woken_where_it_says_so", ()),
    (missed_tokens_are_not_seen, SUFFIX, "test_a_long_match_ends_a_pause_of_steps_that_were_not_seen", ()),
    (
        what_a_budget_left_out_was_rejected,
        COSTS,
        "test_small_budgets_do_not_make_the_later_nodes_of_a_tree_look_bad",
        ((2, 4),),
    ),
    (
        drafts_that_fill_their_budget_ended,
        COSTS,
        "test_drafts_that_end_by_themselves_are_told_from_those_that_a_budget_ends",
        (),
    ),
    (
        drafts_that_ended_were_cut,
        COSTS,
        "test_drafts_that_end_by_themselves_are_told_from_those_that_a_budget_ends",
        (),
    ),
    (one_pass_tells_the_speed_of_the_machine, TIMES, "test_one_slow_pass_says_little_beside_a_prior", ()),
    (new_numbers_start_from_the_prior, TIMES, "test_a_new_number_starts_from_its_neighbours", ()),
    (running_requests_go_on, *SOME, ("none", "sync")),
    (queued_requests_join, *SOME, ("none", "sync")),
    (requests_left_out_are_lost, *SOME, ("none", "sync")),
    (requests_left_out_lose_a_token, *SOME, ("none", "sync")),
    (pending_steps_are_forgotten, *SOME, ("draft_model", "graph")),
    (requests_of_no_tokens_decode, *NONE, ("none", "sync")),
    (requests_of_no_tokens_keep_their_rows, *NONE, ("none", "sync")),
    (a_step_prefills_whole_prompts, SLICES, BETWEEN, ("sync",)),
    (rows_decode_between_slices, SLICES, BETWEEN, ("graph",)),
    (rows_that_leave_are_prefilled, SLICES, LEAVES, ("none", "sync", "cancel")),
    (hidden_states_of_slices_change_places, SLICES, "test_drafts_do_not_depend_on_slices", ("eagle",)),
    (a_reset_forgets_rows_in_their_prefill, SLICES, "test_pages_of_a_prefill_that_saw_a_reset_get_no_names", ("none",)),
]


@cases(MUTANTS)
def test_the_test_fails(
    plant: Callable[[Patch], None], file: str, test: str, arguments: tuple[Any, ...], monkeypatch: Patch
) -> None:
    check_detected(plant, file, test, arguments, monkeypatch)
