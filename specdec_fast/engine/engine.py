"""The engine: requests in, tokens out, one loop for every drafter and rule; rows join and leave at any step.

One step: propose, plan, score (which stages), verify, commit, append, observe. Owns the queue and who runs; tokens
belong to the state, keys and values to the caches, random numbers to nobody. Tests: tests/engine/.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from specdec_fast.adaptive.budget import BudgetPolicy, budget_for
from specdec_fast.core.names import explain_names
from specdec_fast.engine.cuda_graph.eligibility import (
    CaptureFailures,
    engine_ineligible_reasons,
    get_cuda_graph_proposals,
    request_ineligible_reasons,
)
from specdec_fast.engine.cuda_graph.runner import CudaGraphRunner
from specdec_fast.engine.drafter_runner import DrafterRunner
from specdec_fast.engine.generation import generate, stream
from specdec_fast.engine.outputs import collect_graph_outputs, collect_row_outputs, emit_tokens
from specdec_fast.engine.prefill import prefill
from specdec_fast.engine.request import Handle, Prompt, create_handle, encode_prompt, resolve_params
from specdec_fast.engine.state import DecodeState
from specdec_fast.engine.stats import Clock, RequestStats
from specdec_fast.engine.synchronized import synchronized
from specdec_fast.engine.warmup import warm
from specdec_fast.interfaces import Drafter, Needs, Rule, Target, TargetOutput
from specdec_fast.rules import DEFAULT, rule_for
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.sampling.target_distributions import target_distributions

log = logging.getLogger("specdec_fast")


@explain_names("submit", "generate", params=SamplingParams, attributes=True)
class Engine:
    """Continuous batching of speculative decoding.

    target: where logits come from; drafter: proposes (None: plain decoding, a tree of one node per row); rule: name or
    object; tokenizer: a transformers tokenizer, needed for text prompts, text output and stop strings; eos_token_ids:
    ids that end a text; prefill_chunk: most prompt tokens in one pass, None: 512 on a CPU, whose caches hold what so
    many activate, else 2048; budget: how many nodes are drafted, "fixed" (what a request asks for) or "goodput" (what
    pays), or a `BudgetPolicy`; step_mode: "auto" captures steps on a GPU where drafter, rule and requests allow it,
    "sync" never, "graph" on any device (without a GPU the same program runs uncaptured, for tests); where drafter, rule
    or requests forbid captures, steps run as with "sync" and `explain` says why; temperature: of all requests, where it
    is known, for rule `best` to choose by. Threads may share an engine: `submit`, `step` and
    `cancel` wait for each other, and who streams or generates steps for all.

    Raises ValueError when the rule cannot verify what the drafter proposes, and for numbers out of range.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        rule: str | Rule = DEFAULT,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] = (),
        prefill_chunk: int | None = None,
        budget: str | BudgetPolicy = "fixed",
        step_mode: str = "auto",
        temperature: float | None = None,
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        if any(not 0 <= token < target.vocab_size for token in self.eos_token_ids):
            expected = f"ids of the target's vocabulary, 0..{target.vocab_size - 1}"
            raise ValueError(f"eos_token_ids: got {self.eos_token_ids}; expected {expected}")
        self.needs = Needs() if drafter is None else drafter.needs
        self.rule, self.why_rule = rule_for(rule, self.needs, temperature)
        self._running: dict[int, Handle] = {}  # by row, in order of admission
        self._drafter_runner = DrafterRunner(drafter, budget_for(budget), self._running, self.rule, target.vocab_size)
        if drafter is not None and not self.rule.lossless:  # plain decoding draws from the target's distribution
            log.warning("rule %s is lossy: texts do not have the target's distribution", self.rule.name)
        if prefill_chunk is not None and prefill_chunk < 1:
            raise ValueError(f"prefill_chunk: got {prefill_chunk}; expected at least 1")
        cache: Any = target.cache
        self._cache, self._prefill_chunk = cache, prefill_chunk or (512 if cache.device.type == "cpu" else 2048)
        self.state = DecodeState(cache.max_rows, cache.max_length, cache.device)
        proposals = get_cuda_graph_proposals(drafter, cache.max_rows)
        self._graph_ineligible_reasons = engine_ineligible_reasons(
            step_mode, cache.device, proposals, self.rule, self._drafter_runner.budget
        )
        self._failures = CaptureFailures()
        captured = None if isinstance(proposals, str) else proposals
        self._graph_runner = CudaGraphRunner(target, captured, self.rule, self.state, self._drafter_runner)
        self.stats = RequestStats()  # merged from finished requests
        self.seconds = Clock().seconds  # wall-clock per verb, each step counted once
        self._queue: deque[Handle] = deque()
        self._updated_handles: list[Handle] = []  # since the last step: requests that steps under way gave something
        self._next_id = 0
        self.lock = threading.RLock()

    # -- requests ---------------------------------------------------------------------------------------------------

    @synchronized
    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, num_draft_tokens: int | None = None
    ) -> Handle:
        """Queue a request. `num_draft_tokens` overrides the drafter's K (0: plain decoding), as far as texts have room.

        Raises ValueError for a prompt or parameters that cannot be served; nothing else is affected.
        """
        params, tokens = resolve_params(params), self.encode(prompt)
        if (reason := self.rule.why_not_sampling(params)) is not None:
            raise ValueError(reason)
        asked = self._drafter_runner.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        known = {"tokenizer": self.tokenizer, "eos_ids": self.eos_token_ids, "vocab_size": self.target.vocab_size}
        handle = create_handle(self._next_id, tokens, params, asked, cache=self._cache, **known)
        self._next_id += 1
        self._queue.append(handle)
        return handle

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises ValueError for what this target cannot read."""
        return encode_prompt(prompt, self.tokenizer, self.target.vocab_size)

    @synchronized
    def cancel(self, handle: Handle) -> None:
        """End a request now; what it has generated stays on the handle. Idempotent. ValueError for another engine's."""
        if handle.finished:
            return
        self._check_owner(handle)
        with ExitStack() as leaving:  # for good, even if its text cannot be made
            if handle.row is not None:
                leaving.callback(self._retire, handle)
            else:
                leaving.callback(self.stats.merge, handle.stats)
                leaving.callback(self._queue.remove, handle)
            handle.finish_reason = "cancelled"
            handle.finish("cancelled")

    def _check_owner(self, handle: Handle) -> None:
        held = None if handle.row is None else self._running.get(handle.row)
        if held is not handle and handle not in self._queue:
            raise ValueError(f"handle: got request {handle.request_id} of another engine; expected one of its own")

    @property
    def idle(self) -> bool:
        """True when no request waits or runs."""
        return not self._queue and not self._running

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def stream(self, handle: Handle) -> Iterator[str]:
        """Text of one request as it can no longer change; drives the engine. ValueError for another engine's handle."""
        return stream(self, handle)

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        num_draft_tokens: int | None = None,
    ) -> list[Handle]:
        """Run prompts to their ends, batched; handles in their order. One seed is one noise for all under replay.

        A prompt that cannot be served gets a handle with `finish_reason="error"`; the others run. Raises ValueError
        when there are not as many `params` as prompts.
        """
        return generate(self, prompts, params, num_draft_tokens)

    @synchronized
    def warm(self, capacities: Iterable[tuple[int, int]] | None = None) -> None:
        """Compiles kernels and captures steps before requests wait for them.

        Runs steps of every kind on rows and pages that are free: prefill of all sizes up to a chunk, drafts of all
        lengths up to what is asked for, greedy and sampling, with filters and without. Afterwards requests of these
        capacities find everything ready, apart from edits of logits (penalties, bias, grammars) and logprobs. Texts,
        the caches of running requests and the statistics of finished ones stay as they are. Call it before the first
        request, or whenever the engine is idle; while requests run it does what the rest of rows and pages allow.

        Args:
            capacities: Pairs of requests in a batch and draft tokens of each. A captured step serves up to as many of
                both. Default: powers of two up to the target's rows, with the drafter's default budget and without
                drafts.

        Raises:
            ValueError: For more rows than the target has, or fewer than one; for fewer than 0 draft tokens; where
                another engine holds pages of the cache.
            RuntimeError: Where memory runs out in a rehearsal of steps that are not captured.
        """
        warm(self, capacities)

    # -- one step ---------------------------------------------------------------------------------------------------

    @synchronized
    def step(self) -> list[Handle]:
        """Advance every running request by one target pass; the requests that took part."""
        with nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode():
            clock = Clock()
            for handle in [each for each in self._running.values() if each.finished]:  # the step before was broken off
                self._retire(handle)
            with clock.time("prefill"):
                self._reserve_pages()
                self._admit_queued()
            graph = self.step_mode == "graph"
            if self._graph_runner.active and (self._graph_runner.memory_freed or not graph):
                self._drain_pending()
            handles = list(self._running.values())
            if handles and graph:
                self._graph_step(handles, clock)
            elif handles:
                self._sync_step(handles, clock)
                self._failures.record_sync_step()
            told, self._updated_handles = list(dict.fromkeys([*self._updated_handles, *handles])), []
            return told

    def _sync_step(self, handles: list[Handle], clock: Clock) -> None:
        rows, state, target = list(self._running), self.state, self.target
        rng, sampling = state.rng(rows), state.sampling(rows)
        with clock.time("propose"):
            draft = self._drafter_runner.propose(state, rows, rng)
        with clock.time("plan"):
            plan = draft.get_plan()
        with clock.time("score"):
            output, slots = target.score(draft, plan, self.needs.aux_hidden_states)
        with clock.time("verify"):
            assert output.logits is not None
            dists = target_distributions(
                draft, plan, output.logits, sampling, rng.positions, whole=self.needs.node_choices
            )
            acceptance = self.rule(draft, plan, dists, rng)
        try:
            with clock.time("commit"):
                target.cache.commit(draft.rows, slots, acceptance.path, acceptance.num_accepted, draft.chain_rows)
            with clock.time("append"):
                given, acceptance = collect_row_outputs(draft, plan, acceptance, dists, sampling)
                wanted = any(handle.params.logprobs is not None for handle in handles)
                kept, outcomes = emit_tokens(handles, given, dists, acceptance.path.tolist() if wanted else ())
                state.append(rows, kept)
        except BaseException:
            self._requeue_running()
            raise
        try:
            with clock.time("observe"):
                self._drafter_runner.observe(state, draft, acceptance, output)
            drafting = clock.seconds["propose"] + clock.seconds["observe"]
            self._drafter_runner.observe_outcomes(rows, outcomes, drafting, clock.verifying)
        finally:
            self._account_and_retire(handles, clock)

    def _graph_step(self, handles: list[Handle], clock: Clock) -> None:
        """Launch a step and read the one before it."""
        goes_on = any(handle.remaining > self._graph_runner.pending_steps(handle) for handle in handles)
        if goes_on:
            try:
                with clock.time("score"):
                    self._graph_runner.launch(self._running)
            except BaseException as error:  # it may have been interrupted behind the device's back
                self._drain_pending(clock)
                if not isinstance(error, Exception):
                    raise
                log.error("%s", self._failures.record_failure(self._graph_runner.capacity, error), exc_info=error)
                return
            self._failures.record_success(self._graph_runner.capacity)
        if self._graph_runner.pending > 1 or not goes_on:
            with clock.time("append"):
                self._read_pending()
        self._account_and_retire(handles, clock)

    def _read_pending(self) -> None:
        """Hand out what the oldest pending step gave."""
        try:
            read = self._graph_runner.read_oldest()
            kept, _ = emit_tokens(
                [handle for handle, _ in read], [collect_graph_outputs(emission) for _, emission in read]
            )
            for (handle, _), tokens in zip(read, kept):
                assert handle.row is not None
                self.state.append([handle.row], [tokens])
                self._updated_handles.append(handle)
        except BaseException:
            self._requeue_running()
            raise

    def _prepare_for_warmup(self) -> None:
        """No step is pending and no row on the device's side, before something else runs there."""
        self._claim_cache()
        if self._graph_runner.active:
            self._drain_pending()

    def _drain_pending(self, clock: Clock | None = None) -> None:
        """Bring the host up to date: no step is pending, and rows go on from what the host knows."""
        while self._graph_runner.pending:
            self._read_pending()
        self._account_and_retire(list(self._running.values()), clock or Clock())
        self._graph_runner.suspend()

    def _account_and_retire(self, handles: Sequence[Handle], clock: Clock) -> None:
        """Account for a step and retire requests that have ended."""
        for handle in handles:
            for verb, seconds in clock.seconds.items():
                handle.stats.seconds[verb] += seconds
            if handle.finished and handle.row is not None:
                self._retire(handle)
        for verb, seconds in clock.seconds.items():
            self.seconds[verb] += seconds

    # -- who runs -----------------------------------------------------------------------------------------------------

    def _admit_queued(self) -> None:
        """Move queued requests to free rows while there is room for their tokens and one step, and prefill them."""
        joined: list[int] = []
        if self._queue:
            self._claim_cache()
        try:
            while self._queue and self.state.num_free:
                handle = self._queue[0]
                tokens = [*handle.prompt, *handle.tokens]
                room = len(tokens) + self._drafter_runner.max_draft_nodes(handle)
                if self._cache.pages_for(room) > self._cache.pages.num_free:
                    if not self._running and not joined:
                        raise RuntimeError("engine: an empty pool has no room for a request that was accepted")
                    break
                row = self.state.join(
                    tokens, self._drafter_runner.params_with_request_key(handle), len(handle.prompt), handle.stop_ids
                )
                handle.row, self._running[row] = row, self._queue.popleft()
                joined.append(row)
                self._cache.reserve(row, room)
            if joined:
                output = self._prefill(joined)
                self._drafter_runner.begin(self.state, joined, output)
        except BaseException:  # keys and values are half there: wait in the queue for another start
            for row in reversed(joined):
                self._requeue(self._running[row])
            raise

    def _claim_cache(self) -> None:
        """Nobody else uses the cache."""
        self._cache.claim(self, self._running)

    def _prefill(self, rows: list[int]) -> TargetOutput | None:
        """Store keys and values of all committed tokens but the root. Returns the auxiliary hidden states of all of
        them.
        """
        aux_hidden_states = tuple(dict.fromkeys((*self.needs.aux_hidden_states, *self.needs.prompt_aux_hidden_states)))
        texts = {row: self.state.tokens(row)[:-1] for row in rows}
        return prefill(self.target, texts, self._prefill_chunk, aux_hidden_states, self.state.device)

    def _reserve_pages(self) -> None:
        """Reserve slots for this step's nodes; the youngest requests are evicted (and later recomputed) if need be."""
        for row, handle in list(self._running.items()):
            while row in self._running and not self._cache.reserve(row, self._slots_needed(row, handle)):
                if self._graph_runner.pending:
                    self._drain_pending()  # texts may have ended, and whoever is evicted keeps all tokens
                    continue
                youngest = next(reversed(self._running.values()))
                youngest.stats.preemptions += 1
                self._requeue(youngest)

    def _slots_needed(self, row: int, handle: Handle) -> int:
        """Slots that a row may fill by the end of the next step, whatever the steps under way accept."""
        most = self._drafter_runner.max_draft_nodes(handle)
        ahead = self._graph_runner.pending_steps(handle) * (most + 1) if self._graph_runner.pending else 0
        return self.state.length(row) + min(ahead + most, handle.remaining)

    def _requeue(self, handle: Handle) -> None:
        """Back to the head of the queue; its tokens are kept, its keys and values recomputed."""
        try:
            self._retire(handle)
        finally:
            self._queue.appendleft(handle)

    def _requeue_running(self) -> None:
        """Keys and values may be ahead of the texts: all requests are recomputed from the tokens that they have."""
        for handle in reversed(list(self._running.values())):
            (self._retire if handle.finished else self._requeue)(handle)

    def _retire(self, handle: Handle) -> None:
        """Take a request off its row and free everything it held."""
        row, handle.row = handle.row, None
        assert row is not None
        del self._running[row]
        with ExitStack() as leaving:  # the last one first, and all of them, whatever one raises
            if handle.finished:
                leaving.callback(self.stats.merge, handle.stats)
            leaving.callback(self.state.leave, row)
            leaving.callback(self._drafter_runner.release, [row])
            leaving.callback(self._cache.release, [row])
            leaving.callback(self._graph_runner.leave, row)

    def why_not_graph(self) -> list[str]:
        """Why steps are not captured (`graph` mode): the reasons; empty if they are."""
        if self._graph_ineligible_reasons or self._failures.reason is None:
            return self._graph_ineligible_reasons or request_ineligible_reasons(self._running.values())
        return [self._failures.reason, *request_ineligible_reasons(self._running.values())]

    @property
    def step_mode(self) -> str:
        """Either "graph", when steps are captured, or "sync"; `why_not_graph` has the reasons."""
        return "sync" if self.why_not_graph() else "graph"

    def explain(self) -> str:
        """Which rule verifies and how steps run, with the reasons."""
        before = self._failures.last and f" ({self._failures.last}, but not since)"
        reasons = "; ".join(self.why_not_graph()) or f"the host reads one step behind{before or ''}"
        return f"rule {self.rule.name}: {self.why_rule}\nsteps {self.step_mode}: {reasons}"
