"""Known mistakes, planted into rules, cache and engine one at a time: a check must fail with each of them.

The checks are those of oracles.small_checks, and all of them pass without a mistake. `CHECKS` lists the mutants that
each check must detect. A mutant that survives shows a gap in the test suite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from oracles.small_checks import (
    Noticed,
    chains_hold,
    coupled_drafts_hold,
    deterministic_dist_holds,
    dist_holds,
    forbidden_tokens_hold,
    trees_hold,
)

import specdec_fast.cache.paged as paged_module
import specdec_fast.drafters.draft_model as draft_model_module
import specdec_fast.rules.rejection as token_module
import specdec_fast.rules.replay as replay_module
from specdec_fast.core.draft import Draft
from specdec_fast.engine.prefill import Prefill
from specdec_fast.engine.request import Handle
from specdec_fast.engine.state import DecodeState
from specdec_fast.sampling.sampling_tensors import SamplingTensors
from specdec_kernels import distribution_stats, exact_match_verify, kv_commit, kv_slots, rejection_verify, replay_sample
from specdec_kernels import random as random_module
from specdec_kernels.random import ACCEPT, DRAFT_BLOCK

Patch = pytest.MonkeyPatch
chain_module: Any = import_module("specdec_kernels.ops.rejection_verify.reference")  # the attribute is the operator
draw_module: Any = import_module("specdec_kernels.ops.draft_sample.reference")


def plant_in_rejection(patch: Patch, broken: Callable[..., Any]) -> None:
    """Plants a wrong rejection_verify, for computed and for pending target distributions."""

    def on_logits(
        tokens: Any, offsets: Any, kinds: Any, dist_index: Any, logits: Any, sampling: Any, *rest: Any, **more: Any
    ) -> Any:
        stats = distribution_stats(logits, *sampling, masses=True)
        return (*broken(tokens, offsets, kinds, dist_index, (logits, *stats[:4]), *rest, **more), *stats)

    patch.setattr(token_module, "rejection_verify", broken)
    patch.setattr(token_module, "rejection_verify_logits", on_logits)


def plant_in_replay(
    patch: Patch,
    sample: Callable[..., Any] = replay_sample,
    walk: Callable[..., Any] = exact_match_verify,
    deeper: int = 1,
) -> None:
    """Plants a wrong replay_sample, exact_match_verify or node depth into rule replay."""

    def on_logits(
        tokens: Any, offsets: Any, child: Any, sibling: Any, score_only: Any, logits: Any, sampling: Any, seeds: Any,
        roots: Any, *, max_depth: int,
    ) -> Any:  # fmt: skip
        stats = distribution_stats(logits, *sampling, masses=True)
        row = torch.repeat_interleave(torch.arange(len(seeds)), offsets.diff().long())
        depth = torch.zeros(len(tokens), dtype=torch.int32)
        for node in range(len(tokens)):
            below = int(child[node])
            while below >= 0:
                depth[below], below = depth[node] + deeper, int(sibling[below])
        choice = sample(logits, stats[0], stats[2], stats[3], seeds[row], roots[row] + depth + 1)
        return (*walk(tokens, offsets, child, sibling, choice, score_only, max_depth=max_depth), *stats)

    patch.setattr(replay_module, "replay_verify", on_logits)


def resample_from_p(patch: Patch) -> None:
    """The recovered token is sampled from p instead of the residual."""

    def broken(
        tokens: Any, offsets: Any, kinds: Any, dist_index: Any, target_dist: Any, *rest: Any, **more: Any
    ) -> Any:
        path, accepted, _ = rejection_verify(tokens, offsets, kinds, dist_index, target_dist, *rest, **more)
        last = path.gather(1, accepted[:, None].long()).squeeze(1).long()
        rows = len(last)
        alone = tuple(part[last] for part in target_dist)
        roots = torch.zeros(rows, dtype=torch.int64)
        bounds = torch.arange(rows + 1, dtype=torch.int32)
        seeds, positions = rest[2], rest[3]
        again = rejection_verify(
            roots, bounds, torch.zeros(rows, dtype=torch.int8), torch.full((rows,), -1, dtype=torch.int32),
            alone,
            None, None, seeds + 10**9, positions, max_depth=0,
        )  # fmt: skip
        return path, accepted, again[2]

    plant_in_rejection(patch, broken)


def dist_of_the_wrong_node(patch: Patch) -> None:
    """A sampled token is tested against the draft distribution of the next node."""

    def broken(tokens: Any, offsets: Any, kinds: Any, dist_index: Any, *rest: Any, **more: Any) -> Any:
        count = rest[1][0].shape[0] if rest[1] is not None else 1
        shifted = torch.where(dist_index >= 0, (dist_index + 1) % count, dist_index)
        return rejection_verify(tokens, offsets, kinds, shifted.to(torch.int32), *rest, **more)

    plant_in_rejection(patch, broken)


def deterministic_taken_for_sampled(patch: Patch) -> None:
    """A deterministic token is tested with the target's distribution as q, so it is always accepted."""

    def broken(
        tokens: Any, offsets: Any, kinds: Any, dist_index: Any, target_dist: Any, *rest: Any, **more: Any
    ) -> Any:
        rows = torch.arange(len(tokens), dtype=torch.int32) - 1
        return rejection_verify(
            tokens, offsets, kinds + 1, rows.clamp(min=0), target_dist, target_dist, *rest[1:], **more
        )

    plant_in_rejection(patch, broken)


def uniform_may_equal_the_threshold(patch: Patch) -> None:
    """A token is accepted if u <= p / q instead of u < p / q."""

    def broken(*args: Any, uniforms: Any = None, **more: Any) -> Any:
        return rejection_verify(*args, uniforms=None if uniforms is None else uniforms - 1e-7, **more)

    plant_in_rejection(patch, broken)


def same_uniforms_in_every_step(patch: Patch) -> None:
    """Uniforms are keyed by the request only, not by the position of the root."""

    def broken(*args: Any, **more: Any) -> Any:
        return rejection_verify(*args[:8], args[8] * 0 + 1, *args[9:], **more)

    sample = draft_model_module.draft_sample
    plant_in_rejection(patch, broken)
    patch.setattr(
        draft_model_module, "draft_sample", lambda *args, **more: sample(*args[:6], args[6] * 0 + 1, args[7], **more)
    )


def one_stream_for_all_purposes(patch: Patch) -> None:
    """Draft tokens, acceptance tests and recovered tokens use the same random words."""
    patch.setattr(draw_module, "DRAFT", ACCEPT)
    patch.setattr(chain_module, "RECOVER", ACCEPT)
    patch.setattr(random_module, "_BLOCK_STREAM", {ACCEPT: DRAFT_BLOCK})
    patch.setattr(draft_model_module, "draft_sample", draw_module.draft_sample)
    plant_in_rejection(patch, chain_module.rejection_verify)


def drop_unlikely_sampled_tokens(patch: Patch) -> None:
    """A draft token is dropped after it was sampled, because its probability is low."""
    pack = Draft.chains

    def broken(rows: Any, chains: Any, *, dist_rows: Any = None, dists: Any = None, device: Any = "cpu") -> Draft:
        if dist_rows is not None:
            weights = dists.probs()
            for at, (chain, names) in enumerate(zip(chains, dist_rows, strict=True)):
                for place, name in enumerate(names):
                    if float(weights[name, chain[place + 1]]) < 0.25:
                        chains[at], dist_rows[at] = chain[: place + 1], names[:place]
                        break
        return pack(rows, chains, dist_rows=dist_rows, dists=dists, device=device)

    patch.setattr(draft_model_module, "Draft", type("Dropping", (), {"chains": staticmethod(broken)}))


def advance_only(
    caches: Any, table: Any, lengths: Any, path: Any, offsets: Any, accepted: Any, rows: Any, all_: Any
) -> None:
    """Advances the lengths without moving any key or value."""
    all_[rows.long()] = lengths + (path >= 0).sum(1, dtype=torch.int32)


def accepted_nodes_are_not_moved(patch: Patch) -> None:
    """The commit does not move accepted nodes from their staging slots."""
    patch.setattr(paged_module, "kv_commit", advance_only)


def last_accepted_node_is_not_moved(patch: Patch) -> None:
    """The commit does not move the last accepted node."""

    def broken(caches: Any, table: Any, lengths: Any, path: Any, offsets: Any, accepted: Any, *more: Any) -> None:
        kv_commit(caches, table, lengths, path, offsets, (accepted - 1).clamp(min=0))
        advance_only(caches, table, lengths, path, offsets, accepted, *more)

    patch.setattr(paged_module, "kv_commit", broken)


def stage_one_slot_late(patch: Patch) -> None:
    """Nodes are staged one slot after their own."""

    def broken(table: Any, lengths: Any, *rest: Any) -> Any:
        tables, committed, slots, positions = kv_slots(table, lengths, *rest)
        return tables, committed, torch.where(slots >= 0, slots + 1, slots), positions

    patch.setattr(paged_module, "kv_slots", broken)


def root_is_cached_twice(patch: Patch) -> None:
    """Prefill stores the root too, and the step stages it again."""
    add = Prefill.add

    def broken(self: Prefill, row: int, handle: Handle, tokens: Sequence[int], _snapshots: Any = ()) -> None:
        add(self, row, handle, [*tokens, [*handle.prompt, *handle.tokens][-1]])

    patch.setattr(Prefill, "add", broken)


def shift_noise(by: int) -> Callable[[Patch], None]:
    """Returns a mutant: the target samples with the noise of the position `by` tokens later."""

    def plant(patch: Patch) -> None:
        def broken(logits: Any, inv_t: Any, cut: Any, tie: Any, seeds: Any, positions: Any) -> Any:
            return replay_sample(logits, inv_t, cut, tie, seeds, positions + by)

        plant_in_replay(patch, broken)

    return plant


def noise_of_the_root_position(patch: Patch) -> None:
    """Every node is sampled with the noise of the root's position."""
    plant_in_replay(patch, deeper=0)


def noise_of_another_node_s_request(patch: Patch) -> None:
    """Every node is sampled with the seed of the node before it."""

    def broken(logits: Any, inv_t: Any, cut: Any, tie: Any, seeds: Any, positions: Any) -> Any:
        return replay_sample(logits, inv_t, cut, tie, seeds.roll(1), positions)

    plant_in_replay(patch, broken)


def noise_of_the_node(patch: Patch) -> None:
    """Nodes at the same position are sampled with different noise."""

    def broken(logits: Any, inv_t: Any, cut: Any, tie: Any, seeds: Any, positions: Any) -> Any:
        return replay_sample(logits, inv_t, cut, tie, seeds + torch.arange(len(seeds)), positions)

    plant_in_replay(patch, broken)


def draft_noise_off_by_one(patch: Patch) -> None:
    """The draft is coupled to the noise of the next position: still lossless, but few tokens are accepted."""
    sample = SamplingTensors.sample_replay
    patch.setattr(SamplingTensors, "sample_replay", lambda self, logits, positions: sample(self, logits, positions + 1))


def any_child_is_accepted(patch: Patch) -> None:
    """The path continues to one more child, whatever its token is."""

    def broken(tokens: Any, offsets: Any, child: Any, sibling: Any, choice: Any, score_only: Any, **more: Any) -> Any:
        path, accepted, following = exact_match_verify(tokens, offsets, child, sibling, choice, score_only, **more)
        last = path.gather(1, accepted[:, None].long()).squeeze(1).long()
        deeper = child[last].long()
        can_extend = (deeper >= 0) & (accepted < path.shape[1] - 1)
        for row in can_extend.nonzero().flatten().tolist():
            accepted[row] += 1
            path[row, accepted[row]] = deeper[row]
            following[row] = choice[deeper[row]]
        return path, accepted, following

    plant_in_replay(patch, walk=broken)


def next_token_is_not_appended(patch: Patch) -> None:
    """The next token of a step is not emitted after accepted tokens."""
    read = DecodeState.read_emitted_tokens

    def broken(draft: Any, acceptance: Any) -> Any:
        return [(tokens[:-1] if count else tokens, count) for tokens, count in read(draft, acceptance)]

    patch.setattr(DecodeState, "read_emitted_tokens", staticmethod(broken))


def keep_rejected_drafts(patch: Patch) -> None:
    """The draft model's cache is not rolled back after a rejection."""
    patch.setattr(paged_module.PagedCache, "rollback", lambda self, rows, lengths: None)


CHECKS: list[tuple[Callable[[], None], list[Callable[[Patch], None]]]] = [
    (
        dist_holds,
        [
            resample_from_p,
            dist_of_the_wrong_node,
            same_uniforms_in_every_step,
            one_stream_for_all_purposes,
            drop_unlikely_sampled_tokens,
        ],
    ),
    (deterministic_dist_holds, [deterministic_taken_for_sampled]),
    (forbidden_tokens_hold, [uniform_may_equal_the_threshold]),
    (
        trees_hold,
        [
            accepted_nodes_are_not_moved,
            last_accepted_node_is_not_moved,
            stage_one_slot_late,
            root_is_cached_twice,
            shift_noise(1),
            shift_noise(-1),
            noise_of_the_root_position,
            noise_of_another_node_s_request,
            noise_of_the_node,
            any_child_is_accepted,
            next_token_is_not_appended,
        ],
    ),
    (chains_hold, [stage_one_slot_late, root_is_cached_twice, noise_of_the_root_position]),
    (coupled_drafts_hold, [keep_rejected_drafts, draft_noise_off_by_one, shift_noise(1)]),
]


@pytest.mark.parametrize("check", [check for check, _ in CHECKS], ids=lambda check: check.__name__)
def test_the_engine_itself_passes(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("check", "mutant"),
    [
        pytest.param(
            check,
            mutant,
            id=f"{check.__name__}-{mutant.__qualname__.replace('.<locals>.plant', '')}-{number}",
        )
        for check, mutants in CHECKS
        for number, mutant in enumerate(mutants)
    ],
)
def test_the_mutant_is_killed(
    check: Callable[[], None], mutant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(Noticed):
        check()
