"""Chat templates: whether a tokenizer has one, what it reads, and the prompt that it writes.

Tests: tests/engine/test_chat.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from specdec_fast.core.remedies import RefusedError, Remedy


def has_chat_template(tokenizer: Any) -> bool:
    """Returns whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def template_text(tokenizer: Any, chat_template: str | None = None) -> str:
    """Returns the text of a chat template, given by its text or name; of all that the tokenizer has for None."""
    if chat_template is not None and "{" in chat_template:
        return chat_template
    own = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(own, Mapping):
        return str(own.get(chat_template, "".join(own.values())))
    return str(own)


def template_names(tokenizer: Any) -> list[str]:
    """Returns the names of a tokenizer's chat templates; none if it has a single one."""
    templates = getattr(tokenizer, "chat_template", None)
    return sorted(templates) if isinstance(templates, Mapping) else []


def apply_template(tokenizer: Any, messages: list[dict[str, Any]], options: Mapping[str, Any], **arguments: Any) -> Any:
    """Applies the chat template.

    Args:
        tokenizer: A transformers tokenizer, or None, which is refused.
        messages: The turns. A turn that calls tools may lack content. It gets an empty one if the template needs one.
        options: Variables of the template.
        arguments: Arguments of the tokenizer's `apply_chat_template`.

    Returns:
        Token ids, or text with `tokenize=False`.

    Raises:
        RefusedError: If there is no template, or if it refuses the messages. It is a ValueError.
        ValueError: If it does not read the tools.
    """
    if tokenizer is None:
        raise RefusedError(
            "messages: got an engine without a tokenizer; expected one with a chat template",
            Remedy.TOKENIZER_OR_CHAT_IDS,
        )
    template = arguments.get("chat_template")
    if template is None and not has_chat_template(tokenizer):
        raise RefusedError(
            "messages: got a tokenizer without a chat template, as base models have; expected one of an instruct model",
            Remedy.CHAT_TEMPLATE,
        )
    if template is not None and not (isinstance(template, str) and "{" in template):
        names = template_names(tokenizer)
        if template not in names:  # a name that the tokenizer does not know would become the whole prompt
            known = f", or the name of one of the tokenizer's ({', '.join(names)})" if names else ""
            raise RefusedError(
                f"chat_template: got {template!r:.80}; expected the text of a Jinja template{known}",
                Remedy.OWN_TEMPLATE,
            )
    tools, text = arguments.get("tools"), template_text(tokenizer, template)
    if tools and not re.search(r"\btools\b", text):  # the model would never hear of them
        raise ValueError(
            f"tools: got {len(tools)}; expected none, since the chat template does not read them; describe them in a "
            "message, or pass a chat_template that reads tools"
        )
    filled = [{"content": "", **turn} for turn in messages]
    how = {"tokenize": True, "return_dict": False, **arguments, **options}
    try:
        if filled != messages:  # templates that know calls may ask whether there is content, others append to it
            with suppress(Exception):
                return tokenizer.apply_chat_template(messages, **how)
        return tokenizer.apply_chat_template(filled, **how)
    except Exception as error:  # templates raise what they like, beside the errors of Jinja
        roles = ", ".join(message["role"] for message in messages)
        why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise RefusedError(
            f"messages: got roles {roles:.200}; expected messages that the chat template accepts, which answers "
            f"{why!r}",
            Remedy.OTHER_MESSAGES,
        ) from error
