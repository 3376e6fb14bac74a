"""Runs the drafter: budgets per row, and containment of its failures.

A drafter that raises, or returns a malformed draft, never ends a request. The rows that it failed on are found one by
one; their requests continue without drafts, the others as before. Every failure counts in the statistics of its
requests, and the first of its kind is logged. Tests: tests/engine/test_failures.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from specdec_fast.adaptive.budget import BudgetPolicy
from specdec_fast.adaptive.cost_model import DraftOutcome
from specdec_fast.core.device_transfer import select_entries
from specdec_fast.core.draft import Draft
from specdec_fast.engine.empty_drafts import EmptyDrafts
from specdec_fast.engine.request import Handle
from specdec_fast.engine.sub_batch import select_aux_hidden_states, select_step_rows
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
    """A drafter, or none, with its budget.

    A request that is given up drafts no more until it ends, also on another row after a preemption. The drafter then
    observes nothing of it but its release.

    Under rules that read draft distributions, a failure that depends on sampled tokens drops sampled tokens in at most
    one step of a request. Under `replay` and `greedy`, texts do not depend on drafts at all.

    Args:
        drafter: The drafter, or None.
        budget: How many nodes each row may draft.
        running: The engine's running requests by row.
        rule: The rule that verifies the drafts.
        vocab_size: V of the target.

    Attributes:
        num_draft_tokens: The drafter's default draft tokens per step.

    Raises:
        ValueError: If the drafter's vocabulary is larger than the target's.
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
        configure = getattr(budget, "configure_drafter", None)  # some policies set an option of the drafter
        if drafter is not None and configure is not None:
            configure(drafter)
        self.drafter, self.budget = drafter, budget
        self._rule, self._vocab_size = rule, vocab_size
        self.num_draft_tokens: int = getattr(drafter, "num_draft_tokens", 0)
        self._running = running
        self._given_up: set[Handle] = set()
        self._empty_drafts = EmptyDrafts(drafter)
        self._keyed_params: dict[Handle, SamplingParams] = {}
        self._batch_observe_failed = False  # the last batch failed in observe, and none of its rows alone
        self._logged: set[tuple[str, str, str]] = set()
        # The drafter's own draft in this step, and the draft that was made of it.
        self._step_drafts: tuple[Draft, Draft] | None = None

    def max_draft_nodes(self, handle: Handle) -> int:
        """Returns the draft nodes that the next step of a request may have. The last token of a text needs none."""
        return max(min(self.requested_draft_nodes(handle), handle.remaining - 1), 0)

    def requested_draft_nodes(self, handle: Handle) -> int:
        """Returns the draft nodes per step that a request asks for, wherever its text ends."""
        return 0 if self.drafter is None or handle in self._given_up else handle.num_draft_tokens

    def params_with_request_key(self, handle: Handle) -> SamplingParams:
        """Returns the parameters of a request as its row uses them, the same ones after a preemption.

        Drafts may depend on other requests: through shared data, learning, or preemption. A draft that depends on the
        text of another request with the same seed would depend on the uniforms that verify it. Under rules that use
        fresh uniforms, the seed is therefore derived from the prompt too. It also depends on the request's number if
        much may be shared, and beside a running request with an equal prompt and seed.
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
        """Adds rows after their prefill.

        Args:
            view: Committed data.
            rows: Rows that join.
            output: Hidden states of all committed tokens but the roots, [M, hidden] by name, or None.
        """
        served = self._active_rows(rows)
        if self.drafter is not None and served:
            self._begin(
                view,
                served,
                output if len(served) == len(rows) else select_aux_hidden_states(view, rows, served, output),
            )

    def _begin(self, view: StateView, rows: Sequence[int], output: TargetOutput | None) -> None:
        """Adds rows to the drafter, and gives up those on which it fails."""
        assert self.drafter is not None
        try:
            self.drafter.begin(view, rows, output)
        except Exception as error:
            if len(rows) == 1:
                self._give_up("begin", error, rows)
                return
            for row in rows:  # one by one, so that only the rows that fail are given up
                self._release_row(row)
                self._begin(view, [row], select_aux_hidden_states(view, rows, [row], output))

    def _active_rows(self, rows: Sequence[int]) -> list[int]:
        """The rows whose requests have not been given up."""
        if not self._given_up:
            return list(rows)
        return [row for row in rows if self._running[row] not in self._given_up]

    def propose(self, view: StateView, rows: Sequence[int], rng: Rng) -> Draft:
        """Proposes for all rows within the budget of this step.

        Args:
            view: Committed data.
            rows: Rows of the step, in order.
            rng: Keys of the random numbers, in the order of `rows`.

        Returns:
            A draft for exactly these rows. Rows without proposals have their root alone.
        """
        most = [self.max_draft_nodes(self._running[row]) for row in rows]
        limits = self._budget_limits(rows, most)
        self._step_drafts = draft = None
        roots = [view.tokens(row)[-1] for row in rows]
        if any(limits):
            places = list(range(len(rows)))
            if self._given_up:
                served = set(self._active_rows(rows))
                places = [at for at in places if rows[at] in served]
            draft = self._propose_contained(view, rows, places, limits, rng)
        if draft is None:
            whole = Draft.chains(rows, [[root] for root in roots], device=view.device)
        else:
            whole = draft if draft.num_rows == len(rows) else draft.with_missing_rows(rows, roots)
            self._step_drafts = draft, whole
        for row, limit, count in zip(rows, limits, whole.counts):
            if limit:
                self.record_draft_size(self._running[row], count - 1)
        return whole

    def record_draft_size(self, handle: Handle, drafted: int) -> None:
        """Counts the draft tokens of a step that might have had some. A drafter that never drafts has failed."""
        if handle not in self._given_up and self._empty_drafts.is_fault(handle, drafted):
            handle.stats.faults += 1

    def _budget_limits(self, rows: Sequence[int], most: list[int]) -> list[int]:
        """Draft nodes that the budget allows, at most `most`; all of `most` if the budget fails."""
        if self.drafter is None:
            return most
        try:
            wanted = self.budget.nodes(rows, most)
            return [max(0, min(limit, bound)) for limit, bound in zip(wanted, most, strict=True)]
        except Exception as error:
            self._budget_failed("budget", error, "drafts are as long as they may be")
            return most

    def observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Lets the drafter observe the rows that it still serves, with the draft that it made itself.

        Args:
            view: Committed data, with the tokens of this step.
            draft: The draft that was verified.
            acceptance: What the rule accepted.
            output: Logits [M, V] and hidden states [M, hidden] of all nodes.
        """
        if self.drafter is None:
            return
        rows, drafts, self._step_drafts = list(draft.host_rows()), self._step_drafts, None
        served = self._active_rows(rows)
        if drafts is not None and drafts[1] is draft:
            served = list(drafts[0].host_rows())
        if not served:
            return
        if len(served) < len(rows):
            draft, acceptance, output = select_step_rows(draft, acceptance, output, [rows.index(row) for row in served])
        if drafts is not None and drafts[0].num_nodes == draft.num_nodes:
            draft = drafts[0]
        self._observe(view, draft, acceptance, output)

    def _observe(self, view: StateView, draft: Draft, acceptance: Acceptance, output: TargetOutput) -> None:
        """Lets the drafter observe a step, and gives up the rows on which it fails."""
        assert self.drafter is not None
        rows = list(draft.host_rows())
        try:
            self.drafter.observe(view, draft, acceptance, output)
            self._batch_observe_failed &= len(rows) == 1
        except Exception as error:
            if len(rows) == 1:
                self._give_up("observe", error, rows)
                return
            for at in range(len(rows)):  # one by one, so that only the rows that fail are given up
                self._observe(view, *select_step_rows(draft, acceptance, output, [at]))
            if len(self._active_rows(rows)) == len(rows):  # no row fails alone: tolerated once
                (self._give_up if self._batch_observe_failed else self._record_fault)("observe", error, rows)
                self._batch_observe_failed = True

    def observe_outcomes(
        self, rows: Sequence[int], outcomes: Sequence[DraftOutcome], drafting: float, verifying: float
    ) -> None:
        """Lets the budget observe a step.

        Args:
            rows: Rows of the step.
            outcomes: What became of each draft.
            drafting: Seconds that the drafter took.
            verifying: Seconds that the rest of the step took.
        """
        try:
            self.budget.observe(rows, outcomes, drafting, verifying)
        except Exception as error:
            self._budget_failed("observe", error, "it continues with what it has")

    def reserve(self, captured: CudaGraphProposals, row: int, length: int) -> bool:
        """Reserves memory for a row of CUDA-graph steps.

        Args:
            captured: Proposals of the drafter.
            row: The row.
            length: Tokens that the row may hold.

        Returns:
            Whether the row may draft.
        """
        try:
            return captured.reserve(row, length)
        except Exception as error:
            self._give_up("reserve", error, [row])
            return False

    def enter(self, captured: CudaGraphProposals, view: StateView, rows: Sequence[int]) -> list[int]:
        """Adds rows to CUDA-graph steps.

        Args:
            captured: Proposals of the drafter.
            view: Committed data.
            rows: Rows that join.

        Returns:
            The rows on which the drafter did not fail.
        """
        try:
            captured.enter(view, rows)
            return list(rows)
        except Exception as error:
            if len(rows) > 1:  # one by one, so that only the rows that fail are left out
                sound = [own for row in rows for own in self.enter(captured, view, [row])]
                if len(sound) == len(rows):
                    self._record_fault("enter", error, rows)
                return sound
            self._give_up("enter", error, rows)
            return []

    def leave(self, captured: CudaGraphProposals, view: StateView, rows: Sequence[int]) -> None:
        """Returns rows to `sync` steps."""
        for row in rows:
            try:
                captured.leave(view, [row])
            except Exception as error:
                self._give_up("leave", error, [row])

    def release(self, rows: Sequence[int]) -> None:
        """Removes rows from the drafter and the budget."""
        for row in rows:
            if self.drafter is not None:
                self._release_row(row)
        try:
            self.budget.release(rows)
        except Exception as error:
            self._budget_failed("release", error, "it continues with what it has")
        self._empty_drafts.forget_finished()
        self._given_up = {handle for handle in self._given_up if not handle.finished}
        self._keyed_params = {handle: params for handle, params in self._keyed_params.items() if not handle.finished}

    def _propose_contained(
        self, view: StateView, rows: Sequence[int], places: list[int], limits: Sequence[int], rng: Rng
    ) -> Draft | None:
        """The draft of the rows at `places`, without those on which the drafter fails; None if no row has any."""
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
        if len(sound) == len(places):  # no row fails alone
            self._record_fault("propose", first, [rows[at] for at in places])
        try:
            return self._propose_checked(view, rows, sound, limits, rng) if any(limits[at] for at in sound) else None
        except Exception as error:
            self._give_up("propose", error, [rows[at] for at in sound])
            return None

    def _propose_checked(
        self, view: StateView, rows: Sequence[int], places: list[int], limits: Sequence[int], rng: Rng
    ) -> Draft | None:
        """Asks the drafter for the rows at `places`, and checks the draft. None if it proposes nothing."""
        assert self.drafter is not None
        if len(places) < len(rows):
            rng = Rng(select_entries(rng.seeds, places), select_entries(rng.positions, places))
        budget, own = Budget([limits[at] for at in places]), [rows[at] for at in places]
        draft = self.drafter.propose(view, own, budget, rng)
        return None if draft is None else self._check_draft(view, own, budget, draft)

    def _check_draft(self, view: StateView, rows: Sequence[int], budget: Budget, draft: Draft) -> Draft:
        """Returns the draft. Raises ValueError if target, rule or cache would fail on it."""
        # Values on a GPU are checked only if the drafter works on the host: other checks would wait for the device.
        assert self.drafter is not None
        who, needs = f"drafter {self.drafter.name}", self.drafter.needs
        # more nodes would not fit the pages of the row
        if any(not 0 < count <= 1 + limit for count, limit in zip(draft.counts, budget.nodes)):
            raise ValueError(f"{who}: got {draft.counts} nodes; expected 1 + {budget.nodes} at most, the root included")
        own, here = draft.tokens.device, view.device
        if own != here and (own.type != here.type or (own.index or 0) != (here.index or 0)):
            raise ValueError(f"{who}: got a draft on {draft.tokens.device}; expected {view.device}, the view's device")
        if needs.topology == "chain" and not (draft.is_chain and draft.score_only is None):
            raise ValueError(f"{who}: got a tree or score-only nodes; expected chains, as its needs say")
        draft.check(self._vocab_size, {row: view.tokens(row)[-1] for row in rows}, wait=needs.host_tokens)
        if getattr(self._rule, "uses_q", False):
            draft.check_no_dropped_samples(self._rule.name)
        return draft

    def _give_up(self, verb: str, error: Exception, rows: Sequence[int]) -> None:
        """Stops drafting for rows. The drafter keeps their data until they leave."""
        self._record_fault(verb, error, rows)
        self._given_up.update(self._running[row] for row in rows if row in self._running)

    def _release_row(self, row: int) -> None:
        """Removes one row from the drafter."""
        assert self.drafter is not None
        try:
            self.drafter.release([row])
        except Exception as error:
            self._record_fault("release", error, [row])

    def _record_fault(self, verb: str, error: Exception, rows: Sequence[int]) -> None:
        """Counts a failure of the drafter in the statistics of rows."""
        for row in rows:
            if row in self._running:
                self._running[row].stats.faults += 1
        assert self.drafter is not None
        consequence = "the requests it fails on go on without drafts"
        self._log(verb, error, f"drafter {self.drafter.name}", consequence)

    def _budget_failed(self, verb: str, error: Exception, consequence: str) -> None:
        """Logs a failure of the budget."""
        self._log(verb, error, f"budget {type(self.budget).__name__}", consequence)

    def _log(self, verb: str, error: Exception, who: str, consequence: str) -> None:
        """Logs a failure, the first of its kind."""
        if (kind := (who, verb, type(error).__name__)) not in self._logged:
            self._logged.add(kind)
            log.error(
                "%s raised in %s: %s: %s; %s, and this is logged once; fix it or its options, or choose another",
                *(who, verb, type(error).__name__, error, consequence),
                exc_info=error,
            )
