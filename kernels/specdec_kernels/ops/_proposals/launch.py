"""Triton backends of recursive_rejection_verify and traversal_verify: their launches and the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, path_specs, result_tensors
from ...overlay import Overlay
from ...triton_shared.variant import Variant, size_type
from ..draft_sample.launch import (
    Rest,
    draw,
    draw_scratch,
    left_of,
    rest_constants,
    rest_of,
    rest_scratch,
    rest_types,
)
from ..recursive_rejection_verify.triton_kernel import prepare, walk_down, weigh
from ..rejection_verify.launch import TILE, WARPS
from ..traversal_verify.triton_kernel import walk_up
from .reference import Distribution, depths, dust

NODES = 256
"""Nodes of a step of `prepare`."""


def weigh_warps(draft: bool) -> int:
    """Warps of `weigh`; without draft distributions there is less to do per token."""
    return WARPS if draft else WARPS // 2


def weigh_registers(draft: bool, fold: bool = False) -> int:
    """Per thread of `weigh`; 24, 20 or, with an overlay, 16 warps fit on a multiprocessor. Left alone, ptxas may aim at
    fewer and spill."""
    return 112 if fold else 80 if draft else 96


class Proposals:
    """Buffers of one call on a batch of trees. levels: weigh them level by level, each with what reaches it."""

    @staticmethod
    def scratch(
        tokens: Tensor, offsets: Tensor, first_child: Tensor, next_sibling: Tensor, proposal_kinds: Tensor,
        dist_index: Tensor,
        target: Distribution, draft: Distribution | None = None, token_ids: Tensor | None = None, *args: object,
        **kwargs: object,
    ) -> list[TensorSpec]:  # fmt: skip
        """Per node: both links, distribution row, applied, level, parents, accept, both scales, reach; per row: last
        node, its refused child."""
        nodes, rows, vocab = (tokens.shape[0],), (offsets.shape[0] - 1,), target[0].shape[1]
        own = [torch.int32] * 6 + [torch.float32] * 3 + [torch.float64]
        ends: list[TensorSpec] = [(rows, torch.int32), (rows, torch.int32)]
        return [
            *((nodes, dtype) for dtype in own),
            *ends,
            *rest_scratch(vocab, token_ids),
            *draw_scratch(rows[0], vocab),
        ]

    def __init__(
        self, op: str, tokens: Tensor, offsets: Tensor, first_child: Tensor, next_sibling: Tensor,
        proposal_kinds: Tensor,
        dist_index: Tensor, target: Distribution, draft: Distribution | None, token_ids: Tensor | None,
        score_only: Tensor | None,
        levels: bool, workspace: Tensor | None = None, overlay: Overlay | None = None,
    ) -> None:  # fmt: skip
        self.op, self.device, self.nodes, self.rows = op, tokens.device, tokens.shape[0], offsets.shape[0] - 1
        self.offsets = offsets.contiguous()
        self.levels, self.dust = levels, dust(target, draft)
        sizes = self.scratch(
            tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids
        )
        parts, _ = carve_workspace(op, workspace, sizes, tokens.device)
        self.first, self.sibling, source, applied, self.level, self.parents, self.accept = parts[:7]
        p_scale, q_scale, self.reach, self.last, self.firsts, *rest, self.part = parts[7:]
        given = (self.offsets, *(part.contiguous() for part in (first_child, next_sibling, dist_index)))
        kept = (self.first, self.sibling, source, applied, self.level, self.parents, self.accept, self.reach)
        if self.nodes:
            dists = 1 if draft is None else max(1, draft[0].shape[0])
            prepare[(self.rows + 1,)](*given, *kept, self.rows, self.nodes, dists, NODES, num_warps=2)
        self.score_only = score_only if score_only is None else score_only.contiguous()
        tree = (tokens.contiguous(), self.sibling, proposal_kinds.contiguous(), source, self.score_only)
        steps = (applied, p_scale, q_scale)
        self.rest: Rest = rest_of(target, draft, token_ids, tree, steps, scratch=rest, overlay=overlay, op=op)

    def weigh(self, depth: int, shortcut: bool) -> None:
        """Thresholds of all nodes; depth: that of the deepest node, or more."""
        if self.nodes == 0 or self.rows == 0:
            return
        for level in range(depth if self.levels else 1):
            weigh[(self.nodes,)](
                *self.rest.tensors, self.offsets, self.first, self.accept, self.reach, self.level, self.parents, level,
                self.rows, self.rest.vocab, self.dust, TILE, self.levels, shortcut, *self.rest.kind,
                num_warps=weigh_warps(self.rest.kind[1]), enable_fp_fusion=False,
                maxnreg=weigh_registers(self.rest.kind[1], self.rest.kind[4]),
            )  # fmt: skip

    def verify(
        self, seeds: Tensor, positions: Tensor, uniforms: Tensor | None, race: tuple[Tensor, Tensor] | None, depth: int,
        out: Sequence[Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        path, accepted, following = result_tensors(self.op, out, path_specs(self.rows, depth), self.device)
        seeds, positions = seeds.contiguous(), positions.contiguous()
        if self.rows:
            self.weigh(depth, True)
            coins = self.accept if uniforms is None else uniforms.contiguous()
            marks = self.accept if self.score_only is None else self.score_only.view(torch.int8)
            links = (self.offsets, self.first, self.sibling, marks, self.accept)
            ends = (path, accepted, self.last, self.firsts)
            given = (seeds, positions, coins, *ends, self.nodes, depth)
            kind = (uniforms is not None, self.score_only is not None)
            if self.levels:
                walk_up[(self.rows,)](*links, self.level, self.parents, *given, *kind, num_warps=1)
            else:
                walk_down[(self.rows,)](*links, *given, *kind, num_warps=1)
        where = (self.rest, self.last, self.firsts, seeds, positions, accepted)
        return path, accepted, draw(*where, noise=race, out=following, part=self.part)

    def thresholds(self) -> tuple[Tensor, Tensor]:
        """For inspection, so it may ask the device how deep the trees are."""
        deepest = max(depths(self.offsets, self.first, self.sibling), default=0)
        self.weigh(deepest, False)
        left = left_of(self.rest, self.first, self.nodes)
        inside = torch.arange(self.nodes, device=self.device) < self.offsets[-1]
        return self.accept, torch.where(inside[:, None], left, 0.0)


def verify_by(op: str, levels: bool, check: Callable[..., None]) -> Callable[..., Any]:
    """A *_verify over these kernels; `check` raises for what they cannot take."""

    @declare_scratch(Proposals.scratch)
    def verify(
        tokens: Tensor,
        offsets: Tensor,
        first_child: Tensor,
        next_sibling: Tensor,
        proposal_kinds: Tensor,
        dist_index: Tensor,
        target: Distribution,
        draft: Distribution | None,
        token_ids: Tensor | None,
        score_only: Tensor | None,
        seeds: Tensor,
        root_positions: Tensor,
        uniforms: Tensor | None = None,
        race: tuple[Tensor, Tensor] | None = None,
        *,
        max_depth: int,
        overlay: Overlay | None = None,
        out: Sequence[Tensor] | None = None,
        workspace: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tree = (
            tokens,
            offsets,
            first_child,
            next_sibling,
            proposal_kinds,
            dist_index,
            target,
            draft,
            token_ids,
            score_only,
        )
        check(*tree, seeds, root_positions, uniforms, race, max_depth=max_depth)
        proposals = Proposals(op, *tree, levels=levels, workspace=workspace, overlay=overlay)
        return proposals.verify(seeds, root_positions, uniforms, race, max_depth, out)

    verify.__name__ = op
    return verify


def thresholds_by(op: str, levels: bool, check: Callable[..., None]) -> Callable[..., Any]:
    """A *_thresholds over these kernels."""

    def thresholds(
        tokens: Tensor,
        offsets: Tensor,
        first_child: Tensor,
        next_sibling: Tensor,
        proposal_kinds: Tensor,
        dist_index: Tensor,
        target: Distribution,
        draft: Distribution | None,
        token_ids: Tensor | None,
        score_only: Tensor | None = None,
        *,
        overlay: Overlay | None = None,
    ) -> tuple[Tensor, Tensor]:
        tree = (
            tokens,
            offsets,
            first_child,
            next_sibling,
            proposal_kinds,
            dist_index,
            target,
            draft,
            token_ids,
            score_only,
        )
        check(*tree)
        return Proposals(op, *tree, levels=levels, overlay=overlay).thresholds()

    thresholds.__name__ = op
    return thresholds


def weigh_variants(op: str, name: str, everyday: bool, dtype: str = "bf16", **kind: bool) -> list[Variant]:
    """Configurations of the kernels that an operator on ordered proposals launches."""
    levels, chosen = op == "traversal_verify", ("sm_90",) if everyday else ()
    unaligned = kind.get("unaligned", False)
    tables = {
        "offsets": "*i32", "first_child": "*i32", "accept": "*fp32", "reach": "*fp64", "level": "*i32",
        "parents": "*i32", "level_now": "i32", "rows": "i32", "vocab": size_type(unaligned), "dust": "fp32",
    }  # fmt: skip
    constants = rest_constants(chain=False, **kind) | {"TILE": TILE, "LEVELS": levels, "SHORTCUT": True}
    return [
        Variant(f"{op}/weigh {name}", "recursive_rejection_verify.triton_kernel:weigh",
                rest_types(dtype, unaligned=unaligned) | tables, constants, weigh_warps(kind["draft"]),
                everyday=chosen, fusion=False,
                most_registers=weigh_registers(kind["draft"], kind.get("fold", False)))
    ]  # fmt: skip


def walk_variant(op: str, score_only: bool) -> Variant:
    """Configuration of an operator's walk."""
    arguments = {
        "offsets": "*i32", "first_child": "*i32", "next_sibling": "*i32", "score_only": "*i8", "accept": "*fp32",
        "seeds": "*i64", "positions": "*i32", "uniforms": "*fp32", "path": "*i32", "accepted": "*i32",
        "last": "*i32:1", "firsts": "*i32:1", "nodes": "i32", "depth": "i32",
    }  # fmt: skip
    up = op == "traversal_verify"
    if up:
        arguments |= {"level": "*i32", "parents": "*i32"}
    return Variant(
        f"{op}/walk", f"{op}.triton_kernel:{'walk_up' if up else 'walk_down'}", arguments,
        {"EXPLICIT": False, "SCORE_ONLY": score_only}, 1, fusion=False,
    )  # fmt: skip
