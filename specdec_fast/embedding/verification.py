"""Verification in one call, on plain tensors: chains as vLLM has them, and packed trees.

Nothing is read from a GPU unless a function says so. Tests: tests/embedding/test_verify.py,
tests/embedding/test_verify_trees.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_fast.core.distributions import PendingDistributions, TokenDistributions
from specdec_fast.core.draft import Draft
from specdec_fast.core.emitted_tokens import tokens_after_path
from specdec_fast.core.former_names import RENAMED_RULES, explain_arguments
from specdec_fast.core.sampling_rows import PerRow, SamplingRows, integer_rows, sampling_rows
from specdec_fast.embedding.chain_batch import ChainBatch, check_logits, check_tensors, packed_chains, padded_chains
from specdec_fast.interfaces import Acceptance, Rng, Rule
from specdec_fast.rules import get_rule, rule_names
from specdec_kernels import TreePlan, rejection_verify_logits, replay_verify
from specdec_kernels.unknown_names import unknown_name

CHAIN_RULES = ("rejection", "block", "replay", "greedy")
"""Rules of `verify` and `verify_packed`."""

Keys = Sequence[int] | Tensor | None
"""One integer for each row, or None under rule `greedy`, which draws nothing."""


@explain_arguments(place="verify")
def verify(
    logits: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None = None,
    lengths: Sequence[int] | Tensor | None = None,
    *,
    rule: str = "rejection",
    seeds: Keys = None,
    positions: Keys = None,
    temperature: PerRow | None = None,
    top_k: PerRow = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
) -> Tensor:
    """Verifies draft chains: the emitted tokens have exactly the target's distribution.

    Random numbers are functions of seed, position and token. A seed and a position must not meet twice for one text.

    Args:
        logits: The target's logits after the newest token and after each draft token, any float dtype, [B, K + 1, V].
            They come after the caller's own processors, such as penalties.
        draft_tokens: Draft tokens, integers [B, K].
        draft_probs: The probabilities that each draft token was sampled from, [B, K, Vd] with Vd at most V. None if the
            tokens are deterministic: picked by arg-max, by top-k or from a text. `replay` and `greedy` do not read it.
        lengths: Draft tokens of each row, 0 to K; what follows is not read. None: K in every row.
        rule: "rejection", "block", "replay" or "greedy".
        seeds: Seed of each request, 0 to 2**63 - 1, [B].
        positions: Absolute position of the newest token in each text, [B]: the number of tokens before it.
        temperature: One number or [B]; 0 is greedy. None: 1, or 0 under rule `greedy`.
        top_k: One number or [B]; 0 and -1 are off.
        top_p: One number or [B]; 1 is off.
        min_p: One number or [B]; 0 is off.

    Returns:
        int32 [B, K + 1]: the accepted draft tokens, then one token of the target, then -1.

    Raises:
        TypeError: If an argument is no tensor that must be one.
        ValueError: If a shape or value is wrong. Values on a GPU are not read.
    """
    _check_rule(rule, CHAIN_RULES)
    probs = draft_probs if rule in ("rejection", "block") else None
    return _verify_chains(
        padded_chains(logits, draft_tokens, probs, lengths),
        rule,
        (seeds, positions),
        (temperature, top_k, top_p, min_p),
        draft_tokens.shape[0],
    )


@explain_arguments(place="verify_packed")
def verify_packed(
    logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None = None,
    *,
    max_draft_tokens: int | None = None,
    rule: str = "rejection",
    seeds: Keys = None,
    positions: Keys = None,
    temperature: PerRow | None = None,
    top_k: PerRow = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
) -> Tensor:
    """Verifies draft chains in the flat layout of vLLM, without a copy of the logits. See `verify`.

    Args:
        logits: Any float dtype, [N + B, V]: for each request a row for each of its draft tokens, and one more.
        draft_token_ids: Draft tokens of all requests, integers [N].
        cu_num_draft_tokens: How many of them belong to the first requests, [B], the first request included.
        draft_probs: The probabilities that each draft token was sampled from, [N, Vd], or None.
        max_draft_tokens: K, at least the longest chain. None reads it, which waits for a GPU.
        rule: "rejection", "block", "replay" or "greedy".
        seeds: Seed of each request, [B].
        positions: Absolute position of the newest token in each text, [B].
        temperature: One number or [B]. None: 1, or 0 under rule `greedy`.
        top_k: One number or [B].
        top_p: One number or [B].
        min_p: One number or [B].

    Returns:
        int32 [B, K + 1]: the accepted draft tokens, then one token of the target, then -1.

    Raises:
        TypeError: If an argument is no tensor that must be one.
        ValueError: If a shape or value is wrong. Values on a GPU are not read.
    """
    _check_rule(rule, CHAIN_RULES)
    probs = draft_probs if rule in ("rejection", "block") else None
    return _verify_chains(
        packed_chains(logits, draft_token_ids, cu_num_draft_tokens, probs, max_draft_tokens),
        rule,
        (seeds, positions),
        (temperature, top_k, top_p, min_p),
        cu_num_draft_tokens.shape[0],
    )


def apply_rule(
    rule: Rule, draft: Draft, plan: TreePlan, logits: Tensor, sampling: SamplingRows, keys: tuple[Tensor, Tensor]
) -> Acceptance:
    """Verifies a draft by a rule, under the arguments that `request_arguments` returns; logits are [M, V]."""
    if logits.is_cpu:
        return rule(draft, plan, PendingDistributions(logits, sampling), Rng(*keys))
    each = dict(zip(("temperature", "top_k", "top_p", "min_p"), sampling))
    return rule(draft, plan, TokenDistributions.of(logits, **each), Rng(*keys))


@explain_arguments(place="verify_trees")
def verify_trees(
    logits: Tensor,
    draft: Draft,
    *,
    rule: str = "replay",
    seeds: Keys = None,
    positions: Keys = None,
    temperature: PerRow | None = None,
    top_k: PerRow = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
) -> Acceptance:
    """Verifies packed trees. `emitted_tokens` turns the result into tokens.

    Args:
        logits: The target's logits after each node, any float dtype, [M, V].
        draft: Packed trees of M nodes, for example of `Draft.trees`. On a CPU it is checked.
        rule: Any lossless rule: "replay", "recursive_rejection", "traversal", "greedy", and those for chains.
        seeds: Seed of each request, [B].
        positions: Absolute position of the root of each request, [B].
        temperature: One number or [B]. None: 1, or 0 under rule `greedy`.
        top_k: One number or [B].
        top_p: One number or [B].
        min_p: One number or [B].

    Returns:
        `path` (accepted packed nodes, root first and padded with -1), `num_accepted` and `next_token`.

    Raises:
        TypeError: If `logits` is no tensor.
        ValueError: If a shape or value is wrong, or if the rule cannot verify the draft. Values on a GPU are not read.
    """
    found = get_rule(rule)
    check_tensors("verify_trees", logits=logits)
    if logits.dim() != 2 or logits.shape[0] != draft.num_nodes:
        raise ValueError(
            f"verify_trees: got logits {list(logits.shape)}; expected [{draft.num_nodes}, V], a row for each node; "
            "pass chains [B, K + 1, V] to verify"
        )
    draft.check(logits.shape[1], wait=False)
    check_logits(logits)
    keys, sampling = request_arguments(
        rule, draft.num_rows, logits.device, (seeds, positions), (temperature, top_k, top_p, min_p), draft.row_of
    )
    return apply_rule(found, draft, draft.get_plan(), logits, sampling, keys)


def emitted_tokens(draft: Draft, acceptance: Acceptance) -> Tensor:
    """Returns the tokens that a step emits, without a read on the host.

    Args:
        draft: Packed trees of B requests.
        acceptance: What a rule returned for them.

    Returns:
        int32 [B, D + 1]: the tokens of the accepted nodes, then one token of the target, then -1.
    """
    return tokens_after_path(draft.tokens, acceptance.path, acceptance.num_accepted, acceptance.next_token)


def _verify_chains(
    chains: ChainBatch,
    rule: str,
    keys: tuple[Keys, Keys],
    sampling: tuple[PerRow | None, PerRow, PerRow, PerRow],
    rows: int,
) -> Tensor:
    """Runs the operator of a rule and returns the emitted tokens."""
    own_keys, per_node = request_arguments(rule, rows, chains.logits.device, keys, sampling, chains.row_of)
    seeds, positions = (chains.per_request(key) for key in own_keys)
    if rule in ("replay", "greedy"):
        links = chains.child_links()
        arguments = (chains.tokens, chains.offsets, links, torch.full_like(links, -1), None, chains.logits, per_node)
        found = replay_verify(*arguments, seeds, positions, max_depth=chains.max_depth)
    else:
        dists = chains.dists
        found = rejection_verify_logits(
            chains.tokens,
            chains.offsets,
            chains.kinds,
            chains.dist_index,
            chains.logits,
            per_node,
            None if dists is None else (dists.logits, *dists.stats),
            None,
            seeds,
            positions,
            max_depth=chains.max_depth,
            rule=rule,
        )
    return tokens_after_path(chains.tokens, *(chains.of_caller(part) for part in found[:3]))


def request_arguments(
    rule: str,
    rows: int,
    device: torch.device,
    keys: tuple[Keys, Keys],
    sampling: tuple[PerRow | None, PerRow, PerRow, PerRow],
    row_of: Tensor,
) -> tuple[tuple[Tensor, Tensor], SamplingRows]:
    """Returns what a caller says of its requests as tensors.

    Args:
        rule: Name of the rule.
        rows: B, the number of requests.
        device: Device of the results.
        keys: Seeds and positions of the requests; None only under rule `greedy`.
        sampling: Temperature (None: 1, or 0 under rule `greedy`), top-k, top-p and min-p of the requests.
        row_of: Request of each node, int64 [M].

    Returns:
        Seeds int64 [B] and positions int32 [B]; and the sampling parameters of the nodes, each [M].

    Raises:
        ValueError: If seeds or positions are missing, or if a number of values or a value is wrong.
    """
    default = float(rule != "greedy")
    each = sampling_rows(rows, device, default if sampling[0] is None else sampling[0], *sampling[1:])
    _check_greedy(rule, each[0])
    temperature, top_k, top_p, min_p = (part[row_of] for part in each)
    return _keys(*keys, rule, rows, device), (temperature, top_k, top_p, min_p)


def _check_rule(rule: str, known: Sequence[str]) -> None:
    """Raises ValueError for an unknown rule."""
    if rule not in known and rule in rule_names():
        raise ValueError(
            f"verify: got rule {rule!r}, which is none for chains; expected {', '.join(known)}; call verify_trees"
        )
    if rule not in known:
        raise ValueError(unknown_name("verify: rule", rule, known, renamed=RENAMED_RULES, kind="rule"))


def _check_greedy(rule: str, temperature: Tensor) -> None:
    """Raises ValueError for a temperature above 0 under rule `greedy`. Values on a GPU are not read."""
    if rule == "greedy" and temperature.is_cpu and bool((temperature != 0).any()):
        raise ValueError(
            f"rule greedy: got temperature {float(temperature.max())}; expected 0, or another rule (replay, rejection)"
        )


def _keys(seeds: Keys, positions: Keys, rule: str, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns seeds int64 [B] and positions int32 [B]."""
    found = []
    for name, value, dtype in (("seeds", seeds, torch.int64), ("positions", positions, torch.int32)):
        if value is None and rule != "greedy":
            raise ValueError(
                f"{name}: got None; expected {rows} integers, one for each request, since rule {rule} draws random "
                "numbers by seed and position; the same on every rank"
            )
        found.append(integer_rows(name, [0] * rows if value is None else value, rows, dtype, device))
    return found[0], found[1]
