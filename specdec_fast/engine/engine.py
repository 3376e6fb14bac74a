"""The engine: one loop for every drafter and rule, in which requests join and leave between any two steps.

A step proposes, plans, scores, verifies, commits, appends and observes. Tokens belong to `DecodeState`, keys and values
to caches; random numbers have no state. Tests: tests/engine/.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from specdec_fast.adaptive.budget import BudgetPolicy, budget_for
from specdec_fast.core.autocast import without_autocast
from specdec_fast.core.former_names import explain_names
from specdec_fast.engine.chat import ChatMethods
from specdec_fast.engine.closing import Closeable
from specdec_fast.engine.cuda_graph.eligibility import (
    CaptureFailures,
    engine_ineligible_reasons,
    get_cuda_graph_proposals,
)
from specdec_fast.engine.cuda_graph.runner import CudaGraphRunner
from specdec_fast.engine.drafter_runner import DrafterRunner
from specdec_fast.engine.drafter_speed import DrafterSpeed
from specdec_fast.engine.explanation import ExplanationMethods
from specdec_fast.engine.lockstep import Lockstep, Stage
from specdec_fast.engine.output_processor import collect_row_outputs, emit_tokens, graph_row_output
from specdec_fast.engine.prompts import Prompt, encode_prompt
from specdec_fast.engine.request import Handle, check_text_length, create_handle, resolve_params
from specdec_fast.engine.scheduler import Scheduler
from specdec_fast.engine.stats import Clock
from specdec_fast.engine.stop_conditions import check_eos_ids
from specdec_fast.engine.streaming import TextMethods
from specdec_fast.engine.synchronized import synchronized
from specdec_fast.engine.warmup import warm
from specdec_fast.interfaces import Drafter, Needs, Rule, Target
from specdec_fast.rules import DEFAULT, rule_for
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.sampling.target_distributions import target_distributions

log = logging.getLogger("specdec_fast")


@explain_names("submit", "generate", "encode_chat", "submit_chat", "chat", params=SamplingParams, attributes=True)
class Engine(Scheduler, TextMethods, ChatMethods, ExplanationMethods, Closeable):
    """Continuous batching of speculative decoding.

    `specdec_fast.load` builds one from model names. Threads may share an engine: `submit`, `step` and `cancel` wait for
    each other, and every step advances all requests. `close`, or the end of `with load(...) as engine:`, ends it.

    Args:
        target: The model whose distribution the texts have.
        drafter: Proposes draft tokens. None decodes plainly: every tree is its root.
        rule: Verification rule, by name or as an object.
        tokenizer: A transformers tokenizer. Text prompts, text output and stop strings need it.
        eos_token_ids: Token ids that end a text.
        prefill_chunk: Most tokens that a step prefills. Longer prompts take several steps, in which other requests
            decode. Default: 512 on a CPU, whose caches hold the activations of so many tokens, else 2048.
        budget: How many nodes are drafted: "fixed" (as many as a request asks for), "goodput" (as many as pay off), or
            a `BudgetPolicy`.
        step_mode: "auto" runs CUDA-graph steps on a GPU if drafter, rule and requests allow it. "sync" never does.
            "graph" does on any device; without a GPU the same program runs without a graph, for tests. `explain` says
            why steps do not run as CUDA graphs.
        temperature: Temperature of all requests if it is known, by which rule `best` chooses.
        prefix_sharing: Requests whose texts begin alike share pages of the cache, so that the beginning is prefilled
            once. `explain` says whether they do.
        default_params: Sampling parameters of requests without any. Default: `SamplingParams()`.

    Attributes:
        target: The target.
        drafter: The drafter, or None.
        rule: The verification rule.
        why_rule: Why this rule verifies, in words.
        why_drafter: Why this drafter proposes, or none, in words. None if it was named.
        tokenizer: The tokenizer, or None.
        eos_token_ids: Token ids that end a text.
        default_params: Sampling parameters of requests without any.
        state: Tokens, lengths and parameters of all rows.
        stats: `RequestStats` of all requests that have ended.
        seconds: Wall-clock seconds per phase; each step counts once.

    Raises:
        ValueError: If the rule cannot verify what the drafter proposes, or if a number is out of range.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        rule: str | Rule = DEFAULT,
        tokenizer: Any = None,
        eos_token_ids: int | Sequence[int] = (),
        prefill_chunk: int | None = None,
        budget: str | BudgetPolicy = "fixed",
        step_mode: str = "auto",
        temperature: float | None = None,
        prefix_sharing: bool = True,
        default_params: SamplingParams | None = None,
    ) -> None:
        self.drafter, self.tokenizer = drafter, tokenizer
        self.default_params = default_params or SamplingParams()
        self.eos_token_ids = check_eos_ids(eos_token_ids, target.vocab_size)
        self.needs = Needs() if drafter is None else drafter.needs
        self.rule, self.why_rule = rule_for(rule, self.needs, temperature, getattr(drafter, "name", None))
        self.why_drafter: str | None = None
        policy = budget_for(budget)
        Closeable.__init__(self)
        TextMethods.__init__(self)
        Scheduler.__init__(self, target, prefill_chunk, prefix_sharing)
        if (close := getattr(target, "close", None)) is not None:
            self.on_close(close)
        common = self.rule.name, self.eos_token_ids, self._prefill_chunk, prefix_sharing, target.vocab_size
        self._lockstep = Lockstep(target, drafter, policy, common)
        self._drafter_runner = DrafterRunner(drafter, policy, self._running, self.rule, target.vocab_size)
        self._drafter_speed = DrafterSpeed(None if self._lockstep.ranks else drafter, policy)
        if drafter is not None and not self.rule.lossless:  # plain decoding samples from the target under every rule
            log.warning("rule %s: texts do not have the target's distribution", self.rule.name)
        device = self.state.device
        proposals = get_cuda_graph_proposals(drafter, self.state.max_rows)
        parts = proposals, self.rule, policy
        self._graph_ineligible_reasons = engine_ineligible_reasons(step_mode, device, *parts)
        self._graph_ineligible_reasons += self._lockstep.why_no_graph()
        self._failures = CaptureFailures()
        capturable = None if isinstance(proposals, str) else proposals
        self._graph_runner = CudaGraphRunner(target, capturable, self.rule, self.state, self._drafter_runner)
        self._updated_handles: list[Handle] = []  # requests that pending steps gave tokens since the last `step`
        self.lock = threading.RLock()

    @synchronized
    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        num_draft_tokens: int | None = None,
        cache_salt: str | None = None,
        add_special_tokens: bool | None = None,
    ) -> Handle:
        """Queues a request.

        Args:
            prompt: Text; token ids as a sequence, tensor or array, [n] or [1, n]; or what a tokenizer returns for one
                text. Padding that an attention mask shows is dropped.
            params: Sampling parameters. None for the defaults.
            num_draft_tokens: Draft tokens per step; 0 decodes plainly. None for the drafter's default. The end of the
                text may leave fewer.
            cache_salt: The request shares pages of the cache only with requests of the same salt. Time to the first
                token shows whether a prefix was stored, so use one salt per party that must not learn of others.
            add_special_tokens: Whether the tokenizer adds special tokens to a text. None: as the tokenizer does by
                default, but no second beginning of sequence if the text begins with one, as chat templates write it.
                Token ids stay as they are.

        Returns:
            The handle of the request.

        Raises:
            ValueError: If the engine cannot serve the prompt or the parameters. Other requests are not affected.
        """
        self._check_open()
        params = resolve_params(params, self.default_params, self._lockstep.next_seed())
        check_text_length(prompt, self.tokenizer, self.target)
        tokens = self.encode(prompt, add_special_tokens=add_special_tokens)
        if (reason := self.rule.why_not_sampling(params)) is not None:
            raise ValueError(reason)
        requested = self._drafter_runner.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        known = {"tokenizer": self.tokenizer, "eos_ids": self.eos_token_ids, "target": self.target}
        handle = create_handle(self._lockstep.next_id, tokens, params, requested, **known)
        handle.page_names = self._prefixes.names_for(cache_salt, len(tokens) + params.max_new_tokens)
        self._lockstep.add(handle, cache_salt)
        self._queue.append(handle)
        return handle

    def encode(self, prompt: Prompt, *, add_special_tokens: bool | None = None) -> list[int]:
        """Returns the token ids of a prompt.

        Args:
            prompt: A prompt as in `submit`.
            add_special_tokens: As in `submit`.

        Raises:
            ValueError: If the target cannot read the prompt.
        """
        return encode_prompt(prompt, self.tokenizer, self.target.vocab_size, add_special_tokens)

    @synchronized
    def cancel(self, handle: Handle) -> None:
        """Ends a request now. Its tokens stay on the handle. Calling it twice is harmless.

        Raises:
            ValueError: For a running request of another engine.
            RuntimeError: For a running request inside of a step.
        """
        if handle.finished:
            return
        self._check_owner(handle)
        if handle.row is not None:
            self._check_between_steps()
        with ExitStack() as leaving:  # the request leaves even if its text cannot be made
            if handle.row is not None:
                leaving.callback(self._retire, handle)
            else:
                leaving.callback(self.stats.merge, handle.stats)
                leaving.callback(self._queue.remove, handle)
            handle.finish_reason = "cancelled"
            handle.finish("cancelled")

    @synchronized
    def reset_prefix_cache(self) -> None:
        """Forgets all stored prefixes. Call it after a change of the model that the engine cannot see.

        The engine sees changed weights when a request begins after none were running. It does not see changes while
        requests run, switched adapters, or new hooks. Running requests keep their keys and values, but share none.
        """
        self._prefixes.forget()

    @synchronized
    def warm(self, capacities: Iterable[tuple[int, int]] | None = None) -> None:
        """Compiles kernels and captures CUDA graphs before requests wait for them.

        It runs steps of every kind on free rows and pages: prefill of all sizes up to a chunk, drafts of all lengths,
        greedy and sampling, with and without filters. Logits processors and log-probabilities are not warmed. Texts,
        caches of running requests and statistics stay as they are. Call it before the first request, or whenever the
        engine is idle; while requests run it uses the rows and pages that they leave.

        Args:
            capacities: Pairs of requests in a batch and draft tokens of each. A CUDA graph serves up to as many of
                both. Default: powers of two up to the target's rows, with the drafter's default budget and without
                drafts.

        Raises:
            ValueError: For fewer than one row or more than the target has, for fewer than 0 draft tokens, or if another
                engine holds pages of the cache.
            RuntimeError: If memory runs out in a `sync` step.
        """
        self._check_open()
        self._check_between_steps()
        warm(self, capacities)

    @synchronized
    def step(self, only: Collection[Handle] | None = None) -> list[Handle]:
        """Prefills at most `prefill_chunk` tokens, then advances every prefilled request by one target pass.

        Args:
            only: Requests that may run. All others wait in the queue with their tokens. Which request makes steps fail
                is found by steps of a few. None for all.

        Returns:
            The requests that took part or got tokens.

        Raises:
            RuntimeError: Inside of a step, as a logits processor may call it.
        """
        self._check_between_steps()
        grad_off = nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()
        with grad_off, without_autocast(self.state.device), self._lockstep.guarding():
            clock = Clock()
            self._requeue_unsettled()
            self._cancel_abandoned()
            for handle in [each for each in self._running.values() if each.finished]:  # the last step was interrupted
                self._retire(handle)
            if only is not None:
                self._keep_only(only)
            if self._queue:
                self._lockstep.compare(Stage.PREFILL, self._queue, self._running)
            with clock.time("prefill"):
                self._reserve_pages()
                self._admit_queued(only)
            ended = self._end_without_text(clock)
            graph = self.step_mode == "graph"
            if self._graph_runner.active and (self._graph_runner.memory_freed or not graph):
                self._drain_pending()
            handles, ready = list(self._running.values()), self._ready()
            with self._inside_step():
                if ready and graph:
                    self._graph_step(ready, clock)
                elif ready:
                    self._sync_step(ready, clock)
                    self._failures.record_sync_step()
                else:
                    self._account_and_retire([], clock)
            self._lockstep.compare(Stage.TOKENS, self._queue, self._running)
            self._cancel_abandoned()  # streams that were dropped meanwhile
            updated, self._updated_handles = list(dict.fromkeys([*self._updated_handles, *ended, *handles])), []
            return updated

    def _sync_step(self, ready: dict[int, Handle], clock: Clock) -> None:
        """Runs a step whose tokens the host sees before the next step begins."""
        rows, handles, state, target = list(ready), list(ready.values()), self.state, self.target
        rng, sampling = state.rng(rows), state.sampling(rows)
        with clock.time("propose"):
            draft = self._drafter_runner.propose(state, rows, rng)
        if self._requeue_unsettled():
            return
        with clock.time("plan"):
            plan = draft.get_plan()
        self._lockstep.compare(Stage.SCORE, self._queue, self._running, draft)
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
                outputs, acceptance = collect_row_outputs(draft, plan, acceptance, dists, sampling)
                wants_logprobs = any(handle.params.logprobs is not None for handle in handles)
                paths = acceptance.path.tolist() if wants_logprobs else ()
                kept, outcomes = emit_tokens(handles, outputs, dists, paths)
                state.append(rows, kept)
        except BaseException:
            self._requeue_running()
            raise
        try:
            with clock.time("observe"):
                self._drafter_runner.observe(state, draft, acceptance, output)
            seconds = clock.seconds["propose"] + clock.seconds["observe"]
            self._drafter_runner.observe_outcomes(rows, outcomes, seconds, clock.verifying)
            drafting = any(handle.num_draft_tokens for handle in handles)
            if drafting and not any(handle.finished for handle in handles):
                self._drafter_speed.observe(target, state, rows, sum(map(len, kept)), clock)
        finally:
            self._account_and_retire(handles, clock)

    def _requeue_unsettled(self) -> bool:
        """Returns all requests to the queue if a drafter could not take its tokens out of the target's cache."""
        found = bool(getattr(self._cache, "unsettled", None))
        if found:
            self._requeue_running()
        return found

    def _graph_step(self, ready: dict[int, Handle], clock: Clock) -> None:
        """Launches a CUDA-graph step and reads the one before it."""
        continues = any(handle.remaining > self._graph_runner.pending_steps(handle) for handle in ready.values())
        if continues:
            try:
                with clock.time("score"):
                    self._graph_runner.launch(ready)
            except BaseException as error:  # the device may have run a part of the step
                self._drain_pending(clock, failed=True)
                if not isinstance(error, Exception):
                    raise
                log.error("%s", self._failures.record_failure(self._graph_runner.capacity, error), exc_info=error)
                return
            self._failures.record_success(self._graph_runner.capacity)
        if self._graph_runner.pending > 1 or not continues:
            with clock.time("append"):
                self._read_pending()
        self._account_and_retire(list(ready.values()), clock)

    def _read_pending(self) -> None:
        """Reads the oldest pending step and emits its tokens."""
        try:
            read = self._graph_runner.read_oldest()
            kept, _ = emit_tokens([handle for handle, _ in read], [graph_row_output(output) for _, output in read])
            for (handle, _), tokens in zip(read, kept):
                assert handle.row is not None
                self.state.append([handle.row], [tokens])
                self._updated_handles.append(handle)
        except BaseException:
            self._requeue_running()
            raise

    def _drain_pending(self, clock: Clock | None = None, *, failed: bool = False) -> None:
        """Reads all pending steps and returns all rows to `sync` steps, after a launch that failed or otherwise."""
        while self._graph_runner.pending:
            self._read_pending()
        self._account_and_retire(list(self._ready().values()), clock or Clock())
        if self._graph_runner.suspend(failed):
            self._requeue_running()

    def _prepare_for_warmup(self) -> None:
        """Makes sure that no step is pending before rehearsals use the device."""
        self._claim_cache()
        if self._graph_runner.active:
            self._drain_pending()
