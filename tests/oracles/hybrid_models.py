"""Tiny models with recurrent layers, their plain texts, and passes over them node by node."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from specdec_fast import HuggingFaceTarget
from specdec_fast.core.draft import Draft
from specdec_fast.interfaces import Slots
from specdec_fast.targets.tiny_models import HYBRID_FAMILIES, tiny_model

NAMES = tuple(name for name, (model_type, _) in HYBRID_FAMILIES.items() if model_type in CONFIG_MAPPING_NAMES)
"""Families that the installed transformers knows: BailingHybrid came after 5.17."""
EXPERTS = ("qwen3_next_experts", "qwen3_5_experts", "kimi_linear", "bailing_hybrid", "jamba", "lfm2_experts")
"""Families whose tokens share products of experts, so that logits round with the number of tokens."""
SAME_BITS = tuple(each for each in NAMES if each not in (*EXPERTS, "zamba"))
"""Families whose bits do not depend on the number of tokens. Zamba multiplies its steps in one product."""
MIXERS = {
    "gated delta rule": "qwen3_next", "output of a delta rule": "olmo_hybrid",
    "Kimi delta attention": "kimi_linear_dense", "Mamba-2": "bamba", "attention beside Mamba-2": "falcon_h1",
    "Mamba-1": "mamba", "short convolution": "lfm2",
}  # fmt: skip
"""A family of each kind without experts."""


@functools.cache
def model(name: str) -> Any:
    """The model of a family. Its texts do not end by themselves."""
    made = tiny_model(name)
    made.generation_config.eos_token_id = None
    return made


@functools.cache
def _untouched(name: str) -> Any:
    """The same model, which no target uses."""
    return tiny_model(name)


def own_text(name: str, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy text of a model that reads it anew for each token, by transformers' own code."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(_untouched(name)(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_tree(source: random.Random, most: int = 9, reach: int = 3) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree."""
    count = source.randint(2, most)
    parents = [-1, *(source.randint(max(0, at - reach), at - 1) for at in range(1, count))]
    return [source.randrange(1, 90) for _ in range(count)], parents


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The path from the root to a node."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


class Stepper:
    """Passes of a target over single rows."""

    def __init__(self, target: HuggingFaceTarget) -> None:
        self.target, self.cache = target, target.cache

    def start(self, row: int, prompt: Sequence[int]) -> None:
        """Begins a row with a prompt."""
        self.cache.release([row])
        assert self.cache.reserve(row, 64)
        self.feed(row, prompt)

    def feed(self, row: int, tokens: Sequence[int]) -> Tensor:
        """Commits tokens in one pass; returns the logits after the last."""
        packed = torch.tensor(list(tokens))
        with torch.inference_mode():
            found = self.target.extend(int32(row), packed, int32(0, len(tokens)), logits=True).logits
        assert found is not None
        return found[0]

    def follow(self, row: int, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Begins a row, and decodes tokens one at a time; returns the logits after the last."""
        self.start(row, prompt)
        return [self.feed(row, [token]) for token in tokens][-1]

    def score(self, trees: Sequence[tuple[int, list[int], list[int]]]) -> tuple[Tensor, Slots]:
        """Scores trees of rows: (row, tokens, parents). Returns the logits of all nodes."""
        draft = Draft.trees([row for row, _, _ in trees], [(tokens, parents) for _, tokens, parents in trees])
        with torch.inference_mode():
            output, slots = self.target.score(draft, draft.get_plan())
        assert output.logits is not None
        return output.logits, slots

    def commit(self, rows: Sequence[int], slots: Slots, paths: Sequence[Sequence[int]]) -> None:
        """Keeps one path of packed nodes for each row."""
        width = max(len(path) for path in paths)
        padded = torch.tensor([[*path, *[-1] * (width - len(path))] for path in paths], dtype=torch.int32)
        with torch.inference_mode():
            self.cache.commit(int32(*rows), slots, padded, int32(*(len(path) - 1 for path in paths)))

    def states(self, row: int) -> list[Tensor]:
        """Copies of the committed windows and states of a row."""
        own: Any = self.cache
        return [each[row].clone() for part in (own.recurrent.windows, own.recurrent.states) for each in part.values()]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether all states have the same bits."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))
