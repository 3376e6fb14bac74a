"""Ragged batches of packed trees for the operators of recurrent layers, and their runs node by node."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec_kernels import Op, state_commit, tree_delta, tree_ssm, use_backend

GATES = ("head", "channel", "element")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of rounding to a dtype."""


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs torch with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Trees:
    """Packed trees of a batch. Requests may have no node, and nodes behind the last offset belong to none."""

    counts: list[int]
    parents: list[int]
    lengths: list[int]
    rows: list[int]
    tail: int

    @property
    def offsets(self) -> list[int]:
        return [sum(self.counts[:at]) for at in range(len(self.counts) + 1)]

    @property
    def nodes(self) -> int:
        return sum(self.counts) + self.tail

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return int32(self.rows), int32(self.lengths), int32(self.offsets)

    def path_to(self, request: int, node: int) -> list[int]:
        """Packed nodes from a root to a node of a tree."""
        path: list[int] = []
        while node >= 0:
            path.insert(0, self.offsets[request] + node)
            node = self.parents[self.offsets[request] + node]
        return path


def make_trees(seed: int, most: int = 10, chains: bool = False) -> Trees:
    """Random trees of one to five requests; one request in four has no node, and one in four one."""
    draw = random.Random(seed)
    batch = draw.randint(1, 5)
    counts = [draw.choice([0, 1, draw.randint(2, most), draw.randint(2, most)]) for _ in range(batch)]
    parents = [node - 1 if chains else draw.randint(-1, node - 1) for count in counts for node in range(count)]
    tail = draw.randint(0, 2)
    lengths = [draw.choice([0, 5]) for _ in counts]
    return Trees(counts, parents + [0] * tail, lengths, draw.sample(range(batch + 1), batch), tail)


@dataclass(frozen=True)
class Layer:
    """Inputs of one recurrent layer for all nodes of a batch. Without `beta` its rule is that of `tree_ssm`."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    beta: Tensor | None
    decay: Tensor | None
    state: Tensor

    def of(self, part: slice) -> Layer:
        """The inputs of some nodes."""
        beta = None if self.beta is None else self.beta[part]
        return Layer(self.query[part], self.key[part], self.value[part], self.gate[part], beta, self.decay, self.state)

    def in_double(self) -> Layer:
        parts = (self.query, self.key, self.value, self.gate, self.beta, self.decay, self.state)
        return Layer(*[None if each is None else each.double() for each in parts])  # type: ignore[arg-type]

    def run(
        self,
        state: Tensor,
        rows: Tensor,
        lengths: Tensor,
        offsets: Tensor,
        parents: Tensor | None = None,
        advance: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Outputs, and what each key adds to the state."""
        where = (state, rows, lengths, offsets, parents)
        if self.beta is not None:
            return tree_delta(self.query, self.key, self.value, self.gate, self.beta, *where, advance)
        return tree_ssm(self.query, self.key, self.value, self.gate, *where, self.decay, advance), self.value

    def commit(self, state: Tensor, added: Tensor, rows: Tensor, lengths: Tensor, path: Tensor) -> None:
        state_commit(state, self.key, added, self.gate, rows, lengths, path, self.decay)


def make_layer(
    seed: int,
    trees: Trees,
    gate: str,
    delta: bool,
    heads: int = 4,
    groups: int = 2,
    keys: int = 16,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Layer:
    """Random inputs, with normalized keys. The states of texts without tokens are NaN, so none may be read."""
    g = torch.Generator().manual_seed(seed)
    nodes = trees.nodes

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    key = normal(nodes, groups, keys)
    key = key / key.norm(dim=-1, keepdim=True).clamp_min(1e-6)
    shapes = {"head": (nodes, heads), "channel": (nodes, heads, keys), "element": (nodes, heads, width)}
    strength = torch.rand(shapes[gate], generator=g)
    decay = None if gate != "element" else -torch.rand((heads, keys, width), generator=g) * 3
    state = normal(len(trees.rows) + 1, heads, keys, width)
    for row, length in zip(trees.rows, trees.lengths):
        if length == 0:
            state[row] = float("nan")
    return Layer(
        (normal(nodes, groups, keys) * keys**-0.5).to(dtype),
        key.to(dtype),
        normal(nodes, heads, width).to(dtype),
        (strength if decay is not None else -2 * strength).to(torch.float32 if seed % 2 else dtype),
        torch.rand((nodes, heads), generator=g).to(dtype) if delta else None,
        decay,
        state,
    )


@dataclass(frozen=True)
class Sequential:
    """Results of one-node passes with `advance` along the path of every node: outputs, additions and states."""

    outputs: Tensor
    added: Tensor
    states: dict[int, Tensor]


def run_one_by_one(layer: Layer, trees: Trees) -> Sequential:
    """Runs each node alone on the committed state of its parent."""
    outputs, added = torch.zeros_like(layer.value), None
    states: dict[int, Tensor] = {}
    for request, (start, count) in enumerate(zip(trees.offsets, trees.counts)):
        for node in range(start, start + count):
            parent = trees.parents[node]
            length = trees.lengths[request] if parent < 0 else 1
            row = trees.rows[request]
            own = (layer.state[row] if parent < 0 else states[start + parent])[None].clone()
            where = (int32([0]), int32([length]), int32([0, 1]))
            out, add = layer.of(slice(node, node + 1)).run(own, *where, advance=True)
            added = torch.zeros(layer.value.shape, dtype=add.dtype) if added is None else added
            outputs[node], added[node], states[node] = out[0], add[0], own[0]
    return Sequential(outputs, torch.zeros_like(layer.value) if added is None else added, states)


WIDTHS, KEYS, HEADS = (1, 7, 16, 24, 64, 128), (16, 64, 128), ((4, 2), (3, 3), (2, 1), (1, 1))
"""Columns, key channels, and heads with the groups that share keys."""


def served(op: Op, backend: str) -> bool:
    return next(each for each in op.backends if each.name == backend).missing() is None


def check_against_float64(layer: Layer, trees: Trees) -> None:
    """Compares with the reference in float64. A sum of 128 products errs by at most 128 roundings, and a path adds up
    to ten; in practice errors cancel, so a tenth of that is the limit. Half formats round their outputs besides.
    """
    where = (*trees.tensors, int32(trees.parents))
    outputs, added = layer.run(layer.state.clone(), *where)
    exact = layer.in_double()
    with use_backend("reference"):
        want, want_added = exact.run(exact.state, *where)
    limit = 128 * 2.0**-24
    rounding = EPSILON[layer.value.dtype] if layer.value.dtype != torch.float32 else 0.0
    torch.testing.assert_close(outputs.double(), want, rtol=limit + rounding, atol=limit)
    torch.testing.assert_close(added.double(), want_added, rtol=limit, atol=limit)
    assert outputs.dtype == layer.value.dtype and not outputs[trees.offsets[-1] :].any()


def check_extreme_gates(gate: str, delta: bool, count: int) -> None:
    """Compares with float64 for gates from 0 to 1, on a stored state.

    Sums of logarithms near 1e30 would lose the gates behind them, and differences of infinities are NaN. More than 16
    nodes take two tiles, and those of the second have parents in the first.
    """
    draw = random.Random(1)
    parents = [-1, 0, 0, *(draw.randint(0, at // 2) for at in range(3, count))]
    trees = Trees([count], parents, [5], [1], 0)
    layer = make_layer(3, trees, gate, delta, 2, 1, 32, 16)
    strengths = (-torch.inf, -1e30, -300.0, -20.0, -1e-3, 0.0, 0.0)
    gates = torch.tensor([draw.choice(strengths) for _ in range(layer.gate.numel())]).view(layer.gate.shape)
    check_against_float64(replace(layer, gate=gates, decay=None), trees)


def make_case(seed: int, gate: str, delta: bool, chains: bool = False) -> tuple[Layer, Trees]:
    """A case whose sizes and dtype follow from the seed."""
    draw, trees = random.Random(seed), make_trees(seed, chains=chains)
    heads, groups = draw.choice(HEADS)
    keys, width, dtype = draw.choice(KEYS), draw.choice(WIDTHS), draw.choice(DTYPES)
    return make_layer(seed, trees, gate, delta, heads, groups, keys, width, dtype), trees


def check_bits(seed: int, gate: str, delta: bool) -> None:
    """Compares a batch of trees with one node at a time, and commits of random paths with the states of their ends."""
    layer, trees = make_case(seed, gate, delta)
    one_by_one = run_one_by_one(layer, trees)
    used = trees.offsets[-1]
    with threads(1 + seed % 3):
        state = layer.state.clone()
        outputs, added = layer.run(state, *trees.tensors, int32(trees.parents))
        assert torch.equal(outputs[:used], one_by_one.outputs[:used]), seed
        assert torch.equal(added[:used], one_by_one.added[:used]), seed
        assert not outputs[used:].any() and (not delta or not added[used:].any())
        assert torch.equal(state.nan_to_num(7), layer.state.nan_to_num(7)), "without advance nothing is written"
        check_commits(random.Random(seed), layer, trees, added, one_by_one)


def check_commits(draw: random.Random, layer: Layer, trees: Trees, added: Tensor, one_by_one: Sequential) -> None:
    """Commits a path of every request, some of them empty."""
    paths = [
        trees.path_to(request, draw.randrange(-1, count)) if count else [] for request, count in enumerate(trees.counts)
    ]
    padded = torch.full((len(paths), 1 + max(map(len, paths))), -1, dtype=torch.int32)
    for request, path in enumerate(paths):
        padded[request, : len(path)] = int32(path)
    state, want = layer.state.clone(), layer.state.clone()
    for row, path in zip(trees.rows, paths):
        if path:
            want[row] = one_by_one.states[path[-1]]
    rows, lengths, _ = trees.tensors
    layer.commit(state, added, rows, lengths, padded)
    assert torch.equal(state.nan_to_num(7), want.nan_to_num(7))


def check_prompts(gate: str, delta: bool) -> None:
    """A prompt in two parts, at every place, against the whole, for sizes that fill vectors in part or not."""
    nodes = 9
    for seed, width in enumerate(WIDTHS):
        trees = Trees([nodes], [-1] * nodes, [0], [1], 0)
        layer = make_layer(seed, trees, gate, delta, *HEADS[seed % len(HEADS)], KEYS[seed % 3], width, DTYPES[seed % 3])
        state = layer.state.clone()
        outputs, added = layer.run(state, *trees.tensors, advance=True)
        for split in range(1, nodes):
            own = layer.state.clone()
            front = layer.of(slice(0, split)).run(own, int32([1]), int32([0]), int32([0, split]), advance=True)
            rest = layer.of(slice(split, nodes))
            back = rest.run(own, int32([1]), int32([split]), int32([0, nodes - split]), advance=True)
            assert torch.equal(torch.cat([front[0], back[0]]), outputs)
            assert torch.equal(torch.cat([front[1], back[1]]), added)
            assert torch.equal(own.nan_to_num(7), state.nan_to_num(7))


def check_empty_rows(gate: str, delta: bool) -> None:
    """Prompts of a batch in which a request has no node: its state stays, and the others are those of one request."""
    trees = Trees([3, 0, 2], [-1] * 5, [0, 5, 5], [2, 0, 3], 0)
    layer = make_layer(5, trees, gate, delta)
    state, want = layer.state.clone(), layer.state.clone()
    outputs, _ = layer.run(state, *trees.tensors, advance=True)
    for part, row, length in ((slice(0, 3), 2, 0), (slice(3, 5), 3, 5)):
        alone = int32([row]), int32([length]), int32([0, part.stop - part.start])
        found, _ = layer.of(part).run(want, *alone, advance=True)
        assert torch.equal(outputs[part], found)
    assert torch.equal(state.nan_to_num(7), want.nan_to_num(7))
