"""Triton backend of rejection_verify and rejection_thresholds: launch configurations and the calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, path_specs, result_tensors, total_bytes
from ...overlay import Overlay
from ...triton_shared.aot_config import Variant, size_type
from ...triton_shared.jit import lanes_for
from .._proposals.verify_arguments import Distribution, DistributionBatch, DraftChains, Randomness, bind_chains
from ..distribution_stats.launch import clear_stats, distribution_stats, unlisted_nodes
from ..distribution_stats.launch import scratch as stats_scratch
from ..distribution_stats.reference import check as check_sampling
from ..draft_sample.launch import (
    ProposalTensors,
    RejectionTensors,
    dense_residuals,
    draw_scratch,
    residual_arguments,
    residual_constants,
    residual_scratch,
    residual_types,
    sample_residuals,
)
from .checks import BLOCK_RULE, REJECTION, check
from .triton_kernel import block_thresholds, compute_ratios, walk_chains

TILE = 2048
"""Tokens of one step of a pass over a distribution."""
WARPS = 8


def _chain_scratch(chains: DraftChains) -> list[TensorSpec]:
    """Returns the scratch of `_ChainLaunches`.

    Per node: child, applied, distribution row, threshold, scale, reach. Per row: last node and its rejected child. The
    scratch of residuals and of the sample follows.

    Returns:
        The specs in this order.
    """
    nodes, rows, vocab_size = (chains.tokens.shape[0],), (chains.offsets.shape[0] - 1,), chains.target[0].shape[1]
    single, integer = torch.float32, torch.int32
    own: list[TensorSpec] = [*[(nodes, integer)] * 3, (nodes, single), (nodes, single), (nodes, torch.float64)]
    own += [(rows, integer), (rows, integer)]
    return [*own, *residual_scratch(vocab_size, chains.token_ids), *draw_scratch(rows[0], vocab_size)]


class _ChainLaunches:
    """Buffers of one call, and its launches."""

    def __init__(
        self,
        op: str,
        chains: DraftChains,
        rule: str,
        max_depth: int,
        out: Sequence[Tensor] | None = None,
        workspace: Tensor | None = None,
        overlay: Overlay | None = None,
    ) -> None:
        self.num_nodes, self.num_rows = chains.tokens.shape[0], chains.offsets.shape[0] - 1
        self.is_block, self.max_depth = rule == BLOCK_RULE, max_depth
        self.steps = lanes_for(max_depth + 1)
        self.offsets = chains.offsets.contiguous()
        device = chains.tokens.device
        parts, _ = carve_workspace(op, workspace, _chain_scratch(chains), device)
        self.child, applied, dist_index, self.threshold, scale, self.reach, self.last, self.first_rejected = parts[:8]
        *residual_parts, self.block_masses = parts[8:]
        self.child.fill_(-1)
        self.reach.zero_()
        self.threshold.zero_()
        self.given_dist_index = chains.dist_index.contiguous()
        self.num_dists = 1 if chains.draft is None else max(1, chains.draft[0].shape[0])
        kinds = chains.proposal_kinds.contiguous()
        self.residual = residual_arguments(
            chains.target, chains.draft, chains.token_ids,
            ProposalTensors(chains.tokens.contiguous(), dist_index, kinds, dist_index),
            RejectionTensors(applied, scale, scale), chain=True, scratch=residual_parts, overlay=overlay, op=op,
        )  # fmt: skip
        self.path, self.num_accepted, self.next_token = result_tensors(
            op, out, path_specs(self.num_rows, max_depth), device
        )

    def compute_thresholds(self, seeds: Tensor, positions: Tensor, uniforms: Tensor | None, walk: bool) -> None:
        """Thresholds of all nodes, and with `walk` the paths."""
        residual, explicit = self.residual, uniforms is not None
        given = self.threshold if uniforms is None else uniforms.contiguous()
        keys = (seeds, positions, given, self.path, self.num_accepted, self.last, self.first_rejected)
        compute_ratios[(self.num_rows,)](
            *residual.tensors, self.offsets, self.given_dist_index, self.child, self.reach, self.threshold, *keys,
            residual.vocab_size, self.num_nodes, self.num_dists, self.max_depth, self.steps, self.is_block,
            walk and not self.is_block, explicit, *residual.flags, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        if self.is_block:
            block_thresholds[(self.num_nodes,)](
                *residual.tensors, self.child, self.reach, self.threshold, residual.vocab_size, TILE, *residual.flags,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
            if walk:
                walk_chains[(self.num_rows,)](
                    self.threshold, self.child, self.offsets, *keys, self.num_nodes, self.max_depth, self.steps,
                    explicit, num_warps=1, enable_fp_fusion=False,
                )  # fmt: skip

    def verify(self, randomness: Randomness, mass: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Path, number accepted and next token of every row."""
        if self.num_rows:
            keys = (randomness.seeds.contiguous(), randomness.root_positions.contiguous())
            self.compute_thresholds(*keys, randomness.uniforms, True)
            sample_residuals(
                self.residual, self.last, self.first_rejected, *keys, self.num_accepted,
                gumbel_noise=randomness.gumbel_noise, known_masses=mass, out=self.next_token,
                block_masses=self.block_masses,
            )  # fmt: skip
        return self.path, self.num_accepted, self.next_token


def _scratch(*args: Any, **named: Any) -> list[TensorSpec]:
    for name in ("max_depth", "rule", "mass"):
        named.pop(name, None)
    return _chain_scratch(bind_chains(*args, **named)[0])


@declare_scratch(_scratch)
def rejection_verify(
    *args: Any,
    max_depth: int,
    rule: str = REJECTION,
    mass: Tensor | None = None,
    overlay: Overlay | None = None,
    out: Sequence[Tensor] | None = None,
    workspace: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the operator. Parameters are those of `bind_chains`."""
    chains, randomness = bind_chains(*args, **named)
    check("rejection_verify", chains, randomness, max_depth=max_depth, rule=rule, mass=mass)
    launches = _ChainLaunches("rejection_verify", chains, rule, max_depth, out, workspace, overlay)
    return launches.verify(randomness, mass)


def _scratch_logits(
    tokens: Tensor,
    offsets: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    logits: Tensor,
    sampling: object,
    draft: Distribution | None,
    token_ids: Tensor | None,
    *args: object,
    max_depth: int,
    **kwargs: object,
) -> list[TensorSpec]:
    """Returns the scratch of both parts, then per node two flags and per row the last node.

    The flags are whether the statistics of the node are unneeded, and whether it has no child.

    Returns:
        The specs in this order.
    """
    chains = DraftChains(tokens, offsets, proposal_kinds, dist_index, (logits,) * 5, draft, token_ids)
    nodes, rows = tokens.shape[0], offsets.shape[0] - 1
    of_parts = (stats_scratch(logits, pivots=tokens), _chain_scratch(chains))
    parts: list[TensorSpec] = [((total_bytes(part),), torch.uint8) for part in of_parts]
    return [*parts, ((nodes + 1,), torch.bool), ((nodes,), torch.bool), ((rows,), torch.int64)]


@declare_scratch(_scratch_logits)
def rejection_verify_logits(
    tokens: Tensor,
    offsets: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    logits: Tensor,
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    draft: Distribution | None,
    token_ids: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    *,
    max_depth: int,
    rule: str = REJECTION,
    overlay: Overlay | None = None,
    out: Sequence[Tensor] | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Runs the operator. Statistics of all rows are computed in parallel; unneeded ones are then marked as such."""
    op = "rejection_verify_logits"
    argument_checks.check_max_depth(op, max_depth)
    check_sampling(logits, *sampling)
    temperature, top_k, top_p, min_p = sampling
    shaped = (logits, temperature, top_p, min_p, top_k)  # shapes and dtypes of the statistics to come
    chains = DraftChains(tokens, offsets, proposal_kinds, dist_index, shaped, draft, token_ids)
    randomness = Randomness(seeds, root_positions, None, None)
    check("rejection_verify", chains, randomness, max_depth=max_depth, rule=rule)
    sizes = _scratch_logits(
        tokens, offsets, proposal_kinds, dist_index, logits, sampling, draft, token_ids, max_depth=max_depth
    )
    (of_stats, of_chains, unneeded, childless, index), _ = carve_workspace(op, workspace, sizes, logits.device)
    path_out, stats_out = (None, None) if out is None else (out[:3], out[3:])
    stats = distribution_stats(
        logits, *sampling, masses=True, pivots=tokens[1:],  # after a node comes its child, or another row's root
        overlay=overlay, out=stats_out, workspace=of_stats,
    )  # fmt: skip
    *statistics, mass = stats
    chains = chains._replace(target=DistributionBatch(logits, *statistics))
    launches = _ChainLaunches(op, chains, rule, max_depth, path_out, of_chains, overlay)
    verified = launches.verify(randomness, mass)
    unlisted = unlisted_nodes(launches.last, unneeded, index)
    if launches.is_block:  # it reads every node that has a child
        unlisted.logical_and_(torch.lt(launches.child, 0, out=childless))
    clear_stats(unlisted, stats)
    return (*verified, *stats)


def rejection_thresholds(
    *args: Any, rule: str = REJECTION, overlay: Overlay | None = None, **named: Any
) -> tuple[Tensor, Tensor]:
    """Runs the operator. Parameters are those of `DraftChains`."""
    chains = DraftChains(*args, **named)
    check("rejection_thresholds", chains, rule=rule)
    nodes, offsets = chains.tokens.shape[0], chains.offsets
    launches = _ChainLaunches("rejection_thresholds", chains, rule, max(nodes - 1, 0), overlay=overlay)
    if nodes and launches.num_rows:
        launches.compute_thresholds(offsets, offsets, None, False)
    left = dense_residuals(launches.residual, launches.child, nodes)
    whole = dense_residuals(launches.residual, torch.full_like(launches.child, -1), nodes)
    # An empty residual: proposal and target are equal up to rounding. The token is sampled from the target.
    left = torch.where(left.sum(1, keepdim=True, dtype=torch.float64) > 0, left, whole)
    inside = torch.arange(nodes, device=chains.tokens.device) < offsets[-1]
    return launches.threshold, torch.where(inside[:, None], left, 0.0)


def _variants(name: str, everyday: bool, dtype: str = "bf16", drafts: str = "", **flags: bool) -> list[Variant]:
    unaligned = flags.get("unaligned", False)
    residual, constants = residual_types(dtype, drafts, unaligned), residual_constants(chain=True, **flags)
    nodes = {
        "child_ptr": "*i32", "reach_ptr": "*fp64", "threshold_ptr": "*fp32", "vocab_size": size_type(unaligned),
    }  # fmt: skip
    walk = {
        "seeds_ptr": "*i64", "root_positions_ptr": "*i32", "uniforms_ptr": "*fp32", "offsets_ptr": "*i32",
        "path_ptr": "*i32", "num_accepted_ptr": "*i32", "last_node_ptr": "*i32", "first_rejected_ptr": "*i32",
        "given_dist_index_ptr": "*i32", "num_nodes": "i32", "num_dists": "i32", "max_depth": "i32",
    }  # fmt: skip
    kernel, architectures = "rejection_verify.triton_kernel", ("sm_90",) if everyday else ()
    steps: dict[str, object] = {"STEPS": 32, "EXPLICIT_UNIFORMS": False}
    return [
        *(
            Variant(f"rejection_verify/compute_ratios {rule} {name}", f"{kernel}:compute_ratios",
                    residual | nodes | walk,
                    constants | steps | {"BLOCK_RULE": rule == BLOCK_RULE, "WALK": rule == REJECTION}, 1,
                    everyday=architectures if rule == REJECTION else (), fusion=False)
            for rule in (REJECTION, BLOCK_RULE)
        ),
        Variant(f"rejection_verify/block_thresholds {name}", f"{kernel}:block_thresholds", residual | nodes,
                constants | {"TILE": TILE}, WARPS, everyday=architectures, fusion=False),
    ]  # fmt: skip


VARIANTS = [
    *_variants("bf16", True, draft=True),
    *_variants("bf16 mapped", False, draft=True, mapped=True),
    *_variants("fp16", False, "fp16", draft=True),
    *_variants("fp32 bf16 drafts", False, "fp32", "bf16", draft=True),
    *_variants("fp32 deterministic", False, "fp32", draft=False),
    *_variants("bf16 with an overlay", False, draft=True, overlay=True),
    _variants("bf16 unaligned vocabulary", False, draft=True, unaligned=True)[-1],
    Variant(
        "rejection_verify/walk_chains", "rejection_verify.triton_kernel:walk_chains",
        {"threshold_ptr": "*fp32", "child_ptr": "*i32", "offsets_ptr": "*i32", "seeds_ptr": "*i64",
         "root_positions_ptr": "*i32", "uniforms_ptr": "*fp32", "path_ptr": "*i32", "num_accepted_ptr": "*i32",
         "last_node_ptr": "*i32", "first_rejected_ptr": "*i32", "num_nodes": "i32", "max_depth": "i32"},
        {"STEPS": 32, "EXPLICIT_UNIFORMS": False}, 1, fusion=False,
    ),
]  # fmt: skip
