"""Verification of SGLang's draft trees in place of its `eagle_sample`, with the same tensors in and out.

Tests: tests/integrations/test_sglang.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.emitted_tokens import tokens_after_path
from specdec_fast.core.request_seeds import SEED_BITS, request_seed, seeds_with_ids
from specdec_fast.embedding import verify_links

logger = logging.getLogger(__name__)

_OWN_TEXT = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP", "DFLASH", "DSPARK")
"""SGLang's algorithms whose drafts depend on the request's own text alone."""

Answer = tuple[Tensor, Tensor, Tensor]
"""`predict` int32 [bs * D], accepted tokens with the next one int32 [bs], `accept_index` int32 [bs, depth]."""


class TreeSampler:
    """Wraps `eagle_sample`: trees are verified by a rule, and whatever it cannot verify goes to SGLang's own function.

    Args:
        rule: Name of the rule.
    """

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self._told: set[str] = set()

    def __call__(
        self,
        original: Callable[..., Answer],
        verify_input: Any,
        batch: Any,
        logits_output: Any,
        grammar_mask: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Answer:
        """Verifies one batch. The parameters are those of `eagle_sample` in SGLang 0.5.23.

        Args:
            original: SGLang's own function.
            verify_input: Draft tokens and links; `draft_probs` if the tokens were sampled.
            batch: Requests, their lengths and their sampling parameters.
            logits_output: The target's logits after every node, `next_token_logits` [bs * D, V].
            grammar_mask: Mask of forbidden tokens, or None.
            *rest: Further arguments of `eagle_sample`.
            **options: Further arguments of `eagle_sample`.

        Returns:
            `predict`: the token after each accepted node, int32 [bs * D]. The number of emitted tokens, int32 [bs].
            `accept_index`: the accepted nodes, root first and padded with -1, int32 [bs, depth].
        """
        arguments = (verify_input, batch, logits_output, grammar_mask, *rest)
        if batch.forward_mode.is_idle():
            return original(*arguments, **options)
        group = parallel_group()
        found, reason = None, "another tensor-parallel rank could not verify them; see its log"
        try:
            refusal = why_not(batch, rest, options)
            if refusal is None:
                found = self._verify(verify_input, batch, logits_output, grammar_mask)
            reason = refusal or reason
        except Exception as error:  # SGLang's function serves the batch, whose logits are as they were
            reason = f"{type(error).__name__}: {error}"
        if all_ranks_have(found is not None, group) and found is not None:
            answer, logits = found
            broadcast_from_first_rank(answer, group)
            logits_output.next_token_logits = logits  # log-probabilities are computed from them
            return answer
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("SGLang verifies these batches itself, not rule %s: %s", self.rule, reason)
        return original(*arguments, **options)

    def _verify(self, verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any) -> tuple[Answer, Tensor]:
        """Verifies the trees of a batch by this rank alone. Nothing of SGLang's changes.

        Returns:
            The answer, and the processed logits.
        """
        info, nodes = batch.sampling_info, verify_input.draft_token_num
        rows = len(batch.seq_lens)
        logits = processed_logits(logits_output.next_token_logits, info, nodes, grammar_mask)
        found = verify_links(
            logits,
            verify_input.draft_token.reshape(rows, nodes),
            verify_input.retrieve_next_token,
            verify_input.retrieve_next_sibling,
            getattr(verify_input, "draft_probs", None),
            max_depth=verify_input.max_tree_depth - 1,
            rule=self.rule,
            seeds=request_seeds(batch, self.rule, logits.device),
            positions=batch.seq_lens,
            temperature=info.temperatures.flatten(),
            top_k=info.top_ks if info.need_top_k_sampling else 0,
            top_p=info.top_ps if info.need_top_p_sampling else 1.0,
            min_p=info.min_ps if info.need_min_p_sampling else 0.0,
        )
        answer = as_eagle_answer(
            verify_input.draft_token.flatten(),
            verify_input.retrieve_index,
            found.path,
            found.num_accepted,
            found.next_token,
        )
        return answer, logits


def why_not(batch: Any, rest: tuple[Any, ...], options: dict[str, Any]) -> str | None:
    """Returns why a batch is left to SGLang, in one sentence, or None if its trees can be verified.

    Args:
        batch: SGLang's batch.
        rest: Positional arguments of `eagle_sample` after the mask of the grammar.
        options: Named arguments of `eagle_sample`.
    """
    if (rest and rest[0] is not None) or options.get("uno_target_max_top_k") is not None:
        return "UNO's trees are sampled in a way that the rule does not know"
    if options.get("watermark_state") is not None and batch.sampling_info.has_watermark_candidates:
        return "watermarks choose the tokens"
    if import_module("sglang.srt.speculative.spec_utils").SIMULATE_ACC_LEN > 0:
        return "SGLANG_SIMULATE_ACC_LEN replaces verification"
    settings = import_module("sglang.srt.runtime_context").get_spec()
    thresholds = settings.speculative_accept_threshold_single, settings.speculative_accept_threshold_acc
    if min(thresholds) < 1:
        return f"got accept thresholds {thresholds}, which are approximate; expected 1, since the rule is lossless"
    return None


def processed_logits(logits: Tensor, info: Any, nodes: int, grammar_mask: Any) -> Tensor:
    """Applies what SGLang applies before it samples: penalties, biases and the mask of a grammar.

    As in SGLang, penalties of a request count its committed tokens and are the same at all of its nodes.

    Args:
        logits: The target's logits, [bs * D, V]. They are cleaned of NaN in place as SGLang does, and not changed
            otherwise.
        info: The batch's `SamplingBatchInfo`.
        nodes: D, the nodes of each tree.
        grammar_mask: SGLang's mask, or None.

    Returns:
        The logits, or a changed copy.
    """
    import_module("sglang.srt.utils.async_probe").sanitize_nan_logits(logits, "verify: target model logits")
    additive, scaling, bias = info.acc_additive_penalties, info.acc_scaling_penalties, info.logit_bias
    if all(part is None for part in (additive, scaling, bias, grammar_mask)):
        return logits
    changed = logits.clone()
    if additive is not None:
        changed.add_(additive.repeat_interleave(nodes, 0))
    if scaling is not None:
        factors = scaling.repeat_interleave(nodes, 0)
        changed.copy_(torch.where(changed < 0, changed * factors, changed / factors))
    if bias is not None:
        changed.add_(bias.repeat_interleave(nodes, 0))
    if grammar_mask is not None:
        grammar_mask.apply(changed)
    return changed


def drafts_across_requests() -> bool:
    """Returns whether drafts of one request may depend on the texts of others, whose seeds may be the same.

    NGRAM has one corpus for all requests. Algorithms of plugins count as such.
    """
    name = import_module("sglang.srt.runtime_context").get_spec().speculative_algorithm
    return str(name).upper() not in _OWN_TEXT


def request_seeds(batch: Any, rule: str, device: torch.device) -> Tensor:
    """Returns the seeds of a batch, int64 [bs]: SGLang's own where it has them, else those of the requests' ids.

    Own seeds are joined with the ids of the requests if drafts come from other requests, except under rule `replay`.

    Args:
        batch: SGLang's batch.
        rule: Name of the rule.
        device: Device of the result.
    """
    ids = [str(request.rid) for request in batch.reqs]
    own = batch.sampling_info.sampling_seed
    if own is None:
        return host_to_device([request_seed(None, 0, each) for each in ids], torch.int64, device)
    seeds: Tensor = own.to(device=device, dtype=torch.int64) & SEED_BITS
    return seeds_with_ids(seeds, ids) if rule != "replay" and drafts_across_requests() else seeds


def as_eagle_answer(
    tokens: Tensor, node_index: Tensor, path: Tensor, num_accepted: Tensor, next_token: Tensor
) -> Answer:
    """Returns an acceptance as `eagle_sample` does, without a read on the host.

    Args:
        tokens: Tokens of all nodes, [bs * D].
        node_index: SGLang's `retrieve_index`, [bs, D].
        path: Accepted nodes, root first and padded with -1, [bs, depth].
        num_accepted: Accepted draft tokens, [bs].
        next_token: The token after them, [bs].

    Returns:
        `predict`: at each accepted node the token that follows it, else 0, int32 [bs * D]. The number of emitted
        tokens, int32 [bs]. `accept_index`, int32 [bs, depth].
    """
    on_path = path >= 0
    following = tokens_after_path(tokens, path, num_accepted, next_token)
    accept_index = torch.where(on_path, node_index.flatten()[path.long()], -1)
    size = tokens.shape[0]
    predict = torch.zeros(size + 1, dtype=torch.int32, device=path.device)  # the last entry takes the padding
    predict[torch.where(on_path, accept_index, size).flatten()] = following.flatten()
    return predict[:size], num_accepted.to(torch.int32) + 1, accept_index.to(torch.int32)


def parallel_group() -> Any:
    """Returns the group of tensor-parallel ranks that verify the same batch."""
    parallel = import_module("sglang.srt.runtime_context").get_parallel()
    attention = import_module("sglang.srt.layers.dp_attention").is_dp_attention_enabled()
    return parallel.attn_tp_group if attention else parallel.tp_group


def all_ranks_have(found: bool, group: Any) -> bool:
    """Returns whether all tensor-parallel ranks have found an answer. They compare on the host.

    A rank that went to SGLang's function alone would leave the others waiting in a broadcast.

    Args:
        found: Whether this rank has found one.
        group: SGLang's group of ranks.
    """
    if group.world_size == 1:
        return found
    import torch.distributed as dist

    every = torch.tensor([int(found)])
    dist.all_reduce(every, op=dist.ReduceOp.MIN, group=group.cpu_group)
    return bool(every.item())


def broadcast_from_first_rank(answer: Answer, group: Any) -> None:
    """Gives all tensor-parallel ranks the answer of the first one, since their logits differ by rounding.

    Args:
        answer: The tensors of this rank, which are overwritten.
        group: SGLang's group of ranks.
    """
    if group.world_size > 1:
        for part in answer:
            group.broadcast(part, src=0)
