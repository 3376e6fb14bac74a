"""Command-line options that several commands share, declared once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_fast.extras import require

_MODELS, _RUN, SAMPLING = "Models", "Run", "Sampling"

Model = Annotated[
    str,
    typer.Option(
        "--model", "--target", "-m", help="Target: a bundled name, a folder or a hub id.", rich_help_panel=_MODELS
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        help="Draft model of the same family. The bundled target comes with demo-draft.",
        rich_help_panel=_MODELS,
    ),
]
DrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="Who proposes: draft_model, ngram, ... (see `specdec drafters`), or none.",
        rich_help_panel=_MODELS,
    ),
]
DrafterOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter-option",
        "-o",
        metavar="NAME=VALUE",
        help="What else the drafter takes, such as n_max=3 or widths=[4,2]; may be repeated.",
        rich_help_panel=_MODELS,
    ),
]
RuleName = Annotated[
    str, typer.Option("--rule", help="Verification rule (see `specdec info`).", rich_help_panel=_MODELS)
]
DraftTokens = Annotated[
    int | None,
    typer.Option("--draft-tokens", "-k", help="Tokens drafted per step; 0: plain decoding.", rich_help_panel=_MODELS),
]
BudgetName = Annotated[
    str,
    typer.Option(
        "--budget",
        help="Nodes drafted per step: fixed (all that --draft-tokens allows), entropy (what the draft model is sure "
        "of) or goodput (what pays, none if nothing).",
        rich_help_panel=_MODELS,
    ),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="float32, bfloat16, float16 or float64.", rich_help_panel=_RUN),
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.", rich_help_panel=_RUN)]
Threads = Annotated[
    int | None,
    typer.Option("--threads", "-t", help="CPU threads (default: PyTorch's).", rich_help_panel=_RUN),
]
Compile = Annotated[bool, typer.Option("--compile", help="Run the models through torch.compile.", rich_help_panel=_RUN)]
FusedForward = Annotated[
    bool,
    typer.Option(
        "--fused-forward",
        help="Run the target's forward pass as one operator, as for draft models (Llama, float32, CPU).",
        rich_help_panel=_RUN,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Exactly one JSON object on standard output.", rich_help_panel="Output")
]
Temperature = Annotated[float, typer.Option("--temperature", "-T", help="0 is greedy.", rich_help_panel=SAMPLING)]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0: all.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float,
    typer.Option("--top-p", help="Keep the likeliest tokens that make up this mass.", rich_help_panel=SAMPLING),
]
MinP = Annotated[
    float,
    typer.Option("--min-p", help="Drop tokens less likely than this share of the likeliest.", rich_help_panel=SAMPLING),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        help="Above 1: tokens of prompt and text become less likely; 1 is off.",
        rich_help_panel=SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        "--presence-penalty", help="Taken off the logits of tokens in the text; 0 is off.", rich_help_panel=SAMPLING
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option("--frequency-penalty", help="The same, per time they are in the text.", rich_help_panel=SAMPLING),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID:VALUE",
        help="Add VALUE to the logit of token ID; may be repeated.",
        rich_help_panel=SAMPLING,
    ),
]
Ban = Annotated[
    list[int] | None,
    typer.Option("--ban", metavar="ID", help="Never produce token ID; may be repeated.", rich_help_panel=SAMPLING),
]
Regex = Annotated[
    str | None,
    typer.Option("--regex", help="The text matches this expression (extra: grammar).", rich_help_panel=SAMPLING),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        help="The text is JSON of this schema: a file, or the schema itself (extra: grammar).",
        rich_help_panel=SAMPLING,
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        help="Log-probabilities of the tokens and N alternatives, after temperature and all other settings: in the "
        "JSON, else on stderr.",
        rich_help_panel="Output",
    ),
]


def read_drafter_options(entries: list[str] | None) -> dict[str, Any]:
    """Options from NAME=VALUE; a value is JSON where it can be, else text. Raises ValueError."""
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


def read_bias(entries: list[str] | None) -> dict[int, float]:
    """Token biases from ID:VALUE. Raises ValueError."""
    found = {}
    for entry in entries or ():
        token, colon, value = entry.partition(":")
        try:
            found[int(token)] = float(value if colon else "")
        except ValueError:
            raise ValueError(f"--logit-bias: got {entry!r}; expected ID:VALUE, such as 42:-1.5") from None
    return found


def refuse_grammar(regex: str | None, schema: str | None) -> None:
    """What can be said against --regex and --json-schema before a model is loaded. Raises ValueError."""
    if regex is not None and schema is not None:
        raise ValueError("--regex with --json-schema: got both; expected one of them")
    if regex is not None or schema is not None:
        require("grammar", "--json-schema" if regex is None else "--regex")


def read_grammar(regex: str | None, schema: str | None, tokenizer: Any) -> Any:
    """The grammar that --regex or --json-schema asks for, or None. Raises ValueError."""
    if regex is None and schema is None:
        return None
    if tokenizer is None:
        raise ValueError(f"--{'regex' if schema is None else 'json-schema'}: got a model without a tokenizer")
    from specdec_fast.integrations import llguidance

    if regex is not None:
        return llguidance.regex(regex, tokenizer)
    assert schema is not None
    if schema.lstrip().startswith("{"):
        return llguidance.json_schema(schema, tokenizer)
    if not Path(schema).is_file():
        raise ValueError(f"--json-schema: got {schema!r}; expected a file, or a JSON object")
    try:
        text = Path(schema).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--json-schema: got {schema!r}, which is not UTF-8 text (byte {error.start})") from None
    return llguidance.json_schema(text, tokenizer)
