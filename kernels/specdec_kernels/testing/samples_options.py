"""Sample calls with options that the plain samples do not use, by operator and name of the case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch.backend_request import use_backend
from ..dispatch.operator import REFERENCE
from ..ops._proposals.checks import DETERMINISTIC, SAMPLED, SAMPLED_WITHOUT_DETERMINISTIC, SAMPLED_WITHOUT_EARLIER
from ..ops.distribution_stats import distribution_stats
from ..ops.process_logits import Forced
from ..ops.process_logits_overlay import process_logits_overlay
from ..ops.tree_grow import Growth, tree_grow
from ..overlay import Overlay
from .samples_attention import Call, Sizes, attention, drafting, int32, random, size_of, to_default_device
from .samples_recurrent import RECURRENT_OPTIONS
from .samples_verify import (
    chain,
    chain_logits,
    dist,
    draw,
    expand,
    match,
    process,
    replay,
    replay_walk,
    seeds,
    statistics,
    thresholds,
    tree,
    typical,
)

Make = Callable[[Sizes], Call]
FILTERS = {"top-k": (1.0, 20, 1.0, 0.0), "top-p": (1.0, 0, 0.6, 0.0), "min-p": (0.7, 0, 1.0, 0.05)}
"""Temperature, top-k, top-p and min-p."""
KINDS = {
    "sampled": (SAMPLED, SAMPLED),
    "sampled without replacement": (SAMPLED_WITHOUT_EARLIER, SAMPLED_WITHOUT_EARLIER),
    "deterministic and sampled": (DETERMINISTIC, SAMPLED_WITHOUT_DETERMINISTIC),
}
"""Proposal kinds of the two children of a node."""


def filter_settings(name: str, count: int) -> tuple[Tensor, ...]:
    """Returns the arguments of `distribution_stats` for a filter and `count` rows."""
    temperature, top_k, top_p, min_p = FILTERS[name]
    one = torch.ones(count)
    return temperature * one, int32([top_k] * count), top_p * one, min_p * one


def attention_with(
    sizes: Sizes, *, causal: bool = False, sinks: bool = False, float8: bool = False, **options: Any
) -> Call:
    """Attention with options. Tensors among them are made here."""
    call = attention(sizes)
    query, keys, values, *where, ancestors, depth = call.arguments
    if causal:
        ancestors = depth = None
    if sinks:
        options["sinks"] = random(sizes, sizes.heads)
    if float8:
        keys, values = (cache.float().to(torch.float8_e4m3fn) for cache in (keys, values))
        steps = torch.arange(sizes.kv_heads) / sizes.kv_heads
        options |= {"key_scale": 0.5 + steps, "value_scale": 1.5 - steps}
    arguments = (query, keys, values, *where, ancestors, depth)
    return replace(call, arguments=arguments, options=call.options | options)


def without_temperature(call: Call) -> Call:
    """The call with draft chains of the most likely tokens."""
    return replace(call, arguments=(*call.arguments[:7], None, *call.arguments[8:]))


def wide(width: int) -> Make:
    """Attention with heads of this width."""
    return lambda sizes: attention(replace(sizes, width=width))


def with_dist(make: Make, name: str, place: int) -> Make:
    """Replaces the target distribution, the tuple at index `place` of the arguments, by a filtered one."""

    def make_call(sizes: Sizes) -> Call:
        call = make(sizes)
        matrix = call.arguments[place][0]
        target = (matrix, *distribution_stats(matrix, *filter_settings(name, len(matrix))))
        return replace(call, arguments=(*call.arguments[:place], target, *call.arguments[place + 1 :]))

    return make_call


def with_settings(make: Make, name: str, place: int) -> Make:
    """Replaces the sampling settings at index `place` of the arguments, from which the operator makes distributions."""

    def make_call(sizes: Sizes) -> Call:
        call = make(sizes)
        count = len(call.arguments[0])
        return replace(
            call, arguments=(*call.arguments[:place], filter_settings(name, count), *call.arguments[place + 1 :])
        )

    return make_call


def filter_statistics(name: str) -> Make:
    """Statistics of filtered rows."""

    def make_call(sizes: Sizes) -> Call:
        matrix, *_ = statistics(sizes).arguments
        return Call((matrix, *filter_settings(name, len(matrix))), bytes=size_of(matrix))

    return make_call


def greedy_and_pivots(sizes: Sizes) -> Call:
    """Every other row greedy, with masses, and with the most likely token of every row as its pivot."""
    matrix, _, *rest = statistics(sizes).arguments
    temperature = (torch.arange(len(matrix)) % 2).float()
    options = {"masses": True, "pivots": matrix.float().argmax(1)}
    return Call((matrix, temperature, *rest), options, bytes=size_of(matrix))


def filter_draw(make: Make, name: str, parts: tuple[int, ...]) -> Make:
    """Samples from filtered rows. `parts` are the indices of the statistics that the operator takes."""

    def make_call(sizes: Sizes) -> Call:
        call = make(sizes)
        matrix = call.arguments[0]
        known = distribution_stats(matrix, *filter_settings(name, len(matrix)))
        selected = [known[part] for part in parts]
        return replace(call, arguments=(matrix, *selected, *call.arguments[1 + len(selected) :]))

    return make_call


def overlay_of(sizes: Sizes) -> Overlay:
    """Returns an overlay of penalties, bias and masks for the logits of the samples."""
    with use_backend(REFERENCE):
        return process_logits_overlay(*process(sizes).arguments)


def under_overlay(make: Make) -> Make:
    """Adds an overlay of logits processors to the call."""
    return lambda sizes: _with_options(make(sizes), overlay=overlay_of(sizes))


def chain_under_overlay(sizes: Sizes) -> Call:
    """The chain sample, with the target distribution of the processed logits."""
    call, overlay = chain(sizes), overlay_of(sizes)
    *nodes, target, draft, ids, own, roots = call.arguments
    processed = dist(overlay.apply(target[0]))
    arguments = (*nodes, (target[0], *processed[1:]), draft, ids, own, roots)
    return _with_options(replace(call, arguments=arguments), overlay=overlay)


def _with_options(call: Call, **options: Any) -> Call:
    return replace(call, options=call.options | options)


def by_rule(make: Make) -> Make:
    """Uses the block rule."""
    return lambda sizes: _with_options(make(sizes), rule="block")


def with_kinds(make: Callable[..., Call], name: str, count: int | None = None) -> Make:
    """Uses sampled proposals of these kinds. A count gives the call of the operator that shows thresholds."""

    def make_call(sizes: Sizes) -> Call:
        call = make(sizes, KINDS[name])
        return call if count is None else thresholds(call, count)

    return make_call


def noisy_expand(sizes: Sizes) -> Call:
    """Gumbel top-k, with scores that favour first choices."""
    call = expand(sizes)
    own, positions = seeds(len(call.arguments[0]))
    return _with_options(call, seeds=own, positions=positions, sharpness=1.5)


def last_level(sizes: Sizes, *, levels: int, noise: bool) -> Call:
    """The last of `levels` levels of growing trees. The reference grows the levels before it."""
    keep, width = 8, 4
    growth = Growth.room(int32([keep] * sizes.rows), keep, levels, dist(random(sizes, 1, sizes.vocab))[1].dtype)
    growth.tokens[:, 0] = 1
    own, positions = seeds(sizes.rows)
    options: dict[str, Any] = {"seeds": own, "positions": positions} if noise else {}
    counts = [1] * sizes.rows
    for level in range(levels):
        bounds = int32([sum(counts[:row]) for row in range(sizes.rows + 1)])
        matrix, inv_t, _, cut, tie = dist(random(sizes, sum(counts), sizes.vocab, scale=2.0))
        arguments = (matrix, inv_t, cut, tie, bounds, growth)
        options |= {"level": level, "width": width, "last": level == levels - 1}
        if level < levels - 1:
            with use_backend(REFERENCE):
                tree_grow(*arguments, **options)
            front = growth.nodes[:, 1 + level * keep : 1 + level * keep + width]
            counts = (front >= 0).sum(1).tolist()
    written = growth.tokens, growth.scores, growth.parents, growth.nodes
    return Call(arguments, options, written, bytes=size_of(matrix))


def forced(sizes: Sizes) -> Call:
    """All four logits processors, with forced tokens after every root and deeper in the first tree."""
    call = process(sizes)
    root = int(call.arguments[1].roots[0])
    bounds, ids = int32([0, *range(2, sizes.rows + 2)]), int32(range(3, sizes.rows + 4))
    entries = Forced(bounds, int32([root + 1, root + 2] + [root + 1] * (sizes.rows - 1)), ids)
    arguments = (*call.arguments[:4], entries, *call.arguments[5:])
    return replace(call, arguments=arguments)


def pairs(sizes: Sizes) -> Call:
    """Histories over three tokens, in which every pair occurs often with different successors."""
    tokens, starts, lengths, *_ = match(sizes).arguments
    generator = torch.Generator().manual_seed(1)
    tokens = to_default_device(torch.randint(3, tokens.shape, generator=generator, device="cpu"))
    return Call((tokens, starts, lengths, 2, 1, 8), bytes=size_of(tokens))


OPTIONS: dict[str, dict[str, Make]] = {
    **RECURRENT_OPTIONS,
    "tree_attention": {
        "window": partial(attention_with, window=9),
        "softcap": partial(attention_with, softcap=5.0),
        "sinks": partial(attention_with, sinks=True),
        "log-sum-exp": partial(attention_with, return_lse=True),
        "causal": partial(attention_with, causal=True),
        "causal with all of these": partial(
            attention_with, causal=True, window=9, softcap=5.0, sinks=True, return_lse=True
        ),
        "float8 cache": partial(attention_with, float8=True),
        "batch invariant": partial(attention_with, batch_invariant=True, return_lse=True),
        "width 96": wide(96),
        "width 256": wide(256),
    },
    "draft_chain": {
        "sampled": lambda sizes: replace(drafting(sizes), options={"first_draw": 0}),
        "greedy": lambda sizes: without_temperature(drafting(sizes)),
    },
    "distribution_stats": {
        **{name: filter_statistics(name) for name in FILTERS},
        "greedy rows and pivots": greedy_and_pivots,
        "overlay": under_overlay(statistics),
    },
    "replay_sample": {name: filter_draw(replay, name, (0, 2, 3)) for name in FILTERS},
    "draft_sample": {name: filter_draw(draw, name, (0, 1, 2, 3)) for name in FILTERS},
    "rejection_verify": {
        **{name: with_dist(chain, name, 4) for name in FILTERS},
        "block rule": by_rule(chain),
        "overlay": chain_under_overlay,
    },
    "rejection_verify_logits": {
        **{name: with_settings(chain_logits, name, 5) for name in FILTERS},
        "block rule": by_rule(chain_logits),
        "overlay": under_overlay(chain_logits),
    },
    "rejection_thresholds": {"block rule": by_rule(lambda sizes: thresholds(chain(sizes), 7))},
    "replay_verify": {name: with_settings(replay_walk, name, 6) for name in FILTERS},
    "recursive_rejection_verify": {
        **{name: with_kinds(tree, name) for name in KINDS},
        "top-p": with_dist(tree, "top-p", 6),
    },
    "traversal_verify": {**{name: with_kinds(tree, name) for name in KINDS}, "top-p": with_dist(tree, "top-p", 6)},
    "recursive_rejection_thresholds": {name: with_kinds(tree, name, 9) for name in KINDS},
    "traversal_thresholds": {name: with_kinds(tree, name, 9) for name in KINDS},
    "typical_verify": {"top-p": with_dist(typical, "top-p", 4)},
    "tree_expand": {"noise": noisy_expand},
    "tree_grow": {
        "noise": partial(last_level, levels=1, noise=True),
        "second level": partial(last_level, levels=2, noise=False),
        "second level with noise": partial(last_level, levels=2, noise=True),
    },
    "process_logits": {"forced tokens": forced},
    "ngram_match": {"pairs": pairs, "pairs, frequent": lambda sizes: _with_options(pairs(sizes), frequent=True)},
}
