"""Small decoders and packed trees for `fused_forward`: ragged rows, pages in any order, widths that are no multiples of
vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import DecoderLayer, DecoderNumbers, DecoderTable, tree_plan
from specdec_kernels.ops.fused_forward.decoder_table import MATRICES


@dataclass
class Pass:
    """Arguments of one call, floats in float64. by_input: whether the head is stored by input; all other matrices are.

    nodes: tokens, positions, wanted or None, slots, page_table, lengths, offsets, ancestors, depth.
    """

    weights: dict[str, list[Tensor]]
    by_input: bool
    nodes: tuple[Tensor, ...]
    windows: list[int]
    numbers: DecoderNumbers = field(default_factory=lambda: DecoderNumbers(eps=1e-5, scale=0.3))

    def table(self, dtype: torch.dtype) -> DecoderTable:
        """Returns a new decoder with caches."""
        own = {name: [self._stored(each.to(dtype), name) for each in parts] for name, parts in self.weights.items()}
        named = {name: parts for name, parts in own.items() if name not in _ENDS}
        layers = [
            DecoderLayer(
                **{name: parts[at] for name, parts in named.items()}, window=window, rotary=at % len(own["rotary"])
            )
            for at, window in enumerate(self.windows)
        ]
        ends = own["embedding"][0], layers, own["last_norm"][0], own["head"][0], torch.stack(own["rotary"])
        return DecoderTable(*ends, own["keys"], own["values"], self.numbers)

    def _stored(self, each: Tensor, name: str) -> Tensor:
        by_input = name in MATRICES or (name == "head" and self.by_input)
        return each.t().contiguous().clone().t() if by_input else each.clone()


_ENDS = ("embedding", "last_norm", "head", "rotary", "keys", "values")
ALL_OPTIONS = ("biases", "head_norms", "post_norms", "window", "rotary", "softcaps", "embedding", "gelu_tanh", "offset")
"""What a layer may have beyond a Llama's."""


def made(
    seed: int, heads: int, kv_heads: int, width: int, hidden: int, inner: int, vocab: int, layers: int, page: int,
    lengths: list[int], counts: list[int], tail: int = 0, causal: bool = False, wanted: str = "all",
    by_input: bool = False, options: tuple[str, ...] = (),
) -> Pass:  # fmt: skip
    """Returns trees of `counts` nodes after `lengths` committed tokens; tail: nodes after all rows, without slots;
    options: some of `ALL_OPTIONS`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    def whole(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    per_row = max(-(-(length + count) // page) for length, count in zip(lengths, counts))
    pages, total = 1 + per_row * len(lengths), sum(counts) + tail
    table = (torch.randperm(pages - 1, generator=generator) + 1).int().view(len(lengths), per_row)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    parents = [int(whole(max(0, i - 3), i, 1)) if i else -1 for count in counts for i in range(count)]
    plan = tree_plan(torch.tensor([*parents, *[-1] * tail], dtype=torch.int32), offsets)
    row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    place = torch.tensor(lengths)[row] + torch.arange(len(row)) - offsets[row]
    slots = table[row, place // page].long() * page + place % page
    depth = place - torch.tensor(lengths)[row] if causal else plan.depth[: len(row)].long()
    positions = torch.cat([torch.tensor(lengths)[row] + depth, torch.zeros(tail, dtype=torch.int64)])
    each_position = torch.arange(float(max(lengths) + max(counts) + 1), dtype=torch.float64)[:, None]
    angles = [
        each_position / base ** torch.arange(width // 2) for base in ((7.0, 3.0) if "rotary" in options else (7.0,))
    ]
    offset = 1.0 if "offset" in options else 0.0

    def norm(size: int) -> Tensor:
        return 1 - offset + normal(size, scale=0.1)

    weights = {
        "embedding": [normal(vocab, hidden)],
        "last_norm": [norm(hidden)],
        "head": [normal(vocab, hidden, scale=hidden**-0.5)],
        "rotary": [torch.cat([each.cos(), each.sin()], 1) for each in angles],
        "norm": [norm(hidden) for _ in range(layers)],
        "query": [normal(heads * width, hidden, scale=hidden**-0.5) for _ in range(layers)],
        "key": [normal(kv_heads * width, hidden, scale=hidden**-0.5) for _ in range(layers)],
        "value": [normal(kv_heads * width, hidden, scale=hidden**-0.5) for _ in range(layers)],
        "out": [normal(hidden, heads * width, scale=(heads * width) ** -0.5) for _ in range(layers)],
        "mlp_norm": [norm(hidden) for _ in range(layers)],
        "gate": [normal(inner, hidden, scale=hidden**-0.5) for _ in range(layers)],
        "up": [normal(inner, hidden, scale=hidden**-0.5) for _ in range(layers)],
        "down": [normal(hidden, inner, scale=inner**-0.5) for _ in range(layers)],
        "keys": [normal(pages, page, kv_heads, width) for _ in range(layers)],
        "values": [normal(pages, page, kv_heads, width) for _ in range(layers)],
    }
    extra = {
        "biases": {
            "query_bias": heads * width, "key_bias": kv_heads * width, "value_bias": kv_heads * width,
            "out_bias": hidden,
        },
        "head_norms": {"query_norm": width, "key_norm": width},
        "post_norms": {"post_norm": hidden, "mlp_post_norm": hidden},
    }  # fmt: skip
    for option, sizes in extra.items():
        for name, size in sizes.items() if option in options else ():
            weights[name] = [normal(size, scale=0.5) if "bias" in name else norm(size) for _ in range(layers)]
    windows = [(0 if at % 2 else 12) if "window" in options else 0 for at in range(layers)]
    capped, scaled = "softcaps" in options, "embedding" in options
    numbers = DecoderNumbers(
        eps=1e-5,
        scale=0.3,
        softcap=2.0 if capped else 0.0,
        logits_softcap=1.5 if capped else 0.0,
        embedding_scale=hidden**0.5 if scaled else 1.0,
        norm_offset=offset,
        activation="gelu_tanh" if "gelu_tanh" in options else "silu",
    )
    nodes = {"all": None, "last": offsets[1:].long() - 1, "some": whole(0, max(total, 1), 3), "none": whole(0, 1, 0)}[
        wanted
    ]
    trees = (None, None) if causal else (plan.ancestors, plan.depth)
    where = torch.cat([slots, torch.full((tail,), -1)]), table, torch.tensor(lengths, dtype=torch.int32), offsets
    return Pass(weights, by_input, (whole(0, vocab, total), positions, nodes, *where, *trees), windows, numbers)


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    """Draws shapes for all code paths: widths beyond whole vectors, grouped heads, rows without nodes, long rows."""
    rows = draw(st.integers(1, 4))
    kv_heads = draw(st.integers(1, 2))
    counts = [draw(st.sampled_from([0, 1, 1, 3, 8])) for _ in range(rows)]
    counts[-1] = max(counts[-1], draw(st.sampled_from([1, 2, 70])))
    width, hidden = draw(st.sampled_from([2, 6, 16, 40, 64])), draw(st.sampled_from([1, 16, 37, 64]))
    inner = draw(st.sampled_from([1, 16, 50]))
    # norms of one or two numbers, which are near 0 in some node, amplify rounding errors
    steep = {"head_norms", "post_norms"} if width == 2 else set()
    steep |= {"post_norms"} if hidden == 1 or inner == 1 else set()
    options = draw(st.lists(st.sampled_from([each for each in ALL_OPTIONS if each not in steep]), unique=True))
    return made(
        draw(st.integers(0, 999)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        width=width,
        hidden=hidden,
        inner=inner,
        vocab=draw(st.sampled_from([1, 17, 96])),
        layers=draw(st.integers(1, 3)),
        page=draw(st.sampled_from([1, 7, 16])),
        lengths=[draw(st.sampled_from([0, 1, 20, 90])) for _ in range(rows)],
        counts=counts,
        tail=draw(st.sampled_from([0, 0, 2])),
        causal=draw(st.booleans()),
        wanted=draw(st.sampled_from(["all", "some", "none"])),
        by_input=draw(st.booleans()),
        options=tuple(options),
    )
