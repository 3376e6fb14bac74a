"""Triton backend of chain_verify and chain_thresholds: launch configurations and the calls."""

from __future__ import annotations

import torch
from torch import Tensor

from ..draw_sample.launch import Rest, draw, rest_constants, rest_of, rest_types
from ..law_stats.launch import law_stats
from ..law_stats.reference import only
from ..machine_code import Variant
from .reference import BLOCK_RULE, TOKEN, Law, check, looked_at
from .triton_kernel import ratios, shares, walk, write

TILE = 2048
"""Tokens of one step of a pass over a law."""
WARPS = 8


class _Chains:
    """Buffers of one call, and its launches."""

    def __init__(
        self, tokens: Tensor, offsets: Tensor, drawn: Tensor, law_row: Tensor, target: Law, draft: Law | None,
        token_ids: Tensor | None, rule: str, depth: int,
    ) -> None:  # fmt: skip
        self.device, self.nodes, self.rows = tokens.device, tokens.shape[0], offsets.shape[0] - 1
        self.block, self.depth = rule == BLOCK_RULE, depth
        self.steps = 1 << depth.bit_length()
        self.offsets = offsets.contiguous()

        def empty(count: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(count, dtype=dtype, device=self.device)

        self.children = torch.full((self.nodes,), -1, dtype=torch.int32, device=self.device)
        self.reach = torch.zeros(self.nodes, dtype=torch.float64, device=self.device)
        self.threshold = torch.zeros(self.nodes, dtype=torch.float32, device=self.device)
        applied, scale = empty(self.nodes, torch.int32), empty(self.nodes, torch.float32)
        tree = (tokens.contiguous(), law_row.contiguous(), drawn.contiguous(), law_row.contiguous(), None)
        self.rest: Rest = rest_of(target, draft, token_ids, tree, (applied, scale, scale), chain=True)
        self.path = empty(self.rows * (depth + 1), torch.int32).view(self.rows, depth + 1)
        self.accepted, self.last, self.firsts = (empty(self.rows, torch.int32) for _ in range(3))

    def weigh(self, seeds: Tensor, positions: Tensor, uniforms: Tensor | None, walking: bool) -> None:
        explicit = self.threshold if uniforms is None else uniforms.contiguous()
        keys = (seeds, positions, explicit, self.path, self.accepted, self.last, self.firsts)
        ratios[(self.rows,)](
            *self.rest.tensors, self.offsets, self.children, self.reach, self.threshold, *keys, self.rest.vocab,
            self.depth, self.steps, self.block, walking and not self.block, uniforms is not None, *self.rest.kind,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        if self.block:
            shares[(self.nodes,)](
                *self.rest.tensors, self.children, self.reach, self.threshold, self.rest.vocab, TILE, *self.rest.kind,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
            if walking:
                walk[(self.rows,)](
                    self.threshold, self.offsets, *keys, self.depth, self.steps, uniforms is not None, num_warps=1,
                    enable_fp_fusion=False,
                )  # fmt: skip


def chain_verify(
    tokens: Tensor,
    offsets: Tensor,
    drawn: Tensor,
    law_row: Tensor,
    target: Law,
    draft: Law | None,
    token_ids: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    uniforms: Tensor | None = None,
    race: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int,
    rule: str = TOKEN,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    chain = (tokens, offsets, drawn, law_row, target, draft, token_ids)
    check(*chain, seeds, root_positions, uniforms, race, max_depth=max_depth, rule=rule, mass=mass)
    chains = _Chains(*chain, rule, max_depth)
    if chains.rows == 0:
        return chains.path, chains.accepted, torch.empty(0, dtype=torch.int64, device=tokens.device)
    keys = (seeds.contiguous(), root_positions.contiguous())
    chains.weigh(*keys, uniforms, True)
    token = draw(chains.rest, chains.last, chains.firsts, *keys, chains.accepted, noise=race, known=mass)
    return chains.path, chains.accepted, token


def chain_verify_logits(
    tokens: Tensor,
    offsets: Tensor,
    drawn: Tensor,
    law_row: Tensor,
    logits: Tensor,
    sampling: tuple[Tensor, Tensor, Tensor, Tensor],
    draft: Law | None,
    token_ids: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    *,
    max_depth: int,
    rule: str = TOKEN,
) -> tuple[Tensor, ...]:
    """Statistics of all rows, which are found side by side here; those it passes by are marked as such."""
    inv_t, lse, cut, tie_id, mass = stats = law_stats(logits, *sampling, masses=True)
    answer = chain_verify(
        tokens, offsets, drawn, law_row, (logits, inv_t, lse, cut, tie_id), draft, token_ids, seeds, root_positions,
        max_depth=max_depth, rule=rule, mass=mass,
    )  # fmt: skip
    return (*answer, *only(looked_at(answer[0], offsets, len(tokens), rule), stats))


def write_rest(rest: Rest, children: Tensor, nodes: int) -> Tensor:
    """What is left at every node when its children from children[i] on were refused: float32 [nodes, V]."""
    out = torch.empty(nodes, rest.vocab, dtype=torch.float32, device=children.device)
    if nodes:
        write[(nodes, -(-rest.vocab // TILE))](
            *rest.tensors, children, out, rest.vocab, TILE, *rest.kind, num_warps=WARPS, enable_fp_fusion=False
        )
    return out


def chain_thresholds(
    tokens: Tensor,
    offsets: Tensor,
    drawn: Tensor,
    law_row: Tensor,
    target: Law,
    draft: Law | None,
    token_ids: Tensor | None,
    *,
    rule: str = TOKEN,
) -> tuple[Tensor, Tensor]:
    chain = (tokens, offsets, drawn, law_row, target, draft, token_ids)
    check(*chain, rule=rule)
    nodes = tokens.shape[0]
    chains = _Chains(*chain, rule, max(nodes - 1, 0))
    if nodes and chains.rows:
        chains.weigh(offsets, offsets, None, False)
    left = write_rest(chains.rest, chains.children, nodes)
    whole = write_rest(chains.rest, torch.full_like(chains.children, -1), nodes)
    # nothing left: the proposal's law is the target's up to rounding, and the target's is the one to draw from
    left = torch.where(left.sum(1, keepdim=True, dtype=torch.float64) > 0, left, whole)
    inside = torch.arange(nodes, device=tokens.device) < offsets[-1]
    return chains.threshold, torch.where(inside[:, None], left, 0.0)


def _variants(name: str, everyday: bool, dtype: str = "bf16", **kind: bool) -> list[Variant]:
    rest, constants = rest_types(dtype), rest_constants(chain=True, **kind)
    tables = {"children": "*i32", "reach": "*fp64", "threshold": "*fp32", "vocab": "i32:16"}
    keys = {"seeds": "*i64", "positions": "*i32", "uniforms": "*fp32", "offsets": "*i32"}
    paths = {"path": "*i32", "accepted": "*i32", "last": "*i32", "firsts": "*i32", "depth": "i32"}
    kernel, chosen = "chain_verify.triton_kernel", ("sm_90",) if everyday else ()
    steps: dict[str, object] = {"STEPS": 8, "EXPLICIT": False}
    return [
        *(
            Variant(f"chain_verify/ratios {rule} {name}", f"{kernel}:ratios", rest | tables | keys | paths,
                    constants | steps | {"BLOCK_RULE": rule == BLOCK_RULE, "WALK": rule == TOKEN}, 1,
                    everyday=chosen, fusion=False)
            for rule in (TOKEN, BLOCK_RULE)
        ),
        Variant(f"chain_verify/shares {name}", f"{kernel}:shares", rest | tables, constants | {"TILE": TILE}, WARPS,
                everyday=chosen, fusion=False),
        Variant(f"chain_verify/write {name}", f"{kernel}:write",
                rest | {"children": "*i32", "out": "*fp32", "vocab": "i32:16"}, constants | {"TILE": TILE}, WARPS,
                everyday=chosen, fusion=False),
    ]  # fmt: skip


VARIANTS = [
    *_variants("bf16", True, draft=True),
    *_variants("bf16 mapped", False, draft=True, mapped=True),
    *_variants("fp32 chosen", False, "fp32", draft=False),
    Variant(
        "chain_verify/walk", "chain_verify.triton_kernel:walk",
        {"threshold": "*fp32", "offsets": "*i32", "seeds": "*i64", "positions": "*i32", "uniforms": "*fp32",
         "path": "*i32", "accepted": "*i32", "last": "*i32", "firsts": "*i32", "depth": "i32"},
        {"STEPS": 8, "EXPLICIT": False}, 1, fusion=False,
    ),
]  # fmt: skip
