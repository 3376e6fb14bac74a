"""`specdec serve`: an OpenAI-compatible HTTP server over one engine."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from specdec_fast.commands import grammar_options, options
from specdec_fast.commands.word_wrap import wrap_words
from specdec_fast.extras import require

_SERVER, _LIMITS = "Server", "Limits"


def serve(
    ctx: typer.Context,
    model: options.Model = "demo-target",
    draft: options.DraftModel = None,
    adapter: options.Adapter = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    drafter: options.DrafterName = None,
    drafter_option: options.DrafterOptions = None,
    rule: options.RuleName = "replay",
    draft_tokens: options.DraftTokens = None,
    budget: options.BudgetName = "fixed",
    sampling: options.SamplingDefaults = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 127.0.0.1 is this machine.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port; 0 selects a free one.", rich_help_panel=_SERVER)
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="SPECDEC_API_KEY",
            help="Key that clients must send. Other users of the machine see options, so prefer the variable.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name", help="Name of the model in the API (default: --model).", rich_help_panel=_SERVER
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            "--shutdown-timeout",
            min=0,
            help="Seconds that running texts have to finish after SIGTERM or Ctrl-C.",
            rich_help_panel=_SERVER,
        ),
    ] = 30.0,
    max_rows: Annotated[
        int, typer.Option("--max-rows", min=1, help="Texts that run at the same time.", rich_help_panel=_LIMITS)
    ] = 8,
    max_queue: Annotated[
        int,
        typer.Option(
            "--max-queue", min=0, help="Texts that wait; further requests get status 429.", rich_help_panel=_LIMITS
        ),
    ] = 64,
    max_body: Annotated[
        int, typer.Option("--max-body", min=1, help="Bytes in the body of a request.", rich_help_panel=_LIMITS)
    ] = 4 * 2**20,
    grammar_backend: grammar_options.GrammarBackend = "llguidance",
    max_length: Annotated[
        int | None,
        typer.Option(
            "--max-length",
            help="Maximum length of prompt plus new tokens (default: the model's context, at most 4096).",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            "--prefill-chunk",
            min=1,
            help="Most prompt tokens per step; fewer keep other texts flowing (default: 512 on a CPU, else 2048).",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    dtype: options.Dtype = "float32",
    weights: options.Weights = None,
    device: options.Device = "cpu",
    device_map: options.DeviceMap = None,
    threads: options.Threads = None,
    compile: options.Compile = False,
    fused_forward: options.FusedForward = None,
) -> None:
    """Serve a model over HTTP, with the API of OpenAI."""
    require("serve", "specdec serve")
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if processes > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError(
            f"serve: got {processes} processes of torchrun; expected one, since requests reach one process alone; "
            "start it without torchrun"
        )
    from specdec_fast.commands import open_engine

    setup = open_engine.resolve_options(ctx)
    from specdec_fast.commands.terminal_output import counted
    from specdec_fast.server.generation import Service
    from specdec_fast.server.settings import Settings
    from specdec_fast.server.uvicorn_server import Server, bind, is_loopback, url

    settings = Settings(
        model if served_model_name is None else served_model_name, api_key, max_queue, max_body, grammar_backend
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with bind(host, port) as bound:
        open_engine.quiet()
        if not is_loopback(bound) and api_key is None:
            _say("warning: other machines reach this server, and no key protects it; set SPECDEC_API_KEY")
        engine = open_engine.open_engine(
            setup,
            threads=threads,
            max_rows=max_rows,
            max_length=max_length,
            prefill_chunk=prefill_chunk,
            sampling=sampling,
        )
        if engine.state.device.type != "cpu":
            engine.warm()
        ready = f"serving {settings.model_name} on {url(bound)}/v1; Ctrl-C ends it"
        server = Server(
            Service(engine, settings),
            shutdown_timeout=shutdown_timeout,
            started=lambda: _say(ready),
            finishing=lambda count: _say(
                f"finishing {counted(count, 'text')}, at most {shutdown_timeout:g} s; Ctrl-C again ends at once"
            ),
        )
        server.serve_until_stopped([bound])
        _say("the server has ended")


def _say(words: str) -> None:
    print(wrap_words(f"specdec: {words}", sys.stderr), file=sys.stderr, flush=True)
