"""Between the engine and its drafter: how many nodes each row may draft, and what happens when the drafter fails.

A drafter that raises never ends a request, nor does one whose drafts are not well formed. The rows it was working on
when it did so are found one at a time; their requests go on without drafts until they end, the others as before. Every
fault is counted in the statistics of its requests and the first of its kind is logged. Owns no tokens.
Tests: tests/engine/test_failures.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from specdec_fast.adaptive.budget import BudgetPolicy
from specdec_fast.adaptive.cost_model import Outcome
from specdec_fast.core.device_transfer import host_to_device, select_entries
from specdec_fast.core.draft import Draft
from specdec_fast.engine.request import Handle
from specdec_fast.interfaces import (
    Acceptance,
    Budget,
    CudaGraphProposals,
    Drafter,
    Rng,
    Rule,
    StateView,
    TargetOutput,
)
from specdec_fast.sampling.params import SamplingParams

log = logging.getLogger("specdec_fast")


class DrafterRunner:
    """A drafter (or none) with its budget, contained. running: the engine's requests by row; rule: what verifies the
    drafts; vocab_size: the target's.

    A request that is given up drafts no more until it ends, on another row after a preemption neither, and the drafter
    hears no more of it but that its row left. Under rules that use q a fault that depends on what was drawn drops drawn
    tokens in one step of a request at most; under replay and greedy nothing depends on drafts at all.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        budget: BudgetPolicy,
        running: Mapping[int, Handle],
        rule: Rule,
        vocab_size: int,
    ) -> None:
        own = None if drafter is None else drafter.needs.vocab_size
        if drafter is not None and own is not None and own > vocab_size:
            raise ValueError(
                f"drafter {drafter.name}: got a draft model of {own} token ids, the target has {vocab_size}; expected "
                f"no more; where both have one tokenizer give it vocab_size={vocab_size}, which masks ids beyond, "
                "else use tokenizers='tli' or 'slem' of draft_model"
            )
        settle = getattr(budget, "settle", None)  # a policy that works through an option of the drafter's
        if drafter is not None and settle is not None:
            settle(drafter)
        self.drafter, self.budget = drafter, budget
        self._rule, self._vocab_size = rule, vocab_size
        self.num_draft_tokens: int = getattr(drafter, "num_draft_tokens", 0)
        self._running = running
        self._given_up: set[Handle] = set()
        self._keyed_params: dict[Handle, SamplingParams] = {}
        self._batch_observe_failed = False  # the last batch could not be observed, but each of its rows alone
        self._logged: set[tuple[str, str, str]] = set()
        self._step_drafts: tuple[Draft, Draft] | None = (
            None  # of the step: the drafter's own draft, and what was made of it
        )

    def max_draft_nodes(self, handle: Handle) -> int:
        """Draft nodes that the next step of a request may have: the last token of a text needs none."""
        return max(min(self.requested_draft_nodes(handle), handle.remaining - 1), 0)

    def requested_draft_nodes(self, handle: Handle) -> int:
        """Draft nodes that a request asks for, wherever its text ends."""
        return 0 if self.drafter is None or handle in self._given_up else handle.num_draft_tokens

    def params_with_request_key(self, handle: Handle) -> SamplingParams:
        """A request's parameters as its row has them, also after a preemption. What is drafted may follow from other
        requests: by what is shared or learned, and by who was preempted. A draft that knows something of another text
        of one seed would know something of the coins that test it, so where a rule tosses coins, these are keyed by
        the prompt too, and by the request's number where much may be shared and beside an equal prompt of that seed.
        """
        if self.drafter is None or getattr(self._rule, "replays", False):
            return handle.params
        if handle not in self._keyed_params:
            params, others = handle.params, self._running.values()
            alone = not self.drafter.needs.cross_request and not vars(type(self.budget)).get("cross_request", True)
            twin = any(each.params.seed == params.seed and each.prompt == handle.prompt for each in others)
            self._keyed_params[handle] = params.with_derived_seed(
                handle.prompt, None if alone and not twin else handle.request_id
            )
        return self._keyed_params[handle]

    def begin(self, view: StateView, rows: Sequence[int], output: TargetOutput | None) -> None:
        """Rows join. output: auxiliary hidden states of all their tokens, row after row."""
        served = self._active_rows(rows)
        if self.drafter is not None and served:
            self._begin(
                view,
                served,
                output if len(served) == len(rows) else _select_aux_hidden_states(view, rows, served, output),
            )

    def _begin(self, view: StateView, rows: Sequence[int], output: TargetOutput | None) -> None:
        assert self.drafter is not None
        try:
            self.drafter.begin(view, rows, output)
        except Exception as error:
            if len(rows) == 1:
                self._give_up("begin", error, rows)
                return
            for row in rows:  # one by one: who is bad joins alone
                self._release_row(row)
                self._begin(view, [row], _select_aux_hidden_states(view, rows, [row], output))

    def _active_rows(self, rows: Sequence[int]) -> list[int]:
        """The rows whose requests are not given up."""
        if not self._given_up:
            return list(rows)
        return [row for row in rows if self._running[row] not in self._given_up]

    def propose(self, view: StateView, rows: Sequence[int], rng: Rng) -> Draft:
        """A draft for all rows, within the budget of this step."""
        most = [self.max_draft_nodes(self._running[row]) for row in rows]
        limits = self._budget_limits(rows, most)
        self._step_drafts = None
        roots = [view.tokens(row)[-1] for row in rows]
        draft = None
        if any(limits):
            places = list(range(len(rows)))
            if self._given_up:
                served = set(self._active_rows(rows))
                places = [at for at in places if rows[at] in served]
            draft = self._propose_contained(view, rows, places, limits, rng)
        if draft is None:
            return Draft.chains(rows, [[root] for root in roots], device=view.device)
        whole = draft if draft.num_rows == len(rows) else draft.with_missing_rows(rows, roots)
        self._step_drafts = draft, whole
        return whole

    def _budget_limits(self, rows: Sequence[int], most: list[int]) -> list[int]:
        """What the budget allows, never more than there is room for; all of that where the budget fails."""
        if self.drafter is None:
            return most
        try:
            asked = self.budget.nodes(rows, most)
            return [max(0, min(limit, room)) for limit, room in zip(asked, most, strict=True)]
        except Exception as error:
            self._budget_failed("budget", error, "drafts are as long as they may be")
            return most

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """The drafter hears of the rows that it still serves, and of its own draft as it made it."""
        if self.drafter is None:
            return
        rows, asked, self._step_drafts = list(draft.host_rows()), self._step_drafts, None
        served = self._active_rows(rows)
        if asked is not None and asked[1] is draft:
            served = list(asked[0].host_rows())
        if not served:
            return
        if len(served) < len(rows):
            draft, acceptance, output = _select_rows(draft, acceptance, output, [rows.index(row) for row in served])
        if asked is not None and asked[0].num_nodes == draft.num_nodes:
            draft = asked[0]
        self._observe(view, draft, acceptance, output)

    def _observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        assert self.drafter is not None
        rows = list(draft.host_rows())
        try:
            self.drafter.observe(view, draft, acceptance, output)
            self._batch_observe_failed &= len(rows) == 1
        except Exception as error:
            if len(rows) == 1:
                self._give_up("observe", error, rows)
                return
            for at in range(len(rows)):  # one by one: who is bad is lost alone
                self._observe(view, *_select_rows(draft, acceptance, output, [at]))
            if len(self._active_rows(rows)) == len(rows):  # nobody can tell whose fault it is: that may happen once
                (self._give_up if self._batch_observe_failed else self._record_fault)("observe", error, rows)
                self._batch_observe_failed = True

    def observe_outcomes(
        self, rows: Sequence[int], outcomes: Sequence[Outcome], drafting: float, verifying: float
    ) -> None:
        """The budget hears what a step of these rows brought, and the seconds that it took."""
        try:
            self.budget.observe(rows, outcomes, drafting, verifying)
        except Exception as error:
            self._budget_failed("observe", error, "it goes on with what it has")

    def reserve(self, captured: CudaGraphProposals, row: int, length: int) -> bool:
        """Whether a row may draft in captured steps until it holds so many tokens."""
        try:
            return captured.reserve(row, length)
        except Exception as error:
            self._give_up("reserve", error, [row])
            return False

    def enter(self, captured: CudaGraphProposals, view: StateView, rows: Sequence[int]) -> list[int]:
        """Rows join captured steps; those that do, without those on which the drafter fails."""
        try:
            captured.enter(view, rows)
            return list(rows)
        except Exception as error:
            if len(rows) > 1:  # one by one: who is bad stays out alone
                sound = [own for row in rows for own in self.enter(captured, view, [row])]
                if len(sound) == len(rows):
                    self._record_fault("enter", error, rows)
                return sound
            self._give_up("enter", error, rows)
            return []

    def leave(self, captured: CudaGraphProposals, view: StateView, rows: Sequence[int]) -> None:
        """Rows go back to steps that are not captured."""
        for row in rows:
            try:
                captured.leave(view, [row])
            except Exception as error:
                self._give_up("leave", error, [row])

    def release(self, rows: Sequence[int]) -> None:
        """Rows leave."""
        for row in rows:
            if self.drafter is not None:
                self._release_row(row)
        try:
            self.budget.release(rows)
        except Exception as error:
            self._budget_failed("release", error, "it goes on with what it has")
        self._given_up = {handle for handle in self._given_up if not handle.finished}
        self._keyed_params = {handle: params for handle, params in self._keyed_params.items() if not handle.finished}

    def _propose_contained(
        self, view: StateView, rows: Sequence[int], places: list[int], limits: Sequence[int], rng: Rng
    ) -> Draft | None:
        """The draft of the rows at `places`; without those on which the drafter fails, None if nothing is left."""
        try:
            return self._propose_checked(view, rows, places, limits, rng)
        except Exception as error:
            first = error
        sound = []
        for at in places:
            try:
                self._propose_checked(view, rows, [at], limits, rng)
                sound.append(at)
            except Exception as error:
                self._give_up("propose", error, [rows[at]])
        if len(sound) == len(places):  # each of them alone is fine
            self._record_fault("propose", first, [rows[at] for at in places])
        try:
            return self._propose_checked(view, rows, sound, limits, rng) if any(limits[at] for at in sound) else None
        except Exception as error:
            self._give_up("propose", error, [rows[at] for at in sound])
            return None

    def _propose_checked(
        self, view: StateView, rows: Sequence[int], places: list[int], limits: Sequence[int], rng: Rng
    ) -> Draft:
        assert self.drafter is not None
        if len(places) < len(rows):
            rng = Rng(select_entries(rng.seeds, places), select_entries(rng.positions, places))
        budget, own = Budget([limits[at] for at in places]), [rows[at] for at in places]
        draft = self.drafter.propose(view, own, budget, rng)
        self._check_draft(view, own, budget, draft)
        return draft

    def _check_draft(self, view: StateView, rows: Sequence[int], budget: Budget, draft: Draft) -> None:
        """Raise ValueError for a draft on which the target, the rule or the cache would fail. Values on a GPU are
        looked at where the drafter works on the host, so that nothing is waited for that would not be there.
        """
        assert self.drafter is not None
        who, needs = f"drafter {self.drafter.name}", self.drafter.needs
        if any(not 0 < count <= 1 + limit for count, limit in zip(draft.counts, budget.nodes)):  # would leave its pages
            raise ValueError(f"{who}: got {draft.counts} nodes; expected 1 + {budget.nodes} at most, the root included")
        own, here = draft.tokens.device, view.device
        if own != here and (own.type != here.type or (own.index or 0) != (here.index or 0)):
            raise ValueError(f"{who}: got a draft on {draft.tokens.device}; expected {view.device}, the view's device")
        if needs.topology == "chain" and not (draft.is_chain and draft.score_only is None):
            raise ValueError(f"{who}: got a tree or score-only nodes; expected chains, as its needs say")
        draft.check(self._vocab_size, {row: view.tokens(row)[-1] for row in rows}, wait=needs.host_tokens)
        if getattr(self._rule, "uses_q", False):
            draft.check_no_dropped_samples(self._rule.name)

    def _give_up(self, verb: str, error: Exception, rows: Sequence[int]) -> None:
        """No drafts for these rows any more. The drafter keeps what it knows of them until they leave."""
        self._record_fault(verb, error, rows)
        self._given_up.update(self._running[row] for row in rows if row in self._running)

    def _release_row(self, row: int) -> None:
        assert self.drafter is not None
        try:
            self.drafter.release([row])
        except Exception as error:
            self._record_fault("release", error, [row])

    def _record_fault(self, verb: str, error: Exception, rows: Sequence[int]) -> None:
        for row in rows:
            if row in self._running:
                self._running[row].stats.faults += 1
        assert self.drafter is not None
        consequence = "the requests it fails on go on without drafts"
        self._log(verb, error, f"drafter {self.drafter.name}", consequence)

    def _budget_failed(self, verb: str, error: Exception, consequence: str) -> None:
        self._log(verb, error, f"budget {type(self.budget).__name__}", consequence)

    def _log(self, verb: str, error: Exception, who: str, consequence: str) -> None:
        """Say what went wrong, the first time."""
        kind = (who, verb, type(error).__name__)
        if kind not in self._logged:
            self._logged.add(kind)
            log.error(
                "%s raised in %s: %s: %s; %s, and this is logged once; mend it or its options, or choose another",
                *(who, verb, type(error).__name__, error, consequence),
                exc_info=error,
            )


def _select_aux_hidden_states(
    view: StateView, rows: Sequence[int], wanted: Sequence[int], output: TargetOutput | None
) -> TargetOutput | None:
    """The part of what is known of the tokens of rows, row after row, that is of some of them."""
    if output is None:
        return None
    ends = list(accumulate(view.length(row) - 1 for row in rows))  # the root was not prefilled
    spans = {row: slice(start, end) for row, start, end in zip(rows, [0, *ends], ends)}
    aux_hidden_states = {
        name: torch.cat([aux_hidden_state[spans[row]] for row in wanted])
        for name, aux_hidden_state in output.aux_hidden_states.items()
    }
    return TargetOutput(None, aux_hidden_states)


def _select_rows(
    draft: Draft, acceptance: Acceptance, output: TargetOutput, places: list[int]
) -> tuple[Draft, Acceptance, TargetOutput]:
    """What a step says about some rows of its batch, by their places."""
    part, nodes = draft.select(places)
    place_of = torch.full((draft.num_nodes + 1,), -1, dtype=torch.int32, device=nodes.device)  # the last one is for -1
    place_of[nodes] = torch.arange(nodes.shape[0], dtype=torch.int32, device=nodes.device)
    choice, at = acceptance.node_choice, host_to_device(places, torch.int64, nodes.device)
    heard = replace(
        acceptance,
        path=place_of[acceptance.path[at].long()],
        num_accepted=acceptance.num_accepted[at],
        next_token=acceptance.next_token[at],
        node_choice=None if choice is None else choice[nodes],
        num_accepted_host=None
        if acceptance.num_accepted_host is None
        else tuple(acceptance.num_accepted_host[place] for place in places),
    )
    logits = None if output.logits is None else output.logits[nodes]
    return (
        part,
        heard,
        TargetOutput(
            logits, {name: aux_hidden_state[nodes] for name, aux_hidden_state in output.aux_hidden_states.items()}
        ),
    )
