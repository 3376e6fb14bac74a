"""`specdec generate`: streams text from any model; several prompts run as one batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from specdec_fast.commands import chat_options, grammar_options, options, sampling_options
from specdec_fast.commands.json_output import print_json

if TYPE_CHECKING:
    from specdec_fast.commands.open_engine import Setup

_PROMPT = "Prompt"
_MAX_ROWS = 8


def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; without it, --file or standard input is read.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            help="File with prompts: plain text, or .json or .jsonl with texts, lists of token ids, or "
            "objects with prompt or messages, id and sampling parameters. - reads standard input as text.",
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Treat every line of the file as a prompt.", rich_help_panel=_PROMPT)
    ] = False,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Apply the model's chat template: each prompt is a question. --system implies it.",
            rich_help_panel=chat_options.CHAT,
        ),
    ] = False,
    system: chat_options.System = None,
    chat_template: chat_options.ChatTemplate = None,
    template_option: chat_options.TemplateOptions = None,
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
    temperature: options.OptionalTemperature = None,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            "-s",
            help="Seed of the first prompt; each further prompt uses the next number. The same seed gives "
            "the same text; rules other than replay also need the same drafts (default: random).",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    logit_bias: options.LogitBias = None,
    ban: options.Ban = None,
    bad_word: options.BadWord = None,
    no_repeat_ngram_size: options.NoRepeatNgramSize = 0,
    regex: grammar_options.Regex = None,
    json_schema: grammar_options.JsonSchema = None,
    grammar_backend: grammar_options.GrammarBackend = "llguidance",
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", help="Maximum number of tokens to generate.", rich_help_panel=options.LENGTH),
    ] = 128,
    min_new_tokens: options.MinNewTokens = 0,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    max_length: options.MaxLength = None,
    dtype: options.Dtype = "float32",
    weights: options.Weights = None,
    device: options.Device = "cpu",
    device_map: options.DeviceMap = None,
    threads: options.Threads = None,
    compile: options.Compile = False,
    fused_forward: options.FusedForward = None,
    as_json: options.Json = False,
    logprobs: options.Logprobs = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Print tau, acceptance by depth and the time of each phase to standard error.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = False,
    color: options.Color = False,
) -> None:
    """Generate text with a model, faster than the model alone and with the same result."""
    from specdec_fast.commands import open_engine
    from specdec_fast.commands.generate_batch import Job, engine_tokens
    from specdec_fast.commands.prompts import as_conversations, read_entries
    from specdec_fast.commands.terminal_output import counted
    from specdec_fast.commands.warning_lines import warnings_after_text

    if as_json and color:
        raise ValueError("--json with --color: expected one of them; JSON carries the origins of all tokens")
    grammar_options.refuse_grammar(regex, json_schema, grammar_backend)
    entries = read_entries(prompt, file, lines)
    template = chat_options.read_template(chat_template, template_option)
    if chat or system is not None:
        entries = as_conversations(entries, system)
    elif template and all(entry.messages is None for entry in entries):
        flag = "--chat-template" if "chat_template" in template else "--template-option"
        raise ValueError(f"{flag}: got no conversation; expected --chat, or messages in --file; add --chat")
    setup = open_engine.resolve_options(ctx)
    flags = sampling_options.read_params(ctx)
    given = sampling_options.given_fields(ctx) | ({"temperature"} if rule == "greedy" else set())
    params = [entry.params(flags, at) for at, entry in enumerate(entries)]
    follows = sampling == "model"  # then the model has to be loaded before its parameters are known
    temperatures = {None} if follows else {own.temperature for own in params}
    with _json_on_interrupt(setup, as_json):
        open_engine.quiet()
        engine = open_engine.open_engine(
            setup,
            threads=threads,
            max_rows=min(len(entries), _MAX_ROWS),
            max_length=max_length,
            temperature=temperatures.pop() if len(temperatures) == 1 else None,
            sample=lambda defaults: [
                (entry.prompt, entry.params(sampling_options.follow_defaults(flags, defaults, given), at))
                for at, entry in enumerate(entries)
            ],
            sampling=sampling_options.choose_defaults(sampling, given),
        )
        flags = sampling_options.follow_defaults(flags, engine.default_params, given)
        params = [entry.params(flags, at) for at, entry in enumerate(entries)]
        grammar = grammar_options.read_grammar(regex, json_schema, engine.tokenizer, grammar_backend)
    chat_options.note_unread_options(engine.tokenizer, template)
    params = [replace(own, grammar=grammar) for own in params]
    job = Job(engine, entries, params, template, color=color, streams=not as_json)
    with warnings_after_text():
        try:
            job.run()
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
            job.cancel()
    if as_json:
        print_json(job.report(setup, interrupted=interrupted))
    else:
        job.print_logprobs()
    job.note_unused_template()
    if stats:
        job.print_stats()
    job.print_legend()
    if interrupted:
        job.err.print(f"specdec: interrupted after {counted(engine_tokens(job.handles), 'token')}{job.left()}")
        raise typer.Exit(130)
    refused = [handle for handle in job.handles if handle.error is not None]
    if refused:
        if len(job.handles) == 1:
            raise refused[0].error  # type: ignore[misc]
        for entry, handle in zip(entries, job.handles):
            if handle.error is not None:
                job.err.print(f"specdec: error: {entry.where}: {handle.error}", soft_wrap=True)
        raise typer.Exit(2)


@contextmanager
def _json_on_interrupt(setup: Setup, as_json: bool) -> Iterator[None]:
    """With --json, prints an object without requests if Ctrl-C arrives while the models load."""
    try:
        yield
    except KeyboardInterrupt:
        if as_json:
            empty = {"interrupted": True, "new_tokens": 0, "seconds": 0.0, "tokens_per_s": 0.0, "requests": []}
            print_json({**setup.describe(), **empty})
        raise
