"""Command-line options that several commands share, declared once."""

from __future__ import annotations

from typing import Annotated

import typer

_MODELS, _RUN, _SAMPLING = "Models", "Run", "Sampling"

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Target: a bundled name, a folder or a hub id.", rich_help_panel=_MODELS),
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
        help="Who proposes: draft_model, ngram, ... (see `specdec info`), or none.",
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
Json = Annotated[
    bool, typer.Option("--json", help="Exactly one JSON object on standard output.", rich_help_panel="Output")
]
Temperature = Annotated[float, typer.Option("--temperature", "-T", help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0: all.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float,
    typer.Option("--top-p", help="Keep the likeliest tokens that make up this mass.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p", help="Drop tokens less likely than this share of the likeliest.", rich_help_panel=_SAMPLING
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", "-s", help="Same seed, same text (default: random).", rich_help_panel=_SAMPLING),
]
