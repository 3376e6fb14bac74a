"""Triton backend of draft_sample, and the sampling of the next token in every verify operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, result_tensors
from ...overlay import Overlay, launch_arguments
from ...random import BLOCK, DRAFT, RECOVER
from ...triton_shared.aot_config import Variant, size_type
from ...triton_shared.jit import unaligned_vocab
from ...triton_shared.residual import ResidualFlags
from .._proposals.verify_arguments import Distribution, DistributionBatch
from .reference import check
from .triton_kernel import sample_tokens, sum_block_masses

GROUP = 8
"""Noise blocks whose masses one program sums: 8,192 logits."""
FEW = 2
"""Up to so many noise blocks, the drawing kernel weighs all of them, and no launch sums their masses."""
MASS_WARPS = 8
SAMPLE_WARPS = 4


def mass_registers(overlay: bool) -> int | None:
    """Registers per thread of `sum_block_masses`: with an overlay it needs more than ptxas gives."""
    return 192 if overlay else None


def sample_registers(overlay: bool) -> int:
    """Registers per thread of `sample_tokens`. By default ptxas aims at fewer and spills."""
    return 112 if overlay else 96


class ProposalTensors(NamedTuple):
    """Proposals of all nodes, contiguous: `triton_shared.residual.ProposalTree` describes them."""

    tokens: Tensor
    next_sibling: Tensor
    proposal_kinds: Tensor
    dist_index: Tensor
    score_only: Tensor | None = None


class RejectionTensors(NamedTuple):
    """Numbers of every node's rejection: `triton_shared.residual.Rejections` describes them."""

    applied: Tensor
    p_scale: Tensor
    q_scale: Tensor


class ResidualArguments(NamedTuple):
    """Arguments that `triton_shared.residual.pack_residual_inputs` packs.

    Attributes:
        tensors: All arguments before those of a kernel's own. Unread tensors stand in for absent ones.
        flags: Constants of the kernels.
        vocab_size: Columns of the target's logits.
    """

    tensors: tuple[Any, ...]
    flags: ResidualFlags
    vocab_size: int

    @property
    def target(self) -> tuple[Any, ...]:
        """The target's distributions and their overlay, the first nine arguments."""
        return self.tensors[:9]


class _Rows(NamedTuple):
    """Distributions as the kernels take them."""

    logits: Tensor
    inv_t: Tensor
    lse: Tensor
    cut: Tensor
    tie_id: Tensor
    logits_stride: int
    num_columns: int


def _rows(dists: Distribution) -> _Rows:
    logits, inv_t, lse, cut, tie_id = dists
    statistics = inv_t.contiguous(), lse.contiguous(), cut.contiguous(), tie_id.contiguous()
    return _Rows(logits, *statistics, logits.stride(0), logits.shape[1])


def _fill_draft_columns(token_ids: Tensor, columns: Tensor, index: Tensor, places: Tensor) -> Tensor:
    """Fills int32 [V + 1] with the draft column of every token id, -1 for none.

    Ids that do not exist share the last entry.

    Args:
        token_ids: Token id of each draft column, int64 [Vd].
        columns: Result, int32 [V + 1].
        index: Scratch, int32 [Vd].
        places: Scratch, int64 [Vd].

    Returns:
        `columns`.
    """
    size = columns.shape[0]
    torch.arange(token_ids.shape[0], dtype=torch.int32, device=token_ids.device, out=index)
    torch.clamp(token_ids, -1, size - 1, out=places).remainder_(size)
    return columns.fill_(-1).scatter_(0, places, index)


def residual_scratch(vocab_size: int, token_ids: Tensor | None) -> list[TensorSpec]:
    """Returns the scratch of `residual_arguments`: a dummy for absent tensors, and columns of a draft vocabulary."""
    mapped, size = (0, 0) if token_ids is None else (token_ids.shape[0], vocab_size + 1)
    return [((1,), torch.int64), ((size,), torch.int32), ((mapped,), torch.int32), ((mapped,), torch.int64)]


def residual_arguments(
    target: Distribution,
    draft: Distribution | None = None,
    token_ids: Tensor | None = None,
    tree: ProposalTensors | None = None,
    rejections: RejectionTensors | None = None,
    chain: bool = False,
    *,
    scratch: Sequence[Tensor],
    overlay: Overlay | None = None,
    op: str = "",
) -> ResidualArguments:
    """Makes the kernels' arguments of residual distributions.

    Args:
        target: Target distributions, [M, V].
        draft: Draft distributions, [R, Vd], or None.
        token_ids: int64 [Vd], token id of each draft column, or None.
        tree: Proposals, or None for draws without a rejection.
        rejections: Numbers of their rejections, or None as `tree`.
        chain: A node has one child at most, the next node; next_sibling is not read.
        scratch: Tensors as `residual_scratch` lists them.
        overlay: Processed logits of the target.
        op: Operator that an error about the overlay names.

    Returns:
        The arguments.
    """
    p, vocab_size = _rows(target), target[0].shape[1]
    has_draft = draft is not None and draft[0].shape[0] > 0
    q = _rows(draft) if has_draft and draft is not None else p
    absent, columns, *order = scratch
    mapped = has_draft and token_ids is not None
    if mapped and token_ids is not None:
        columns = _fill_draft_columns(token_ids, columns, *order)
    ints, floats, has_score_only = p.tie_id, p.inv_t, False  # tensors that stand in for absent ones
    if tree is None:
        proposals: tuple[Tensor, ...] = (absent, ints, (kinds := absent.view(torch.int8)), ints, kinds)
    else:
        has_score_only = tree.score_only is not None
        proposals = (*tree[:4], tree.proposal_kinds if tree.score_only is None else tree.score_only.view(torch.int8))
    words, overlay_stride = launch_arguments(op, overlay, target[0], p.tie_id)
    unaligned = unaligned_vocab(vocab_size, p.logits_stride, q.logits_stride)
    flags = ResidualFlags(chain, has_draft, mapped, has_score_only, overlay_stride > 0, unaligned)
    tensors = (*p, words, overlay_stride, *q, columns, *proposals, *(rejections or (ints, floats, floats)))
    return ResidualArguments(tensors, flags, vocab_size)


def draw_scratch(rows: int, vocab_size: int) -> list[TensorSpec]:
    """Scratch of `sample_residuals`: block masses."""
    blocks = -(-vocab_size // BLOCK)
    return [((rows, 1 if blocks <= FEW else blocks), torch.float32)]


def sample_residuals(
    residual: ResidualArguments,
    nodes: Tensor,
    first_rejected: Tensor,
    seeds: Tensor,
    positions: Tensor,
    index: Tensor,
    stream: int = RECOVER,
    gumbel_noise: tuple[Tensor, Tensor] | None = None,
    known_masses: Tensor | None = None,
    *,
    out: Tensor,
    block_masses: Tensor,
) -> Tensor:
    """Samples one token per row from the residual of a node.

    Args:
        residual: Distributions and rejections.
        nodes: int32 [B], node of each draw, -1 for none.
        first_rejected: int32 [B], first rejected child of that node, -1 for none.
        seeds: int64 [B], request seeds.
        positions: int32 [B], absolute positions of the roots.
        index: int32 [B], number of each draw within its step.
        stream: Stream of the noise, DRAFT or RECOVER.
        gumbel_noise: Noise in place of the keyed one, (blocks [B, K], tokens [B, V]).
        known_masses: Block masses of the target's distributions, float32 [M, K], or None. They bound the residuals'.
        out: int64 [B].
        block_masses: Scratch as `draw_scratch` lists it.

    Returns:
        `out`.
    """
    rows, blocks = nodes.shape[0], -(-residual.vocab_size // BLOCK)
    if rows == 0:
        return out
    few, known, flags = blocks <= FEW, known_masses is not None, residual.flags
    masses = block_masses if known_masses is None else known_masses.contiguous()
    shared = (*residual.tensors, nodes, first_rejected, masses, block_masses)
    if not few:
        sum_block_masses[(rows, -(-blocks // GROUP))](
            *shared, residual.vocab_size, blocks, GROUP, known, False, *flags, num_warps=MASS_WARPS,
            maxnreg=mass_registers(flags.has_overlay), enable_fp_fusion=False,
        )  # fmt: skip
    noise = (block_masses, block_masses) if gumbel_noise is None else tuple(each.contiguous() for each in gumbel_noise)
    sample_tokens[(rows,)](
        *shared, seeds, positions, index, *noise, out, residual.vocab_size, blocks,
        max(4, 1 << (blocks - 1).bit_length()), stream, gumbel_noise is not None, known and not few, few, *flags,
        num_warps=SAMPLE_WARPS, maxnreg=sample_registers(flags.has_overlay), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def dense_residuals(residual: ResidualArguments, first_rejected: Tensor, nodes: int) -> Tensor:
    """Residuals of all nodes after their children from first_rejected[i] on were rejected: float32 [nodes, V]."""
    out = torch.empty(nodes, residual.vocab_size, dtype=torch.float32, device=first_rejected.device)
    if nodes:
        blocks = -(-residual.vocab_size // BLOCK)
        all_nodes = torch.arange(nodes, dtype=torch.int32, device=first_rejected.device)
        sum_block_masses[(nodes, -(-blocks // GROUP))](
            *residual.tensors, all_nodes, first_rejected, out, out, residual.vocab_size, blocks, GROUP, False, True,
            *residual.flags, num_warps=MASS_WARPS, maxnreg=mass_registers(residual.flags.has_overlay),
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _scratch(logits: Tensor, *args: object, **kwargs: object) -> list[TensorSpec]:
    """Returns the scratch: per row its index and its rejected child (none), then the scratch of the sample."""
    rows, vocab_size = logits.shape
    own: list[TensorSpec] = [((rows,), torch.int32), ((rows,), torch.int32)]
    return [*own, *residual_scratch(vocab_size, None), *draw_scratch(rows, vocab_size)]


@declare_scratch(_scratch)
def draft_sample(
    logits: Tensor,
    inv_t: Tensor,
    lse: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    seeds: Tensor,
    root_positions: Tensor,
    index: Tensor,
    *,
    mass: Tensor | None = None,
    overlay: Overlay | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Samples one token per row."""
    dists = DistributionBatch(logits, inv_t, lse, cut, tie_id)
    check(dists, seeds, root_positions, index, mass)
    (rows, none, *scratch, block_masses), _ = carve_workspace(
        "draft_sample", workspace, _scratch(logits), logits.device
    )
    (tokens,) = result_tensors("draft_sample", out, [((logits.shape[0],), torch.int64)], logits.device)
    torch.arange(logits.shape[0], dtype=torch.int32, device=logits.device, out=rows)
    keys = (seeds.contiguous(), root_positions.contiguous(), index.contiguous())
    residual = residual_arguments(dists, scratch=scratch, overlay=overlay, op="draft_sample")
    return sample_residuals(
        residual, rows, none.fill_(-1), *keys, DRAFT, known_masses=mass, out=tokens, block_masses=block_masses
    )


def residual_types(dtype: str, draft: str = "", unaligned: bool = False) -> dict[str, str]:
    """Types of the kernels' arguments that `ResidualArguments` holds."""
    draft, columns = draft or dtype, size_type(unaligned)
    return {
        "logits_ptr": f"*{dtype}", "inv_t_ptr": "*fp32", "lse_ptr": "*fp32", "cut_ptr": "*fp32", "tie_id_ptr": "*i32",
        "logits_stride": "i32:16", "num_columns": columns, "overlay_ptr": "*i32", "overlay_stride": "i32:16",
        "q_logits_ptr": f"*{draft}", "q_inv_t_ptr": "*fp32", "q_lse_ptr": "*fp32", "q_cut_ptr": "*fp32",
        "q_tie_id_ptr": "*i32", "q_logits_stride": "i32:16", "q_num_columns": columns, "draft_column_ptr": "*i32",
        "tokens_ptr": "*i64", "next_sibling_ptr": "*i32", "proposal_kinds_ptr": "*i8", "dist_index_ptr": "*i32",
        "score_only_ptr": "*i8", "applied_ptr": "*i32", "p_scale_ptr": "*fp32", "q_scale_ptr": "*fp32",
    }  # fmt: skip


def residual_constants(
    chain: bool,
    draft: bool,
    mapped: bool = False,
    score_only: bool = False,
    overlay: bool = False,
    unaligned: bool = False,
) -> dict[str, bool]:
    """Values of the kernels' constants that `ResidualArguments` holds."""
    return {
        "IS_CHAIN": chain, "HAS_DRAFT": draft, "MAPPED": mapped, "HAS_SCORE_ONLY": score_only, "HAS_OVERLAY": overlay,
        "UNALIGNED": unaligned,
    }  # fmt: skip


def _variants(name: str, everyday: bool, dtype: str = "bf16", known: bool = False, **flags: bool) -> list[Variant]:
    unaligned, overlay = flags.get("unaligned", False), flags.get("overlay", False)
    shared = residual_types(dtype, unaligned=unaligned) | {
        "nodes_ptr": "*i32", "first_rejected_ptr": "*i32", "known_masses_ptr": "*fp32", "block_masses_ptr": "*fp32",
        "num_blocks": "i32", "vocab_size": size_type(unaligned),
    }  # fmt: skip
    noise = {
        "seeds_ptr": "*i64", "root_positions_ptr": "*i32", "draw_index_ptr": "*i32", "block_noise_ptr": "*fp32",
        "token_noise_ptr": "*fp32", "out_ptr": "*i64",
    }  # fmt: skip
    constants = residual_constants(**flags) | {"KNOWN": known}
    mass_constants = constants | {"GROUP": GROUP, "WRITE": False}
    sample_constants = constants | {"PLACES": 256, "STREAM": RECOVER, "EXPLICIT_NOISE": False, "FEW": False}
    architectures = ("sm_90",) if everyday else ()
    kernel = "draft_sample.triton_kernel"
    return [
        Variant(f"draft_sample/sum_block_masses {name}", f"{kernel}:sum_block_masses", shared, mass_constants,
                MASS_WARPS, everyday=architectures, fusion=False, most_registers=mass_registers(overlay)),
        Variant(f"draft_sample/sample_tokens {name}", f"{kernel}:sample_tokens", shared | noise, sample_constants,
                SAMPLE_WARPS, everyday=architectures, fusion=False, most_registers=sample_registers(overlay)),
    ]  # fmt: skip


VARIANTS = [
    *_variants("of a distribution bf16", False, chain=False, draft=False),
    *_variants("of a distribution fp32 known masses", False, "fp32", True, chain=False, draft=False),
    *_variants("after a chain bf16", False, known=True, chain=True, draft=True),
    *_variants("after a chain bf16 mapped", False, chain=True, draft=True, mapped=True),
    *_variants("after a tree bf16", True, chain=False, draft=True, score_only=True),
    *_variants("after a tree fp16", False, "fp16", chain=False, draft=True),
    *_variants("after a tree fp32 mapped", False, "fp32", chain=False, draft=True, mapped=True),
    *_variants("after a tree bf16 with an overlay", False, chain=False, draft=True, score_only=True, overlay=True),
    *_variants("after a chain bf16 with an overlay", False, known=True, chain=True, draft=True, overlay=True),
    *_variants("after a chain bf16 unaligned vocabulary", False, known=True, chain=True, draft=True, unaligned=True),
    *_variants(
        "after a tree fp32 mapped unaligned vocabulary", False, "fp32", chain=False, draft=True, mapped=True,
        unaligned=True,
    ),
]  # fmt: skip
