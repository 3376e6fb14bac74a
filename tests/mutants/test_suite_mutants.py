"""Mistakes of public systems, planted into drafters, targets, rules and requests: a test of the suite must fail.

`MUTANTS` names each mistake and the test that detects it, with its arguments. The test runs once without the mistake
and once with it. `specdec_fast.lab.mutant_rules` has the same mistakes as exact distributions, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module, util
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec_fast.drafters.draft_model as draft_model_module
import specdec_fast.engine.text_stream as text_stream_module
import specdec_fast.rules.recursive_rejection as tree_module
import specdec_kernels.ops._proposals.reference as proposals_module
from specdec_fast.cache.paged import PagedCache
from specdec_fast.core.distributions import TokenDistributions, concat_distributions
from specdec_fast.engine.request import Handle
from specdec_fast.lab import mutant_rules
from specdec_fast.sampling.logits_processors import LogitsProcessors
from specdec_fast.targets import attention, load_checks
from specdec_fast.targets.fused_forward import FusedForward
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.linear_layers import BatchInvariantLinear
from specdec_kernels import Overlay, distribution_stats

Patch = pytest.MonkeyPatch
TESTS = Path(__file__).parents[1]
chain_module: Any = import_module("specdec_kernels.ops.rejection_verify.reference")  # the attribute is the operator


@cache
def module_of(file: str) -> Any:
    """Imports a test file separately from pytest's own import."""
    spec = util.spec_from_file_location(f"suite_{Path(file).stem}", TESTS / file)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(mutants: Sequence[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Returns the parameters of a test that takes plant, file, test and arguments, as `check_detected` does."""
    names = ("plant", "file", "test", "arguments")
    return pytest.mark.parametrize(names, mutants, ids=lambda value: getattr(value, "__name__", ""))


def check_detected(
    plant: Callable[[Patch], None],
    file: str,
    test: str,
    arguments: tuple[Any, ...],
    patch: Patch,
    errors: tuple[type[Exception], ...] = (AssertionError,),
) -> None:
    """Runs a test of the suite without a mistake, where it must pass, and with it, where it must fail."""
    run = getattr(module_of(file), test)
    if "monkeypatch" in signature(run).parameters:
        run = partial(run, monkeypatch=patch)
    run(*arguments)
    plant(patch)
    with pytest.raises(errors):
        run(*arguments)


def arg_max_with_softmax_q(patch: Patch) -> None:
    """The draft token is the arg-max of q, but is marked as sampled from q."""
    patch.setattr(draft_model_module, "draft_sample", lambda logits, *rest, **more: logits.argmax(1))


def q_before_the_filters(patch: Patch) -> None:
    """The draft carries the distributions before top-k, top-p and min-p."""

    def broken(parts: Sequence[TokenDistributions]) -> TokenDistributions:
        dists = concat_distributions(parts)
        one, none = torch.ones_like(dists.inv_t), torch.zeros_like(dists.tie_id)
        return TokenDistributions(
            dists.logits, *distribution_stats(dists.logits, 1 / dists.inv_t, none, one, torch.zeros_like(one))
        )

    patch.setattr(draft_model_module, "concat_distributions", broken)


def padding_is_not_removed(patch: Patch) -> None:
    """The padding rows of the output layer count as tokens."""
    found = HuggingFaceTarget._run

    def broken(self: Any, *arguments: Any) -> Any:
        vocab_size, self.vocab_size = self.vocab_size, self.num_embeddings
        try:
            return found(self, *arguments)
        finally:
            self.vocab_size = vocab_size

    patch.setattr(HuggingFaceTarget, "_run", broken)
    patch.setattr(load_checks, "check_logits", lambda *_: None)  # the test finds it without the check


def windows_of_masks_are_ignored(patch: Patch) -> None:
    """Passes apply the windows that a model passes with its calls, and not those of its masks."""
    context = attention.PackedContext
    patch.setattr(attention, "PackedContext", lambda slots, keys, values, *_: context(slots, keys, values))


def approximate_totals_decide(patch: Patch) -> None:
    """The approximate sum of a distribution decides even where only the exact sum can."""
    module: Any = module_of("kernels/test_rough_totals.py")

    def broken(
        tokens: Any, offsets: Any, kinds: Any, dist_index: Any, logits: Any, sampling: Any, *rest: Any, **more: Any
    ) -> Any:
        inv_t, lse, *ties = distribution_stats(logits, *sampling)
        return module.rejection_verify(
            tokens, offsets, kinds, dist_index, (logits, inv_t, lse + 0.0069, *ties), *rest, **more
        )

    patch.setattr(module, "rejection_verify_logits", broken)


def fused_forward_treats_trees_as_chains(patch: Patch) -> None:
    """The fused forward attends as if every tree were a chain."""
    call = FusedForward.__call__

    def broken(self: Any, tokens: Any, positions: Any, wanted: Any, packed: Any) -> Any:
        slots = replace(packed.slots, ancestors=None, depth=None)
        return call(self, tokens, positions, wanted, replace(packed, slots=slots))

    patch.setattr(FusedForward, "__call__", broken)
    patch.setattr(load_checks, "check_logits", lambda *_: None)  # the test finds it without the check


def dists_of_previous_token(patch: Patch) -> None:
    """The fused chain returns for every token the distribution of the token before it."""
    chain = FusedForward.chain

    def broken(self: Any, *arguments: Any) -> Any:
        found = chain(self, *arguments)
        return found if isinstance(found, torch.Tensor) else (found[0], *(part.roll(1, 0) for part in found[1:]))

    patch.setattr(FusedForward, "chain", broken)


def decoding_starts_inside_characters(patch: Patch) -> None:
    """The decoded window starts a fixed number of tokens back, even inside a character."""
    patch.setattr(text_stream_module, "_MAX_CHARACTER_TOKENS", 1)


def commit_drops_the_last_token_of_chains(patch: Patch) -> None:
    """The commit of a chain drops the last accepted token."""
    commit = PagedCache.commit

    def broken(self: Any, rows: Any, slots: Any, path: Any, accepted: Any, chains: Any = None) -> None:
        commit(self, rows, slots, path, accepted if chains is None else (accepted - 1).clamp(min=0), chains)

    patch.setattr(PagedCache, "commit", broken)


def mask_of_a_sibling(patch: Patch) -> None:
    """A node attends to its previous sibling instead of itself."""
    score = HuggingFaceTarget.score

    def broken(self: Any, draft: Any, plan: Any, aux_hidden_states: Sequence[str] = ()) -> Any:
        ancestors = plan.ancestors.clone()
        first = (plan.next_sibling >= 0).nonzero().flatten()
        ancestors[plan.next_sibling[first].long()] = plan.ancestors[first]
        return score(self, draft, replace(plan, ancestors=ancestors), aux_hidden_states)

    patch.setattr(HuggingFaceTarget, "score", broken)
    patch.setattr(load_checks, "check_logits", lambda *_: None)  # the test finds it without the check


def ids_off_by_one(patch: Patch) -> None:
    """Every column of a reduced draft vocabulary is mapped to the next token id."""
    arguments = tree_module.tree_arguments

    def broken(draft: Any, plan: Any, target_dists: TokenDistributions) -> tuple[Any, ...]:
        *found, ids, score_only = arguments(draft, plan, target_dists)
        return (*found, None if ids is None else (ids + 1) % target_dists.logits.shape[1], score_only)

    patch.setattr(tree_module, "tree_arguments", broken)


def _with_a_child(paths: Any, request_of: torch.Tensor) -> torch.Tensor:
    """Nodes that have children."""
    return (paths.parents + paths.offsets[request_of])[paths.parents >= 0].long()


def processors_of_leaves_only(patch: Patch) -> None:
    """Logits processors change only the logits of leaves."""
    apply = LogitsProcessors.apply

    def broken(self: LogitsProcessors, logits: torch.Tensor, paths: Any, request_of: torch.Tensor) -> torch.Tensor:
        processed, inner = apply(self, logits.clone(), paths, request_of), _with_a_child(paths, request_of)
        processed[inner] = logits[inner].to(processed.dtype)
        return processed

    patch.setattr(LogitsProcessors, "apply", broken)


def overlays_of_leaves_only(patch: Patch) -> None:
    """The overlay of the logits processors is empty except for leaves."""
    make_overlay = LogitsProcessors.make_overlay

    def broken(self: LogitsProcessors, logits: torch.Tensor, paths: Any, request_of: torch.Tensor) -> Overlay:
        overlay = make_overlay(self, logits, paths, request_of)
        overlay.words[_with_a_child(paths, request_of)] = 0
        return overlay

    patch.setattr(LogitsProcessors, "make_overlay", broken)


def overlays_of_the_node_before(patch: Patch) -> None:
    """The overlay of a node is that of the node before it."""
    make_overlay = LogitsProcessors.make_overlay

    def broken(self: LogitsProcessors, logits: torch.Tensor, paths: Any, request_of: torch.Tensor) -> Overlay:
        overlay = make_overlay(self, logits, paths, request_of)
        return replace(overlay, words=overlay.words.roll(1, 0))

    patch.setattr(LogitsProcessors, "make_overlay", broken)


def only_the_last_token_can_end_a_text(patch: Patch) -> None:
    """An end-of-sequence token ends a text only if it is the last token of a step."""
    append_step = Handle.append_step

    def broken(self: Any, emitted: Sequence[int], *counts: int) -> list[int]:
        ends = self.checker._eos
        self.checker._eos = ends & set(emitted[-1:])
        try:
            return append_step(self, emitted, *counts)
        finally:
            self.checker._eos = ends

    patch.setattr(Handle, "append_step", broken)


def an_empty_residual_stays_empty(patch: Patch) -> None:
    """If (p - q)+ is empty up to rounding, p does not replace it."""
    residual = chain_module.residual_weights
    patch.setattr(chain_module, "residual_weights", lambda *given, fall_back=True: residual(*given, fall_back=False))


def an_empty_residual_stays_empty_in_trees(patch: Patch) -> None:
    """If the residual of siblings is empty up to rounding, p does not replace it."""
    patch.setattr(proposals_module, "residual_epsilon", lambda target, draft: -1.0)


def the_last_thread_decides(patch: Patch) -> None:
    """If several threads find a rejection in a chain, the last thread to finish decides, not the first rejection."""
    suite = module_of("kernels/test_parallel.py")
    start = suite.HEADER.index("int64_t best = found;")
    end = suite.HEADER.index("}", start) + 1
    patch.setattr(suite, "HEADER", suite.HEADER[:start] + "found = i;" + suite.HEADER[end:])


def sums_depend_on_the_batch(patch: Patch) -> None:
    """Products of several rows are summed in two rounded parts, those of one row in a single part."""
    forward = BatchInvariantLinear.forward

    def broken(self: BatchInvariantLinear, input: torch.Tensor) -> torch.Tensor:
        if input.shape[:-1].numel() == 1:
            return forward(self, input)
        first, second = (part.contiguous() for part in input.chunk(2, -1))
        size = first.shape[-1]
        rest = BatchInvariantLinear.product(second, self.weight[:, size:], self.bias)
        return BatchInvariantLinear.product(first, self.weight[:, :size], None) + rest

    patch.setattr(BatchInvariantLinear, "forward", broken)


MUTANTS: list[tuple[str, Callable[[Patch], None], str, str, tuple[Any, ...]]] = [
    (
        "arg-max draft, softmax q", arg_max_with_softmax_q,
        "drafters/test_draft_model.py", "test_sampled_tokens_follow_their_distribution", (),
    ),
    (
        "q recorded before top-k", q_before_the_filters,
        "drafters/test_draft_model.py", "test_sampled_tokens_carry_their_distributions", (),
    ),
    (
        "padded vocabulary", padding_is_not_removed,
        "targets/test_huggingface.py", "test_a_padded_vocabulary_is_cut", (),
    ),
    (
        "window of a mask", windows_of_masks_are_ignored,
        "targets/test_load_checks.py", "test_a_window_that_only_the_mask_has_is_served", (24,),
    ),
    (
        "distribution of the wrong parent", mask_of_a_sibling,
        "targets/test_huggingface.py", "test_trees_on_ragged_rows_have_the_logits_of_their_own_paths",
        ("llama", False, 16),
    ),
    (
        "tree as a chain in a fused forward", fused_forward_treats_trees_as_chains,
        "targets/test_huggingface.py", "test_trees_on_ragged_rows_have_the_logits_of_their_own_paths",
        ("llama", None, 16),
    ),
    *(
        ("distribution of the wrong parent", dists_of_previous_token, "drafters/test_whole_chains.py", test, arguments)
        for test, arguments in (
            ("test_texts_have_the_distribution_of_the_target", ("rejection", 1.0)),
            ("test_drafts_are_those_of_single_passes", ("sampled", "none")),
        )
    ),
    (
        "text cut inside a character", decoding_starts_inside_characters,
        "engine/test_text_stream.py", "test_runs_of_bytes_are_not_cut_inside_a_character", (0,),
    ),
    (
        "stale keys and values", commit_drops_the_last_token_of_chains,
        "engine/test_kv.py", "test_the_target_s_cache_after_every_step", ("llama", 16),
    ),
    (
        "draft vocabulary off by one", ids_off_by_one,
        "rules/test_recursive_rejection.py", "test_a_draft_s_own_vocabulary_changes_no_distribution",
        ("recursive_rejection", "ordered", "reference"),
    ),
    (
        "processors on the bonus token only", processors_of_leaves_only,
        "sampling/test_target_distributions.py",
        "test_ends_are_forbidden_before_the_minimum_at_each_node_s_own_depth", (3,),
    ),
    *(
        (
            name, plant,
            "engine/test_folded_logits_processors.py",
            "test_overlays_give_the_texts_of_processing_in_place", (rule,),
        )
        for name, plant in (
            ("processors on the bonus token only", overlays_of_leaves_only),
            ("distribution of the wrong parent", overlays_of_the_node_before),
        )
        for rule in ("replay", "recursive_rejection", "rejection")
    ),
    (
        "end of sequence inside a block", only_the_last_token_can_end_a_text,
        "engine/test_engine.py", "test_any_of_several_ends_and_further_stop_ids", (),
    ),
    (
        "zero residual", an_empty_residual_stays_empty,
        "kernels/test_rejection_verify.py", "test_equal_distributions_are_always_accepted_with_empty_residuals",
        ("reference",),
    ),
    (
        "zero residual", an_empty_residual_stays_empty_in_trees,
        "rules/test_recursive_rejection.py", "test_equal_distributions_leave_nothing_to_draw_from", ("reference",),
    ),
    (
        "approximate total", approximate_totals_decide,
        "kernels/test_rough_totals.py", "test_rough_totals_decide_as_the_distributions_do", ("sampled", 67, 6000,
            torch.float32),
    ),
    (
        "later rejection", the_last_thread_decides,
        "kernels/test_parallel.py", "test_the_first_in_order_is_found_in_any_order_of_completion", (),
    ),
    (
        "bits depend on the batch", sums_depend_on_the_batch,
        "engine/test_replay.py", "test_half_precision_texts_are_the_same_alone_and_in_a_batch", (),
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:process_logits_overlay runs on its slow PyTorch reference")
@pytest.mark.parametrize(
    ("plant", "file", "test", "arguments"),
    [pytest.param(*how, id="-".join((how[1], how[0].__name__, *map(str, how[3])))) for _, *how in MUTANTS],
)
def test_the_test_fails(
    plant: Callable[[Patch], None], file: str, test: str, arguments: tuple[Any, ...], monkeypatch: Patch
) -> None:
    run = getattr(module_of(file), test)
    for mark in getattr(run, "pytestmark", ()):  # skip where the test itself is skipped
        condition = mark.args[0] if mark.name == "skipif" else False
        if eval(condition, run.__globals__) if isinstance(condition, str) else condition:
            pytest.skip(mark.kwargs["reason"])
    check_detected(plant, file, test, arguments, monkeypatch, (AssertionError, ArithmeticError))


def test_names_are_those_of_the_lab() -> None:
    # these mistakes change no exact distribution, or concern parts that the lab does not use
    no_dists = {"zero residual", "later rejection", "bits depend on the batch", "approximate total"}
    no_dists |= {"tree as a chain in a fused forward", "text cut inside a character", "window of a mask"}
    ours = {name for name, *_ in MUTANTS} - no_dists
    assert ours <= {mutant.name for mutant in mutant_rules.MUTANTS}
