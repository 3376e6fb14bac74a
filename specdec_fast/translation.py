"""Between the vocabularies of a target and of a draft model that has another tokenizer, by way of the text.

Timor et al. 2025 (heterogeneous vocabularies): TLI restricts the draft's law to the tokens that both know, SLEM hands
over what the draft's text is in the target's tokens. Tests: tests/test_translation.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_BEHIND = 8  # committed tokens that are written anew with a draft's text: where they meet, tokens may join


class Translation:
    """target, draft: transformers tokenizers; vocab_size, draft_vocab_size: valid ids of the two models.

    Raises ValueError when a tokenizer is missing or when they have no token in common.
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        vocab_size: int,
        draft_vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if target is None or draft is None:
            whose = "target" if target is None else "draft"
            raise ValueError(f"translation: got no tokenizer of the {whose}; expected one beside each model")
        self._target, self._draft = target, draft
        ours, theirs = _by_text(target, vocab_size), _by_text(draft, draft_vocab_size)
        common = sorted((ours[text], theirs[text]) for text in ours.keys() & theirs.keys())
        if not common:
            raise ValueError("translation: got tokenizers without a common token; expected some; take another draft")
        self.target_ids = torch.tensor([ours for ours, _ in common], dtype=torch.int64).to(device)
        self.draft_ids = torch.tensor([theirs for _, theirs in common], dtype=torch.int64).to(device)
        self._draft_of = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        self._draft_of[self.target_ids] = self.draft_ids
        self._vocab_size = vocab_size

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        """A text of the target in the draft's tokens: at least one."""
        text = _text(self._target, tokens)
        return list(self._draft.encode(text, add_special_tokens=False)) or [0]

    def to_target(self, tokens: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """What the draft's tokens are in the target's, behind its text so far."""
        new = _text(self._draft, drafted)
        behind = _text(self._target, tokens[-_BEHIND:])
        before = self._target.encode(behind, add_special_tokens=False)
        both = self._target.encode(behind + new, add_special_tokens=False)
        if both[: len(before)] == before:
            return list(both[len(before) :])
        return list(self._target.encode(new, add_special_tokens=False))  # the seam would be cut elsewhere

    def law(self, logits: Tensor) -> Tensor:
        """The draft's logits [B, V] over the target's vocabulary, -inf for tokens that only one of the two has."""
        full = logits.new_full((logits.shape[0], self._vocab_size), float("-inf"))
        full[:, self.target_ids] = logits[:, self.draft_ids]
        return full

    def ids(self, tokens: Tensor) -> Tensor:
        """The draft's ids of common tokens, int64 [N]."""
        return self._draft_of[tokens]


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _by_text(tokenizer: Any, vocab_size: int) -> dict[str, int]:
    """Ids by what tokens look like, with one sign for a space in front."""
    return {token.replace("Ġ", "▁"): index for token, index in tokenizer.get_vocab().items() if index < vocab_size}
