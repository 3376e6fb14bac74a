"""Remedies of refused requests, by key: each user interface states them in its own words.

Tests: tests/core/test_remedies.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Remedy(Enum):
    """What a caller in Python does about a refused request. The value is the text for that caller.

    The server and the command line map every member to words of their own. Tests check that both mappings are complete,
    so that a text may change here without a change there.
    """

    TOKENIZER_OR_IDS = "pass token ids or tokenizer="
    TOKENIZER_OR_STOP_IDS = "pass tokenizer=, or use stop_token_ids"
    TOKENIZER_OR_BAD_WORD_IDS = "pass tokenizer=, or token ids"
    TOKENIZER_OR_CHAT_IDS = "pass tokenizer=, or submit token ids"
    CHAT_TEMPLATE = "pass chat_template=, or give the text to generate"
    OTHER_MESSAGES = "change them, or pass another chat_template"
    OWN_TEMPLATE = "pass None for the tokenizer's own"
    TEMPLATE_ARGUMENTS = (
        "pass tools, chat_template, add_generation_prompt and continue_final_message as arguments, and drop the others"
    )
    MORE_PAGES = "lower max_new_tokens, or raise num_pages of load"


class RefusedError(ValueError):
    """A request that the engine refuses, with its remedy as a key.

    Args:
        fault: What was got, and what was expected.
        remedy: What to do.

    Attributes:
        fault: What was got, and what was expected.
        remedy: What to do.
    """

    def __init__(self, fault: str, remedy: Remedy) -> None:
        super().__init__(fault, remedy)  # both, so that the error can be pickled
        self.fault, self.remedy = fault, remedy

    def __str__(self) -> str:
        return f"{self.fault}; {self.remedy.value}"


def stated(error: Exception, words: Mapping[Remedy, str]) -> str:
    """Returns the message of an error with the remedy of a user interface.

    Args:
        error: Any error.
        words: The words of the interface for every remedy.

    Returns:
        The fault and the interface's remedy for a `RefusedError`, else the message as it is.
    """
    return f"{error.fault}; {words[error.remedy]}" if isinstance(error, RefusedError) else str(error)
