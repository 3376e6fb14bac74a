"""`specdec tune head-layers`: finds the layers that an EAGLE-3 head reads, by accepted draft tokens."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from specdec_fast.commands import options
from specdec_fast.commands.json_output import print_json


def head_layers(
    head: Annotated[str, typer.Option("--head", help="Folder or hub id of an EAGLE-3 head.")],
    model: options.Model = "demo-target",
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="Text file to measure on (default: a bundled text).")
    ] = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Check which target layers an EAGLE-3 head reads: those of its config.json, and one layer before and after.

    Exporters count layers in two ways. The acceptance rate of the head's first token at temperature 0 decides.
    """
    from specdec_fast.commands import open_engine
    from specdec_fast.commands.prompts import bundled_workload, read_prompts
    from specdec_fast.draft_runners.detect_aux_layers import layer_acceptance
    from specdec_fast.draft_runners.head_runner import PagedHead
    from specdec_fast.heads.checkpoint_eagle import load_eagle3

    open_engine.quiet()
    setup = open_engine.resolve(
        model=model, draft=None, drafter=open_engine.NO_DRAFTER, rule="replay", draft_tokens=None,
        dtype=dtype, device=device, compile=False,
    )  # fmt: skip
    engine = open_engine.open_engine(setup, threads=threads, max_rows=1)
    target: Any = engine.target
    texts = [item.prompt for item in bundled_workload()] if file is None else read_prompts(None, file, False)
    tokens = [token for text in texts for token in engine.encode(text)]
    rates = layer_acceptance(PagedHead(load_eagle3(head, target), target), target, tokens)
    configured, best = next(iter(rates)), max(rates, key=lambda ids: rates[ids])
    if as_json:
        found = [{"layers": list(ids), "acceptance": rate} for ids, rate in rates.items()]
        print_json({"head": head, "configured": list(configured), "best": list(best), "rates": found})
        return
    for ids, rate in rates.items():
        print(f"inputs of layers {list(ids)}: {rate:.3f}" + (" (as config.json is read)" if ids == configured else ""))
    if best == configured:
        print("the configuration is right")
    else:
        print(f"other layers have a higher acceptance rate: use -o layers={json.dumps(list(best))}")
