"""Rewrites the library's error messages in terms of command-line flags. Tests: tests/commands/test_errors.py."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from specdec_fast.core.remedies import RefusedError, Remedy

# Fields of `SamplingParams` that have a flag. `_FLAGS` has flags that are not the field's name with dashes.
_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens", "min_new_tokens", "stop", "ignore_eos",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "banned_token_ids", "logprobs",
    "bad_words", "no_repeat_ngram_size",
)  # fmt: skip
_FLAGS = {name: f"--{name.replace('_', '-')}" for name in _FIELDS} | {
    "banned_token_ids": "--ban",
    "bad_words": "--bad-word",
}
_UNMISTAKABLE = re.compile(rf"\b({'|'.join(name for name in _FIELDS if '_' in name)})\b")
_OF_COMMAND = re.compile(
    r"^(?:drafter \w+: )?(model|draft|adapter|device_map|rule|dtype|weights|budget|chat_template|grammar_backend): got"
)
_ARGUMENT = re.compile(r"(?<![\w/'])(dtype|device|device_map|drafter|budget|rule)='([^']+)'")  # as Python writes it
NAMED = (
    "SamplingParams.", "drafter ", "model: ", "draft: ", "adapter: ", "device_map: ", "tokenizer: ", "rule: ",
    "dtype: ", "weights: ", "fused_forward: ", "budget: ", "messages: ", "chat_template: ", "grammar_backend: ",
)  # fmt: skip
"""Beginnings of messages about flags, unless a prompt in a file sets the parameter itself."""
OF_CODE = {
    "an engine without a tokenizer": "a model without a tokenizer",
    "stop strings: got": "--stop: got",
    "expected the text of a Jinja template": "expected a file with a Jinja template",
    "which is the default of load; pass max_length to load": "which is the default; pass --max-length",
    "which is max_length; raise it": "which is --max-length; raise it",
    "; expected trust_remote_code=True, which runs": "; expected --trust-remote-code, which runs",
    "pass trust_remote_code=True, which runs": "pass --trust-remote-code, which runs",
    "layers on disk also need model_options={'offload_folder': ...}": "keep layers off the disk",
    "pass tokenizer= with the folder or hub id of the original model": "use the original checkpoint",
    "; pass the model, and adapter=": "; pass --model, and --adapter ",
    "leave weights out": "leave --weights out",
    "fused_forward: got True, but": "--fused-forward: cannot be met:",
    "(compile=True serves every model)": "(--compile serves every model)",
    "try drafter auto, a smaller num_draft_tokens or budget goodput": (
        "try --drafter auto, a smaller --draft-tokens or --budget goodput"
    ),
    "lower max_length or max_rows, or pass num_pages": "lower --max-length",
    ", or a BudgetPolicy": "",
    "None, or a count from": "a count from",
    "got no draft model; expected draft=, a model": "got no draft model; expected --draft with a model",
    "pass stop_token_ids, and do not ignore_eos": (
        'pass "stop_token_ids" beside the prompt in a .json or .jsonl --file, and do not --ignore-eos'
    ),
}
"""Words of the library -> words of the program. Remedies of requests are in `REMEDIES`."""

REMEDIES = {
    Remedy.TOKENIZER_OR_IDS: (
        "expected token ids; pass lists of them with --file ids.json or --file ids.jsonl, or put the tokenizer's files "
        "into the folder of --model"
    ),
    Remedy.TOKENIZER_OR_STOP_IDS: (
        "expected one with a tokenizer; put its files into the folder of --model, or pass ids with --file: "
        '{"prompt": [5, 6], "stop_token_ids": [7]}'
    ),
    Remedy.TOKENIZER_OR_BAD_WORD_IDS: (
        "expected one with a tokenizer; put its files into the folder of --model, or pass ids with --file: "
        '{"prompt": [5, 6], "bad_words": [[7]]}'
    ),
    Remedy.TOKENIZER_OR_CHAT_IDS: "put the tokenizer's files into the folder of --model",
    Remedy.CHAT_TEMPLATE: "pass --chat-template FILE, or use `specdec generate` without --chat",
    Remedy.OTHER_MESSAGES: "change them, or pass another --chat-template",
    Remedy.OWN_TEMPLATE: "drop the option for the tokenizer's own",
    Remedy.TEMPLATE_ARGUMENTS: "drop it",
    Remedy.MORE_PAGES: "lower --max-new-tokens",
}
"""What a user of the command line does about a request that the engine refuses."""

_VALUES = {
    "float_parsing": "a number",
    "int_parsing": "an integer",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}
"""Kind of an error of pydantic -> what the option expects."""


def explain_value(error: Any) -> str | None:
    """Returns the message for a value of an option that has another type or is out of range.

    Args:
        error: An exception of typer.

    Returns:
        The message, or None for other errors, which typer words itself.
    """
    flag = next(iter(getattr(getattr(error, "param", None), "opts", ())), None)
    cause: Any = error.__cause__
    if flag is None or not hasattr(cause, "errors"):
        return None
    first = cause.errors()[0]
    words = _VALUES.get(first["type"])
    if words is None:
        return None
    return f"{flag}: got {first['input']!r:.80}; expected {words.format(**first.get('ctx', {}))}"


def replace_code_words(message: str) -> str:
    """Replaces words of the library by those of the program, also in warnings."""
    for code_words, flag_words in OF_CODE.items():
        message = message.replace(code_words, flag_words)
    return _ARGUMENT.sub(lambda found: f"--{found[1].replace('_', '-')} {found[2]}", message)


def in_flags(error: Exception, own: Collection[str] = ()) -> str:
    """Replaces parameter names at the start of a message by command-line flags, and states remedies for the program.

    Args:
        error: An error of the library.
        own: Parameters that a prompt in a file sets itself. They keep their names.

    Returns:
        The message for the command line.
    """
    if isinstance(error, RefusedError):  # the remedy has the program's words already
        return f"{in_flags(ValueError(error.fault), own)}; {REMEDIES[error.remedy]}"
    message = str(error)
    message = message.replace("stop: got ('',);", "stop: got '';")  # a flag has no tuple
    message = replace_code_words(message)
    message = _OF_COMMAND.sub(lambda found: f"--{found[1].replace('_', '-')}: got", message)
    name, colon, rest = message.removeprefix("SamplingParams.").partition(":")
    if name not in _FLAGS or name in own or not colon:
        return message
    return f"{_FLAGS[name]}:{_UNMISTAKABLE.sub(lambda found: _FLAGS[found[1]], rest)}"
