"""Sampling parameters of the command line: options that were given, and the model's or neutral values for the others.

Tests: tests/commands/test_sampling_options.py.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from specdec_fast.sampling.params import SamplingParams

_FIELDS = {"ban": "banned_token_ids", "bad_word": "bad_words"}
"""Parameter of a command -> its field of `SamplingParams`, where the names differ."""
_OF_THE_MODEL = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
"""Fields by which one sees that sampling was chosen on the command line."""


def read_params(ctx: typer.Context) -> SamplingParams:
    """Returns the sampling parameters of a command that declares their options.

    Raises:
        ValueError: If a value is out of range, or if values contradict each other.
    """
    from specdec_fast.commands.options import read_bias
    from specdec_fast.commands.prompts import unescape
    from specdec_fast.sampling.params import SamplingParams

    found = dict(ctx.params)
    check_length(found["max_new_tokens"])
    if found["temperature"] is None:
        found["temperature"] = 0.0 if found["rule"] == "greedy" else 1.0
    found |= {
        "stop": tuple(unescape(text) for text in found["stop"] or ()),
        "logit_bias": read_bias(found["logit_bias"]),
        "banned_token_ids": tuple(found["ban"] or ()),
        "bad_words": tuple(unescape(text) for text in found["bad_word"] or ()),
    }
    names = {each.name for each in fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in found.items() if name in names})


def check_length(max_new_tokens: int) -> None:
    """Raises ValueError for a command that would write no text."""
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens: got {max_new_tokens}; expected at least 1")


def given_fields(ctx: typer.Context) -> set[str]:
    """Returns the fields of `SamplingParams` whose options were given."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    # by name, since some versions of typer come with an enumeration of their own
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    return {_FIELDS.get(name, name) for name in given}


def choose_defaults(sampling: str | None, given: set[str]) -> str | None:
    """Returns option `--sampling`, or "neutral" without a note if the sampling was chosen by other options.

    Args:
        sampling: Option `--sampling`.
        given: Fields whose options were given.
    """
    return "neutral" if sampling is None and given & _OF_THE_MODEL else sampling


def follow_defaults(flags: SamplingParams, defaults: SamplingParams, given: set[str]) -> SamplingParams:
    """Returns the parameters of a command with the engine's defaults in place of options that were not given.

    Args:
        flags: The parameters of the command.
        defaults: The engine's defaults. Those that equal the defaults of `SamplingParams` change nothing.
        given: Fields whose options were given.
    """
    neutral = type(flags)()
    changes = {each.name: getattr(defaults, each.name) for each in fields(flags) if each.name not in given}
    return replace(flags, **{name: value for name, value in changes.items() if value != getattr(neutral, name)})
