"""Triton backends of recursive_rejection_verify and traversal_verify: their launches and the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, path_specs, result_tensors
from ...overlay import Overlay
from ...triton_shared.aot_config import Variant, size_type
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
from ..recursive_rejection_verify.triton_kernel import prepare_trees, reject_children, walk_down
from ..rejection_verify.launch import TILE, WARPS
from ..traversal_verify.triton_kernel import walk_up
from .checks import depths
from .reference import residual_epsilon
from .verify_arguments import DraftTrees, Randomness, bind_trees

NODES = 256
"""Nodes of a step of `prepare_trees`."""


def reject_warps(draft: bool) -> int:
    """Warps of `reject_children`. Without draft distributions there is less to do per token."""
    return WARPS if draft else WARPS // 2


def reject_registers(draft: bool, overlay: bool = False) -> int:
    """Computes the registers per thread of `reject_children`, for 24, 20 or (with an overlay) 16 warps per processor.

    Without the option ptxas may choose fewer registers and spill.

    Args:
        draft: Whether there are draft distributions.
        overlay: Whether the target's logits have an overlay.

    Returns:
        The launch option maxnreg.
    """
    return 112 if overlay else 80 if draft else 96


def _tree_scratch(trees: DraftTrees) -> list[TensorSpec]:
    """Returns the scratch of `_TreeLaunches`.

    Per node: both links, distribution row, applied, level, parent, threshold, both scales, reach. Per row: last node
    and its first rejected child. The scratch of residuals and of the sample follows.

    Returns:
        The specs in this order.
    """
    nodes, rows, vocab_size = (trees.tokens.shape[0],), (trees.offsets.shape[0] - 1,), trees.target[0].shape[1]
    own = [torch.int32] * 6 + [torch.float32] * 3 + [torch.float64]
    ends: list[TensorSpec] = [(rows, torch.int32), (rows, torch.int32)]
    draw = (*residual_scratch(vocab_size, trees.token_ids), *draw_scratch(rows[0], vocab_size))
    return [*((nodes, dtype) for dtype in own), *ends, *draw]


class _TreeLaunches:
    """Buffers of one call on a batch of trees, and its launches.

    levels: reject the children level by level, each node with its reach.
    """

    def __init__(
        self,
        op: str,
        trees: DraftTrees,
        levels: bool,
        workspace: Tensor | None = None,
        overlay: Overlay | None = None,
    ) -> None:
        assert trees.proposal_kinds is not None and trees.dist_index is not None
        self.op, self.device, self.levels = op, trees.tokens.device, levels
        self.num_nodes, self.num_rows = trees.tokens.shape[0], trees.offsets.shape[0] - 1
        self.offsets = trees.offsets.contiguous()
        self.epsilon = residual_epsilon(trees.target, trees.draft)
        parts, _ = carve_workspace(op, workspace, _tree_scratch(trees), self.device)
        self.first_child, self.next_sibling, dist_index, applied, self.level, self.parents, self.accept = parts[:7]
        p_scale, q_scale, self.reach, self.last, self.first_rejected, *residual_parts, self.block_masses = parts[7:]
        if self.num_nodes:
            given = (self.offsets, trees.first_child, trees.next_sibling, trees.dist_index)
            num_dists = 1 if trees.draft is None else max(1, trees.draft[0].shape[0])
            prepare_trees[(self.num_rows + 1,)](
                *(part.contiguous() for part in given), self.first_child, self.next_sibling, dist_index, applied,
                self.level, self.parents, self.accept, self.reach, self.num_rows, self.num_nodes, num_dists, NODES,
                num_warps=2,
            )  # fmt: skip
        self.score_only = None if trees.score_only is None else trees.score_only.contiguous()
        kinds = trees.proposal_kinds.contiguous()
        self.residual = residual_arguments(
            trees.target, trees.draft, trees.token_ids,
            ProposalTensors(trees.tokens.contiguous(), self.next_sibling, kinds, dist_index, self.score_only),
            RejectionTensors(applied, p_scale, q_scale), scratch=residual_parts, overlay=overlay, op=op,
        )  # fmt: skip

    def compute_thresholds(self, depth: int, shortcut: bool) -> None:
        """Thresholds of all nodes. depth: of the deepest node, or more."""
        if self.num_nodes == 0 or self.num_rows == 0:
            return
        residual, flags = self.residual, self.residual.flags
        for level in range(depth if self.levels else 1):
            reject_children[(self.num_nodes,)](
                *residual.tensors, self.offsets, self.first_child, self.accept, self.reach, self.level, self.parents,
                level, self.num_rows, residual.vocab_size, self.epsilon, TILE, self.levels, shortcut, *flags,
                num_warps=reject_warps(flags.has_draft), enable_fp_fusion=False,
                maxnreg=reject_registers(flags.has_draft, flags.has_overlay),
            )  # fmt: skip

    def verify(
        self, randomness: Randomness, max_depth: int, out: Sequence[Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Path, number accepted and next token of every row."""
        path, num_accepted, next_token = result_tensors(self.op, out, path_specs(self.num_rows, max_depth), self.device)
        seeds, positions = randomness.seeds.contiguous(), randomness.root_positions.contiguous()
        if self.num_rows:
            self.compute_thresholds(max_depth, True)
            explicit, has_score_only = randomness.uniforms is not None, self.score_only is not None
            uniforms = self.accept if randomness.uniforms is None else randomness.uniforms.contiguous()
            score_only = self.accept if self.score_only is None else self.score_only.view(torch.int8)
            links = (self.offsets, self.first_child, self.next_sibling, score_only, self.accept)
            keys = (seeds, positions, uniforms, path, num_accepted, self.last, self.first_rejected)
            sizes = (self.num_nodes, max_depth, explicit, has_score_only)
            if self.levels:
                walk_up[(self.num_rows,)](*links, self.level, self.parents, *keys, *sizes, num_warps=1)
            else:
                walk_down[(self.num_rows,)](*links, *keys, *sizes, num_warps=1)
        sample_residuals(
            self.residual, self.last, self.first_rejected, seeds, positions, num_accepted,
            gumbel_noise=randomness.gumbel_noise, out=next_token, block_masses=self.block_masses,
        )  # fmt: skip
        return path, num_accepted, next_token

    def thresholds(self) -> tuple[Tensor, Tensor]:
        """Thresholds and residuals of all nodes, for inspection: it reads the depth of the trees from the device."""
        deepest = max(depths(self.offsets, self.first_child, self.next_sibling), default=0)
        self.compute_thresholds(deepest, False)
        left = dense_residuals(self.residual, self.first_child, self.num_nodes)
        inside = torch.arange(self.num_nodes, device=self.device) < self.offsets[-1]
        return self.accept, torch.where(inside[:, None], left, 0.0)


def _scratch(*args: Any, max_depth: int = 0, **named: Any) -> list[TensorSpec]:
    return _tree_scratch(bind_trees(*args, **named)[0])


def verify_by(op: str, levels: bool, check: Callable[..., None]) -> Callable[..., Any]:
    """Makes a *_verify over these kernels; `check` raises for arguments that they cannot take."""

    @declare_scratch(_scratch)
    def verify(
        *args: Any,
        max_depth: int,
        overlay: Overlay | None = None,
        out: Sequence[Tensor] | None = None,
        workspace: Tensor | None = None,
        **named: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        trees, randomness = bind_trees(*args, **named)
        check(trees, randomness, max_depth=max_depth)
        return _TreeLaunches(op, trees, levels, workspace, overlay).verify(randomness, max_depth, out)

    verify.__name__ = op
    return verify


def thresholds_by(op: str, levels: bool, check: Callable[..., None]) -> Callable[..., Any]:
    """Makes a *_thresholds over these kernels."""

    def thresholds(*args: Any, overlay: Overlay | None = None, **named: Any) -> tuple[Tensor, Tensor]:
        trees = DraftTrees(*args, **named)
        check(trees)
        return _TreeLaunches(op, trees, levels, overlay=overlay).thresholds()

    thresholds.__name__ = op
    return thresholds


def reject_variants(op: str, name: str, everyday: bool, dtype: str = "bf16", **flags: bool) -> list[Variant]:
    """Configurations of `reject_children` that an operator on ordered proposals launches."""
    levels, architectures = op == "traversal_verify", ("sm_90",) if everyday else ()
    unaligned, draft = flags.get("unaligned", False), flags["draft"]
    nodes = {
        "offsets_ptr": "*i32", "first_child_ptr": "*i32", "accept_ptr": "*fp32", "reach_ptr": "*fp64",
        "level_ptr": "*i32", "parents_ptr": "*i32", "current_level": "i32", "num_rows": "i32",
        "vocab_size": size_type(unaligned), "residual_epsilon": "fp32",
    }  # fmt: skip
    constants = residual_constants(chain=False, **flags) | {"TILE": TILE, "LEVELS": levels, "SHORTCUT": True}
    return [
        Variant(f"{op}/reject_children {name}", "recursive_rejection_verify.triton_kernel:reject_children",
                residual_types(dtype, unaligned=unaligned) | nodes, constants, reject_warps(draft),
                everyday=architectures, fusion=False,
                most_registers=reject_registers(draft, flags.get("overlay", False)))
    ]  # fmt: skip


def walk_variant(op: str, score_only: bool) -> Variant:
    """Configuration of an operator's walk."""
    arguments = {
        "offsets_ptr": "*i32", "first_child_ptr": "*i32", "next_sibling_ptr": "*i32", "score_only_ptr": "*i8",
        "accept_ptr": "*fp32", "seeds_ptr": "*i64", "root_positions_ptr": "*i32", "uniforms_ptr": "*fp32",
        "path_ptr": "*i32", "num_accepted_ptr": "*i32", "last_node_ptr": "*i32:1", "first_rejected_ptr": "*i32:1",
        "num_nodes": "i32", "max_depth": "i32",
    }  # fmt: skip
    kernel = "walk_down"
    if op == "traversal_verify":
        kernel = "walk_up"
        arguments |= {"level_ptr": "*i32", "parents_ptr": "*i32"}
    constants = {"EXPLICIT_UNIFORMS": False, "HAS_SCORE_ONLY": score_only}
    return Variant(f"{op}/{kernel}", f"{op}.triton_kernel:{kernel}", arguments, constants, 1, fusion=False)
