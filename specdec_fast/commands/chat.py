"""`specdec chat`: a conversation with an instruct model. Tests: tests/commands/test_chat.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from specdec_fast.commands import chat_options, grammar_options, options, sampling_options


def chat(
    ctx: typer.Context,
    model: chat_options.InstructModel = "demo-target",
    draft: options.DraftModel = None,
    adapter: options.Adapter = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    drafter: options.DrafterName = None,
    drafter_option: options.DrafterOptions = None,
    rule: options.RuleName = "replay",
    draft_tokens: options.DraftTokens = None,
    budget: options.BudgetName = "fixed",
    system: chat_options.System = None,
    chat_template: chat_options.ChatTemplate = None,
    template_option: chat_options.TemplateOptions = None,
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
            help="Seed of the first answer; each further answer uses the next number (default: random).",
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
        typer.Option("--max-new-tokens", help="Maximum number of tokens of an answer.", rich_help_panel=options.LENGTH),
    ] = 1024,
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
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one line of JSON for each answer to standard output.", rich_help_panel=options.OUTPUT
        ),
    ] = False,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Print tau, acceptance by depth and the time of each phase after every answer.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = False,
    color: options.Color = False,
) -> None:
    """Chat with an instruct model: every line of standard input is a question; /help lists commands."""
    from specdec_fast.commands import open_engine

    if as_json and color:
        raise ValueError("--json with --color: expected one of them; JSON carries no colours")
    grammar_options.refuse_grammar(regex, json_schema, grammar_backend)
    template = chat_options.read_template(chat_template, template_option)
    setup = open_engine.resolve_options(ctx)
    from specdec_fast.commands.chat_session import ChatSession, Output
    from specdec_fast.commands.conversation import Conversation
    from specdec_fast.engine.chat_template import has_chat_template

    params = sampling_options.read_params(ctx)
    given = sampling_options.given_fields(ctx) | ({"temperature"} if rule == "greedy" else set())
    open_engine.quiet()
    engine = open_engine.open_engine(
        setup,
        threads=threads,
        max_rows=1,
        max_length=max_length,
        temperature=None if sampling == "model" else params.temperature,
        sampling=sampling_options.choose_defaults(sampling, given),
        chats=chat_template is None,
    )
    params = sampling_options.follow_defaults(params, engine.default_params, given)
    if engine.tokenizer is not None and chat_template is None and not has_chat_template(engine.tokenizer):
        raise open_engine.no_template(model)
    params = replace(
        params, grammar=grammar_options.read_grammar(regex, json_schema, engine.tokenizer, grammar_backend)
    )
    chat_options.note_unread_options(engine.tokenizer, template)
    conversation = Conversation(engine, system, template)
    session = ChatSession(engine, conversation, params, Output(color=color, stats=stats, as_json=as_json))
    session.greet(model)
    session.run()
    if session.refused and not session.interactive:
        raise typer.Exit(2)
