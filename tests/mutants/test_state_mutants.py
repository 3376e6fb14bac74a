"""Mistakes of serving stacks in state, slots, noise and ranks, and of adapters, planted one at a time.

Those with a name of the lab are the same mistakes as in `specdec_fast.lab.mutant_states`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from mutants.test_suite_mutants import check_detected, module_of

import specdec_fast.cache.paged as paged_module
import specdec_fast.drafters.draft_model as draft_model_module
import specdec_fast.embedding.chain_batch as chains_module
import specdec_fast.integrations.sglang.tree_sampler as sampler_module
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.embedding.chain_batch import ChainBatch
from specdec_fast.lab import mutant_rules
from specdec_kernels.random import DRAFT

Patch = pytest.MonkeyPatch
rejection_module: Any = import_module("specdec_kernels.ops.rejection_verify.reference")  # the attribute is the operator
verification_module: Any = import_module("specdec_fast.embedding.verification")


def draft_noise_redraws_the_residual(patch: Patch) -> None:
    """The recovered token is drawn with the noise that drew the rejected draft token."""
    patch.setattr(rejection_module, "RECOVER", DRAFT)
    patch.setattr(verification_module, "rejection_verify_logits", rejection_module.rejection_verify_logits)


def after_commit(change: Callable[[int, int], int]) -> Callable[[Patch], None]:
    """Returns a mutant that changes a row's length after each commit, by its draft tokens and the accepted ones."""

    def plant(patch: Patch) -> None:
        commit = paged_module.PagedCache.commit

        def broken(self: Any, rows: Any, slots: Any, path: Any, accepted: Any, chains: Any = None) -> None:
            commit(self, rows, slots, path, accepted, chains)
            drafted = (slots.offsets.diff() - 1).tolist()
            for row, count, kept in zip(rows.tolist(), drafted, accepted.tolist()):
                length = int(self.lengths[row] if chains is None else self._host_lengths[row])
                self.set_lengths([row], [length + change(count, kept)])

        patch.setattr(paged_module.PagedCache, "commit", broken)

    return plant


def rejected_nodes_stay(patch: Patch) -> None:
    """The cache counts rejected nodes as committed."""
    after_commit(lambda drafted, kept: drafted - kept)(patch)


def no_drafts_read_the_state_before(patch: Patch) -> None:
    """After a step in which a request drafted nothing, its cache is as before that step."""
    after_commit(lambda drafted, kept: -1 if drafted == 0 else 0)(patch)


def rollback_is_applied_again(patch: Patch) -> None:
    """The step after one with a rejection takes another token back."""
    latched: list[bool] = []

    def change(drafted: int, kept: int) -> int:
        again = bool(latched) and latched[-1]
        latched.append(kept < drafted)
        return -int(again)

    after_commit(change)(patch)


def dists_of_the_slot_before(patch: Patch) -> None:
    """From the third request on, draft tokens are tested against the distributions of the request before."""
    pack = Draft.chains

    def broken(rows: Any, chains: Any, *, dist_rows: Any = None, **more: Any) -> Draft:
        if dist_rows is not None:
            own = [list(each) for each in dist_rows]
            dist_rows = own[:2] + [(before + each)[: len(each)] for before, each in zip(own[1:], own[2:])]
        return pack(rows, chains, dist_rows=dist_rows, **more)

    patch.setattr(draft_model_module, "Draft", type("Slots", (), {"chains": staticmethod(broken)}))


def probs_of_the_slot_before(patch: Patch) -> None:
    """`verify` reads the draft probabilities of the row before, from the third row on."""
    rows_of = chains_module._as_rows

    def broken(probs: Any, *rest: Any) -> Any:
        return rows_of(torch.cat([probs[:2], probs[1:-1]]), *rest)

    patch.setattr(chains_module, "_as_rows", broken)


def uniforms_reach_their_ends(patch: Patch) -> None:
    """32 random bits are divided by 2**32 - 1 and rounded to float32."""
    module = module_of("kernels/test_random.py")
    patch.setattr(module, "uniform", lambda word: (word.double() / (2**32 - 1)).float())


def seeds_of_the_rank_s_generator(patch: Patch) -> None:
    """Requests without a seed draw one from the global generator of their process."""
    patch.setattr(sampler_module, "request_seed", lambda *_: int(torch.randint(2**62, ())))


def keys_leave_out_the_id(patch: Patch) -> None:
    """Requests with one seed verify drafts that another of them made from the same random numbers."""
    patch.setattr(sampler_module, "seeds_with_ids", lambda seeds, ids: seeds)


def lengths_are_ignored(patch: Patch) -> None:
    """Padding behind a shorter chain is verified."""
    check = chains_module._check_lengths

    def broken(lengths: Any, rows: int, width: int, device: Any) -> Any:
        return torch.full_like(check(lengths, rows, width, device), width)

    patch.setattr(chains_module, "_check_lengths", broken)
    patch.setattr(chains_module, "_check_tokens", lambda *_: None)


def chains_go_on_in_the_next_row(patch: Patch) -> None:
    """The last node of a chain has the next root as its child."""

    def broken(self: ChainBatch) -> torch.Tensor:
        links = torch.arange(1, self.tokens.shape[0] + 1, dtype=torch.int32)
        links[-1:] = -1
        return links

    patch.setattr(ChainBatch, "child_links", broken)


def zeros_are_smoothed(patch: Patch) -> None:
    """Zero probabilities become small ones, so that their logarithm is finite."""
    found = TokenDistributions.from_probs

    def broken(probs: Any, **more: Any) -> Any:
        return found(probs.clamp(min=1e-4) / probs.clamp(min=1e-4).sum(1, keepdim=True), **more)

    patch.setattr(TokenDistributions, "from_probs", staticmethod(broken))


def accepted_nodes_are_numbered_by_tree(patch: Patch) -> None:
    """SGLang gets the numbers of accepted nodes within their trees."""
    answer = sampler_module.as_eagle_answer

    def broken(tokens: Any, node_index: Any, *rest: Any) -> Any:
        return answer(tokens, node_index - node_index[:, :1], *rest)

    patch.setattr(sampler_module, "as_eagle_answer", broken)


def penalties_change_logits_in_place(patch: Patch) -> None:
    """A verification that fails leaves SGLang's logits changed, so its own function applies penalties again."""
    process = sampler_module.processed_logits

    def broken(logits: Any, info: Any, nodes: int, grammar_mask: Any) -> Any:
        if grammar_mask is not None:
            grammar_mask.apply(logits)
        return process(logits, info, nodes, None)

    patch.setattr(sampler_module, "processed_logits", broken)


CHECKS, VERIFY, SGLANG = "oracles/small_checks.py", "embedding/test_verify.py", "integrations/test_sglang.py"
LAYOUTS = "test_every_layout_has_the_same_answer"
MUTANTS: list[tuple[str, Callable[[Patch], None], str, str, tuple[Any, ...]]] = [
    ("draft noise redraws the residual", draft_noise_redraws_the_residual, VERIFY,
        "test_drafts_of_draft_sample_keep_the_distribution", ()),
    ("state of rejected tokens stays", rejected_nodes_stay, CHECKS, "chains_hold", ()),
    ("state column 0 after a step without drafts", no_drafts_read_the_state_before, CHECKS,
        "chains_with_pauses_hold", ()),
    ("rollback is applied again", rollback_is_applied_again, CHECKS, "chains_hold", ()),
    ("draft distribution of another slot", dists_of_the_slot_before, CHECKS, "dist_holds", ()),
    ("draft distribution of another slot", probs_of_the_slot_before, VERIFY, "test_the_joint_distribution_is_exact",
        ("rejection", "sampled", "plain")),
    ("uniform 1 takes the last token", uniforms_reach_their_ends, "kernels/test_random.py",
        "test_uniform_stays_inside_the_open_interval", ()),
    ("ranks draw their own seeds", seeds_of_the_rank_s_generator, SGLANG,
        "test_seeds_are_the_same_on_every_rank", ()),
    ("", keys_leave_out_the_id, SGLANG, "test_drafts_of_a_request_with_the_same_seed", ("recursive_rejection",)),
    ("", lengths_are_ignored, VERIFY, LAYOUTS, ("rejection", False)),
    ("", chains_go_on_in_the_next_row, VERIFY, LAYOUTS, ("replay", False)),
    ("", zeros_are_smoothed, "core/test_sampling_rows.py", "test_from_probs_gives_them_back", (torch.float32,)),
    ("", accepted_nodes_are_numbered_by_tree, SGLANG, "test_greedy_batches_have_sglang_s_own_answer", ("replay",)),
    ("", penalties_change_logits_in_place, SGLANG, "test_penalties_biases_and_grammars_apply_as_in_sglang", ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "file", "test", "arguments"), [pytest.param(*how, id=how[0].__name__) for _, *how in MUTANTS]
)
def test_the_test_fails(
    plant: Callable[[Patch], None], file: str, test: str, arguments: tuple[Any, ...], monkeypatch: Patch
) -> None:
    check_detected(plant, file, test, arguments, monkeypatch, (AssertionError, ValueError))


def test_names_are_those_of_the_lab() -> None:
    named = {name for name, *_ in MUTANTS} - {""}
    assert named <= {mutant.name for mutant in mutant_rules.MUTANTS} and len(named) == 7
