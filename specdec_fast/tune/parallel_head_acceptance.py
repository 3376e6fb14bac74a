"""Acceptance rates of each parallel head's first, second, ... choice, from which the best static tree follows.

Rates are measured over texts that the target generates. Source: Cai et al. 2024 (Medusa), section 2.3.3.
Tests: tests/tune/test_parallel_head_acceptance.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.draft_runners.parallel_heads import AUX_HIDDEN_STATE, ParallelHeadsDrafter
from specdec_fast.interfaces import Target
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.sampling.sampling_tensors import SamplingTensors
from specdec_fast.tune.draft_tree_acceptance import write_texts


@torch.inference_mode()
def measure_heads(
    target: Target,
    drafter: ParallelHeadsDrafter,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int] = (),
) -> tuple[list[list[float]], int]:
    """Measures acceptance rates by head and rank on texts of the target.

    Args:
        target: The target, without rows.
        drafter: A drafter whose tree has the depth and the width to measure. Its `pick` orders the choices.
        prompts: Prompts as token ids.
        params: Temperature, length and first seed.
        eos_token_ids: Token ids that end a text.

    Returns:
        Rates [k][r]: the share of positions where choice r of head k is the token k + 1 behind the root. Then the
        number of tokens they were measured on.

    Raises:
        ValueError: If no prompt leads to a text.
    """
    hits, places, tokens = torch.zeros(0), torch.zeros(0, 1), 0
    for handle in write_texts(target, prompts, params, eos_token_ids):
        text = [*handle.prompt, *handle.tokens]
        start = max(len(handle.prompt) - 2, 0)  # the state before the first root
        count = len(text) - 2 - start
        if handle.error is not None or count < 1:
            continue
        target.cache.reserve(0, len(text))
        try:
            shape = chain_layout((0,), (len(text) - 1,), target.cache.lengths.device)
            fed = torch.tensor(text[:-1], dtype=torch.int64).to(shape.offsets.device)
            states = target.extend(
                shape.rows, fed, shape.offsets, logits=False, aux_hidden_states=(AUX_HIDDEN_STATE,)
            ).aux_hidden_states[AUX_HIDDEN_STATE]
        finally:
            target.cache.release([0])
        here = states[start : start + count]
        best = drafter.pick_tokens(
            here, _sampling(handle.params, count, here.device), _positions(start, count, here.device)
        ).cpu()
        if not len(hits):
            hits, places = torch.zeros(best.shape[0], best.shape[2]), torch.zeros(best.shape[0], 1)
        for head in range(len(best)):
            found = torch.tensor(text[start + 2 + head :], dtype=torch.int64)
            hits[head] += (best[head, : len(found)] == found[:, None]).sum(0)
            places[head] += len(found)
        tokens += len(handle.tokens)
    if not tokens:
        raise ValueError("tune tree: got no text to measure on; expected prompts that fit the target")
    return (hits / places.clamp(min=1)).tolist(), tokens


def _positions(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Returns the positions of `count` roots, int32 [count]."""
    return torch.arange(start + 1, start + 1 + count, dtype=torch.int32).to(device)


def _sampling(params: SamplingParams, count: int, device: torch.device) -> SamplingTensors:
    """Returns the temperature and seed of a request for `count` positions, without filters."""
    assert params.seed is not None
    temperature = torch.full((count,), float(params.temperature)).to(device)
    nothing = torch.zeros_like(temperature)
    return SamplingTensors(
        temperature,
        nothing.int(),
        nothing + 1,
        nothing,
        torch.full((count,), params.seed, dtype=torch.int64).to(device),
        all_greedy=params.temperature == 0,
        any_filter=False,
    )
