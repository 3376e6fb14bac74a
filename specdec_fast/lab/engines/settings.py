"""Engines that the lab can run, and their ways of drafting. Tests: tests/lab/engines/test_settings.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_kernels.unknown_names import unknown_name


@dataclass(frozen=True)
class Setting:
    """One way in which an engine generates text.

    Attributes:
        name: Its name on the command line.
        summary: What drafts and verifies, for tables.
        pair: Pair of tiny models that it needs; see `scripts/build_pairs.py`.
        recorder: What `scripts/record.py` needs to know.
        batches: Whether several requests can be one batch.
        seed_per_request: Whether each request of a batch has a seed of its own.
        own: Whether this project verifies the drafts.
        note: What is known about it, such as where the engine's developers discuss a deviation.
    """

    name: str
    summary: str
    pair: str = "llama"
    recorder: dict[str, Any] = field(default_factory=dict)
    batches: bool = False
    seed_per_request: bool = False
    own: bool = False
    note: str = ""


_ASSISTED: dict[str, Any] = {
    "draft": True,
    "draft_generation": {
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    },
}
_DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 3}
_PROBABILISTIC = {**_DRAFT_MODEL, "draft_sample_method": "probabilistic"}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def _vllm(name: str, summary: str, speculation: dict[str, Any], rule: str = "", note: str = "") -> Setting:
    recorder: dict[str, Any] = {"speculation": speculation, "draft": speculation.get("method") == "draft_model"}
    if rule:
        recorder["plugin"] = {"rule": rule}
    return Setting(name, summary, recorder=recorder, batches=True, seed_per_request=True, own=bool(rule), note=note)


_UNINITIALIZED = "On a CPU, temperature, top-k and top-p of drafts are uninitialized memory (vllm-project/vllm #55005)."

ENGINES: dict[str, tuple[Setting, ...]] = {
    "transformers": (
        Setting("plain", "no drafts", batches=True),
        Setting("assisted", "draft model of the same tokenizer", recorder=_ASSISTED),
        Setting("prompt-lookup", "n-grams of the text", recorder={"options": {"prompt_lookup_num_tokens": 3}}),
        Setting(
            "universal",
            "draft model of another tokenizer",
            "universal",
            recorder={**_ASSISTED, "tokenizers": "as loaded"},
            note="Draft probabilities are assigned in the order of `get_vocab()`, which is not the order of ids.",
        ),
        Setting(
            "universal-sorted",
            "the same, vocabularies sorted by id",
            "universal",
            recorder={**_ASSISTED, "tokenizers": "sorted"},
        ),
        Setting("early-exit", "the model's own first layer", recorder={"options": {"assistant_early_exit": 1}}),
        Setting(
            "dflash",
            "block drafter DFlash",
            "dflash",
            recorder={"draft": "headless", "options": {"speculation_type": "dflash"}},
        ),
        Setting(
            "gemma4-assistant",
            "Gemma 4 assistant",
            "gemma4",
            recorder={"draft": True},
            note="Drafts are the most probable tokens, verified as if sampled (huggingface/transformers #47932).",
        ),
        *(
            Setting(
                f"specdec-{rule}",
                f"attached specdec-fast, draft model, rule {rule}",
                recorder={"attach": {"rule": rule, "num_draft_tokens": 3}},
                batches=True,
                own=True,
            )
            for rule in ("replay", "rejection", "block")
        ),
    ),
    "vllm": (
        _vllm("plain", "no drafts", {}),
        _vllm("ngram", "n-grams of the text", _NGRAM, note=_UNINITIALIZED),
        _vllm("draft-model", "draft model, greedy drafts", _DRAFT_MODEL, note=_UNINITIALIZED),
        _vllm("draft-model-sampled", "draft model, sampled drafts", _PROBABILISTIC, note=_UNINITIALIZED),
        _vllm("specdec-plain", "plugin of specdec-fast, no drafts, rule replay", {}, "replay"),
        _vllm("specdec-ngram", "plugin of specdec-fast, n-grams, rule rejection", _NGRAM, "rejection"),
        *(
            _vllm(f"specdec-{rule}", f"plugin of specdec-fast, draft model, rule {rule}", _PROBABILISTIC, rule)
            for rule in ("replay", "rejection", "block")
        ),
    ),
    "callable": (Setting("sampler", "a sampler of your own", batches=True, seed_per_request=True),),
}
"""Engine -> its settings, in the order of tables."""


def settings_of(engine: str, names: Sequence[str] = ()) -> tuple[Setting, ...]:
    """Returns settings of an engine.

    Args:
        engine: A key of `ENGINES`.
        names: Names of settings. Without any, all settings are returned.

    Returns:
        The settings, in the order of tables.

    Raises:
        ValueError: If a name is unknown.
    """
    if engine not in ENGINES:
        raise ValueError(unknown_name("--engine", engine, sorted(ENGINES)))
    known = {each.name: each for each in ENGINES[engine]}
    for name in names:
        if name not in known:
            raise ValueError(unknown_name(f"--setting of engine {engine}", name, list(known)))
    return tuple(each for each in known.values() if not names or each.name in names)
