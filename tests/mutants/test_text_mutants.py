"""Mistakes of processors that read texts, and of scored prompts, planted one at a time: a named test must fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from mutants.test_suite_mutants import module_of

import specdec_fast.engine.scheduler as scheduler_module
from specdec_fast.sampling.banned_continuations import BannedContinuations
from specdec_fast.sampling.custom_processors import CustomProcessors

Patch = pytest.MonkeyPatch


def custom_processors_read_the_text_of_the_root(patch: Patch) -> None:
    """A custom processor sees the committed text at every node."""
    apply = CustomProcessors.apply

    def broken(self: CustomProcessors, logits: Any, row_of: Any, tokens: Any, parents: Sequence[int]) -> Any:
        failures: dict[int, Any] = {}
        for node, row in row_of.items():
            found = apply(self, logits, {0: row}, tokens[:1], parents[:1])
            failures |= dict.fromkeys([node] if found else [], found.get(0))
        return failures

    patch.setattr(CustomProcessors, "apply", broken)


def ngrams_on_the_path_are_forgotten(patch: Patch) -> None:
    """N-grams that draft tokens complete may be repeated below them."""
    find = BannedContinuations.find

    def broken(self: BannedContinuations, tokens: Any, parents: Any, wanted: Any) -> Any:
        end = find(self, tokens, parents, [0])[0]
        own, self._size = self._size, 0
        found = find(self, tokens, parents, wanted)
        self._size = own
        return [[*ids, *end] if node == 0 else ids for node, ids in zip(wanted, found)]

    patch.setattr(BannedContinuations, "find", broken)


def scored_prompts_share_pages(patch: Patch) -> None:
    """A request that asks for log-probabilities of its prompt takes over pages, which have no logits."""
    patch.setattr(scheduler_module, "needs_scoring", lambda handle: False)


NODES = "sampling/test_text_processors.py", "test_every_node_is_processed_with_its_own_text", (torch.float32, False)
LAW = (
    "engine/test_tree_distribution.py",
    "test_the_joint_distribution_with_processors_that_read_texts",
    ("recursive_rejection", "mixed"),
)
MUTANTS: list[tuple[Callable[[Patch], None], str, str, tuple[Any, ...]]] = [
    (custom_processors_read_the_text_of_the_root, *NODES),
    (custom_processors_read_the_text_of_the_root, *LAW),
    (ngrams_on_the_path_are_forgotten, *NODES),
    (
        scored_prompts_share_pages,
        "engine/test_prompt_logprobs.py",
        "test_a_shared_prefix_is_computed_again_for_them",
        (),
    ),
]


@pytest.mark.parametrize(
    ("plant", "file", "test", "arguments"), MUTANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_test_fails(
    plant: Callable[[Patch], None], file: str, test: str, arguments: tuple[Any, ...], monkeypatch: Patch
) -> None:
    run = getattr(module_of(file), test)
    run(*arguments)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run(*arguments)
