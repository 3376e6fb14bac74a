"""Draft chains as the operators take them: one axis of nodes, with a root in front of every chain.

Nothing here reads from a GPU. Chains of other lengths than K keep their places: the rest of a row becomes a request of
its own, whose result is dropped. Tests: tests/embedding/test_verify.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec_fast.core.distributions import TokenDistributions, check_probs


@dataclass(slots=True, eq=False)
class ChainBatch:
    """Chains of R requests on one axis of M nodes, of which the first B or every second one are the caller's.

    Attributes:
        logits: The target's logits after each node, [M, V].
        tokens: Tokens of the nodes, int64 [M]; 0 at roots, which no rule reads.
        offsets: First node of each request, int32 [R + 1].
        kinds: `ProposalKind` of each node, int8 [M].
        dist_index: Row of `dists` of each node, int32 [M]; -1 for none.
        dists: Distributions of the sampled tokens, or None.
        row_of: Row of the caller of each node, int64 [M].
        max_depth: K, the most draft tokens of a request.
        doubled: Every second request holds the rest of a row.
    """

    logits: Tensor
    tokens: Tensor
    offsets: Tensor
    kinds: Tensor
    dist_index: Tensor
    dists: TokenDistributions | None
    row_of: Tensor
    max_depth: int
    doubled: bool = False

    def child_links(self) -> Tensor:
        """Returns the next node of each node's chain, int32 [M]; -1 at the last one."""
        nodes = self.tokens.shape[0]
        links = torch.arange(1, nodes + 1, dtype=torch.int32, device=self.tokens.device)
        links[(self.offsets[1:] - 1).long()] = -1
        links[-1:] = -1
        return links

    def per_request(self, values: Tensor) -> Tensor:
        """Repeats values [B] of the caller's rows for the R requests."""
        return values.repeat_interleave(2) if self.doubled else values

    def of_caller(self, values: Tensor) -> Tensor:
        """Returns those of R results that belong to the caller's rows, [B, ...]."""
        return values[::2] if self.doubled else values


def padded_chains(
    logits: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, lengths: Sequence[int] | Tensor | None
) -> ChainBatch:
    """Packs padded chains.

    Args:
        logits: Any float dtype, [B, K + 1, V].
        draft_tokens: Integers [B, K].
        draft_probs: What the tokens were sampled from, [B, K, Vd] with Vd at most V, or None.
        lengths: Draft tokens of each row, 0 to K, or None for K.

    Returns:
        The chains.

    Raises:
        ValueError: If shapes do not fit, or if a token or a length is out of range. Values on a GPU are not read.
    """
    check_tensors("verify", logits=logits, draft_tokens=draft_tokens, draft_probs=draft_probs)
    if (
        logits.dim() != 3
        or draft_tokens.dim() != 2
        or logits.shape[:2]
        != (
            draft_tokens.shape[0],
            draft_tokens.shape[1] + 1,
        )
    ):
        raise ValueError(
            f"verify: got logits {list(logits.shape)} and draft_tokens {list(draft_tokens.shape)}; expected "
            "[B, K + 1, V] and [B, K]; pass flat rows to verify_packed, and trees to verify_trees"
        )
    rows, width, vocab_size = draft_tokens.shape[0], draft_tokens.shape[1], logits.shape[2]
    device = logits.device
    places = torch.arange(width + 1, device=device)
    counts = None if lengths is None else _check_lengths(lengths, rows, width, device)
    valid = (places[1:] <= counts[:, None]) if counts is not None else places[1:].expand(rows, width) > 0
    _check_tokens(draft_tokens, valid, vocab_size)
    check_logits(logits, torch.cat([torch.ones_like(valid[:, :1]), valid], 1) if width else None)
    tokens = torch.zeros(rows, width + 1, dtype=torch.int64, device=device)
    tokens[:, 1:] = torch.where(valid, draft_tokens, 0).clamp(0, vocab_size - 1)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * (width + 1)
    if counts is not None:
        starts = torch.cat([torch.stack([starts[:-1], starts[:-1] + counts + 1], 1).flatten(), starts[-1:]])
    return replace(
        _with_probs(
            ChainBatch(
                logits=logits.reshape(-1, vocab_size),
                tokens=tokens.flatten(),
                offsets=starts.to(torch.int32),
                kinds=torch.zeros(rows * (width + 1), dtype=torch.int8, device=device),
                dist_index=torch.full((rows * (width + 1),), -1, dtype=torch.int32, device=device),
                dists=None,
                row_of=torch.arange(rows, device=device).repeat_interleave(width + 1),
                max_depth=width,
            ),
            None if draft_probs is None else _as_rows(draft_probs, (rows, width), vocab_size),
            valid,
            torch.arange(rows * (width + 1), device=device).view(rows, width + 1)[:, 1:].flatten(),
        ),
        doubled=counts is not None,
    )


def packed_chains(
    logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    max_draft_tokens: int | None,
) -> ChainBatch:
    """Packs flat chains, whose logits have a row for every draft token and one more for every request.

    Args:
        logits: Any float dtype, [N + B, V].
        draft_token_ids: Integers [N].
        cu_num_draft_tokens: Integers [B], without a leading 0.
        draft_probs: What the tokens were sampled from, [N, Vd] with Vd at most V, or None.
        max_draft_tokens: K, at least the longest chain. None reads it, which waits for a GPU.

    Returns:
        The chains.

    Raises:
        ValueError: If shapes do not fit, or if a value is out of range. Values on a GPU are not read.
    """
    check_tensors(
        "verify_packed",
        logits=logits,
        draft_token_ids=draft_token_ids,
        cu_num_draft_tokens=cu_num_draft_tokens,
        draft_probs=draft_probs,
    )
    total, rows = draft_token_ids.shape[0], cu_num_draft_tokens.shape[0]
    if logits.dim() != 2 or draft_token_ids.dim() != 1 or logits.shape[0] != total + rows:
        raise ValueError(
            f"verify_packed: got logits {list(logits.shape)}, draft_token_ids {list(draft_token_ids.shape)} and "
            f"cu_num_draft_tokens {list(cu_num_draft_tokens.shape)}; expected [N + B, V], [N] and [B]: a row of logits "
            "for every draft token and one for every request"
        )
    device, vocab_size = logits.device, logits.shape[1]
    ends = cu_num_draft_tokens.to(device=device, dtype=torch.int64)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    if ends.is_cpu and rows and (int(counts.min()) < 0 or int(ends[-1]) != total):
        raise ValueError(
            f"cu_num_draft_tokens: got {ends.tolist()} and {total} tokens; expected numbers that never decrease and "
            f"end at {total}, without a leading 0"
        )
    longest = max_draft_tokens
    if longest is None or ends.is_cpu:
        most = int(counts.max()) if rows else 0
        longest = most if longest is None else longest
        if most > longest:
            raise ValueError(f"max_draft_tokens: got {longest} and a chain of {most}; expected at least {most}")
    _check_tokens(draft_token_ids, torch.ones_like(draft_token_ids, dtype=torch.bool), vocab_size)
    check_logits(logits)
    place = torch.arange(total, device=device)
    node = place + torch.searchsorted(ends, place, right=True) + 1
    tokens = torch.zeros(total + rows, dtype=torch.int64, device=device)
    tokens[node] = draft_token_ids.long().clamp(0, vocab_size - 1)
    offsets = torch.cat([ends.new_zeros(1), ends + torch.arange(1, rows + 1, device=device)]).to(torch.int32)
    every = torch.arange(total + rows, device=device)
    return _with_probs(
        ChainBatch(
            logits=logits,
            tokens=tokens,
            offsets=offsets,
            kinds=torch.zeros(total + rows, dtype=torch.int8, device=device),
            dist_index=torch.full((total + rows,), -1, dtype=torch.int32, device=device),
            dists=None,
            row_of=torch.searchsorted(offsets[1:].long(), every, right=True).clamp(max=max(rows - 1, 0)),
            max_depth=longest,
        ),
        None if draft_probs is None else _as_rows(draft_probs, (total,), vocab_size),
        torch.ones(total, dtype=torch.bool, device=device),
        node,
    )


def check_tensors(place: str, **values: Tensor | None) -> None:
    """Checks that arguments are tensors.

    Args:
        place: The function that got them.
        **values: Arguments by name. None passes.

    Raises:
        TypeError: If one is something else.
    """
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(
                f"{place}: got {name} of type {type(value).__name__}; expected a tensor; pass torch.as_tensor"
            )


def check_logits(logits: Tensor, used: Tensor | None = None) -> None:
    """Checks that each row has a token that can be sampled, and no NaN. Values on a GPU are not read.

    Args:
        logits: [..., V].
        used: Rows that are checked, bool of their shape; None for all.

    Raises:
        ValueError: If the largest logit of a row is not finite.
    """
    if not logits.is_cpu or not logits.numel():
        return
    bad = ~logits.sum(-1).isfinite()  # half the time of a maximum; -inf alone is no fault yet
    bad = bad if used is None else bad & used
    for place in bad.nonzero().tolist():
        largest = float(logits[tuple(place)].max())
        if not math.isfinite(largest):
            raise ValueError(
                f"logits{place}: got {largest} as the largest number; expected finite logits, or -inf for some tokens "
                "of a row; check what computed them"
            )


def _with_probs(chains: ChainBatch, probs: Tensor | None, used: Tensor, nodes: Tensor) -> ChainBatch:
    """Returns the chains with draft distributions: row i of `probs` is that of node `nodes[i]` if it is used."""
    valid = used.flatten()
    if probs is None or not len(probs):
        return chains
    dists = TokenDistributions.from_probs(probs, check=False)
    if probs.is_cpu:
        check_probs(probs, dists.lse.exp(), valid, "draft_probs", tuple(used.shape))  # padding is not read
    chains.kinds[nodes] = valid.to(torch.int8)
    chains.dist_index[nodes] = torch.where(valid, torch.arange(len(probs), device=probs.device), -1).to(torch.int32)
    return replace(chains, dists=dists)


def _as_rows(probs: Tensor, shape: tuple[int, ...], vocab_size: int) -> Tensor:
    """Returns draft probabilities as rows, [N, Vd]. Raises ValueError for another shape."""
    if tuple(probs.shape[:-1]) != shape or not 0 < probs.shape[-1] <= vocab_size:
        raise ValueError(
            f"draft_probs: got {list(probs.shape)}; expected [{', '.join(map(str, shape))}, V] with V at most "
            f"{vocab_size}, the probabilities that each draft token was sampled from; pass None for deterministic ones"
        )
    return probs.reshape(-1, probs.shape[-1])


def _check_tokens(tokens: Tensor, valid: Tensor, vocab_size: int) -> None:
    """Raises ValueError for a draft token that is no token. Values on a GPU are not read."""
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"draft tokens: got {tokens.dtype}; expected integers")
    if tokens.is_cpu:
        bad = valid.cpu() & ((tokens < 0) | (tokens >= vocab_size))
        if bool(bad.any()):
            negative = tokens.dim() == 2 and int(tokens[bad][0]) < 0
            raise ValueError(
                f"draft tokens: got {int(tokens[bad][0])} at {bad.nonzero()[0].tolist()}; expected ids from 0 to "
                f"{vocab_size - 1}, as logits have {vocab_size} columns{'; pass lengths= for padded rows' * negative}"
            )


def _check_lengths(lengths: Sequence[int] | Tensor, rows: int, width: int, device: torch.device) -> Tensor:
    """Returns lengths as int32 [B]. Raises ValueError for wrong ones; values on a GPU are not read."""
    found = torch.as_tensor(lengths)
    if tuple(found.shape) != (rows,) or (
        found.is_cpu and rows and not 0 <= int(found.min()) <= int(found.max()) <= width
    ):
        got = found.tolist() if found.is_cpu else list(found.shape)
        raise ValueError(f"lengths: got {got}; expected {rows} numbers from 0 to {width}, the draft tokens of each row")
    return found.to(device=device, dtype=torch.int32)
