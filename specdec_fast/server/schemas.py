"""Bodies of requests: the fields of the OpenAI API that are served, and those that vLLM adds.

Types are checked here, values by `SamplingParams`. Tests: tests/server/test_errors.py.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specdec_fast.server.errors import APIError

_WITHOUT_EFFECT = {
    "metadata", "parallel_tool_calls", "priority", "prompt_cache_key", "prompt_cache_retention", "request_id",
    "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip
"""Fields that have no effect on the text. They are accepted and ignored."""
_USE_RESPONSE_FORMAT = "use response_format with type json_schema"
_USE_TEMPLATE = "pass chat_template_kwargs if the model's chat template reads it"
_UNSUPPORTED = {
    "audio": "this model generates text alone",
    "best_of": "leave it out or use n, since every text that is made is returned; choose among them",
    "diversity_penalty": "use n with a temperature",
    "do_sample": "set temperature: 0 decodes greedily, and numbers above 0 sample",
    "early_stopping": "use n with a temperature",
    "length_penalty": "use n with a temperature",
    "max_completion_tokens": "use max_tokens",  # of chats alone
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "num_beams": "use n with a temperature",
    "num_return_sequences": "use n",
    "prediction": "the server's drafter drafts the text",
    "reasoning_effort": _USE_TEMPLATE,
    "stop_strings": "use stop",
    "typical_p": "use min_p or top_p",
    "chat_template": "templates are taken from the model alone",
    "function_call": "this server does not parse calls of functions; describe functions in a message",
    "functions": "this server does not parse calls of functions; describe functions in a message",
    "guided_choice": _USE_RESPONSE_FORMAT,
    "guided_grammar": _USE_RESPONSE_FORMAT,
    "guided_json": _USE_RESPONSE_FORMAT,
    "guided_regex": _USE_RESPONSE_FORMAT,
    "logits_processors": "they are functions of Python; pass them to SamplingParams of an engine",
    "structured_outputs": _USE_RESPONSE_FORMAT,
    "suffix": "this model continues a text and does not fill gaps",
    "use_beam_search": "use n with a temperature",
    "verbosity": "ask for it in a message",
}
"""Fields that would change the text, and what to do."""
_ASK_FOR_NOTHING: dict[str, Any] = {
    "best_of": 1,
    "diversity_penalty": 0,
    "early_stopping": False,
    "echo": False,
    "function_call": "none",
    "functions": [],
    "length_penalty": 1,
    "logits_processors": [],
    "min_new_tokens": 0,
    "modalities": ["text"],
    "num_beams": 1,
    "return_tokens_as_token_ids": False,
    "spaces_between_special_tokens": True,
    "stop_strings": [],
    "structured_outputs": {},
    "suffix": "",
    "typical_p": 1,
    "use_beam_search": False,
}
"""Field that is not served -> the value that changes nothing, and is accepted beside null."""

_FAIL_FAST = Field(fail_fast=True)  # one error for a list, not one for each of a million elements
Ids = Annotated[list[int], _FAIL_FAST]
ShortText = Annotated[str, Field(max_length=1024)]
"""A text that is compared with the end of the generated text, at a cost that grows with its length."""


class _Body(BaseModel):
    """A JSON object: numbers are no strings, and unknown fields are refused by `check_fields`."""

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Leaves out what is null, since many clients send all options and null for those that are not set."""
        if not isinstance(given, dict):
            return given
        # a schema may not be null, since any JSON would follow it
        return {name: value for name, value in given.items() if value is not None or name == "schema"}

    def check_fields(self) -> None:
        """Refuses fields that would be ignored, here and in nested objects.

        Raises:
            APIError: With status 400.
        """
        for name, value in (self.model_extra or {}).items():
            self._refuse(name, value)
        for name in type(self).model_fields:
            inner = getattr(self, name)
            if isinstance(inner, _Body):
                inner.check_fields()

    def _refuse(self, name: str, value: Any) -> None:
        """Refuses a field that this object does not have."""
        names = [field.alias or each for each, field in type(self).model_fields.items()]
        close = get_close_matches(name, names, 1)
        words = f"{name!r:.80}: unknown parameter" + (f"; did you mean {close[0]!r}?" if close else "")
        raise APIError(400, words, param=name, code="unknown_parameter")


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False  # of vLLM


class JsonSchema(_Body):
    """A named JSON schema. Texts always follow it, so `strict` changes nothing."""

    name: str = ""
    description: str | None = None
    definition: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """The format that a text must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(_Body):
    """Fields of completions and of chats. None leaves the default."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: ShortText | Annotated[list[ShortText], Field(max_length=16)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # fields of vLLM
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None  # of transformers
    bad_words: Annotated[list[ShortText | Ids], Field(max_length=1024), _FAIL_FAST] | None = None
    prompt_logprobs: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None

    def _refuse(self, name: str, value: Any) -> None:
        """Refuses a field, unless it changes nothing."""
        if name in _WITHOUT_EFFECT or (name in _ASK_FOR_NOTHING and value == _ASK_FOR_NOTHING[name]):
            return
        if name == "best_of" and value == self.n:  # all of the texts that are made
            return
        if name in _UNSUPPORTED:
            raise APIError(400, f"{name}: not supported; {_UNSUPPORTED[name]}", param=name, code="unsupported")
        super()._refuse(name, value)


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: str | Ids | Annotated[list[str], _FAIL_FAST] | Annotated[list[Ids], _FAIL_FAST]
    echo: bool | None = None
    logprobs: int | None = None


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], _FAIL_FAST]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    # fields of vLLM
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
