"""Output of `specdec demo`: a title, each text with its tau, a table with speeds, and the totals in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec_fast.commands.demo_comparison import Comparison, distribution_of, is_replaying, summary
from specdec_fast.commands.info import num_parameters
from specdec_fast.commands.open_engine import BUNDLED_HYBRID, BUNDLED_TARGET
from specdec_fast.commands.terminal_output import STYLES, Painter, harmless, legend, paint, percents, print_table
from specdec_fast.loading import ASSETS

if TYPE_CHECKING:
    from specdec_fast.engine.engine import Engine
    from specdec_fast.engine.request import Handle

_COLUMNS = (
    ("plain\ntok/s", "plain_tokens_per_s", ".1f"),
    ("spec.\ntok/s", "speculative_tokens_per_s", ".1f"),
    ("speed\nup", "speedup", ".2f"),
    ("tau", "tau", ".2f"),
    ("alpha", "alpha", ".2f"),
    ("distinct-4", "distinct_4", ".2f"),
)

_HERE = " >> "
"""Separates a prompt from its text where colours are off."""

_WITHHELD = "?"
"""Table entry of a withheld speed-up."""


def print_title(out: Console, header: dict[str, Any]) -> None:
    """Prints the setup, a note on the bundled model, and the meaning of the colours."""
    drafts = f"{header['draft_tokens']} tokens ahead"
    words = Text.assemble((header["model"], "bold"), " with ", (header["draft"] or header["drafter"], "bold"))
    words.append(f" drafting {drafts}")
    out.print(words)
    threads = header["threads"]
    where = f"{header['device']}, {threads} thread{'s' if threads != 1 else ''}"
    out.print(f"rule {header['rule']}, {header['dtype']}, {where}, one request at a time", style="dim")
    note = model_note(header["model"])
    if note:
        out.print(note, style="dim")
    if out.color_system is not None:
        out.print()
        out.print(legend())
    else:
        out.print(f"texts: the end of the prompt, {_HERE.strip()}, what was written")


def model_note(model: str) -> str:
    """Returns a sentence about the size of a bundled target; empty for any other model."""
    if model not in (BUNDLED_TARGET, BUNDLED_HYBRID):
        return ""
    count = num_parameters(ASSETS / model) or 0
    return f"{model} has only {count / 1e6:.1f}M parameters, so its text is not meaningful prose."


def print_text(out: Console, comparison: Comparison, engine: Engine) -> None:
    """Prints one prompt: its numbers, its end, and the models' continuation."""
    stats = comparison.speculative.stats
    words, style = _verdict(comparison, engine.rule.name)
    title = Text.assemble("\n", (comparison.item.id, "bold"), f"  {_mode(comparison.temperature)}  ")
    title.append(f"tau {stats.tau:.2f}  alpha {stats.alpha:.2f}  ").append(words, style)
    out.print(title)
    context = tail_of(comparison.item.prompt)
    _print_body(out, context, comparison.speculative, engine)
    if not comparison.identical:
        out.print("plain decoding:", style="dim")
        _print_body(out, context, comparison.plain, engine)


def _print_body(out: Console, context: str, handle: Handle, engine: Engine) -> None:
    here = _HERE if out.color_system is None else ""
    body = Text.assemble((harmless(context), "dim"), here, paint(Painter(handle, engine.tokenizer).fresh()))
    body.rstrip()
    for line in body.wrap(out, out.width - 2):
        out.print(Text("  ").append_text(line))


def _mode(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def _speeds(plain: float, fast: float, speedup: float | None) -> str:
    """Describes both speeds; without a speed-up nothing suggests that the second one follows from the first."""
    digits = 1 if min(plain, fast) < 20 else 0
    if speedup is None:
        return f"plain {plain:.{digits}f} tokens/s, speculative {fast:.{digits}f} tokens/s (speed-up withheld)"
    return f"{plain:.{digits}f} → {fast:.{digits}f} tokens/s  {speedup:.2f}x"


def _verdict(comparison: Comparison, rule: str) -> tuple[str, str]:
    """Returns text and style for whether the texts are equal."""
    if comparison.identical:
        return "same text", "green"
    if not is_replaying(rule, comparison.temperature):
        return f"other text, {distribution_of(rule)}", ""
    words = f"differs from token {comparison.first_difference}"
    if comparison.gap is not None:
        words += f", scores {abs(comparison.gap):.1e} apart"
    return words, "bold red"


def tail_of(prompt: str, limit: int = 100) -> str:
    """Returns the last line of a prompt, shortened on the left."""
    body = prompt.rstrip("\n")
    tail = prompt[body.rfind("\n") + 1 :]
    if len(tail) <= limit:
        return tail
    tail = tail[-limit:]
    return f"… {tail[tail.find(' ') + 1 :]}"


def print_conclusion(out: Console, done: list[Comparison], header: dict[str, Any]) -> None:
    """Prints the table, the shares of the origins, and the totals in one sentence."""
    total = summary(done)
    out.print()
    print_table(out, _table(done, header["rule"], total))
    origins = [origin for each in done for origin in each.speculative.origins]
    shares = Text("tokens: ")
    present = [name for name in STYLES if name in origins]
    for name, share in zip(present, percents([origins.count(name) for name in present]), strict=True):
        shares.append(f"{share}% {'not drafted' if name == 'plain' else name}", STYLES[name]).append("  ")
    shares.rstrip()
    out.print(shares)
    rounds = len(done[0].ratios)
    times = "one round" if rounds == 1 else f"the median of {rounds} rounds over all texts"
    out.print(
        f"tok/s: {times}; tau: tokens per target pass; alpha: share of tested draft tokens accepted; distinct-4: share "
        "of distinct runs of four tokens (low if a text repeats itself)",
        style="dim",
    )
    bound = [each for each in done if is_replaying(header["rule"], each.temperature)]
    same = sum(each.identical for each in bound)
    texts = f"{same} of {len(bound)} texts identical to plain decoding"
    if not bound:
        equal = sum(each.identical for each in done)
        texts = f"{distribution_of(header['rule'])}, {equal} of {len(done)} texts identical"
    if same < len(bound) and header["dtype"] in ("bfloat16", "float16"):
        out.print(
            f"{header['dtype']} rounding depends on the other tokens of a pass, so near-ties may be decided "
            "differently; --dtype float32 gives the same texts",
            style="dim",
        )
    reasons = withheld(done, total)
    if reasons:
        less = "" if header["threads"] == 1 else ', or with --threads 1 (`make demo DEMO_ARGS="--threads 1"`)'
        advice = f"Other work on this machine disturbs the measurement: run the demo again later{less}."
        out.print(f"{reasons} {advice}", style="yellow")
    speeds = _speeds(total["plain_tokens_per_s"], total["speculative_tokens_per_s"], total["speedup"])
    out.print(f"{speeds}, {texts}", style="bold")


def withheld(done: list[Comparison], total: dict[str, Any]) -> str:
    """Describes which speed-ups are withheld, and why; empty if none is."""
    if total["speedup_doubt"] is not None:
        return f"Speed-up withheld: {total['speedup_doubt']}."
    doubts = [(each, why) for each in done if (why := summary([each])["speedup_doubt"]) is not None]
    if not doubts:
        return ""
    first, why = doubts[0]
    of = f"{len(doubts)} of {len(done)} texts"
    return f"{_WITHHELD}: speed-up withheld for {of}, first {first.item.id} ({_mode(first.temperature)}): {why}."


def _cell(number: float | None, form: str) -> str:
    return _WITHHELD if number is None else format(number, form)


def _table(done: list[Comparison], rule: str, total: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_footer=True, footer_style="bold")
    table.add_column("prompt", "all")
    table.add_column("mode")
    for title, key, form in _COLUMNS:
        table.add_column(title, _cell(total[key], form), justify="right")
    bound = [each for each in done if is_replaying(rule, each.temperature)]
    verdict = distribution_of(rule) if not bound else "yes" if all(each.identical for each in bound) else "no"
    table.add_column("same\ntext", verdict, justify="right")
    for each in done:
        numbers = summary([each])
        if total["speedup"] is None and len(each.ratios) == 1:  # this measurement may be disturbed too
            numbers["speedup"] = None
        cells = [_cell(numbers[key], form) for _, key, form in _COLUMNS]
        same = "yes" if each.identical else "no" if is_replaying(rule, each.temperature) else distribution_of(rule)
        table.add_row(each.item.id, _mode(each.temperature), *cells, same)
    return table
