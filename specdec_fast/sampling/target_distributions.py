"""The target's distributions: the only place that turns logits into `TokenDistributions`.

Order: custom processors, n-grams and bad words, penalties (repetition, frequency, presence), bias and banned tokens
(minimum length included), forced tokens, allowed tokens and grammar, temperature, top-k, top-p, min-p.
Tests: tests/sampling/test_target_distributions.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.distributions import TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.sampling.sampling_tensors import SamplingTensors
from specdec_kernels import NodePaths, TreePlan


def target_distributions(
    draft: Draft,
    plan: TreePlan,
    logits: Tensor,
    sampling: SamplingTensors,
    root_positions: Tensor,
    *,
    whole: bool = False,
) -> TokenDistributions:
    """Computes the target's distribution after every node of a draft.

    Logits processors see each node with its own path. On a CPU they change `logits` in place. On a device operators
    apply most of them as they load the logits (`TokenDistributions.overlay`). A drafter that observes these logits then
    sees them without processors, which costs acceptance at most. Processors that read texts change `logits` everywhere.

    A node below a token that a grammar forbids keeps a distribution without the grammar's mask. Its token has
    probability 0, so no rule reaches it. A reachable node without any allowed token has a distribution of NaN, which
    `find_invalid_distributions` reports.

    Args:
        draft: Packed trees of M nodes.
        plan: Depths, ancestors and links of the nodes.
        logits: Logits after each node, any float dtype, [M, V].
        sampling: Parameters of the B requests.
        root_positions: Absolute position of each root, int32 [B].
        whole: Compute all statistics at once, for callers that need the target's choice at every node. Otherwise a CPU
            computes them when they are first read.

    Returns:
        M distributions; row i is the distribution of the token after node i.
    """
    overlay = None
    if sampling.logits_processors is not None:
        paths = NodePaths(draft.tokens, draft.parents, draft.offsets, root_positions)
        if uses_overlay(logits):
            logits = sampling.logits_processors.apply_text_processors(logits, paths)
            overlay = sampling.logits_processors.make_overlay(logits, paths, draft.row_of)
        else:
            logits = sampling.logits_processors.apply(logits, paths, draft.row_of)
    each = sampling.expand_to_nodes(draft.counts, draft.row_of)
    if whole or overlay is not None or not logits.is_cpu:  # a device computes all rows in one launch, without a wait
        return each.distributions(logits, overlay)
    return each.lazy_distributions(logits)


def uses_overlay(logits: Tensor) -> bool:
    """Returns whether operators apply logits processors as they load these logits.

    They do on a device, where a float32 copy would cost more than the load, in all formats that kernels read.
    """
    return not logits.is_cpu and logits.dtype != torch.float64


def chain_distributions(
    logits: Tensor, sampling: SamplingTensors, root_positions: Tensor, chains: Sequence[Sequence[int]]
) -> TokenDistributions:
    """Computes a draft model's distributions with the logits processors that the target will have there.

    A row whose processors leave no token keeps its own distribution. Any q is lossless there, because the target
    forbids these tokens.

    Args:
        logits: The draft model's logits after each chain, [B, V] with V at most the target's. Not changed.
        sampling: Parameters of the B requests.
        root_positions: Absolute position of each root, int32 [B].
        chains: Root and draft tokens so far of each request.

    Returns:
        B distributions.
    """
    processors = sampling.logits_processors
    if processors is None:
        return sampling.distributions(logits)
    shape = chain_layout(tuple(range(len(chains))), tuple(map(len, chains)), logits.device)
    tokens = host_to_device([token for chain in chains for token in chain], torch.int64, logits.device)
    paths = NodePaths(tokens, shape.parents, shape.offsets, root_positions, shape.offsets[1:] - 1)
    processed = processors.apply_to_draft(logits.clone(), paths, torch.arange(len(chains), device=logits.device))
    dists = sampling.distributions(processed)
    empty = torch.isnan(dists.lse)
    if bool(empty.any()):
        dists = sampling.distributions(torch.where(empty[:, None], logits.to(processed.dtype), processed))
    return dists


def find_invalid_distributions(
    path: Tensor, dists: TokenDistributions, sampling: SamplingTensors
) -> dict[int, tuple[int, str]]:
    """Finds accepted paths that meet a distribution without any token, or a failure of a custom processor.

    Distributions of rejected nodes are ignored.

    Args:
        path: Accepted nodes, root first and padded with -1, int32 [B, D + 1].
        dists: The target's distributions after the M nodes.
        sampling: Parameters of the B requests.

    Returns:
        For each such request its first place on the path, and the reason.
    """
    processors = sampling.logits_processors
    found: dict[int, tuple[int, str]] = {}
    texts = None if processors is None else processors.text_processors
    if texts is not None and texts.failures:
        for row, nodes in enumerate(path.tolist()):
            failed = texts.first_failure(nodes)
            if failed is not None:
                found[row] = failed[0], failed[1].report()
    if not math.isnan(sum(dists.lse.tolist())):  # the usual case: one read decides
        return found
    met = (path >= 0) & torch.isnan(dists.lse)[path.long().clamp(min=0)]
    for row in met.any(1).nonzero().flatten().tolist():
        place = int(met[row].int().argmax())
        if row in found and found[row][0] <= place:
            continue
        node = path[row, place : place + 1].long()
        masked = bool((dists.select(node).effective_logits() == float("-inf")).all())
        reason = processors.explain_empty(row) if masked and processors is not None else None
        found[row] = place, reason or "the model returned NaN or no finite logit"
    return found
