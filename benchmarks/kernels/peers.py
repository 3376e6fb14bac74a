"""Other libraries' implementations of the same calls, from installed packages or from the folders in SPECDEC_PEERS.

None is part of this repository. A peer that is missing, or that cannot run a call, is reported with its reason. `make`
turns one of our calls (`specdec_kernels.testing.agreement.SAMPLES`) into a callable without arguments on the same data.

Results of attention and of KV moves are compared with ours before they are timed. Samplers use their own noise, so
their results cannot be compared. The preparation of a call (softmax, plans, masks) is not timed, which favours the
peer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.verify_peers import flashinfer_whole_chain, torch_chain, vllm_whole_chain
from specdec_kernels.testing.samples_attention import Call

sys.path += [each for each in os.environ.get("SPECDEC_PEERS", "").split(os.pathsep) if each]
Run = Callable[[], Any]


@dataclass(frozen=True)
class Peer:
    """What another project does for one of our calls.

    Attributes:
        name: What it is called in results.
        op: The operator that it is compared with.
        package: What must be importable.
        make: Our call as theirs.
        gpu: It runs on a GPU only.
        same: Whether its result, or its content of the caches, equals ours up to rounding.
        late: It takes long to prepare (it compiles for each shape), so that it runs after all others.
    """

    name: str
    op: str
    package: str
    make: Callable[[Call], Run]
    gpu: bool = True
    same: bool = False
    late: bool = False

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run here, or None."""
        if self.gpu and device.type != "cuda":
            return "needs a GPU"
        root = self.package.partition(".")[0]
        if find_spec(root) is None:
            return f"{root} is not installed; install it, or name its folder in SPECDEC_PEERS"
        return None


def _dense(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries [B, H, N, D], keys and values [B, Hkv, L, D] side by side, and who sees whom, bool [B, N, L]."""
    query, keys, values, table, lengths, _, ancestors, _ = call.arguments
    rows, nodes = table.shape[0], query.shape[0] // table.shape[0]
    length = int(lengths[0]) + nodes
    k, v = (pool[table.long()].flatten(1, 2)[:, :length].transpose(1, 2).contiguous() for pool in (keys, values))
    bit = torch.arange(nodes, device=query.device)
    seen = (ancestors.view(rows, nodes, -1)[:, :, bit // 32] >> (bit % 32).int()) & 1
    prefix = seen.new_ones(rows, nodes, length - nodes)
    q = query.view(rows, nodes, *query.shape[1:]).transpose(1, 2).contiguous()
    return q, k, v, torch.cat([prefix, seen], 2).bool()


def _packed(out: Tensor) -> Tensor:
    """Converts a result [B, H, N, D] to the layout of our operator."""
    return out.transpose(1, 2).flatten(0, 1)


def sdpa(call: Call) -> Run:
    q, k, v, mask = _dense(call)
    return lambda: _packed(
        scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=call.options["scale"], enable_gqa=True)
    )


def flex(call: Call) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, mask = _dense(call)
    rows, _, nodes, _ = q.shape
    blocks = create_block_mask(
        lambda b, h, i, j: mask[b, i, j], rows, None, nodes, k.shape[2], device=str(q.device), BLOCK_SIZE=128
    )
    attend: Any = torch.compile(flex_attention, dynamic=False) if q.is_cuda else flex_attention
    return lambda: _packed(attend(q, k, v, block_mask=blocks, scale=call.options["scale"], enable_gqa=True))


def flashinfer_mask(call: Call) -> Run:
    flashinfer = import_module("flashinfer")
    query, keys, values, table, _, offsets, *_ = call.arguments
    *_, mask = _dense(call)
    rows, page = table.shape[0], keys.shape[1]
    length = mask.shape[2]
    used = -(-length // page)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=query.device), "NHD"
    )
    indptr = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * used
    last = torch.full((rows,), length - (used - 1) * page, dtype=torch.int32, device=query.device)
    wrapper.plan(
        offsets, indptr, table[:, :used].reshape(-1).contiguous(), last, query.shape[1], keys.shape[2], query.shape[2],
        page, custom_mask=mask.reshape(-1), sm_scale=call.options["scale"], q_data_type=query.dtype,
        kv_data_type=keys.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(query, (keys, values))


def vllm_unified(call: Call) -> Run:
    """Causal chains in place of the tree: it has no mask per request."""
    attend = import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    query, keys, values, table, lengths, offsets, *_ = call.arguments
    nodes, out = query.shape[0] // table.shape[0], torch.empty_like(query)
    seen = lengths + nodes
    return partial(
        attend, q=query, k=keys, v=values, out=out, cu_seqlens_q=offsets, max_seqlen_q=nodes, seqused_k=seen,
        max_seqlen_k=int(seen.max()), softmax_scale=call.options["scale"], causal=True, window_size=(-1, -1),
        block_table=table, softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
    )  # fmt: skip


def sglang_extend(call: Call) -> Run:
    """Its two stages: the committed prefix without a mask, then the nodes under the tree's."""
    attend = import_module("sglang.srt.layers.attention.triton_ops.extend_attention").extend_attention_fwd
    query, keys, values, table, _, offsets, *_ = call.arguments
    *_, mask = _dense(call)
    rows, nodes, seen = mask.shape
    at, prefix = torch.arange(seen, device=query.device), seen - nodes
    slots = table.long()[:, at // keys.shape[1]] * keys.shape[1] + at % keys.shape[1]
    pools = [pool.flatten(0, 1) for pool in (keys, values)]
    own = [pool[slots[:, prefix:].flatten()] for pool in pools]
    committed, row = slots[:, :prefix].flatten(), torch.arange(rows + 1, device=query.device)
    out, tree = torch.empty_like(query), (mask.flatten(), True, row * nodes * seen)
    scales = {"k_scale": 1.0, "v_scale": 1.0} if "k_scale" in signature(attend).parameters else {}

    def run() -> Tensor:
        attend(
            query, *own, out, *pools, offsets, (row * prefix).int(), committed, *tree, nodes,
            sm_scale=call.options["scale"], **scales,
        )  # fmt: skip
        return out

    return run


def fa3_cascade(call: Call) -> Run:
    """Two passes as SGLang runs trees: all nodes over the committed prefix, then causal over the nodes themselves (a
    chain in place of the tree), joined by their normalisers.
    """
    attend = import_module("flash_attn_interface").flash_attn_with_kvcache
    _, keys, values, table, lengths, *_ = call.arguments
    q, k, v, _ = _dense(call)
    nodes, scale = q.shape[2], call.options["scale"]
    own_k, own_v = (each[:, :, -nodes:].transpose(1, 2).contiguous() for each in (k, v))
    queries = q.transpose(1, 2).contiguous()
    kind = {"softmax_scale": scale, "return_softmax_lse": True}

    def run() -> Tensor:
        out, lse, *_ = attend(queries, keys, values, cache_seqlens=lengths, page_table=table, causal=False, **kind)
        own, own_lse, *_ = attend(queries, own_k, own_v, causal=True, **kind)
        share = torch.sigmoid(lse - own_lse).transpose(1, 2)[..., None].to(out.dtype)
        return (out * share + own * (1 - share)).flatten(0, 1)

    return run


def index_copy(call: Call) -> Run:
    """One gather and one scatter per layer and side."""
    caches, source, target = _moves(call)
    flat = [cache.flatten(0, 1) for cache in caches]

    def run() -> None:
        for cache in flat:
            cache.index_copy_(0, target, cache.index_select(0, source))

    return run


def _moves(call: Call) -> tuple[list[Tensor], Tensor, Tensor]:
    """Caches, and the flat slots that accepted nodes leave and reach, int64."""
    caches, table, lengths, path, offsets, accepted, *_ = call.arguments
    page = caches[0].shape[1]
    found: tuple[list[int], list[int]] = [], []
    for row, (walk, count) in enumerate(zip(path.tolist(), accepted.tolist())):
        for place, node in enumerate(walk[: count + 1]):
            for slots, at in zip(found, (node - int(offsets[row]), place)):
                at += int(lengths[row])
                slots.append(int(table[row, at // page]) * page + at % page)
    source, target = (torch.tensor(each, device=table.device) for each in found)
    return list(caches), source, target


def sglang_move(call: Call) -> Run:
    kernel = import_module("sglang.srt.mem_cache.memory_pool").copy_all_layer_kv_cache_tiled
    caches, source, target = _moves(call)
    device = source.device
    pointers = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.uint64, device=device)
    row = caches[0].stride(1) * caches[0].element_size()
    strides, tile = torch.full((len(caches),), row, dtype=torch.int64, device=device), 512 if row >= 8192 else 256
    grid, count = (len(caches), -(-row // tile)), source.numel()
    upper = 1 << max(count - 1, 1).bit_length()
    return lambda: kernel[grid](pointers, strides, target, source, count, upper, BYTES_PER_TILE=tile)


def _probabilities(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Of chains: target [B, N, V] and draft [B, N - 1, V] as float32 probabilities, drafted tokens int32 [B, N - 1]."""
    tokens, offsets, _, _, target, draft = call.arguments[:6]
    rows = offsets.shape[0] - 1
    nodes, vocab = tokens.shape[0] // rows, target[0].shape[1]
    p, q = (dist[0].float().softmax(1).view(rows, nodes, vocab) for dist in (target, draft))
    return p, q[:, :-1].contiguous(), tokens.view(rows, nodes)[:, 1:].int().contiguous()


def flashinfer_chain(call: Call) -> Run:
    sampling = import_module("flashinfer.sampling")
    p, q, tokens = _probabilities(call)
    return partial(sampling.chain_speculative_sampling, q, tokens, p)


def vllm_rejection(call: Call) -> Run:
    sample = import_module("vllm.v1.sample.rejection_sampler").rejection_sample
    p, q, tokens = _probabilities(call)
    rows, drafted, vocab = q.shape
    ends = torch.arange(1, rows + 1, dtype=torch.int32, device=p.device) * drafted
    bonus = p[:, -1].argmax(1, keepdim=True).int()
    settings = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(rows, device=p.device), generators={}
    )
    flat = tokens.reshape(-1), [drafted] * rows, drafted, ends
    return partial(sample, *flat, q.reshape(-1, vocab), p[:, :-1].reshape(-1, vocab).contiguous(), bonus, settings)


def _sglang_trees(call: Call) -> tuple[Tensor, ...]:
    """Returns SGLang's output tensors (tokens, path, number accepted), then candidates and the links of their trees."""
    tokens, offsets, child, sibling, *_ = call.arguments
    rows, device = offsets.shape[0] - 1, tokens.device
    nodes, depth = tokens.shape[0] // rows, call.options["max_depth"] + 1

    def within(links: Tensor) -> Tensor:
        return torch.where(links < 0, -1, links - offsets[:-1].repeat_interleave(nodes)).view(rows, nodes).long()

    at = torch.arange(rows * nodes, device=device).view(rows, nodes)
    predicted = torch.zeros(rows * nodes, dtype=torch.int32, device=device)
    path = torch.full((rows, depth), -1, dtype=torch.int32, device=device)
    count = torch.zeros(rows, dtype=torch.int32, device=device)
    return predicted, path, count, tokens.view(rows, nodes), at, within(child), within(sibling)


def sglang_tree(call: Call) -> Run:
    """Target-only sampling on our trees: no draft probabilities."""
    sample, trees = import_module("sgl_kernel").tree_speculative_sampling_target_only, _sglang_trees(call)
    rows, nodes = trees[3].shape
    p = call.arguments[6][0].float().softmax(1).view(rows, nodes, -1)
    uniforms, last_uniform = torch.rand(rows, nodes, device=p.device), torch.rand(rows, device=p.device)
    return partial(sample, *trees, uniforms, last_uniform, p, torch.zeros_like(p), 1.0, 1.0, True)


def sglang_greedy(call: Call) -> Run:
    """The walk along the target's choices, which are made before."""
    trees = _sglang_trees(call)
    return partial(import_module("sgl_kernel").verify_tree_greedy, *trees, call.arguments[4].view_as(trees[3]))


def transformers_sampling(call: Call) -> Run:
    """Runs one request after the other, since the function takes one at a time."""
    sample = import_module("transformers.generation.utils")._speculative_sampling
    tokens, offsets, _, _, target, draft = call.arguments[:6]
    rows = offsets.shape[0] - 1
    nodes = tokens.shape[0] // rows
    views = [each.view(rows, nodes, -1) for each in (target[0].float(), draft[0].float())]
    ids = tokens.view(rows, nodes)

    def run() -> None:
        for row in range(rows):
            sample(ids[row : row + 1], views[1][row : row + 1, 1:], nodes - 1, views[0][row : row + 1])

    return run


def topk_of_log_softmax(call: Call) -> Run:
    """Children by torch's own operators: two passes over the logits and one search, without the best of each tree."""
    logits, _, _, _, _, scores = call.arguments
    return lambda: (scores[:, None] + logits.float().log_softmax(1)).topk(call.options["width"], 1)


def unfold_and_compare(call: Call) -> Run:
    """The longest suffix only, over rows of equal length: every window beside the newest tokens."""
    tokens, starts, _, n_max, _, wanted = call.arguments
    rows = tokens.view(starts.shape[0], -1)
    ahead = torch.arange(wanted, device=tokens.device)

    def run() -> Tensor:
        same = (rows[:, :-1].unfold(1, n_max, 1) == rows[:, None, -n_max:]).all(2)
        index = torch.arange(same.shape[1], device=tokens.device)
        last = torch.where(same, index, 0).amax(1) + n_max
        return rows.gather(1, (last[:, None] + ahead).clamp(max=rows.shape[1] - 1))

    return run


PEERS = [
    Peer("torch sdpa with mask", "tree_attention", "torch", sdpa, gpu=False, same=True),
    Peer("torch FlexAttention", "tree_attention", "torch", flex, gpu=False, same=True, late=True),
    Peer("FlashInfer custom mask", "tree_attention", "flashinfer", flashinfer_mask, same=True, late=True),
    Peer("vLLM unified attention (chain)", "tree_attention", "vllm", vllm_unified),
    Peer("SGLang Triton extend", "tree_attention", "sglang", sglang_extend, same=True),
    Peer("FA3 cascade (chain)", "tree_attention", "flash_attn_interface", fa3_cascade),
    Peer("torch index_copy per layer", "kv_commit", "torch", index_copy, gpu=False, same=True),
    Peer("SGLang KV move", "kv_commit", "sglang", sglang_move, same=True),
    Peer("FlashInfer chain sampling", "rejection_verify", "flashinfer", flashinfer_chain, late=True),
    Peer("vLLM rejection sampler", "rejection_verify", "vllm", vllm_rejection),
    Peer("transformers _speculative_sampling", "rejection_verify", "transformers", transformers_sampling, gpu=False),
    Peer("torch operators, filters included", "rejection_verify_logits", "torch", torch_chain, gpu=False),
    Peer(
        "FlashInfer softmax, top-p and chain",
        "rejection_verify_logits",
        "flashinfer",
        flashinfer_whole_chain,
        late=True,
    ),
    Peer("vLLM top-p and rejection sampler", "rejection_verify_logits", "vllm", vllm_whole_chain),
    Peer("SGLang tree sampling", "recursive_rejection_verify", "sgl_kernel", sglang_tree),
    Peer("SGLang greedy tree walk", "exact_match_verify", "sgl_kernel", sglang_greedy),
    Peer("torch log_softmax and topk", "tree_expand", "torch", topk_of_log_softmax, gpu=False),
    Peer("torch unfold and compare", "ngram_match", "torch", unfold_and_compare, gpu=False),
]
