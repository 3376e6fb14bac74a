"""What others do for a whole `rejection_verify_logits`, from the target's logits to the next token: filters and
softmax are inside of the clock, unlike those of the samplers in `benchmarks/kernels/peers.py`. The draft's
probabilities are made before it, because a drafter has them already.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.testing.samples_attention import Call

Run = Callable[[], Any]


def _whole_chain(call: Call) -> tuple[Tensor, Tensor, Tensor, float]:
    """Of chains: logits of target [B, N, V] and draft [B, N - 1, V], drafted tokens int32 [B, N - 1], and top-p. Ours
    takes one for each row; the samples have the same for all.
    """
    tokens, offsets, _, _, logits, sampling, draft, *_ = call.arguments
    rows = offsets.shape[0] - 1
    target, guess = (each.view(rows, -1, each.shape[1]) for each in (logits, draft[0]))
    return target, guess[:, :-1], tokens.view(rows, -1)[:, 1:].int().contiguous(), float(sampling[2][0])


def torch_chain(call: Call) -> Run:
    """The rejection rule in torch's own operators, filters included, with noise of torch's: dense distributions of
    all nodes.
    """
    target, guess, tokens, top_p = _whole_chain(call)
    draft, drafted = guess.float().softmax(2), tokens.long()[..., None]

    def run() -> tuple[Tensor, Tensor]:
        dist = kept(target.float().softmax(2), top_p)
        ratio = dist[:, :-1].gather(2, drafted)[..., 0] / draft.gather(2, drafted)[..., 0]
        count = (torch.rand_like(ratio) < ratio).long().cumprod(1).sum(1)
        last = dist.gather(1, count[:, None, None].expand(-1, 1, dist.shape[2]))[:, 0]
        place = count.clamp(max=draft.shape[1] - 1)[:, None, None].expand(-1, 1, draft.shape[2])
        refused = (count < draft.shape[1])[:, None]
        rest = (last - torch.where(refused, draft.gather(1, place)[:, 0], 0.0)).clamp(min=0)
        return count, (rest / torch.empty_like(rest).exponential_()).argmax(1)

    return run


def kept(dist: Tensor, top_p: float) -> Tensor:
    """The distribution cut to its likeliest tokens."""
    if top_p >= 1:
        return dist
    ordered, ids = dist.sort(dim=-1, descending=True)
    ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0)
    return torch.zeros_like(dist).scatter_(-1, ids, ordered / ordered.sum(-1, keepdim=True))


def flashinfer_whole_chain(call: Call) -> Run:
    """Softmax, its top-p filter and its chain sampling: what ours does in one operator."""
    sampling = import_module("flashinfer.sampling")
    target, guess, tokens, top_p = _whole_chain(call)
    q = guess.float().softmax(2).contiguous()

    def run() -> Any:
        p = target.flatten(0, 1).float().softmax(1)
        p = p if top_p >= 1 else sampling.top_p_renorm_probs(p, top_p)
        return sampling.chain_speculative_sampling(q, tokens, p.view(target.shape))

    return run


def vllm_whole_chain(call: Call) -> Run:
    """Its top-p mask, softmax, a bonus token for every row, and its rejection sampler."""
    sample = import_module("vllm.v1.sample.rejection_sampler").rejection_sample
    cut = import_module("vllm.v1.sample.ops.topk_topp_sampler").apply_top_k_top_p
    target, guess, tokens, top_p = _whole_chain(call)
    (rows, drafted), vocab = tokens.shape, target.shape[2]
    q = guess.float().softmax(2).reshape(-1, vocab)
    ends = torch.arange(1, rows + 1, dtype=torch.int32, device=q.device) * drafted
    share = None if top_p >= 1 else torch.full((rows * (drafted + 1),), top_p, device=q.device)
    settings = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(rows, device=q.device), generators={}
    )

    def run() -> Any:
        level = target.flatten(0, 1).to(torch.float32, copy=True)  # it masks in place
        p = (level if share is None else cut(level, None, share)).softmax(1).view(rows, drafted + 1, vocab)
        bonus = (p[:, -1] / torch.empty_like(p[:, -1]).exponential_()).argmax(1, keepdim=True).int()
        flat = p[:, :-1].reshape(-1, vocab)
        return sample(tokens.reshape(-1), [drafted] * rows, drafted, ends, q, flat, bonus, settings)

    return run
