"""Log-probabilities of emitted tokens under the distribution they were chosen from. Tests:
tests/sampling/test_logprobs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec_fast.core.device_transfer import host_to_device
from specdec_fast.core.distributions import TokenDistributions


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An emitted token, its natural log-probability, and the likeliest tokens of its distribution with theirs,
    likeliest first.

    The distribution is the target's after everything that `SamplingParams` asks for. At temperature 0, where the
    distribution is a single token, it is the one of temperature 1 over the same edited logits, without top-k, top-p
    and min-p.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        top = [{"token": token, "logprob": logprob} for token, logprob in self.top]
        return {"token": self.token, "logprob": self.logprob, "top": top}


def token_logprobs(
    dists: TokenDistributions, nodes: Sequence[int], tokens: Sequence[int], count: int
) -> list[TokenLogprob]:
    """Log-probabilities of tokens, each after its node. nodes: rows of `dists`; count: alternatives, fewer if fewer are
    possible.
    """
    if not tokens:
        return []
    device = dists.logits.device
    own = dists.select(host_to_device(nodes[: len(tokens)], torch.int64, device))
    levels = own.effective_logits().to(own.lse.dtype)
    ids = torch.arange(levels.shape[1], device=device)
    kept = (levels > own.cut[:, None]) | ((levels == own.cut[:, None]) & (ids <= own.tie_id[:, None]))
    sampled = torch.where(kept, levels * own.inv_t[:, None] - own.lse[:, None], -torch.inf)
    logprobs = torch.where((own.inv_t == 0)[:, None], levels.log_softmax(1), sampled)
    chosen = logprobs.gather(1, host_to_device(tokens, torch.int64, device)[:, None]).squeeze(1).tolist()
    best = logprobs.topk(min(count, levels.shape[1]), dim=1)
    found = []
    for token, logprob, values, others in zip(tokens, chosen, best.values.tolist(), best.indices.tolist()):
        top = sorted(zip(others, values), key=lambda pair: (-pair[1], pair[0]))
        found.append(TokenLogprob(token, logprob, tuple(pair for pair in top if pair[1] > -torch.inf)))
    return found
