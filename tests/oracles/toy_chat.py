"""A chat model without weights: a byte tokenizer with a chat template, and a target that answers by a bigram table."""

from __future__ import annotations

from typing import Any

import torch

from oracles.automaton import AutomatonTarget
from oracles.toy_tokenizer import byte_tokenizer

BOS, END_OF_TURN = "<bos>", "<|end|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}:{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if tools %}[{{ tools[0]['name'] }}]{% endif %}{% if mood %}({{ mood }}){% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
"""A turn is `<|start|>ROLE:CONTENT<|end|>` and a newline, and the template writes the first token itself."""
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ m['content'] }}<|end|>{% endfor %}"
)
"""A template that refuses a system message."""


def chat_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Returns a tokenizer that adds `<bos>` to plain text, with special tokens for the ends of turns.

    Args:
        template: Its chat template, or None.
    """
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer.from_str(byte_tokenizer().backend_tokenizer.to_str())
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", bos_token=BOS)
    made.add_special_tokens({"additional_special_tokens": ["<|start|>", END_OF_TURN]})
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, made.bos_token_id)]
    )
    made.chat_template = template
    return made


class BigramTarget(AutomatonTarget):
    """A target whose next token depends on the last one alone: greedy text follows `after`, then repeats its end.

    Args:
        size: V.
        after: Last token -> next token. Every other token is followed by `rest`.
        rest: The token after all others.
        **shape: Arguments of `AutomatonTarget`.
    """

    def __init__(self, size: int, after: dict[int, int], rest: int, **shape: int) -> None:
        logits = torch.zeros(size, size)
        for token in range(size):
            logits[token, after.get(token, rest)] = 20.0
        super().__init__(logits, torch.arange(size).expand(size, size), **{"max_length": 256, **shape})


def speaker(tokenizer: Any, text: str, end: str = END_OF_TURN, **shape: int) -> BigramTarget:
    """Returns a target that answers with a text of different letters, and then with a special token for ever.

    Args:
        tokenizer: A `chat_tokenizer`. A question must end in `:` behind the role, as its template does.
        text: The answer, with no letter twice and no colon.
        end: The token that follows.
        **shape: Arguments of `AutomatonTarget`.
    """
    (start,) = tokenizer.encode(":", add_special_tokens=False)
    tokens = [start, *tokenizer.encode(text, add_special_tokens=False)]
    stop = tokenizer.convert_tokens_to_ids(end)
    return BigramTarget(len(tokenizer), dict(zip(tokens, tokens[1:])), stop, **shape)
