"""Plain PyTorch definition of process_logits.

Tests: tests/kernels/test_process_logits.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .processors import Additions, Forced, NodePaths, Penalties, TokenMasks

OP = "process_logits"


def check(
    logits: Tensor,
    paths: NodePaths,
    penalties: Penalties | None = None,
    additions: Additions | None = None,
    forced: Forced | None = None,
    masks: TokenMasks | None = None,
) -> None:
    """Raises ValueError for arguments that process_logits cannot take; values are checked on a CPU only."""
    rows, vocab = argument_checks.check_logits(OP, "logits", logits, "R").shape
    nodes = argument_checks.check_tensor(OP, "tokens", paths.tokens, torch.int64, "N").shape[0]
    argument_checks.check_tensor(OP, "parents", paths.parents, torch.int32, nodes)
    requests = argument_checks.check_offsets(OP, paths.offsets, nodes).shape[0] - 1
    argument_checks.check_tensor(OP, "roots", paths.roots, torch.int32, requests)
    if paths.nodes is not None:
        argument_checks.check_tensor(OP, "nodes", paths.nodes, torch.int32, rows)
    elif rows != nodes:
        raise ValueError(f"{OP}: logits has {rows} rows; expected {nodes}, one per node, or nodes= with one per row")
    if penalties is not None:
        table, capacity = argument_checks.check_tensor(OP, "penalties ids", penalties.ids, torch.int32, "T", "C").shape
        argument_checks.check_tensor(OP, "penalties counts", penalties.counts, torch.int32, table, capacity)
        argument_checks.check_tensor(OP, "penalties sizes", penalties.sizes, torch.int32, table)
        argument_checks.check_tensor(OP, "penalties factors", penalties.factors, torch.float32, requests, 3)
        argument_checks.check_tensor(OP, "penalties rows", penalties.rows, torch.int32, requests)
    if additions is not None:
        entries = argument_checks.check_tensor(OP, "additions ids", additions.ids, torch.int32, "E").shape[0]
        argument_checks.check_tensor(OP, "additions values", additions.values, torch.float32, entries)
        argument_checks.check_tensor(OP, "additions until", additions.until, torch.int32, entries)
        argument_checks.check_tensor(OP, "additions offsets", additions.offsets, torch.int32, requests + 1)
    if forced is not None:
        entries = argument_checks.check_tensor(OP, "forced ids", forced.ids, torch.int32, "F").shape[0]
        argument_checks.check_tensor(OP, "forced positions", forced.positions, torch.int32, entries)
        argument_checks.check_tensor(OP, "forced offsets", forced.offsets, torch.int32, requests + 1)
    if masks is not None:
        width = argument_checks.check_tensor(OP, "masks words", masks.words, torch.int32, "K", "W").shape[1]
        if 32 * width < vocab:
            raise ValueError(f"{OP}: masks words has {width} words a row; expected at least {-(-vocab // 32)}")
        argument_checks.check_tensor(OP, "masks index", masks.index, torch.int32, rows)
    if argument_checks.can_read_values(logits):
        _check_values(nodes, paths, penalties, additions, forced, masks)


def _check_values(
    nodes: int,
    paths: NodePaths,
    penalties: Penalties | None,
    additions: Additions | None,
    forced: Forced | None,
    masks: TokenMasks | None,
) -> None:
    """Checks the values of the tensors; see `check`."""
    if paths.nodes is not None:
        argument_checks.check_values(
            OP, "nodes", (paths.nodes >= 0) & (paths.nodes < nodes), paths.nodes, f"nodes below {nodes}"
        )
    bounds, parent_of = paths.offsets.tolist(), paths.parents.tolist()
    for start, stop in zip(bounds, bounds[1:]):
        for node in range(stop - start):
            if (node == 0) != (parent_of[start + node] == -1) or not -1 <= parent_of[start + node] < max(node, 1):
                raise ValueError(
                    f"{OP}: parents[{start + node}] is {parent_of[start + node]}; expected -1 for a root and an "
                    "earlier node of the request otherwise"
                )
    if penalties is not None:
        (table, capacity), repetition, sizes = penalties.ids.shape, penalties.factors[:, 0], penalties.sizes
        argument_checks.check_values(OP, "penalties repetition", repetition > 0, repetition, "a number > 0; 1 is off")
        fits = (penalties.rows >= 0) & (penalties.rows < table)
        argument_checks.check_values(OP, "penalties rows", fits, penalties.rows, f"rows below {table}")
        argument_checks.check_values(
            OP, "penalties sizes", (sizes >= 0) & (sizes <= capacity), sizes, f"at most {capacity}"
        )
    if additions is not None:
        argument_checks.check_values(
            OP, "additions values", additions.values < torch.inf, additions.values, "a finite number, or -inf"
        )
    for name, listed in (("additions", additions), ("forced", forced)):
        if listed is not None:
            entries, offsets = listed.ids.shape[0], listed.offsets
            good = (offsets <= entries) & (offsets.diff(prepend=offsets.new_zeros(1)) >= 0)
            argument_checks.check_values(OP, f"{name} offsets", good, offsets, f"ascending, up to {entries}")
    if masks is not None:
        count = masks.words.shape[0]
        fits = (masks.index >= -1) & (masks.index < count)
        argument_checks.check_values(OP, "masks index", fits, masks.index, f"-1, or a mask below {count}")


def process_logits(
    logits: Tensor,
    paths: NodePaths,
    penalties: Penalties | None = None,
    additions: Additions | None = None,
    forced: Forced | None = None,
    masks: TokenMasks | None = None,
) -> Tensor:
    """Applies logits processors to rows of logits in place, each for the prefix of its own node.

    Shapes: R rows of logits, V token ids, N packed nodes of B requests.

    The processors apply in this order, where l is the logit of a token:

    1. penalties, for tokens that are committed or on the node's path: ``l = l * r if l < 0 else l / r`` with the
       repetition penalty r, then ``l -= frequency * n``, then ``l -= presence`` if n > 0. n counts how often the token
       was generated, including the path;
    2. additions: ``l += value`` if the position to decide is below `until`;
    3. forced tokens: if the position is listed, all tokens but the listed one are forbidden;
    4. masks: tokens whose bit is clear are forbidden.

    A forbidden token has -inf added, so NaN and +inf stay visible as NaN. Numbers are computed in float32 (float64 for
    float64 logits); steps 1 and 2 each round once to the dtype of the logits. Ids outside the vocabulary are ignored,
    because a draft's vocabulary may be smaller. Rows that follow no request (tail nodes) are not changed.

    Args:
        logits: float32, bfloat16, float16 or float64 [R, V]; the row stride is free.
        paths: Packed trees, and the node that each row of logits follows.
        penalties: Repetition, presence and frequency penalties, or None.
        additions: Numbers added to logits, or None.
        forced: Tokens without an alternative, or None.
        masks: Bit masks of allowed tokens, or None.

    Returns:
        `logits`.

    Raises:
        ValueError: If a shape, dtype or value is wrong.

    Source:
        Repetition penalty: Keskar et al. (2019) section 4.1, in the form of transformers, which distinguishes signs.
    """
    check(logits, paths, penalties, additions, forced, masks)
    vocab, dtype, device = logits.shape[1], argument_checks.statistics_dtype(logits), logits.device
    bounds, parents, tokens = paths.offsets.tolist(), paths.parents.tolist(), paths.tokens.tolist()
    nodes = range(logits.shape[0]) if paths.nodes is None else paths.nodes.tolist()
    roots = paths.roots.tolist()
    for at, node in enumerate(nodes):
        request = next((b for b in range(len(roots)) if bounds[b] <= node < bounds[b + 1]), None)
        if request is None:
            continue
        start, path, here = bounds[request], [], node
        while parents[here] >= 0:
            path.append(tokens[here])
            here = start + parents[here]
        position = roots[request] + len(path) + 1
        row = logits[at]
        if penalties is not None:
            table = int(penalties.rows[request])
            used = int(penalties.sizes[table])
            counts = dict(zip(penalties.ids[table, :used].tolist(), penalties.counts[table, :used].tolist()))
            for token in path:
                counts[token] = counts.get(token, 0) + 1
            known = {token: count for token, count in counts.items() if 0 <= token < vocab}
            ids = torch.tensor(list(known), dtype=torch.int64, device=device)
            count = torch.tensor(list(known.values()), dtype=dtype, device=device)
            repetition, presence, frequency = penalties.factors[request].to(dtype)
            level = row[ids].to(dtype)
            level = torch.where(level < 0, level * repetition, level / repetition)
            level = level - frequency * count
            row[ids] = torch.where(count > 0, level - presence, level).to(logits.dtype)
        if additions is not None:
            first, last = additions.offsets[request : request + 2].tolist()
            listed = additions.ids[first:last].long()
            wanted = (position < additions.until[first:last]) & (listed >= 0) & (listed < vocab)
            ids, values = listed[wanted], additions.values[first:last][wanted].to(dtype)
            added = torch.zeros(vocab, dtype=dtype, device=device).index_add_(0, ids, values)
            row[ids] = (row[ids].to(dtype) + added[ids]).to(logits.dtype)
        if forced is not None:
            first, last = forced.offsets[request : request + 2].tolist()
            here_forced = forced.ids[first:last][forced.positions[first:last] == position].tolist()
            for token in here_forced:
                _forbid(row, torch.arange(vocab, device=device) != token)
        if masks is not None and int(masks.index[at]) >= 0:
            words = masks.words[int(masks.index[at])]
            ids = torch.arange(vocab, device=device)
            _forbid(row, (words[ids // 32] >> (ids % 32)) & 1 == 0)
    return logits


def _forbid(row: Tensor, where: Tensor) -> None:
    row.copy_(torch.where(where, row - torch.inf, row))
