"""Triton backend of draft_sample, and the draw at the end of every verify operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, result_tensors
from ...overlay import Overlay, folded
from ...random import BLOCK, DRAFT, RECOVER
from ...triton_shared.jit import unaligned_vocab
from ...triton_shared.variant import Variant, size_type
from .reference import check
from .triton_kernel import masses, race

GROUP = 8
"""Race blocks whose masses one program sums: 8,192 logits."""
FEW = 2
"""Race blocks up to which all of them are weighed in the race itself, without a launch for their masses."""
MASS_WARPS = 8
RACE_WARPS = 4


def mass_registers(fold: bool) -> int | None:
    """Per thread of the masses, where an overlay takes more than ptxas would give."""
    return 192 if fold else None


def race_registers(fold: bool) -> int:
    """Per thread of the race. Left to itself ptxas aims at fewer, for programs that are not there, and spills."""
    return 112 if fold else 96


Distribution = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Rest(NamedTuple):
    """The distributions and proposals that a draw, or a pass before it, reads: the kernels' arguments in order, and
    their kind.

    tensors: what `rest_triton` describes, with stand-ins where something is absent. kind: (chain, has draft
    distributions, draft columns are mapped, has score-only nodes, the target has an overlay,
    vocabulary is unaligned).
    """

    tensors: tuple[Any, ...]
    kind: tuple[bool, bool, bool, bool, bool, bool]
    vocab: int

    @property
    def target(self) -> tuple[Any, ...]:
        """The target's distribution and its overlay."""
        return self.tensors[:9]


def dist_arguments(dist: Distribution) -> tuple[Any, ...]:
    """A distribution as the kernels take it."""
    logits, *others = dist
    return (logits, *(part.contiguous() for part in others), logits.stride(0), logits.shape[1])


def columns_of(token_ids: Tensor, columns: Tensor, index: Tensor, places: Tensor) -> Tensor:
    """Fills int32 [vocab + 1] with the draft column of every target id, -1 for none. Ids that do not exist share the
    last place. index: int32, places: int64, both [draft vocabulary] and scratch."""
    room = columns.shape[0]
    torch.arange(token_ids.shape[0], dtype=torch.int32, device=token_ids.device, out=index)
    torch.clamp(token_ids, -1, room - 1, out=places).remainder_(room)
    return columns.fill_(-1).scatter_(0, places, index)


def rest_scratch(vocab: int, token_ids: Tensor | None) -> list[TensorSpec]:
    """What `rest_of` needs: a stand-in for what is absent, and the columns of a smaller draft vocabulary."""
    own, room = (0, 0) if token_ids is None else (token_ids.shape[0], vocab + 1)
    return [((1,), torch.int64), ((room,), torch.int32), ((own,), torch.int32), ((own,), torch.int64)]


def rest_of(
    target: Distribution,
    draft: Distribution | None = None,
    token_ids: Tensor | None = None,
    tree: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None] | None = None,
    steps: tuple[Tensor, Tensor, Tensor] | None = None,
    chain: bool = False,
    *,
    scratch: Sequence[Tensor],
    overlay: Overlay | None = None,
    op: str = "",
) -> Rest:
    """tree: (tokens, next_sibling, drawn, dist_index, score_only); steps: (applied, p_scale, q_scale) per node;
    scratch: as `rest_scratch` says; overlay: of the target's logits, refused in the name of `op` where it does not fit.

    chain: a node has one child at most, the next node; next_sibling is not read.
    """
    p, vocab = dist_arguments(target), target[0].shape[1]
    has_draft = draft is not None and draft[0].shape[0] > 0
    q = dist_arguments(draft) if has_draft and draft is not None else p
    nothing, columns, *order = scratch
    if has_draft and token_ids is not None:
        columns = columns_of(token_ids, columns, *order)
    tokens, siblings, proposal_kinds, dist_index, score_only = tree or (
        nothing,
        p[4],
        nothing.view(torch.int8),
        p[4],
        None,
    )
    applied, p_scale, q_scale = steps or (p[4], p[1], p[1])
    links = (
        tokens,
        siblings,
        proposal_kinds,
        dist_index,
        proposal_kinds if score_only is None else score_only.view(torch.int8),
    )
    cells, room = folded(op, overlay, target[0], p[4])
    mapped = has_draft and token_ids is not None
    unaligned = unaligned_vocab(vocab, p[5], q[5])
    kind = (chain, has_draft, mapped, score_only is not None, room > 0, unaligned)
    return Rest((*p, cells, room, *q, columns, *links, applied, p_scale, q_scale), kind, vocab)


def draw_scratch(rows: int, vocab: int) -> list[TensorSpec]:
    """What `draw` needs."""
    blocks = -(-vocab // BLOCK)
    return [((rows, 1 if blocks <= FEW else blocks), torch.float32)]


def draw(
    rest: Rest,
    nodes: Tensor,
    firsts: Tensor,
    seeds: Tensor,
    positions: Tensor,
    index: Tensor,
    stream: int = RECOVER,
    noise: tuple[Tensor, Tensor] | None = None,
    known: Tensor | None = None,
    *,
    out: Tensor,
    part: Tensor,
) -> Tensor:
    """One token per row of nodes int32 [B] (-1: none), after the refused children from firsts int32 [B] (-1: none) on.

    known: masses of the target's race blocks that bound those of what is left, or None; out: int64 [B]; part: as
    `draw_scratch` says.
    """
    rows, blocks = nodes.shape[0], -(-rest.vocab // BLOCK)
    if rows == 0:
        return out
    few = blocks <= FEW
    given = part if known is None else known.contiguous()
    shared = (*rest.tensors, nodes, firsts, given, part)
    if not few:
        masses[(rows, -(-blocks // GROUP))](
            *shared, rest.vocab, blocks, GROUP, known is not None, False, *rest.kind, num_warps=MASS_WARPS,
            maxnreg=mass_registers(rest.kind[4]), enable_fp_fusion=False,
        )  # fmt: skip
    explicit = (part, part) if noise is None else tuple(each.contiguous() for each in noise)
    race[(rows,)](
        *shared, seeds, positions, index, *explicit, out, rest.vocab, blocks, max(4, 1 << (blocks - 1).bit_length()),
        stream, noise is not None, known is not None and not few, few, *rest.kind,
        num_warps=RACE_WARPS, maxnreg=race_registers(rest.kind[4]), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def left_of(rest: Rest, firsts: Tensor, nodes: int) -> Tensor:
    """Weights left at every node after its children from firsts[i] on were refused: float32 [nodes, V]."""
    out = torch.empty(nodes, rest.vocab, dtype=torch.float32, device=firsts.device)
    if nodes:
        blocks, all_nodes = -(-rest.vocab // BLOCK), torch.arange(nodes, dtype=torch.int32, device=firsts.device)
        masses[(nodes, -(-blocks // GROUP))](
            *rest.tensors, all_nodes, firsts, out, out, rest.vocab, blocks, GROUP, False, True, *rest.kind,
            num_warps=MASS_WARPS, maxnreg=mass_registers(rest.kind[4]), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _scratch(logits: Tensor, *args: object, **kwargs: object) -> list[TensorSpec]:
    rows, vocab = logits.shape
    own: list[TensorSpec] = [((rows,), torch.int32), ((rows,), torch.int32)]
    return [*own, *rest_scratch(vocab, None), *draw_scratch(rows, vocab)]


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
    check(logits, inv_t, lse, cut, tie_id, seeds, root_positions, index, mass)
    (rows, firsts, *scratch, part), _ = carve_workspace("draft_sample", workspace, _scratch(logits), logits.device)
    (tokens,) = result_tensors("draft_sample", out, [((logits.shape[0],), torch.int64)], logits.device)
    torch.arange(logits.shape[0], dtype=torch.int32, device=logits.device, out=rows)
    keys = (seeds.contiguous(), root_positions.contiguous(), index.contiguous())
    rest = rest_of((logits, inv_t, lse, cut, tie_id), scratch=scratch, overlay=overlay, op="draft_sample")
    return draw(rest, rows, firsts.fill_(-1), *keys, DRAFT, known=mass, out=tokens, part=part)


def rest_types(dtype: str, draft: str = "", unaligned: bool = False) -> dict[str, str]:
    """Types of the kernels' arguments that `Rest` gives."""
    draft, columns = draft or dtype, size_type(unaligned)
    return {
        "logits": f"*{dtype}", "inv_t": "*fp32", "lse": "*fp32", "cut": "*fp32", "tie_id": "*i32", "stride": "i32:16",
        "width": columns, "cells": "*i32", "room": "i32:16", "q_logits": f"*{draft}", "q_inv_t": "*fp32",
        "q_lse": "*fp32", "q_cut": "*fp32", "q_tie": "*i32", "q_stride": "i32:16", "q_width": columns,
        "columns": "*i32", "tokens": "*i64", "next_sibling": "*i32", "proposal_kinds": "*i8", "dist_index": "*i32",
        "score_only": "*i8", "applied": "*i32", "p_scale": "*fp32", "q_scale": "*fp32",
    }  # fmt: skip


def rest_constants(
    chain: bool,
    draft: bool,
    mapped: bool = False,
    score_only: bool = False,
    fold: bool = False,
    unaligned: bool = False,
) -> dict[str, bool]:
    """Values of the kernels' constants that `Rest` gives."""
    return {
        "CHAIN": chain,
        "DRAFT": draft,
        "MAPPED": mapped,
        "SCORE_ONLY": score_only,
        "FOLD": fold,
        "UNALIGNED": unaligned,
    }


def _draw(name: str, everyday: bool, dtype: str = "bf16", known: bool = False, **kind: bool) -> list[Variant]:
    shared = rest_types(dtype, unaligned=kind.get("unaligned", False)) | {
        "nodes": "*i32", "firsts": "*i32", "known": "*fp32", "part": "*fp32", "blocks": "i32",
        "vocab": size_type(kind.get("unaligned", False)),
    }  # fmt: skip
    noise = {
        "seeds": "*i64", "positions": "*i32", "index": "*i32", "block_noise": "*fp32", "token_noise": "*fp32",
        "out": "*i64",
    }  # fmt: skip
    constants = rest_constants(**kind) | {"KNOWN": known}
    mass_constants = constants | {"GROUP": GROUP, "WRITE": False}
    race_constants = constants | {"PLACES": 256, "STREAM": RECOVER, "EXPLICIT": False, "FEW": False}
    chosen = ("sm_90",) if everyday else ()
    kernel = "draft_sample.triton_kernel"
    return [
        Variant(f"draft_sample/masses {name}", f"{kernel}:masses", shared, mass_constants, MASS_WARPS, everyday=chosen,
                fusion=False, most_registers=mass_registers(kind.get("fold", False))),
        Variant(f"draft_sample/race {name}", f"{kernel}:race", shared | noise, race_constants, RACE_WARPS,
                everyday=chosen, fusion=False, most_registers=race_registers(kind.get("fold", False))),
    ]  # fmt: skip


VARIANTS = [
    *_draw("of a distribution bf16", False, chain=False, draft=False),
    *_draw("of a distribution fp32 known masses", False, "fp32", True, chain=False, draft=False),
    *_draw("after a chain bf16", False, known=True, chain=True, draft=True),
    *_draw("after a chain bf16 mapped", False, chain=True, draft=True, mapped=True),
    *_draw("after a tree bf16", True, chain=False, draft=True, score_only=True),
    *_draw("after a tree fp16", False, "fp16", chain=False, draft=True),
    *_draw("after a tree fp32 mapped", False, "fp32", chain=False, draft=True, mapped=True),
    *_draw("after a tree bf16 with an overlay", False, chain=False, draft=True, score_only=True, fold=True),
    *_draw("after a chain bf16 with an overlay", False, known=True, chain=True, draft=True, fold=True),
    *_draw("after a chain bf16 unaligned vocabulary", False, known=True, chain=True, draft=True, unaligned=True),
    *_draw(
        "after a tree fp32 mapped unaligned vocabulary",
        False,
        "fp32",
        chain=False,
        draft=True,
        mapped=True,
        unaligned=True,
    ),
]
