"""Command-line options that several commands share, declared once."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

_MODELS, _RUN, SAMPLING, LENGTH, OUTPUT = "Models", "Run", "Sampling", "Length", "Output"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "--target",
        "-m",
        help="Target model: a bundled name, a folder, a .gguf file, a hub id, or owner/name:file.gguf.",
        rich_help_panel=_MODELS,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        help="Draft model, in the same form (default: demo-draft for a bundled target).",
        rich_help_panel=_MODELS,
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter", help="PEFT adapter to merge into the target: a folder or a hub id.", rich_help_panel=_MODELS
    ),
]
Revision = Annotated[
    str | None,
    typer.Option("--revision", help="Branch, tag or commit of the target on the hub.", rich_help_panel=_MODELS),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with checkpoints.", rich_help_panel=_MODELS),
]
DrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="Drafter: draft_model, ngram, ... (see `specdec drafters`), or none. Default: draft_model if there is a "
        "draft model, else auto on a CPU.",
        rich_help_panel=_MODELS,
    ),
]
DrafterOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter-option",
        "-o",
        metavar="NAME=VALUE",
        help="Option of the drafter as NAME=VALUE, such as n_max=3 or widths=[4,2]; may be repeated.",
        rich_help_panel=_MODELS,
    ),
]
RuleName = Annotated[
    str, typer.Option("--rule", help="Verification rule (see `specdec info`).", rich_help_panel=_MODELS)
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--draft-tokens", "-k", help="Draft tokens per step; 0 disables speculation.", rich_help_panel=_MODELS
    ),
]
BudgetName = Annotated[
    str,
    typer.Option(
        "--budget",
        help="Draft budget per step: fixed (all that --draft-tokens allows), entropy (stops where the "
        "draft model is uncertain) or goodput (the number that saves the most time, 0 if none "
        "does).",
        rich_help_panel=_MODELS,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", help="Data type of the models: float32, bfloat16, float16 or float64.", rich_help_panel=_RUN
    ),
]
Device = Annotated[str, typer.Option("--device", help="Device: cpu, cuda or cuda:N.", rich_help_panel=_RUN)]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        help="Devices of the target's layers, in place of --device: auto, a device, or a JSON object by module.",
        rich_help_panel=_RUN,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", "-t", help="Number of CPU threads (default: PyTorch's).", rich_help_panel=_RUN),
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the models with torch.compile.", rich_help_panel=_RUN)
]
FusedForward = Annotated[
    bool | None,
    typer.Option(
        "--fused-forward/--no-fused-forward",
        help="Run the target's forward pass as one operator (Llama, Mistral, Qwen, Gemma; float32, bfloat16; CPU). "
        "Default: where it is possible.",
        rich_help_panel=_RUN,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="int8: round the target's weights to int8. Faster on a CPU, and another model than the one named.",
        rich_help_panel=_RUN,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print exactly one JSON object to standard output.", rich_help_panel=OUTPUT)
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-T", help="Sampling temperature; 0 is greedy.", rich_help_panel=SAMPLING)
]
OptionalTemperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-T",
        help="Sampling temperature; 0 is greedy (default: 1, or 0 with --rule greedy).",
        rich_help_panel=SAMPLING,
    ),
]
MinNewTokens = Annotated[
    int,
    typer.Option(
        "--min-new-tokens",
        help="Minimum number of tokens before an end-of-text token or --stop ends the text.",
        rich_help_panel=LENGTH,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", help="Stop before this text appears; may be repeated. \\n is a newline.", rich_help_panel=LENGTH
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Continue after an end-of-text token.", rich_help_panel=LENGTH)
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length",
        help="Maximum length of prompt plus new tokens (default: the model's context, at most 4096).",
        rich_help_panel=LENGTH,
    ),
]
Color = Annotated[
    bool,
    typer.Option(
        "--color",
        help="Colour tokens by origin and explain the colours. Needs a terminal, or FORCE_COLOR=1.",
        rich_help_panel=OUTPUT,
    ),
]
SamplingDefaults = Annotated[
    str | None,
    typer.Option(
        "--sampling",
        help="Sampling parameters without an option of their own: model (those that its generation_config.json sets) "
        "or neutral (default: neutral, with a note if the model sets any).",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int, typer.Option("--top-k", help="Keep the k most likely tokens; 0 keeps all.", rich_help_panel=SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        help="Keep the most likely tokens up to this cumulative probability; 1 keeps all.",
        rich_help_panel=SAMPLING,
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        help="Drop tokens below this fraction of the highest probability; 0 keeps all.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        help="Values above 1 make tokens of prompt and text less likely; 1 is off.",
        rich_help_panel=SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        "--presence-penalty",
        help="Subtracted from the logits of tokens that the text contains; 0 is off.",
        rich_help_panel=SAMPLING,
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        help="Subtracted from the logit of a token for each occurrence in the text; 0 is off.",
        rich_help_panel=SAMPLING,
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID:VALUE",
        help="Add VALUE to the logit of token ID, as ID:VALUE; may be repeated.",
        rich_help_panel=SAMPLING,
    ),
]
Ban = Annotated[
    list[int] | None,
    typer.Option("--ban", metavar="ID", help="Never generate token ID; may be repeated.", rich_help_panel=SAMPLING),
]
BadWord = Annotated[
    list[str] | None,
    typer.Option(
        "--bad-word",
        metavar="TEXT",
        help="Never complete the tokens of TEXT, with or without a space before it; may be repeated.",
        rich_help_panel=SAMPLING,
    ),
]
NoRepeatNgramSize = Annotated[
    int,
    typer.Option(
        "--no-repeat-ngram-size",
        metavar="N",
        help="Repeat no sequence of N tokens of prompt and text; 0 is off.",
        rich_help_panel=SAMPLING,
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        help="Report log-probabilities of the tokens and of N alternatives, after all sampling "
        "parameters, in the JSON or on standard error.",
        rich_help_panel=OUTPUT,
    ),
]


def read_drafter_options(entries: list[str] | None) -> dict[str, Any]:
    """Parses drafter options.

    Args:
        entries: Options as NAME=VALUE. A value is JSON if it parses, otherwise text.

    Returns:
        Values by name.

    Raises:
        ValueError: If an option has no name or value.
    """
    found: dict[str, Any] = {}
    for entry in entries or ():
        name, equals, value = entry.partition("=")
        if not name or not equals:
            raise ValueError(f"--drafter-option: got {entry!r}; expected NAME=VALUE, such as n_max=3")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def read_device_map(value: str | None) -> Any:
    """Parses --device-map.

    Args:
        value: A name, or a JSON object.

    Returns:
        The device map, as transformers takes it.

    Raises:
        ValueError: If it is no device map.
    """
    if value is None or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(
            f"--device-map: got {value!r}; expected auto, a device, or a JSON object of devices by module: {error}"
        ) from None


def read_bias(entries: list[str] | None) -> dict[int, float]:
    """Parses token biases.

    Args:
        entries: Biases as ID:VALUE.

    Returns:
        Biases by token id.

    Raises:
        ValueError: If one cannot be parsed.
    """
    found = {}
    for entry in entries or ():
        token, colon, value = entry.partition(":")
        try:
            found[int(token)] = float(value if colon else "")
        except ValueError:
            raise ValueError(f"--logit-bias: got {entry!r}; expected ID:VALUE, such as 42:-1.5") from None
    return found
