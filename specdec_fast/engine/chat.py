"""Chats: the prompt that a chat template writes for a conversation, and the tokens that end an answer.

Tests: tests/engine/test_chat.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, overload

from specdec_fast.core.remedies import RefusedError, Remedy
from specdec_fast.engine.chat_template import apply_template, has_chat_template
from specdec_fast.engine.prompts import PROBED, Prompt, describe_excess, encode_prompt
from specdec_fast.engine.request import Handle, pair_with_params, rejected_handle, resolve_params, warn_of_errors
from specdec_fast.interfaces import Target
from specdec_fast.sampling.params import SamplingParams

Message = Mapping[str, Any]
"""One turn: `role` and `content`, and whatever else the chat template reads."""

_FORM = "a list of messages such as {'role': 'user', 'content': 'Hello'}"
_PROBE = "specdec probe"
TOKENIZER_ARGUMENTS = {
    "conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of the tokenizer that no template option may replace."""


class ChatMethods(ABC):
    """Methods of an engine that take conversations instead of prompts. `Engine` derives from it.

    Attributes:
        target: The model that scores drafts.
        tokenizer: The tokenizer, or None.
        eos_token_ids: Token ids that end a text.
        default_params: Sampling parameters of requests without any.
    """

    target: Target
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    default_params: SamplingParams

    @abstractmethod
    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, num_draft_tokens: int | None = None
    ) -> Handle:
        """Queues a request."""

    @abstractmethod
    def _generate(self, pairs: Iterable[tuple[Prompt, SamplingParams | None]], **given: Any) -> list[Handle]:
        """Generates texts for a batch of prompts."""

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids that the chat template writes for a conversation.

        The template writes the special tokens, and the tokenizer adds none.

        Args:
            messages: The turns, each with `role` and `content`. A content is text, or a list of parts such as
                `{"type": "text", "text": "Hello"}`, which are joined.
            tools: Tools that the template describes to the model.
            add_generation_prompt: Whether the beginning of an answer follows the last message.
            continue_final_message: Whether the last message is left open, so that the model continues it. Then no
                answer begins after it.
            chat_template: A Jinja template, or the name of one of the tokenizer's. None for the tokenizer's own.
            template_options: Variables of the template, such as `enable_thinking`.

        Raises:
            ValueError: If the messages are malformed, if there is no chat template, if it refuses the messages, or if
                it does not read the tools.
        """
        turns = check_messages(messages)
        tokens = apply_template(
            self.tokenizer,
            turns,
            _checked_options(template_options),
            tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
        )
        return encode_prompt(tokens, None, self.target.vocab_size)

    @cached_property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer in a chat, besides `eos_token_ids`; empty without a chat template."""
        return self._find_end_of_turn()

    def submit_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        num_draft_tokens: int | None = None,
        **template: Any,
    ) -> Handle:
        """Queues the answer to a conversation.

        The answer also ends at a token that ends a turn in the chat template, unless `ignore_eos` is set.

        Args:
            messages: The turns, as in `encode_chat`.
            params: Sampling parameters. None for the defaults.
            num_draft_tokens: Draft tokens per step; 0 decodes plainly. None for the drafter's default.
            **template: Other arguments of `encode_chat`.

        Returns:
            The handle of the request.

        Raises:
            ValueError: As `encode_chat` and `submit`.
        """
        prompt = self.encode_chat(messages, **template)
        return self.submit(prompt, self._chat_params(params, template), num_draft_tokens=num_draft_tokens)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        num_draft_tokens: int | None = None,
        **template: Any,
    ) -> Handle: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        num_draft_tokens: int | None = None,
        **template: Any,
    ) -> list[Handle]: ...

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        num_draft_tokens: int | None = None,
        **template: Any,
    ) -> Handle | list[Handle]:
        """Answers a conversation, or a batch of them, and returns when all answers have ended.

        Args:
            messages: The turns, as in `encode_chat`; or a list of such conversations.
            params: Sampling parameters, or one for each conversation. None for the defaults.
            num_draft_tokens: Draft tokens per step and request. None for the drafter's default.
            **template: Other arguments of `encode_chat`.

        Returns:
            The handle of the answer. For a list of conversations, handles in their order: a conversation that the
            engine cannot serve gets a handle with `finish_reason="error"`, and the others run.

        Raises:
            ValueError: If the engine cannot serve a single conversation, or as `generate`.
        """
        batch = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        pairs = pair_with_params(messages if batch else [messages], params)
        prompts: dict[int, list[int]] = {}
        refused: dict[int, Handle] = {}
        own: dict[int, SamplingParams] = {}
        for at, (conversation, each) in enumerate(pairs):
            try:
                prompts[at] = self.encode_chat(conversation, **template)  # type: ignore[arg-type]
                own[at] = self._chat_params(each, template)
            except ValueError as error:
                if not batch:
                    raise
                refused[at] = rejected_handle(each, error)
        ended = self._generate(zip(prompts.values(), own.values()), num_draft_tokens=num_draft_tokens)
        handles = refused | dict(zip(prompts, ended, strict=True))
        if batch:
            made = [handles[at] for at in range(len(pairs))]
            warn_of_errors(made)
            return made
        if handles[0].request_id < 0:  # the engine refused it
            assert handles[0].error is not None
            raise handles[0].error
        return handles[0]

    def _chat_params(self, params: SamplingParams | None, template: Mapping[str, Any]) -> SamplingParams:
        """Adds the tokens that end a turn to the parameters of a request."""
        resolved = resolve_params(params, self.default_params)
        text, options = template.get("chat_template"), template.get("template_options")
        plain = text is None and not options
        ids = self.end_of_turn_ids if plain else self._find_end_of_turn(text, options)
        new = () if resolved.ignore_eos else tuple(token for token in ids if token not in resolved.stop_token_ids)
        return replace(resolved, stop_token_ids=(*resolved.stop_token_ids, *new)) if new else resolved

    def _find_end_of_turn(
        self, chat_template: str | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Finds ids of the target's vocabulary that end an answer."""
        found = end_of_turn_ids(self.tokenizer, self.eos_token_ids, chat_template, options)
        return tuple(token for token in found if token < self.target.vocab_size)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Checks a conversation, and joins contents that are lists of text parts.

    Args:
        messages: A list of messages.

    Returns:
        Copies of the messages. Keys whose value is None are left out, such as the content of calls of tools.

    Raises:
        ValueError: If the conversation is empty or malformed.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages: got {messages!r:.80}; expected {_FORM}; put text into one of them")
    if not messages:
        raise ValueError(f"messages: got an empty list; expected {_FORM}; add the user's turn")
    return [_check_message(message, f"message {at}") for at, message in enumerate(messages, 1)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages: got {message!r:.80} as {where}; expected {_FORM}; give it a role")
    found = {name: value for name, value in message.items() if value is not None}
    role = found.get("role")
    if not isinstance(role, str) or not role:
        got = f"the role {role!r:.40}" if "role" in message else "no role"
        raise ValueError(f"messages: got {got} in {where}; expected system, user, assistant or tool; name one")
    content = found.get("content")
    if content is None:
        if "tool_calls" not in found:
            raise ValueError(f"messages: got no content in {where}; expected text; add it, or drop the message")
    elif isinstance(content, list | tuple):
        found["content"] = "".join(_text_of(part, where) for part in content)
    elif not isinstance(content, str):
        raise ValueError(f"messages: got the content {content!r:.60} in {where}; expected text; convert it")
    for name in ("role", "content"):
        try:
            str(found.get(name, "")).encode()
        except UnicodeEncodeError:
            wanted = "Unicode text without lone surrogates; repair it"
            raise ValueError(f"messages: got the {name} {found[name]!r:.60} in {where}; expected {wanted}") from None
    return found


def _text_of(part: Any, where: str) -> str:
    """Returns the text of a content part."""
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
    if kind == "text" and isinstance(text, str):
        return text
    got = f"a part of type {kind!r:.40}" if isinstance(kind, str) and kind != "text" else f"the part {part!r:.60}"
    wanted = "parts of type text with a text, since the engine reads text alone; drop the others"
    raise ValueError(f"messages: got {got} in {where}; expected {wanted}")


def _checked_options(options: Any) -> dict[str, Any]:
    """Returns a copy of template options. Raises ValueError for names that are no variables of a template."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise ValueError(f"template_options: got {options!r:.80}; expected a mapping of names to values")
    for name in options:
        if name in TOKENIZER_ARGUMENTS:
            raise RefusedError(
                f"template_options: got {name!r}; expected variables of the chat template", Remedy.TEMPLATE_ARGUMENTS
            )
    return dict(options)


def describe_chat_excess(
    messages: Sequence[Message], tokenizer: Any, limit: int, template_options: Mapping[str, Any] | None = None
) -> str | None:
    """Returns how long a conversation is, in words, if it has far more tokens than a limit; None if it may fit.

    The cost of encoding grows with the limit and not with the conversation.

    Args:
        messages: The turns, as in `ChatMethods.encode_chat`.
        tokenizer: A transformers tokenizer.
        limit: Most tokens.
        template_options: Variables of the template.

    Raises:
        ValueError: As `ChatMethods.encode_chat`.
    """
    turns = check_messages(messages)
    if sum(len(turn.get("content", "")) for turn in turns) <= limit * PROBED // 2:
        return None  # most conversations, which need not be written twice
    text: str = apply_template(tokenizer, turns, _checked_options(template_options), tokenize=False)
    return describe_excess(text, tokenizer, limit)


def end_of_turn_ids(
    tokenizer: Any,
    eos_token_ids: Sequence[int],
    chat_template: str | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Returns token ids that end an answer, besides the end-of-sequence ids of the model.

    These are the special token that the chat template writes behind an answer, such as `<|im_end|>`, and the
    tokenizer's own end-of-sequence token. Many models list neither in their generation config.

    Args:
        tokenizer: A transformers tokenizer, or None.
        eos_token_ids: End-of-sequence ids of the model.
        chat_template: A Jinja template. None for the tokenizer's own.
        template_options: Variables of the template.

    Returns:
        Ids that are not in `eos_token_ids`; none without a chat template.
    """
    if tokenizer is None or (chat_template is None and not has_chat_template(tokenizer)):
        return ()
    turns = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
    found = [getattr(tokenizer, "eos_token_id", None)]
    try:
        text: str = apply_template(
            tokenizer, turns, template_options or {}, chat_template=chat_template, tokenize=False
        )
    except ValueError:  # a template that wants more than two plain turns
        text = ""
    rest = text.rpartition(_PROBE)[2].lstrip()
    added = {str(token): at for at, token in tokenizer.added_tokens_decoder.items()}
    behind = max((token for token in added if token and rest.startswith(token)), key=len, default=None)
    found.append(None if behind is None else added[behind])
    return tuple(dict.fromkeys(token for token in found if token is not None and token not in eos_token_ids))
