"""`specdec tune head-layers`: finds the layers that an EAGLE-3 head reads, by accepted draft tokens."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specdec_fast.commands import options
from specdec_fast.commands.json_output import print_json
from specdec_fast.core.shell_commands import generate_command


def head_layers(
    head: Annotated[str, typer.Option("--head", help="Folder or hub id of an EAGLE-3 head.")],
    model: options.Model = "demo-target",
    adapter: options.Adapter = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="Text file to measure on (default: a bundled text).")
    ] = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Check which target layers an EAGLE-3 head reads: those of its config.json, and one layer before and after.

    Exporters count layers in two ways. The acceptance rate of the head's first token decides, if the difference is
    beyond the noise.
    """
    from specdec_fast.commands import open_engine
    from specdec_fast.commands.prompts import bundled_workload, read_prompts
    from specdec_fast.draft_runners.detect_aux_layers import best_layers, layer_acceptances, mean_rates
    from specdec_fast.draft_runners.head_runner import PagedHead
    from specdec_fast.heads.checkpoint_eagle import load_eagle3

    open_engine.quiet()
    setup = open_engine.resolve(
        model=model, draft=None, drafter="none", rule="replay", draft_tokens=None,
        dtype=dtype, device=device, compile=False, adapter=adapter, revision=revision,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    engine = open_engine.open_engine(setup, threads=threads, max_rows=1)
    target: Any = engine.target
    texts = [item.prompt for item in bundled_workload()] if file is None else read_prompts(None, file, False)
    tokens = [token for text in texts for token in engine.encode(text)]
    samples = layer_acceptances(PagedHead(load_eagle3(head, target), target), target, tokens)
    rates, configured = mean_rates(samples), next(iter(samples))
    best, gain = best_layers(samples)
    use = {"--model": model, "--adapter": adapter, "--revision": revision, "--trust-remote-code": trust_remote_code,
           "--dtype": None if dtype == "float32" else dtype, "--device": None if device == "cpu" else device,
           "--drafter": "eagle3"}  # fmt: skip
    command = generate_command(use, {"head": head} | ({} if best == configured else {"layers": list(best)}))
    if as_json:
        found = [{"layers": list(ids), "acceptance": rate} for ids, rate in rates.items()]
        interval = None if gain is None else [gain.low, gain.high]
        print_json({"head": head, "configured": list(configured), "best": list(best), "gain": interval,
                    "command": command, "rates": found})  # fmt: skip
        return
    for ids, rate in rates.items():
        print(f"inputs of layers {list(ids)}: {rate:.3f}" + (" (as config.json is read)" if ids == configured else ""))
    if best != configured:
        print(f"other layers have a higher acceptance rate, by {gain} (95 % interval); use them with")
    elif gain is not None and gain.high > 0:
        print(f"no other layers are better beyond the noise (by {gain}, 95 % interval); the configuration stays")
    else:
        print("the configuration is right")
    print(command)
