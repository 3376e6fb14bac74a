"""Sample calls with options: what the plain ones of `samples` and `samples_verify` leave out, by operator and name."""

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
from .samples_verify import (
    chain,
    chain_logits,
    dist,
    draw,
    edit,
    expand,
    match,
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
MARKS = {
    "sampled": (SAMPLED, SAMPLED),
    "sampled without replacement": (SAMPLED_WITHOUT_EARLIER, SAMPLED_WITHOUT_EARLIER),
    "deterministic and sampled": (DETERMINISTIC, SAMPLED_WITHOUT_DETERMINISTIC),
}
"""Of the two children of a node."""


def filtered(name: str, count: int) -> tuple[Tensor, ...]:
    """The parameters of a filter for `distribution_stats`, for so many rows."""
    temperature, top_k, top_p, min_p = FILTERS[name]
    one = torch.ones(count)
    return temperature * one, int32([top_k] * count), top_p * one, min_p * one


def attending(sizes: Sizes, *, causal: bool = False, sinks: bool = False, float8: bool = False, **options: Any) -> Call:
    """Attention with options; those that are tensors are made here."""
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


def greedily(call: Call) -> Call:
    """Chains of the likeliest tokens: without a temperature."""
    return replace(call, arguments=(*call.arguments[:7], None, *call.arguments[8:]))


def wide(width: int) -> Make:
    return lambda sizes: attention(replace(sizes, width=width))


def with_dist(make: Make, name: str, place: int) -> Make:
    """The call with another target distribution: of five parts behind one another or in a tuple, by the operator."""

    def made(sizes: Sizes) -> Call:
        call = make(sizes)
        matrix = call.arguments[place][0]
        target = (matrix, *distribution_stats(matrix, *filtered(name, len(matrix))))
        return replace(call, arguments=(*call.arguments[:place], target, *call.arguments[place + 1 :]))

    return made


def with_settings(make: Make, name: str, place: int) -> Make:
    """The call with other parameters of its distributions, which the operator makes itself."""

    def made(sizes: Sizes) -> Call:
        call = make(sizes)
        count = len(call.arguments[0])
        return replace(call, arguments=(*call.arguments[:place], filtered(name, count), *call.arguments[place + 1 :]))

    return made


def filter_statistics(name: str) -> Make:
    def made(sizes: Sizes) -> Call:
        matrix, *_ = statistics(sizes).arguments
        return Call((matrix, *filtered(name, len(matrix))), bytes=size_of(matrix))

    return made


def greedy_and_pivots(sizes: Sizes) -> Call:
    """Every other row greedy, top-p on all, with masses and with the likeliest token of every row as its pivot."""
    matrix, _, *rest = statistics(sizes).arguments
    temperature = (torch.arange(len(matrix)) % 2).float()
    options = {"masses": True, "pivots": matrix.float().argmax(1)}
    return Call((matrix, temperature, *rest), options, bytes=size_of(matrix))


def filter_draw(make: Make, name: str, parts: tuple[int, ...]) -> Make:
    """A draw from filtered rows; parts: which of the statistics the operator takes."""

    def made(sizes: Sizes) -> Call:
        call = make(sizes)
        matrix = call.arguments[0]
        known = distribution_stats(matrix, *filtered(name, len(matrix)))
        taken = [known[part] for part in parts]
        return replace(call, arguments=(matrix, *taken, *call.arguments[1 + len(taken) :]))

    return made


def overlay_of(sizes: Sizes) -> Overlay:
    """Penalties, bias and masks over the logits of the samples."""
    with use_backend(REFERENCE):
        return process_logits_overlay(*edit(sizes).arguments)


def under_overlay(make: Make) -> Make:
    """The call with edits over its logits."""
    return lambda sizes: _with_options(make(sizes), overlay=overlay_of(sizes))


def chain_under_overlay(sizes: Sizes) -> Call:
    """The chain whose target distribution is that of the edited logits."""
    call, overlay = chain(sizes), overlay_of(sizes)
    *nodes, target, draft, ids, own, roots = call.arguments
    edited = dist(overlay.apply(target[0]))
    arguments = (*nodes, (target[0], *edited[1:]), draft, ids, own, roots)
    return _with_options(replace(call, arguments=arguments), overlay=overlay)


def _with_options(call: Call, **options: Any) -> Call:
    return replace(call, options=call.options | options)


def by_rule(make: Make) -> Make:
    return lambda sizes: _with_options(make(sizes), rule="block")


def marked(make: Callable[..., Call], name: str, count: int | None = None) -> Make:
    """Proposals with marks; count: arguments of the operator that shows thresholds."""

    def made(sizes: Sizes) -> Call:
        call = make(sizes, MARKS[name])
        return call if count is None else thresholds(call, count)

    return made


def noisy_expand(sizes: Sizes) -> Call:
    """Gumbel top-k, with scores that favour first choices."""
    call = expand(sizes)
    own, positions = seeds(len(call.arguments[0]))
    return _with_options(call, seeds=own, positions=positions, sharpness=1.5)


def grown(sizes: Sizes, *, levels: int, noise: bool) -> Call:
    """The last of the levels of trees that keep the best; the reference has grown those before."""
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
    """All four kinds of edits: a token without an alternative after every root, and deeper in the first tree."""
    call = edit(sizes)
    root = int(call.arguments[1].roots[0])
    bounds, ids = int32([0, *range(2, sizes.rows + 2)]), int32(range(3, sizes.rows + 4))
    entries = Forced(bounds, int32([root + 1, root + 2] + [root + 1] * (sizes.rows - 1)), ids)
    arguments = (*call.arguments[:4], entries, *call.arguments[5:])
    return replace(call, arguments=arguments)


def pairs(sizes: Sizes) -> Call:
    """Histories of three tokens: each pair of them was there often, and was followed by any of them."""
    tokens, starts, lengths, *_ = match(sizes).arguments
    generator = torch.Generator().manual_seed(1)
    tokens = to_default_device(torch.randint(3, tokens.shape, generator=generator, device="cpu"))
    return Call((tokens, starts, lengths, 2, 1, 8), bytes=size_of(tokens))


OPTIONS: dict[str, dict[str, Make]] = {
    "tree_attention": {
        "window": partial(attending, window=9),
        "softcap": partial(attending, softcap=5.0),
        "sinks": partial(attending, sinks=True),
        "log-sum-exp": partial(attending, return_lse=True),
        "causal": partial(attending, causal=True),
        "causal with all of these": partial(attending, causal=True, window=9, softcap=5.0, sinks=True, return_lse=True),
        "float8 cache": partial(attending, float8=True),
        "batch invariant": partial(attending, batch_invariant=True, return_lse=True),
        "width 96": wide(96),
        "width 256": wide(256),
    },
    "draft_chain": {
        "sampled": lambda sizes: replace(drafting(sizes), options={"first_draw": 0}),
        "greedy": lambda sizes: greedily(drafting(sizes)),
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
        **{name: marked(tree, name) for name in MARKS},
        "top-p": with_dist(tree, "top-p", 6),
    },
    "traversal_verify": {**{name: marked(tree, name) for name in MARKS}, "top-p": with_dist(tree, "top-p", 6)},
    "recursive_rejection_thresholds": {name: marked(tree, name, 9) for name in MARKS},
    "traversal_thresholds": {name: marked(tree, name, 9) for name in MARKS},
    "typical_verify": {"top-p": with_dist(typical, "top-p", 4)},
    "tree_expand": {"noise": noisy_expand},
    "tree_grow": {
        "noise": partial(grown, levels=1, noise=True),
        "second level": partial(grown, levels=2, noise=False),
        "second level with noise": partial(grown, levels=2, noise=True),
    },
    "process_logits": {"forced tokens": forced},
    "ngram_match": {"pairs": pairs, "pairs, frequent": lambda sizes: _with_options(pairs(sizes), frequent=True)},
}
