"""Triton backend of rejection_verify and rejection_thresholds: launch configurations and the calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, path_specs, result_tensors, total_bytes
from ...overlay import Overlay
from ...triton_shared.jit import lanes_for
from ...triton_shared.variant import Variant, size_type
from ..distribution_stats.launch import beside, distribution_stats, forget
from ..distribution_stats.launch import scratch as dist_scratch
from ..distribution_stats.reference import check as check_sampling
from ..draft_sample.launch import Rest, draw, draw_scratch, left_of, rest_constants, rest_of, rest_scratch, rest_types
from .reference import BLOCK_RULE, REJECTION, Distribution, check
from .triton_kernel import ratios, shares, walk

TILE = 2048
"""Tokens of one step of a pass over a distribution."""
WARPS = 8


class _Chains:
    """Buffers of one call, and its launches."""

    @staticmethod
    def scratch(
        tokens: Tensor, offsets: Tensor, proposal_kinds: Tensor, dist_index: Tensor, target: Distribution,
        draft: Distribution | None = None,
        token_ids: Tensor | None = None, *args: object, **kwargs: object,
    ) -> list[TensorSpec]:  # fmt: skip
        """Per node: children, applied, distribution row, threshold, scale, reach; per row: last node, its child;
        the rest.
        """
        nodes, rows, vocab = (tokens.shape[0],), (offsets.shape[0] - 1,), target[0].shape[1]
        single, integer = torch.float32, torch.int32
        own: list[TensorSpec] = [*[(nodes, integer)] * 3, (nodes, single), (nodes, single), (nodes, torch.float64)]
        return [*own, (rows, integer), (rows, integer), *rest_scratch(vocab, token_ids), *draw_scratch(rows[0], vocab)]

    def __init__(
        self, op: str, tokens: Tensor, offsets: Tensor, proposal_kinds: Tensor, dist_index: Tensor,
        target: Distribution, draft: Distribution | None,
        token_ids: Tensor | None, rule: str, depth: int, out: Sequence[Tensor] | None = None,
        workspace: Tensor | None = None, overlay: Overlay | None = None,
    ) -> None:  # fmt: skip
        self.nodes, self.rows = tokens.shape[0], offsets.shape[0] - 1
        self.block, self.depth = rule == BLOCK_RULE, depth
        self.steps = lanes_for(depth + 1)
        self.offsets = offsets.contiguous()
        chain = (tokens, offsets, proposal_kinds, dist_index, target, draft, token_ids)
        parts, _ = carve_workspace(op, workspace, self.scratch(*chain), tokens.device)
        self.children, applied, source, self.threshold, scale, self.reach, self.last, self.firsts = parts[:8]
        *rest, self.part = parts[8:]
        self.children.fill_(-1)
        self.reach.zero_()
        self.threshold.zero_()
        self.source, self.dists = dist_index.contiguous(), 1 if draft is None else max(1, draft[0].shape[0])
        tree = (tokens.contiguous(), source, proposal_kinds.contiguous(), source, None)
        steps = (applied, scale, scale)
        self.rest: Rest = rest_of(
            target, draft, token_ids, tree, steps, chain=True, scratch=rest, overlay=overlay, op=op
        )
        self.path, self.accepted, self.tokens = result_tensors(op, out, path_specs(self.rows, depth), tokens.device)

    def weigh(self, seeds: Tensor, positions: Tensor, uniforms: Tensor | None, walking: bool) -> None:
        explicit = self.threshold if uniforms is None else uniforms.contiguous()
        keys = (seeds, positions, explicit, self.path, self.accepted, self.last, self.firsts)
        ratios[(self.rows,)](
            *self.rest.tensors, self.offsets, self.source, self.children, self.reach, self.threshold, *keys,
            self.rest.vocab, self.nodes, self.dists, self.depth, self.steps, self.block, walking and not self.block,
            uniforms is not None, *self.rest.kind, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        if self.block:
            shares[(self.nodes,)](
                *self.rest.tensors, self.children, self.reach, self.threshold, self.rest.vocab, TILE, *self.rest.kind,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
            if walking:
                walk[(self.rows,)](
                    self.threshold, self.children, self.offsets, *keys, self.nodes, self.depth, self.steps,
                    uniforms is not None, num_warps=1, enable_fp_fusion=False,
                )  # fmt: skip

    def verify(
        self, seeds: Tensor, positions: Tensor, uniforms: Tensor | None, race: tuple[Tensor, Tensor] | None,
        mass: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if self.rows:
            keys = (seeds.contiguous(), positions.contiguous())
            self.weigh(*keys, uniforms, True)
            where = (self.rest, self.last, self.firsts, *keys, self.accepted)
            draw(*where, noise=race, known=mass, out=self.tokens, part=self.part)
        return self.path, self.accepted, self.tokens


@declare_scratch(_Chains.scratch)
def rejection_verify(
    tokens: Tensor,
    offsets: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    uniforms: Tensor | None = None,
    race: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int,
    rule: str = REJECTION,
    mass: Tensor | None = None,
    overlay: Overlay | None = None,
    out: Sequence[Tensor] | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    chain = (tokens, offsets, proposal_kinds, dist_index, target, draft, token_ids)
    check(*chain, seeds, root_positions, uniforms, race, max_depth=max_depth, rule=rule, mass=mass)
    chains = _Chains("rejection_verify", *chain, rule, max_depth, out, workspace, overlay)
    return chains.verify(seeds, root_positions, uniforms, race, mass)


def _scratch_logits(
    tokens: Tensor, offsets: Tensor, proposal_kinds: Tensor, dist_index: Tensor, logits: Tensor, sampling: object,
    draft: Distribution | None, token_ids: Tensor | None, *args: object, max_depth: int, **kwargs: object,
) -> list[TensorSpec]:  # fmt: skip
    """Of both parts; per node: whether its distribution is not needed, whether it has no child; per row: its last
    node.
    """
    chain = _Chains.scratch(tokens, offsets, proposal_kinds, dist_index, (logits,) * 5, draft, token_ids)
    nodes, rows = tokens.shape[0], offsets.shape[0] - 1
    parts: list[TensorSpec] = [
        ((total_bytes(part),), torch.uint8) for part in (dist_scratch(logits, pivots=tokens), chain)
    ]
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
    """Statistics of all rows, which are found side by side here; those it passes by are marked as such."""
    op, chain = "rejection_verify_logits", (tokens, offsets, proposal_kinds, dist_index)
    argument_checks.check_max_depth(op, max_depth)
    check_sampling(logits, *sampling)
    temperature, top_k, top_p, min_p = sampling
    shaped = (logits, temperature, top_p, min_p, top_k)  # as the distribution will be, which is not there yet
    check(*chain, shaped, draft, token_ids, seeds, root_positions, max_depth=max_depth, rule=rule)
    sizes = _scratch_logits(*chain, logits, sampling, draft, token_ids, max_depth=max_depth)
    (of_stats, of_chain, off, childless, index), _ = carve_workspace(op, workspace, sizes, logits.device)
    given, found = (None, None) if out is None else (out[:3], out[3:])
    drafted = tokens[1:]  # after a node comes its child, or another row's root
    given_stats = {"overlay": overlay, "out": found, "workspace": of_stats}
    *dist, mass = stats = distribution_stats(logits, *sampling, masses=True, pivots=drafted, **given_stats)
    target = (logits, *dist)
    chains = _Chains(op, *chain, target, draft, token_ids, rule, max_depth, given, of_chain, overlay)
    answer = chains.verify(seeds, root_positions, None, None, mass)
    passed = beside(chains.last, off, index)
    if chains.block:  # it reads every node that has a child
        passed.logical_and_(torch.lt(chains.children, 0, out=childless))
    forget(passed, stats)
    return (*answer, *stats)


def rejection_thresholds(
    tokens: Tensor,
    offsets: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    *,
    rule: str = REJECTION,
    overlay: Overlay | None = None,
) -> tuple[Tensor, Tensor]:
    chain = (tokens, offsets, proposal_kinds, dist_index, target, draft, token_ids)
    check(*chain, rule=rule)
    nodes = tokens.shape[0]
    chains = _Chains("rejection_thresholds", *chain, rule, max(nodes - 1, 0), overlay=overlay)
    if nodes and chains.rows:
        chains.weigh(offsets, offsets, None, False)
    left = left_of(chains.rest, chains.children, nodes)
    whole = left_of(chains.rest, torch.full_like(chains.children, -1), nodes)
    # nothing left: the proposal's distribution is the target's up to rounding, and the target's is the one to draw from
    left = torch.where(left.sum(1, keepdim=True, dtype=torch.float64) > 0, left, whole)
    inside = torch.arange(nodes, device=tokens.device) < offsets[-1]
    return chains.threshold, torch.where(inside[:, None], left, 0.0)


def _variants(name: str, everyday: bool, dtype: str = "bf16", draws: str = "", **kind: bool) -> list[Variant]:
    unaligned = kind.get("unaligned", False)
    rest, constants = rest_types(dtype, draws, unaligned), rest_constants(chain=True, **kind)
    tables = {"children": "*i32", "reach": "*fp64", "threshold": "*fp32", "vocab": size_type(unaligned)}
    keys = {"seeds": "*i64", "positions": "*i32", "uniforms": "*fp32", "offsets": "*i32"}
    paths = dict.fromkeys(("path", "accepted", "last", "firsts", "source"), "*i32")
    paths |= dict.fromkeys(("nodes", "dists", "depth"), "i32")
    kernel, chosen = "rejection_verify.triton_kernel", ("sm_90",) if everyday else ()
    steps: dict[str, object] = {"STEPS": 32, "EXPLICIT": False}
    return [
        *(
            Variant(f"rejection_verify/ratios {rule} {name}", f"{kernel}:ratios", rest | tables | keys | paths,
                    constants | steps | {"BLOCK_RULE": rule == BLOCK_RULE, "WALK": rule == REJECTION}, 1,
                    everyday=chosen if rule == REJECTION else (), fusion=False)
            for rule in (REJECTION, BLOCK_RULE)
        ),
        Variant(f"rejection_verify/shares {name}", f"{kernel}:shares", rest | tables, constants | {"TILE": TILE}, WARPS,
                everyday=chosen, fusion=False),
    ]  # fmt: skip


VARIANTS = [
    *_variants("bf16", True, draft=True),
    *_variants("bf16 mapped", False, draft=True, mapped=True),
    *_variants("fp16", False, "fp16", draft=True),
    *_variants("fp32 bf16 drafts", False, "fp32", "bf16", draft=True),
    *_variants("fp32 chosen", False, "fp32", draft=False),
    *_variants("bf16 with an overlay", False, draft=True, fold=True),
    _variants("bf16 unaligned vocabulary", False, draft=True, unaligned=True)[-1],
    Variant(
        "rejection_verify/walk", "rejection_verify.triton_kernel:walk",
        {"threshold": "*fp32", "children": "*i32", "offsets": "*i32", "seeds": "*i64", "positions": "*i32",
         "uniforms": "*fp32", "path": "*i32", "accepted": "*i32", "last": "*i32", "firsts": "*i32",
         "nodes": "i32", "depth": "i32"},
        {"STEPS": 32, "EXPLICIT": False}, 1, fusion=False,
    ),
]  # fmt: skip
