"""The requests of one `specdec generate`: one batch, printed while it runs or reported as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from specdec_fast.commands.error_wording import in_flags

if TYPE_CHECKING:
    from specdec_fast.commands.open_engine import Setup
    from specdec_fast.commands.prompts import Entry
    from specdec_fast.engine.engine import Engine
    from specdec_fast.engine.request import Handle
    from specdec_fast.sampling.params import SamplingParams


def engine_tokens(handles: list[Handle]) -> int:
    """Returns the number of tokens generated so far."""
    return sum(len(handle.tokens) for handle in handles)


def _non_default(params: SamplingParams) -> dict[str, Any]:
    """Returns temperature, length and every parameter that differs from its default, as JSON values."""
    from dataclasses import fields

    plain, always = type(params)(), ("temperature", "max_new_tokens")
    values = {each.name: getattr(params, each.name) for each in fields(params) if each.name not in ("seed", "grammar")}
    found = {name: value for name, value in values.items() if name in always or value != getattr(plain, name)}
    return found if params.grammar is None else {**found, "grammar": True}


def busy_machine(threads: int) -> str | None:
    """Returns advice if other work slows several threads down, or None.

    Args:
        threads: Number of CPU threads of the run.

    Returns:
        The advice if the load average of the last minute exceeds the number of cores.
    """
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # the system has no load average
        return None
    cores = os.cpu_count() or 1
    if threads < 2 or load <= cores:
        return None
    return f"the machine is busy (load average {load:.1f}, cores: {cores}); --threads 1 is often faster then"


def _not_started(handle: Handle) -> bool:
    """Returns whether a request was cancelled before its first token."""
    return handle.finish_reason == "cancelled" and not handle.tokens


class Job:
    """Runs the requests of one call. One request streams; several are printed in order as they end.

    Args:
        engine: The engine.
        entries: Prompts.
        params: Sampling parameters of each prompt.
        template: Arguments of `Engine.encode_chat` for entries that are conversations.
        color: Colour tokens by origin if the output is a terminal.
        streams: Print texts while they grow; otherwise `report` has them.
    """

    def __init__(
        self,
        engine: Engine,
        entries: list[Entry],
        params: list[SamplingParams],
        template: Mapping[str, Any] = MappingProxyType({}),
        *,
        color: bool,
        streams: bool,
    ) -> None:
        from specdec_fast.commands.terminal_output import Painter, make_console

        self.engine, self.entries = engine, entries
        self.out, self.err = make_console(), make_console(stderr=True)
        self.seconds, self._template = 0.0, template
        self._color, self._streams = color and self.out.is_terminal, streams
        if color and not self.out.is_terminal:
            self.err.print("specdec: note: --color: standard output is not a terminal; FORCE_COLOR=1 colours a pipe")
        self.handles = [self._submit(entry, own) for entry, own in zip(entries, params, strict=True)]
        self._painters = [Painter(handle, engine.tokenizer, by_origin=self._color) for handle in self.handles]
        self._shown = 0  # requests printed to their end
        self._note_short_context()

    def _submit(self, entry: Entry, params: SamplingParams) -> Handle:
        """Adds a request; in a batch, a rejected prompt becomes a handle with its error."""
        from specdec_fast.engine.request import Handle

        try:
            if entry.messages is not None:
                return self.engine.submit_chat(entry.messages, params, **self._template)
            return self.engine.submit(entry.prompt, params)
        except ValueError as error:
            reworded = ValueError(in_flags(error, entry.settings))
            if len(self.entries) == 1:
                name = str(error).partition(":")[0]
                of_file = entry.where.startswith("--file") and (
                    name in ("prompt", "messages") or name in entry.settings
                )
                raise (ValueError(f"{entry.where}: {reworded}") if of_file else reworded) from error
            refused = Handle(-1, [], params, 0)
            refused.finish("error", reworded)
            return refused

    def _note_short_context(self) -> None:
        """Notes once that the context ends before `max_new_tokens`."""
        from specdec_fast.commands.open_engine import short_context

        for handle in self.handles:
            if handle.error is not None:
                continue
            words = short_context(self.engine, len(handle.prompt), handle.params.max_new_tokens)
            if words is not None:
                self.err.print(f"specdec: note: {words} (see --max-length)", soft_wrap=True)
                return

    def run(self) -> None:
        """Runs all requests to their end, with a progress bar for several on a terminal."""
        from rich.progress import Progress

        count = len(self.handles)
        bar = Progress(console=self.err, transient=True, disable=count == 1 or not self.err.is_terminal)
        task = bar.add_task("prompts", total=count)
        start = perf_counter()
        bar.start()
        try:
            ended = self._num_ended()
            while ended < count:
                self.engine.step()
                before, ended = ended, self._num_ended()
                if ended > before or count == 1:
                    bar.stop()  # text and bar on one terminal take turns
                    self._show()
                    bar.start()
                    bar.update(task, completed=ended)
        finally:
            bar.stop()
            self.seconds = perf_counter() - start
        self._show()

    def _num_ended(self) -> int:
        return sum(handle.finished for handle in self.handles)

    def cancel(self) -> None:
        """Cancels running requests and prints their partial texts."""
        for handle in self.handles:
            if not handle.finished:
                handle.finish("cancelled")
        self._show()

    def left(self) -> str:
        """Returns how many prompts were cancelled before their first token, in words; empty if none was."""
        count = sum(map(_not_started, self.handles))
        return f"; {count} of {len(self.handles)} prompts were not started" if count and len(self.handles) > 1 else ""

    def _show(self) -> None:
        """Prints new text of a single request, or requests that have ended."""
        if not self._streams:
            return
        several = len(self.handles) > 1
        while self._shown < len(self.handles):
            at = self._shown
            handle = self.handles[at]
            if several and not handle.finished:
                return
            if not several or not _not_started(handle):
                self._print(at)
            if not handle.finished:
                return
            self._shown += 1

    def _print(self, at: int) -> None:
        """Prints the new part of a text."""
        from specdec_fast.commands.terminal_output import write_pieces

        if len(self.handles) > 1:
            self._heading(at)
        write_pieces(self.out, self._painters[at].fresh(), color=self._color)
        if self.handles[at].finished:
            self.out.print()

    def _heading(self, at: int) -> None:
        from rich.text import Text

        from specdec_fast.commands.terminal_output import counted

        prompt = self.entries[at].prompt
        words = (
            prompt.strip().splitlines()[0]
            if isinstance(prompt, str) and prompt.strip()
            else counted(len(prompt), "token")
        )
        reason = self.handles[at].finish_reason
        self.out.print(Text(f"── {at + 1}: {words[:60]} [{reason}]", "bold"), soft_wrap=True)

    def note_unused_template(self) -> None:
        """Notes that texts are empty because a prompt without the chat template is no question to an instruct model."""
        from specdec_fast.commands.terminal_output import counted
        from specdec_fast.engine.chat_template import has_chat_template

        tokenizer = self.engine.tokenizer
        if not has_chat_template(tokenizer):
            return
        special = tuple(tokenizer.all_special_tokens)
        empty = [
            handle
            for entry, handle in zip(self.entries, self.handles, strict=True)
            if handle.finish_reason == "eos"
            and not handle.text.strip()
            and entry.messages is None
            # the prompt may carry the template already
            and not (isinstance(entry.prompt, str) and any(token in entry.prompt for token in special))
        ]
        if empty:
            many = "" if len(self.handles) == 1 else f" for {counted(len(empty), 'prompt')}"
            words = f"the model answers nothing{many}; it has a chat template, so try --chat"
            self.err.print(f"specdec: note: {words}", soft_wrap=True)

    def print_stats(self) -> None:
        """Prints statistics of all requests together to standard error, with advice on a busy machine."""
        import torch

        from specdec_fast.commands.terminal_output import stats_table
        from specdec_fast.engine.stats import RequestStats

        total = RequestStats()
        for handle in self.handles:
            total.merge(handle.stats)
        if len(self.handles) > 1:
            total.seconds = dict(self.engine.seconds)  # requests of a batch share their steps
        table = stats_table(total, self.seconds)
        table.add_row("drafter", self.engine.explain_drafter())
        if len(self.handles) == 1:
            (handle,) = self.handles
            full = ", the context is full (see --max-length)" if handle.limit == "max_length" else ""
            table.add_row("ended by", f"{handle.finish_reason}{full}; seed {handle.params.seed}")
        self.err.print(table)
        if self._streams and self.engine.state.device.type == "cpu":
            advice = busy_machine(torch.get_num_threads())
            if advice is not None:
                self.err.print(f"specdec: note: {advice}", soft_wrap=True)

    def print_legend(self) -> None:
        """Prints the meaning of the colours to standard error."""
        from specdec_fast.commands.terminal_output import legend

        if self._color:
            self.err.print(legend())

    def print_logprobs(self) -> None:
        """Prints log-probabilities of requests that asked for them to standard error."""
        from specdec_fast.commands.terminal_output import logprobs_table, print_table

        for at, handle in enumerate(self.handles):
            if not handle.logprobs:
                continue
            if len(self.handles) > 1:
                self.err.print(f"{at + 1}:")
            print_table(self.err, logprobs_table(handle.logprobs, self.engine.tokenizer))

    def report(self, setup: Setup, *, interrupted: bool) -> dict[str, Any]:
        """Returns the JSON object of `--json`."""
        import torch

        from specdec_fast.commands.open_engine import versions

        tokens = engine_tokens(self.handles)
        return {
            **setup.describe(self.engine),
            "draft_tokens": getattr(self.engine.drafter, "num_draft_tokens", None),
            "interrupted": interrupted,
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "new_tokens": tokens,
            "seconds": self.seconds,
            "tokens_per_s": tokens / self.seconds if self.seconds else 0.0,
            "requests": [self._described(entry, handle) for entry, handle in zip(self.entries, self.handles)],
        }

    def _described(self, entry: Entry, handle: Handle) -> dict[str, Any]:
        """Describes a request as JSON values; log-probabilities include the text of their tokens."""
        tokenizer, found = self.engine.tokenizer, handle.as_dict()
        scored = [each for each in found.get("prompt_logprobs", ()) if each is not None]
        for each in (*found.get("logprobs", ()), *scored):
            for token in (each, *each["top"]):
                token["text"] = None if tokenizer is None else tokenizer.decode([token["token"]])
        named = {} if entry.id is None else {"id": entry.id}
        chat = {} if entry.messages is None else {"messages": entry.messages}
        return {
            **named,
            "prompt": entry.prompt,
            **chat,
            "sampling": _non_default(handle.params),
            **found,
            "origins": handle.origins,
        }
