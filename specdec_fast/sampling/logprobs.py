"""Log-probabilities of emitted tokens under the distribution they were sampled from, and of the tokens of a prompt.

Tests: tests/sampling/test_logprobs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.distributions import TokenDistributions


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token.

    For emitted tokens, the distribution is the target's after all `SamplingParams`. At temperature 0, where it is a
    single token, it is the distribution at temperature 1 over the same processed logits, without top-k, top-p and
    min-p. For tokens of a prompt, it is the model's own, without any parameters.

    Attributes:
        token: Token id.
        logprob: Its natural log-probability.
        top: The most probable tokens with their log-probabilities, the most probable first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns the values for JSON."""
        top = [{"token": token, "logprob": logprob} for token, logprob in self.top]
        return {"token": self.token, "logprob": self.logprob, "top": top}


def token_logprobs(
    dists: TokenDistributions, nodes: Sequence[int], tokens: Sequence[int], count: int
) -> list[TokenLogprob]:
    """Computes log-probabilities of emitted tokens.

    Args:
        dists: The target's distributions after the M nodes of a step.
        nodes: The node before each token, at least as many as tokens.
        tokens: Emitted tokens of one request.
        count: Most probable tokens to report for each. There are fewer if fewer are possible.

    Returns:
        One entry for each token.
    """
    if not tokens:
        return []
    device = dists.logits.device
    own = dists.select(host_to_device(nodes[: len(tokens)], torch.int64, device))
    logits = own.effective_logits().to(own.lse.dtype)
    ids = torch.arange(logits.shape[1], device=device)
    kept = (logits > own.cut[:, None]) | ((logits == own.cut[:, None]) & (ids <= own.tie_id[:, None]))
    sampled = torch.where(kept, logits * own.inv_t[:, None] - own.lse[:, None], -torch.inf)
    logprobs = torch.where((own.inv_t == 0)[:, None], logits.log_softmax(1), sampled)
    return _collect(logprobs, tokens, count)


def logprobs_of_tokens(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Computes log-probabilities of the tokens of a text under a model's own distributions.

    Args:
        logits: Logits before each token, any float dtype, [N, V].
        tokens: The N tokens.
        count: Most probable tokens to report for each.

    Returns:
        One entry for each token.
    """
    return _collect(logits.float().log_softmax(1), tokens, count)


def _collect(logprobs: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Entries of tokens from log-probabilities [N, V]."""
    at = host_to_device(tokens, torch.int64, logprobs.device)
    of_tokens = logprobs.gather(1, at[:, None]).squeeze(1).tolist()
    best = logprobs.topk(min(count, logprobs.shape[1]), dim=1)
    found = []
    for token, logprob, values, others in zip(tokens, of_tokens, best.values.tolist(), best.indices.tolist()):
        top = sorted(zip(others, values), key=lambda pair: (-pair[1], pair[0]))
        found.append(TokenLogprob(token, logprob, tuple(pair for pair in top if pair[1] > -torch.inf)))
    return found
